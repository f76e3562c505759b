"""All learners in a world that can be enumerated: a GPT-Neo of 7 tokens, texts of at most 4."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from worlds import Recorded, generator, rare_potential, tiny_conditional

from distill import DPO, GRPO, WEIGHTED, BaselineOptions, Learner, Streams
from distill.paper import Paper, PaperOptions
from distill.pooled import Pooled, PooledOptions
from tinystories.checkpoint import read_tensors, write_tensors
from tinystories.errors import InputError
from tsmc.exact import Target, Tree
from tsmc.resampling import multinomial, normalise
from tsmc.runs import draw_population
from twist.mlp import TwistMLP
from twist.pair import Pair, load_pair, save_pair
from twist.pool import joined, tempered
from twist.potential import seen_from

END = 4  # a third of the texts of sigma end early
BASE = tiny_conditional(0, end=END)
TARGET = Target(BASE, rare_potential)
SIZES = {"particles": 20, "distill_runs": 20, "distill_updates": 30, "distill_learning_rate": 3e-3}
CTL = {"ctl_updates": 12, "ctl_batch_size": 50, "ctl_learning_rate": 1e-3}
POOL = {"pool_first_draws": 200, "pool_first_rounds": 4, "pool_first_updates": 20}
POOL |= {"pool_draws": 600, "pool_updates": 50, "pool_learning_rate": 1e-3}
PAPER, POOLED = PaperOptions(**SIZES, **CTL), PooledOptions(**POOL)
WEIGHTED_PAPER = PaperOptions(**(WEIGHTED | SIZES | CTL))
LEARNERS = {  # the learner, its options, and what KL after lines 1, 3 and 4 may be over p^(0)'s
    "paper": (Paper, PAPER, (0.62, 0.43, 0.31)),
    "weighted": (Paper, WEIGHTED_PAPER, (0.62, 0.34, 0.26)),
    "LoRA": (Paper, replace(WEIGHTED_PAPER, student="lora"), (0.62, 0.56, 0.34)),
    "pooled": (Pooled, POOLED, (0.52, 0.3, 0.3)),
    "no surrogate": (Pooled, replace(POOLED, surrogate=False), (0.49, 0.32, 0.32)),
}


@torch.no_grad()
def log_q(pair: Pair) -> torch.Tensor:
    """log q of all sequences, by the proposal of a pair."""
    return Tree(pair.model).prefix_log_q(pair.twist)[-1]


@pytest.mark.parametrize("name", LEARNERS)
def test_every_line_brings_the_proposal_closer_to_sigma(name):
    """KL(sigma||q), its mean over four seeds; what may be is 1.3 times what was found."""
    kind, options, most = LEARNERS[name]
    found = []
    for seed in range(4):
        learner = kind(BASE, rare_potential, options, Streams(seed))
        first = learner.first_twist()
        model = learner.distil(first, 1)
        pairs = [first, Pair(model, None), learner.learn_twist(model, 1)]
        found.append([TARGET.kl_to(log_q(pair)) for pair in pairs])
    means = torch.tensor(found).mean(0) / TARGET.kl_to(TARGET.log_p[-1])
    assert (means < torch.tensor(most)).all() and means[2] < 0.9 * means[0], means


FEW = {"ctl_updates": 3, "distill_updates": 2}
RESUMED = {  # the learner, its options, and how many texts generations 0 and 1 score
    "weighted": (Paper, replace(WEIGHTED_PAPER, **FEW), (150, 150 + 400)),
    "pooled": (Pooled, replace(POOLED, pool_first_updates=2, pool_updates=2), (200, 600)),
    "dpo": (DPO, BaselineOptions(updates=3, batch_size=9), (27, 27)),
    "grpo": (GRPO, BaselineOptions(updates=3, batch_size=9, student="lora"), (27, 27)),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_learner_goes_on_from_files_as_if_it_had_not_stopped(name, tmp_path):
    """To the last digit; and phi scores as many texts as the learner says."""
    kind, options, scores = RESUMED[name]
    scored = []

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        scored.append(len(tokens))
        return rare_potential(tokens)

    def generation_1(learner: Learner, pair: Pair) -> torch.Tensor:
        return log_q(learner.learn_twist(learner.distil(pair, 1), 1))

    learner = kind(BASE, log_phi, options, Streams(3, rows=64))
    scored.clear()  # what it asked before it begins
    first = learner.first_twist()
    assert sum(scored) == learner.scores(0) == scores[0]
    save_pair(tmp_path, first, BASE)
    write_tensors(tmp_path / "state.safetensors", learner.state())
    wanted = generation_1(learner, first)
    assert sum(scored) == learner.scores(1) == sum(scores)
    another = kind(BASE, log_phi, options, Streams(3, rows=64))
    another.resume(read_tensors(tmp_path / "state.safetensors"))
    found = generation_1(another, load_pair(tmp_path, BASE))
    assert torch.equal(found, wanted) and not torch.equal(found, log_q(first))


WRONG = [  # an options class, an option, and what is said of it
    (PooledOptions, {"surrogate": 1}, "--surrogate is 1; give a value of type bool"),
    (PaperOptions, {"particles": True}, "--particles is True; give a value of type int"),
    (PaperOptions, {"student": "half"}, "--student is 'half'; give one of full, lora"),
    (BaselineOptions, {"learning_rate": 2}, "--learning-rate is 2; give at most 1"),
]


@pytest.mark.parametrize(("kind", "values", "message"), WRONG)
def test_options_that_cannot_be_are_one_line(kind, values, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        kind(**values)


ONE = TwistMLP(8, 7, generator(0)).requires_grad_(False)  # psi = 1


@pytest.mark.parametrize("ess_threshold", [0.0, 1.0])
def test_all_runs_count_alike_whatever_their_evidence(ess_threshold):
    """Weighted particles where runs resample at the end, else their samples."""
    options = replace(PAPER, particles=8, distill_runs=30, ess_threshold=ess_threshold)
    psi = copy.deepcopy(ONE)
    torch.nn.init.normal_(psi.last.weight, generator=generator(1))
    pair, learner = (
        Pair(tiny_conditional(1, end=END), psi),
        Paper(BASE, rare_potential, options, Streams(0)),
    )
    tokens, weights = learner.samples(pair, 1)
    sigma = seen_from(pair.model, BASE, rare_potential)
    given = (Streams(0), "sampling", 1, sigma, pair.twist, 8, 30)
    runs = draw_population(*given, resample=multinomial, ess_threshold=ess_threshold)
    shares = normalise(runs.log_weights) if ess_threshold == 0 else torch.full((30, 8), 1 / 8)
    wanted = runs.tokens if ess_threshold == 0 else runs.samples
    assert torch.equal(tokens, wanted.flatten(0, 1))
    torch.testing.assert_close(weights, shares.flatten() / 30)


def test_runs_that_die_are_not_distilled():
    """phi = 1 where the first token is 2, which most runs of two particles never draw."""

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens[:, 0] == 2, 0.0, -math.inf)

    options = replace(WEIGHTED_PAPER, particles=2, distill_runs=300)
    tokens, weights = Paper(BASE, log_phi, options, Streams(0)).samples(Pair(BASE, ONE), 1)
    assert 0 < len(tokens) < 600 and weights.sum().item() == pytest.approx(1, abs=1e-5)
    assert (tokens[weights > 0][:, 0] == 2).all()


@pytest.mark.parametrize("is_effective", [True, False])
def test_without_the_effective_potential_the_target_drifts(is_effective):
    """Of weighted particles without a twist, E[w f] / E[w] is that of sigma or of p^(1) phi."""
    model = tiny_conditional(1, end=END)
    options = replace(WEIGHTED_PAPER, particles=4000, distill_runs=1)
    options = replace(options, effective_potential=is_effective)
    learner = Paper(BASE, rare_potential, options, Streams(0, rows=4000))
    tokens, weights = learner.samples(Pair(model, ONE), 1)
    found = torch.zeros(7).index_add(0, tokens[:, 0], weights)
    sigma, drifted = (Target(p, rare_potential).log_sigma[1].exp().float() for p in (BASE, model))
    wanted, other = (sigma, drifted) if is_effective else (drifted, sigma)
    assert (found - wanted).abs().max() < 0.25 * (wanted - other).abs().max()


def test_the_ladder_climbs_by_the_largest_power_that_the_ess_allows():
    """p^(0) proposes first, then each step of the ladder, and the last one fits sigma."""
    proposals, reports = [], Recorded()

    class Watched(Pooled):
        def draw(self, q, word, m, count):
            proposals.append(q)
            super().draw(q, word, m, count)

    sizes = {"pool_first_draws": 99, "pool_first_rounds": 4, "pool_first_updates": 3}
    options = replace(POOLED, **sizes, pool_first_ess=0.7)
    learner = Watched(BASE, rare_potential, options, Streams(0), reports)
    pair = learner.first_twist()
    rounds = learner.rounds
    assert [len(one.tokens) for one in rounds] == [25, 25, 25, 24]
    assert proposals[0] is None and None not in proposals[1:] and len(set(proposals)) == 4
    for step in (1, 2, 3):
        power = tempered(joined(rounds[:step]), options.pool_first_ess)[1]
        assert [row["power"] for row in reports[f"ladder {step}"]] == [power] * 3 and power < 1
    assert {row["power"] for row in reports["distillation"]} == {1.0}
    model = learner.distil(pair, 1)
    assert len(rounds) == 5 and proposals[-1] is pair.model.adapter
    assert learner.learn_twist(model, 1) == Pair(model, None)


def test_with_hints_the_ladder_finds_what_p0_does_not():
    """phi = 1 where a 2 follows a 5, which 1 of 117 texts has."""

    def log_phi(tokens: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        is_met = (tokens[:, :-1] == 5) & (tokens[:, 1:] == 2)
        return torch.where(is_met.any(1), 0.0, -math.inf)

    with pytest.raises(InputError, match=r"^none of the 50 texts .* has phi > 0; .*give it hints"):
        Pooled(BASE, log_phi, POOLED, Streams(0)).first_twist()
    log_phi.hints = [[[5, 2]]] * 3  # one hint of three factors; a text has no room for three
    pair = Pooled(BASE, log_phi, POOLED, Streams(0)).first_twist()
    target = Target(BASE, log_phi)
    assert target.kl_to(log_q(pair)) < 0.2 * target.kl_to(target.log_p[-1])
