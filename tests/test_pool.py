"""The pool: weights against enumeration, tempering, and a twist that learns sigma from what was drawn."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from worlds import generator, table_world, tiny_gpt_neo

from tinystories.errors import InputError
from tsmc.exact import Target
from tsmc.sampler import Sigma
from tsmc.scoring import proposal_log_probs
from tsmc.steps import Chunks, Steps
from tsmc.table import TableTwist
from twist.embedding import EmbeddingTwist
from twist.pool import Pool, PoolBatch, batches_from_pools, draw_round, learn_twist_from_pools, negative_log_proposal

INF = math.inf


def world(seed: int = 1):
    """Model, twist, sigma and its enumeration."""
    model, twist, potential = table_world(3, 3, seed=seed, scale=2.0)
    return model, twist, Sigma(model, lambda tokens, log_p: potential(tokens)), Target(model, potential)


def everything(target: Target) -> Pool:
    """A pool in which every sequence occurs once, with the weight that makes it sigma."""
    pool = Pool()
    pool.add(target.tree.sequences(), target.log_sigma[-1])
    return pool


def divergence(model, twist, target: Target) -> float:
    """KL(sigma||q) by enumeration."""
    return target.kl_to(proposal_log_probs(model, twist, target.tree.sequences())[1])


def test_a_round_weighs_every_sequence_by_the_proposal_that_drew_it():
    model, twist, sigma, target = world()
    tokens, log_weights = draw_round(sigma, twist, 1.0, Chunks(6000, 1000, generator))
    log_p, log_q = proposal_log_probs(model, twist, tokens)
    torch.testing.assert_close(log_weights, log_p + sigma.log_potential(tokens, log_p) - log_q, rtol=0, atol=1e-9)
    weights = log_weights.exp()
    error, evidence = weights.std() / len(weights) ** 0.5, math.exp(target.log_z)
    assert abs(weights.mean() - evidence) < 4 * error < 0.25 * evidence


def test_a_flattened_twist_draws_more_broadly_and_weighs_what_it_drew():
    model, twist, sigma, _ = world()
    tokens, log_weights = draw_round(sigma, twist, 0.4, Chunks(50, 20, generator))
    log_p, log_q = proposal_log_probs(model, TableTwist(0.4 * twist.log_psi), tokens)
    torch.testing.assert_close(log_weights, log_p + sigma.log_potential(tokens, log_p) - log_q, rtol=0, atol=1e-9)


def test_the_first_round_is_drawn_from_the_model_itself():
    _, _, sigma, _ = world()
    tokens, log_weights = draw_round(sigma, None, 0.6, Chunks(50, 20, generator))
    torch.testing.assert_close(log_weights, sigma.log_potential(tokens, None), rtol=0, atol=1e-12)


def test_weights_are_truncated_as_little_as_the_ess_allows():
    pool, log_weights = Pool(), 3 * torch.randn(1000, generator=generator(0), dtype=torch.float64)
    for part in log_weights.split(300):
        pool.add(torch.zeros(len(part), 2), part)
    untouched = log_weights.softmax(0)
    ess = 1 / untouched.square().sum()
    torch.testing.assert_close(pool.weights(0.9 * ess.item() / 1000), untouched)
    truncated = pool.weights(4 * ess.item() / 1000)
    assert 1 / truncated.square().sum() == pytest.approx(4 * ess.item(), rel=1e-6)
    below = truncated < truncated.max() * (1 - 1e-9)
    assert 0 < (~below).sum() < 500
    ratios = truncated[below] / untouched[below]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
    torch.testing.assert_close(pool.weights(1.0), torch.full((1000,), 1e-3, dtype=torch.float64))


def test_what_has_no_weight_is_never_learned_from():
    pool = Pool()
    pool.add(torch.zeros(4, 2), torch.tensor([0.0, -5.0, -INF, -INF], dtype=torch.float64))
    pool.add(torch.zeros(2, 2), torch.tensor([-INF, -INF], dtype=torch.float64))
    torch.testing.assert_close(pool.weights(1.0), torch.tensor([0.5, 0.5, 0, 0, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(pool.weights(0.0)[1] / pool.weights(0.0)[0], torch.tensor(-5.0).double().exp())


def test_a_weight_that_is_no_number_is_refused():
    for wrong in (math.nan, INF):
        with pytest.raises(InputError, match="check the potential"):
            Pool().add(torch.zeros(2, 3), torch.tensor([0.0, wrong]))


def test_a_pool_in_which_nothing_has_a_weight_is_refused():
    model, *_ = world()
    pool = Pool()
    pool.add(torch.zeros(5, 3, dtype=torch.long), torch.full((5,), -INF, dtype=torch.float64))
    with pytest.raises(InputError, match="none of the 5 sequences drawn has phi > 0"):
        batches_from_pools([model], [pool], 0.1, 2, 4, generator(0))


def test_the_loss_is_the_cross_entropy_of_sigma_and_q():
    """Over all minibatches the mean loss is -E_sigma[log q] / T, and so is its gradient, by enumeration."""
    model, twist, _, target = world(seed=4)
    sequences, share = target.tree.sequences(), target.log_sigma[-1].exp()
    draw_batch = batches_from_pools([model], [everything(target)], 0.0, 40, 5000, generator(3))
    losses = torch.stack([negative_log_proposal(twist, draw_batch(update)) for update in range(40)])
    _, logits, hidden = model.log_probs(sequences)
    each = cross_entropy((logits + twist(hidden)).flatten(0, 1), sequences.flatten(), reduction="none")
    exact = (share[:, None] * each.view(sequences.shape)).sum() / sequences.shape[1]
    assert abs(losses.mean() - exact) < 4 * losses.std() / 40**0.5 < 0.01
    found, wanted = (torch.autograd.grad(value, twist.log_psi)[0] for value in (losses.mean(), exact))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.003)
    assert wanted.abs().max() > 0.03, "there is something to be found"


def test_a_twist_learned_from_a_whole_pool_proposes_sigma():
    model, _, _, target = world()
    twist = TableTwist.ones(model)
    before = divergence(model, twist, target)
    draw_batch = batches_from_pools([model], [everything(target)], 0.0, 200, 500, generator(0))
    learn_twist_from_pools(twist, torch.optim.Adam([twist.log_psi], lr=0.1), draw_batch, Steps(200))
    assert divergence(model, twist, target) < 0.01 < 0.1 * before


def test_rounds_that_start_from_the_model_alone_find_sigma():
    """The whole method in a world that can be enumerated and where phi is rare, each twist from psi = 1."""
    model, _, potential = table_world(4, 4, seed=7, scale=5.0)
    sigma = Sigma(model, lambda tokens, log_p: potential(tokens))
    target = Target(model, sigma.log_potential)
    pool, twist, found = Pool(), None, [divergence(model, None, target)]
    for number in range(4):
        chunks = Chunks(2000, 1000, lambda chunk, n=number: generator(100 * n + chunk))
        pool.add(*draw_round(sigma, twist, 0.6, chunks))
        twist = TableTwist.ones(model)
        draw_batch = batches_from_pools([model], [pool], 0.02, 60, 500, generator(number))
        learn_twist_from_pools(twist, torch.optim.Adam([twist.log_psi], lr=0.1), draw_batch, Steps(60))
        found.append(divergence(model, twist, target))
    assert found[-1] < 0.8 * found[1] < 0.16 * found[0], found


def test_parts_of_a_batch_sum_to_its_loss():
    model, twist, _, target = world()
    batch = batches_from_pools([model], [everything(target)], 0.0, 1, 10, generator(0))(0)
    parts = [negative_log_proposal(twist, batch.rows(part)) for part in (slice(0, 3), slice(3, 10))]
    torch.testing.assert_close(sum(parts), negative_log_proposal(twist, batch))


def test_the_embedding_twist_moves_the_hidden_state_of_a_tied_head():
    model, source = tiny_gpt_neo(11), generator(0)
    twist = EmbeddingTwist(6, model.wte.weight, source)
    hidden = torch.randn(5, 3, 8, generator=source)
    assert not twist(hidden).any(), "psi = 1 at first"
    torch.nn.init.normal_(twist.shift.last.weight, generator=source)
    together = model.head(hidden) + twist(hidden)
    torch.testing.assert_close(together, model.head(hidden + twist.shift(hidden)))
    batch = PoolBatch(model, torch.randint(11, (5, 3), generator=source), hidden, 5)
    by_one_product, by_two = (
        negative_log_proposal(twist, batch),
        negative_log_proposal(lambda states: twist(states), batch),
    )
    torch.testing.assert_close(by_one_product, by_two)
    trained = list(twist.shift.parameters())
    gradients = (torch.autograd.grad(loss, trained, retain_graph=True) for loss in (by_one_product, by_two))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    trained = [name for name, parameter in twist.named_parameters() if parameter.requires_grad]
    assert trained and all(name.startswith("shift.") for name in trained)
    assert twist(hidden.bfloat16()).dtype == torch.float32
