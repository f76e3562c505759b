"""The pool: its weights, truncated and tempered; a fit to them; the surrogate."""

import math
from unittest import mock

import pytest
import torch
from torch.nn.functional import logsigmoid, one_hot
from worlds import (
    generator,
    log_q,
    rare_potential,
    recorded,
    table_world,
    tiny_conditional,
    tiny_gpt_neo,
)

import distill.pooled.learner
from distill import Pooled, PooledOptions, Streams
from distill.pair import Pair
from distill.pooled.adapter import Adapted, Adapter
from distill.pooled.held_out import Texts
from distill.pooled.pool import POWERS, Round, joined, tempered, truncated
from distill.pooled.surrogate import fit_surrogate
from tinystories import GPTNeoModel
from tinystories.decoder import counted
from tsmc.draws import log_mean_exp
from tsmc.exact import TableModel, Target

INF = math.inf


def test_weights_are_truncated_as_little_as_the_ess_allows():
    log_weights = 3 * torch.randn(1000, generator=generator(0), dtype=torch.float64)
    untouched = log_weights.softmax(0)
    ess = 1 / untouched.square().sum().item()
    torch.testing.assert_close(truncated(log_weights, 0.9 * ess / 1000), untouched)
    weights = truncated(log_weights, 4 * ess / 1000)
    assert 1 / weights.square().sum().item() == pytest.approx(4 * ess, rel=1e-6)
    below = weights < weights.max() * (1 - 1e-9)
    assert 0 < (~below).sum() < 500
    ratios = weights[below] / untouched[below]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
    some = torch.tensor([0.0, -5.0, -INF, -INF]).double()
    torch.testing.assert_close(truncated(some, 1.0), torch.tensor([0.5, 0.5, 0, 0]).double())


def test_tempered_pools_have_the_largest_power_that_the_ess_allows():
    """Where every sequence occurs once with weight p phi, w' is p phi^b."""
    model, _, potential = table_world(3, 3, seed=1, scale=2.0)
    target = Target(model, potential)
    tokens, log_p = target.tree.sequences(), target.log_p[-1].detach()
    log_phi = potential(tokens)
    pool = Round(tokens, log_p + log_phi, log_phi)
    dead = Round(torch.zeros(100, 3, dtype=torch.long), *torch.full((2, 100), -INF).double())
    ess = [1 / (log_p + b * log_phi).softmax(0).square().sum().item() for b in POWERS.tolist()]
    enough = [b for b, one in zip(POWERS.tolist(), ess, strict=True) if one >= 0.5 * 27]
    for rounds in ([pool], [pool, dead]):  # the dead do not count
        log_weights, power = tempered(joined(rounds), 0.5)
        assert power == max(enough) and 0.01 < power < 1
        torch.testing.assert_close(log_weights[:27], log_p + power * log_phi)
        assert (log_weights[27:] == -INF).all()
    assert tempered(pool, 0.0)[1] == 1.0


def test_a_step_of_the_fit_follows_the_weighted_likelihood(monkeypatch):
    """A step of size one from the MLP of the last adapter, on some rows drawn by the truncated
    weights: the gradient of the mean of -log q over the tokens of texts. p^(0) stays."""
    base, scores = tiny_conditional(0, end=6), torch.linspace(-1, 2, 7)
    start = Adapter(base, scores, generator(0))
    torch.nn.init.normal_(start.shift.last.weight, std=0.1, generator=generator(2))
    tokens = torch.randint(7, (9, 4), generator=generator(1))
    log_weights = torch.arange(9.0).double()
    rows, drawn_by = torch.tensor([[8, 1, 1, 5]]), []
    options = PooledOptions(pool_learning_rate=base.width / 192, pool_least_ess=0.4)
    learner = Pooled(base, rare_potential, options, Streams(0))
    learner.pool = Round(tokens, log_weights, torch.zeros(9))
    monkeypatch.setattr(distill.pooled.learner, "fit_surrogate", lambda *_: scores)
    monkeypatch.setattr(Texts, "tilt", lambda *_: None)
    draw = lambda weights, *_: drawn_by.append(weights) or rows  # noqa: E731
    monkeypatch.setattr(distill.pooled.learner, "draw_batches", draw)
    with mock.patch("torch.optim.Adam", torch.optim.SGD):
        fitted = learner.fit("x", 1, log_weights, 1, Adapted(base, start), is_rung=True).adapter
    torch.testing.assert_close(drawn_by, [truncated(log_weights, 0.4)])
    is_counted = counted(tokens[rows[0]], 6)
    assert 4 < is_counted.sum() < 16
    loss = -Adapted(base, start).log_probs(tokens[rows[0]]).sum() / is_counted.sum()
    gradients = torch.autograd.grad(loss, list(start.shift.parameters()))
    assert recorded(learner, "x", "loss") == [pytest.approx(loss.item(), rel=1e-5)]
    parameters = (start.shift.parameters(), fitted.shift.parameters(), gradients)
    for before, after, gradient in zip(*parameters, strict=True):
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(before - after, gradient, rtol=1e-3, atol=1e-5)
    assert all(parameter.grad is None for parameter in base.network.parameters())


class Headed(GPTNeoModel):
    """A model whose logits are scaled, capped, biased, and masked at the last token."""

    def head(self, hidden):
        logits = 2 * torch.tanh(0.5 * super().head(hidden)) + torch.linspace(-1, 1, 7)
        return logits.masked_fill(torch.arange(7) == 6, -INF)


@pytest.mark.learned
def test_the_adapter_moves_what_the_models_own_head_reads():
    base = Headed(tiny_conditional(0).network, torch.tensor([1, 2]), 4)
    fresh, scores = Adapter(base, None, generator(0)), torch.randn(7, generator=generator(1))
    torch.testing.assert_close(log_q(Pair(Adapted(base, fresh), None)), log_q(Pair(base, None)))
    hidden = torch.randn(3, 8, generator=generator(2))
    tilted = Adapter(base, scores, generator(0))
    torch.nn.init.ones_(tilted.shift.last.bias[8:])
    torch.testing.assert_close(tilted(hidden), base.head(hidden) + scores)
    sizes = {"pool_first_draws": 800, "pool_first_rounds": 4, "pool_learning_rate": 4e-5}
    learner = Pooled(base, rare_potential, PooledOptions(**sizes), Streams(0))
    pair, target = learner.first_twist(), Target(base, rare_potential)
    assert target.kl_to(log_q(pair)) < 0.3 * target.kl_to(target.log_p[-1])
    population = learner.population(pair, "x", 0, 1000, 4)
    for found in (population.log_mean_z(), log_mean_exp(learner.pool.log_weights).item()):
        assert found == pytest.approx(target.log_z, abs=0.08)


@pytest.mark.learned
def test_the_surrogate_finds_the_tokens_that_phi_depends_on():
    """log phi = log sigmoid(b + sum of g over different tokens), recovered from random texts."""
    scores = torch.tensor([0.0, 0.0, 3.0, -2.0, 1.0, 0.0])
    tokens = torch.randint(6, (4000, 5), generator=generator(0))
    is_there = one_hot(tokens, 6).amax(1).float()  # [N, V]
    log_phi = logsigmoid(is_there @ scores)
    found = fit_surrogate(tokens, log_phi, None, 8)
    torch.testing.assert_close(found[:6], scores, rtol=0, atol=0.1)
    assert (found[6:] == 0).all(), "tokens that never occur"
    found = fit_surrogate(tokens, 30 * log_phi, None, 8)  # nearly all labels were 0
    assert torch.corrcoef(torch.stack([found[:6], scores]))[0, 1] > 0.98


@pytest.mark.learned
def test_tokens_never_seen_get_a_score_from_their_neighbours():
    """Scores are linear in the embeddings, but for token 0, whose own score they do not tell."""
    embeddings = torch.randn(40, 3, generator=generator(1))
    scores = embeddings @ torch.tensor([1.0, -1.0, 0.5])
    scores[0] += 4.0
    tokens = torch.randint(30, (2000, 5), generator=generator(0))  # 30 to 39 never occur
    log_phi = 8 * logsigmoid(one_hot(tokens, 40).amax(1).float() @ scores - 2)
    # Neither the mean of embeddings nor their size matters.
    found = fit_surrogate(tokens, log_phi, 1e-3 * embeddings + 5.0, 40)
    assert torch.corrcoef(torch.stack([found[30:], scores[30:]]))[0, 1] > 0.95
    ratio = [found[rows].std() / scores[rows].std() for rows in (slice(1, 30), slice(30, 40))]
    assert ratio[1].item() == pytest.approx(ratio[0].item(), rel=0.4)
    excess = (found[0] - found[1:].mean()) / (scores[0] - scores[1:].mean())
    assert excess.item() == pytest.approx(ratio[0].item(), rel=0.4)


def test_a_model_in_float64_and_one_without_embeddings_learn_too():
    for base in (
        GPTNeoModel(tiny_gpt_neo(7).double(), torch.tensor([1, 2]), 4),
        TableModel.random(7, 4, generator(0)),
    ):
        options = PooledOptions(pool_first_draws=400, pool_first_rounds=2)
        pair = Pooled(base, rare_potential, options, Streams(0)).first_twist()
        assert pair.model.adapter.scores.isfinite().all()
