"""Both learners in a world that can be enumerated: a GPT-Neo of 7 tokens, 4 of them to come."""

import copy
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from worlds import Recorded, generator, rare_potential, tiny_conditional

from distill.pooled import Pooled, PooledOptions
from distill.published import Published, PublishedOptions
from tsmc.exact import Target, Tree
from tsmc.resampling import normalise
from tsmc.runs import Phases, draw_population
from twist.mlp import TwistMLP
from twist.pair import Pair
from twist.pool import Pool, tempered
from twist.potential import seen_from

BASE = tiny_conditional(0)
TARGET = Target(BASE, rare_potential)
SIZES = {"ctl_updates": 30, "ctl_batch_size": 50, "ctl_hidden_units": 16, "particles": 20}
SIZES |= {"distill_runs": 20, "distill_updates": 30, "distill_batch_size": 64}
RATES = {"ctl_learning_rate": 4e-3, "distill_learning_rate": 3e-3}
RATES |= {"distill_lora_learning_rate": 3e-2}
POOL = {"pool_first_draws": 200, "pool_first_rounds": 4, "pool_first_updates": 20}
POOL |= {"pool_draws": 600, "pool_updates": 50, "pool_batch_size": 64}
POOL |= {"pool_learning_rate": 5e-3, "pool_hidden_units": 16}
PUBLISHED, POOLED = PublishedOptions(**SIZES, **RATES), PooledOptions(**POOL)
LEARNERS = {  # the learner, its options, and what KL after lines 1, 3 and 4 may be over p^(0)'s
    "full": (Published, PUBLISHED, (0.53, 0.33, 0.25)),
    "LoRA": (Published, replace(PUBLISHED, student="lora"), (0.53, 0.5, 0.31)),
    "pooled": (Pooled, POOLED, (0.47, 0.28, 0.28)),
    "no surrogate": (Pooled, replace(POOLED, surrogate=False), (0.42, 0.29, 0.29)),
}


def learner_of(kind: type, options, phases: Phases):
    rest = (8.0,) if kind is Pooled else ()  # c of the surrogate is that of the potential
    return kind(BASE, rare_potential, options, phases, *rest)


@torch.no_grad()
def kl(pair: Pair) -> float:
    """KL(sigma||q) of the proposal of a pair."""
    return TARGET.kl_to(Tree(pair.model).prefix_log_q(pair.twist)[-1])


@pytest.mark.parametrize("name", LEARNERS)
def test_every_line_brings_the_proposal_closer_to_sigma(name):
    """Means over five seeds; what may be is 1.3 times what was found."""
    kind, options, most = LEARNERS[name]
    found = []
    for seed in range(5):
        learner = learner_of(kind, options, Phases(seed))
        first = learner.line_1()
        model = learner.line_3(first, 1)
        found.append([kl(first), kl(Pair(model, None)), kl(learner.line_4(model, 1))])
    means = torch.tensor(found).mean(0) / kl(Pair(BASE, None))
    assert (means < torch.tensor(most)).all() and means[2] < 0.9 * means[0], means


ONE = TwistMLP(8, 6, 7, generator(0)).requires_grad_(False)  # psi = 1


@pytest.mark.parametrize("ess_threshold", [0.0, 1.0])
def test_all_runs_count_alike_whatever_their_evidence(ess_threshold):
    """Weighted particles where runs resample at the end, else their samples."""
    options = replace(PUBLISHED, particles=8, distill_runs=30, ess_threshold=ess_threshold)
    psi = copy.deepcopy(ONE)
    torch.nn.init.normal_(psi.last.weight, generator=generator(1))
    phases, pair = Phases(0), Pair(tiny_conditional(1), psi)
    tokens, weights = learner_of(Published, options, phases).samples(pair, 1)
    sigma = seen_from(pair.model, BASE, rare_potential)
    given = (phases, "sampling", 1, sigma, pair.packed_twist(), 8, 30)
    runs = draw_population(*given, **options.rule())
    shares = normalise(runs.log_weights) if ess_threshold == 0 else torch.full((30, 8), 1 / 8)
    wanted = runs.tokens if ess_threshold == 0 else runs.samples
    assert torch.equal(tokens, wanted.flatten(0, 1))
    torch.testing.assert_close(weights, shares.flatten() / 30)


def test_runs_that_die_are_not_distilled():
    """phi = 1 where the first token is 2, which most runs of two particles never draw."""

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens[:, 0] == 2, 0.0, -math.inf)

    options = replace(PUBLISHED, particles=2, distill_runs=300)
    tokens, weights = Published(BASE, log_phi, options, Phases(0)).samples(Pair(BASE, ONE), 1)
    assert 0 < len(tokens) < 600 and weights.sum().item() == pytest.approx(1, abs=1e-5)
    assert (tokens[weights > 0][:, 0] == 2).all()


@pytest.mark.parametrize("is_effective", [True, False])
def test_without_the_effective_potential_the_target_drifts(is_effective):
    """Of weighted particles without a twist, E[w f] / E[w] is that of sigma or of p^(1) phi."""
    model = tiny_conditional(1)
    options = replace(PUBLISHED, particles=4000, distill_runs=1, effective_potential=is_effective)
    learner = learner_of(Published, options, Phases(0, rows=4000))
    tokens, weights = learner.samples(Pair(model, ONE), 1)
    found = torch.zeros(7).index_add(0, tokens[:, 0], weights)
    sigma, drifted = (Target(p, rare_potential).log_sigma[1].exp().float() for p in (BASE, model))
    wanted, other = (sigma, drifted) if is_effective else (drifted, sigma)
    assert (found - wanted).abs().max() < 0.25 * (wanted - other).abs().max()


def test_the_ladder_climbs_by_the_largest_power_that_the_ess_allows():
    """By p^(0) until something has phi > 0, then from step to step, and the last fits sigma."""
    proposals, reports = [], defaultdict(Recorded)

    class Reported(Phases):
        def once(self, phase, m, steps, compute):
            return compute(self.stream(phase, m), reports[phase])

    class Watched(Pooled):
        def draw(self, q, phase, m, count):
            proposals.append(q)
            super().draw(q, phase, m, count)
            if len(proposals) == 1:
                self.pool.rounds[0].log_weights[:] = -math.inf

    sizes = {"pool_first_draws": 99, "pool_first_rounds": 4, "pool_first_updates": 3}
    options = replace(POOLED, **sizes, pool_first_ess=0.7)
    learner = Watched(BASE, rare_potential, options, Reported(0), 8.0)
    pair = learner.line_1()
    rounds = learner.pool.rounds
    assert [len(one.tokens) for one in rounds] == [25, 25, 25, 24]
    assert proposals[:2] == [None, None] and None not in proposals[2:]
    assert proposals[2] is not proposals[3]
    for step in (2, 3):
        power = tempered(Pool(rounds[:step]), options.pool_first_ess)[1]
        assert [row["power"] for row in reports[f"ladder {step}"]] == [power] * 3 and power < 1
    assert {row["power"] for row in reports["distillation"]} == {1.0}
    assert "ladder 1" not in reports
    model = learner.line_3(pair, 1)
    assert len(rounds) == 5 and proposals[-1] is pair.model.adapter
    assert learner.line_4(model, 1) == Pair(model, None)
