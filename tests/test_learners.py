"""All learners in an enumerated world, a GPT-Neo of 7 tokens and 4 steps; fine-tuning."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from worlds import Recorded, generator, log_q, rare_potential, tiny_conditional

from distill import WEIGHTED, Streams
from distill.finetune import Student
from distill.paper import Paper, PaperOptions
from distill.pooled import Pooled, PooledOptions
from tinystories.errors import InputError
from tsmc.exact import Target
from twist.pair import Pair
from twist.pool import Round, tempered

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


@pytest.mark.parametrize("name", LEARNERS)
def test_every_line_brings_the_proposal_closer_to_sigma(name):
    """KL(sigma||q), its mean over four seeds; what may be is 1.3 times what was found.

    And phi scores as many texts as the learner says.
    """
    kind, options, most = LEARNERS[name]
    scored, found = [], []

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        scored.append(len(tokens))
        return rare_potential(tokens)

    log_phi.scale = rare_potential.scale
    for seed in range(4):
        learner = kind(BASE, log_phi, options, Streams(seed))
        scored.clear()
        first = learner.first_twist()
        assert sum(scored) == learner.scores(0)
        model = learner.distil(first, 1)
        pairs = [first, Pair(model, None), learner.learn_twist(model, 1)]
        assert sum(scored) == learner.scores(1)
        found.append([TARGET.kl_to(log_q(pair)) for pair in pairs])
    means = torch.tensor(found).mean(0) / TARGET.kl_to(TARGET.log_p[-1])
    assert (means < torch.tensor(most)).all() and means[2] < 0.9 * means[0], means


@pytest.mark.parametrize("ess_threshold", [0.0, 1.0])
def test_all_living_runs_count_alike_whatever_their_evidence(ess_threshold):
    """phi > 0 where the first token is 2, which some runs of two particles never draw."""

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        return rare_potential(tokens).masked_fill(tokens[:, 0] != 2, -math.inf)

    options = replace(PAPER, particles=2, distill_runs=30, ess_threshold=ess_threshold)
    learner = Paper(BASE, log_phi, options, Streams(0))
    tokens, weights = learner.samples(Pair(tiny_conditional(1, end=END), None), 1)
    runs = weights.view(-1, 2).sum(1)
    assert 0 < len(runs) < 30
    torch.testing.assert_close(runs, torch.full_like(runs, 1 / len(runs)))
    assert (tokens[weights > 0][:, 0] == 2).all()


def test_without_the_effective_potential_the_target_drifts():
    """Of weighted particles without a twist, E[w f] / E[w] is that of p^(1) phi, not of sigma."""
    model = tiny_conditional(1, end=END)
    sizes = {"particles": 4000, "distill_runs": 1}
    options = replace(WEIGHTED_PAPER, **sizes, effective_potential=False)
    learner = Paper(BASE, rare_potential, options, Streams(0, rows=4000))
    tokens, weights = learner.samples(Pair(model, None), 1)
    found = torch.zeros(7).index_add(0, tokens[:, 0], weights)
    sigma, drifted = (Target(p, rare_potential).log_sigma[1].exp().float() for p in (BASE, model))
    assert (found - drifted).abs().max() < 0.25 * (drifted - sigma).abs().max()


def test_the_ladder_climbs_by_the_largest_power_that_the_ess_allows():
    """And its last step fits sigma."""
    sizes = {"pool_first_draws": 99, "pool_first_rounds": 4, "pool_first_updates": 3}
    options, reports = replace(POOLED, **sizes, pool_first_ess=0.7), Recorded()
    learner = Pooled(BASE, rare_potential, options, Streams(0), reports)
    pair = learner.first_twist()
    for step in (1, 2, 3):
        drawn = Round(*(values[: 25 * step] for values in vars(learner.pool).values()))
        power = tempered(drawn, options.pool_first_ess)[1]
        assert [row["power"] for row in reports[f"ladder {step}"]] == [power] * 3 and power < 1
    assert {row["power"] for row in reports["distillation"]} == {1.0}
    model = learner.distil(pair, 1)
    assert len(learner.pool.tokens) == 99 + 600
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


@pytest.mark.parametrize("student", ["full", "lora"])
def test_distilled_samples_become_likelier_and_the_teacher_stays(student):
    """Texts, one of which ends, of weights 1/4, 3/4 and none. LoRA learns as much at its rate."""
    teacher = tiny_conditional(0, end=1)
    before = copy.deepcopy(teacher.network.state_dict())
    tokens = torch.tensor([[3, 4, 5, 6], [3, 1, 1, 1], [0, 0, 0, 0]])
    weights = torch.tensor([0.25, 0.75, 0.0])
    options = PaperOptions(student=student, distill_updates=60, distill_learning_rate=1e-3)
    reports = Recorded()
    learner = Paper(teacher, rare_potential, options, Streams(0), reports)
    learner.samples = lambda pair, m: (tokens, weights)
    trained = learner.distil(Pair(teacher, None), 1)
    nats = [-(weights * model.log_probs(tokens)[0].sum(1)).sum() for model in (teacher, trained)]
    assert nats[1] < 0.5 * nats[0]
    losses = [figures["loss"] for figures in reports["distillation"]]
    # The mean number of tokens of a text is 1/4 of 4 and 3/4 of 2.
    assert len(losses) == 60 and losses[0] == pytest.approx(nats[0].item() / 2.5, rel=0.1)
    torch.testing.assert_close(teacher.network.state_dict(), before, rtol=0, atol=0)
    assert trained.network.state_dict().keys() == before.keys(), "LoRA is merged"


def test_lora_starts_at_the_base_model_to_the_bit_and_ends_in_plain_weights():
    model, ids = tiny_conditional(0).network, torch.arange(27).view(3, 9) % 7
    student = Student(model, 1e-2, True, generator(0))
    assert torch.equal(student.network(ids), model(ids))
    trained = {id(one) for one in student.network.parameters() if one.requires_grad}
    assert trained == {id(one) for one in student.parameters}
    for parameter in student.parameters:
        torch.nn.init.normal_(parameter, std=0.3)
    expected = student.network(ids)
    assert (expected - model(ids)).abs().max() > 0.1
    assert torch.equal(student.finish(1)(ids), expected)


def test_a_model_that_is_not_finite_is_not_returned():
    trained = Student(tiny_conditional(0).network, 1e-2, True, generator(0))
    trained.parameters[1].data[0] = torch.nan
    with pytest.raises(InputError, match=r"generation 2 is not finite; lower the learning rate$"):
        trained.finish(2)
