"""The pool: its weights against enumeration, and a twist that learns sigma from what was drawn."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from worlds import generator, table_world, tiny_gpt_neo

from tinystories.errors import InputError
from tsmc.exact import Target
from tsmc.proposal import proposal_log_probs
from tsmc.sampler import Sigma
from tsmc.table import TableModel, TableTwist
from twist.embedding import EmbeddingTwist
from twist.pool import Pool, PoolBatch, batches_from_pool, draw_round, learn_twist_from_pool
from twist.pool import negative_log_proposal as loss_of

INF = math.inf


def world(seed: int = 1):
    """Model, twist, sigma and its enumeration."""
    model, twist, potential = table_world(3, 3, seed=seed, scale=2.0)
    twist = PoolTwist(twist.log_psi.detach(), model)
    return model, twist, Sigma(model, potential), Target(model, potential)


class PoolTwist(TableTwist):
    """A table twist that also gives the logits of q, which the loss is made of."""

    def __init__(self, log_psi: torch.Tensor, model: TableModel):
        super().__init__(log_psi)
        self.head = model.head

    def tilted_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) + self(hidden)


def pool_of(log_weights: list[float], tokens: torch.Tensor | None = None) -> Pool:
    """A pool of one round."""
    pool = Pool()
    log_weights = torch.as_tensor(log_weights, dtype=torch.float64)
    tokens = torch.zeros(len(log_weights), 3, dtype=torch.long) if tokens is None else tokens
    pool.add(tokens, log_weights)
    return pool


def everything(target: Target) -> Pool:
    """A pool in which every sequence occurs once, with the weight that makes it sigma."""
    return pool_of(target.log_sigma[-1], target.tree.sequences())


def divergence(twist, target: Target) -> float:
    """KL(sigma||q) by enumeration."""
    return target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())


@pytest.mark.parametrize("power", [0.6, 0.3, None])
def test_a_round_weighs_every_sequence_by_the_proposal_that_drew_it(power):
    """With psi^power; None is the first round, which is drawn from the model itself."""
    model, twist, sigma, target = world()
    options = (None, 0.6) if power is None else (twist, power)
    drawn = draw_round(sigma, *options, 6000, generator(0))
    flattened = None if power is None else TableTwist(power * twist.log_psi)
    log_p, log_q = proposal_log_probs(model, flattened, drawn["tokens"])
    wanted = log_p + sigma.log_potential(drawn["tokens"], log_p) - log_q
    torch.testing.assert_close(drawn["log_weights"], wanted, rtol=0, atol=1e-9)
    weights = wanted.exp()
    error = weights.std() / len(weights) ** 0.5
    assert abs(weights.mean() - math.exp(target.log_z)) < 4 * error < 0.25 * math.exp(target.log_z)


def test_weights_are_truncated_as_little_as_the_ess_allows():
    log_weights = 3 * torch.randn(1000, generator=generator(0), dtype=torch.float64)
    pool = Pool()
    for part in log_weights.split(300):
        pool.add(torch.zeros(len(part), 2), part)
    untouched = log_weights.softmax(0)
    ess = 1 / untouched.square().sum().item()
    torch.testing.assert_close(pool.weights(0.9 * ess / 1000), untouched)
    truncated = pool.weights(4 * ess / 1000)
    assert 1 / truncated.square().sum().item() == pytest.approx(4 * ess, rel=1e-6)
    below = truncated < truncated.max() * (1 - 1e-9)
    assert 0 < (~below).sum() < 500
    ratios = truncated[below] / untouched[below]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
    torch.testing.assert_close(pool.weights(1.0), torch.full((1000,), 1e-3).double())
    some = pool_of([0.0, -5.0, -INF, -INF])
    torch.testing.assert_close(some.weights(1.0), torch.tensor([0.5, 0.5, 0, 0]).double())
    torch.testing.assert_close(
        some.weights(0.0), torch.tensor([0.0, -5, -INF, -INF]).double().softmax(0)
    )


def test_what_cannot_be_learned_from_is_refused():
    for wrong in (math.nan, INF):
        with pytest.raises(InputError, match="check the potential"):
            pool_of([0.0, wrong])
    with pytest.raises(InputError, match="none of the 5 sequences drawn has phi > 0"):
        batches_from_pool(world()[0], pool_of([-INF] * 5), 0.1, 2, 4, generator(0))


def test_the_loss_is_the_cross_entropy_of_sigma_and_q():
    """Over all batches the mean loss is -E_sigma[log q] / T, and so is its gradient."""
    model, twist, _, target = world(seed=4)
    sequences, share = target.tree.sequences(), target.log_sigma[-1].exp()
    draw_batch = batches_from_pool(model, everything(target), 0.0, 40, 5000, generator(3))
    losses = torch.stack([loss_of(twist, draw_batch(update)) for update in range(40)])
    _, logits, hidden = model.log_probs(sequences)
    tilted = (logits + twist(hidden)).flatten(0, 1)
    each = cross_entropy(tilted, sequences.flatten(), reduction="none")
    exact = (share[:, None] * each.view(sequences.shape)).sum() / sequences.shape[1]
    assert abs(losses.mean() - exact) < 4 * losses.std() / 40**0.5 < 0.01
    found, wanted = (torch.autograd.grad(x, twist.log_psi)[0] for x in (losses.mean(), exact))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.003)
    assert wanted.abs().max() > 0.03, "there is something to be found"


def fit(model, pool: Pool, least_ess: float, updates: int, seed: int) -> PoolTwist:
    """A twist learned from psi = 1 on batches of 500."""
    twist = PoolTwist(torch.zeros_like(model.table), model)
    draw_batch = batches_from_pool(model, pool, least_ess, updates, 500, generator(seed))
    optimizer = torch.optim.Adam([twist.log_psi], lr=0.1)
    learn_twist_from_pool(twist, optimizer, draw_batch, updates)
    return twist


def test_a_twist_learned_from_a_whole_pool_proposes_sigma():
    model, _, _, target = world()
    twist = fit(model, everything(target), 0.0, 200, seed=0)
    assert divergence(twist, target) < 0.01 < 0.1 * divergence(None, target)


def test_rounds_that_start_from_the_model_alone_find_sigma():
    """The whole method in a world where phi is rare, each twist learned from psi = 1."""
    model, _, potential = table_world(4, 4, seed=7, scale=5.0)
    sigma, target = Sigma(model, potential), Target(model, potential)
    pool, twist, found = Pool(), None, [divergence(None, target)]
    for number in range(4):
        pool.add(**draw_round(sigma, twist, 0.6, 2000, generator(100 * number)))
        twist = fit(model, pool, 0.02, 60, number)
        found.append(divergence(twist, target))
    assert found[-1] < 0.6 * found[1] < 0.15 * found[0], found


def test_the_embedding_twist_moves_the_hidden_state_of_a_tied_head():
    """One product with the embeddings gives the logits and the twist together."""
    model, source = tiny_gpt_neo(11), generator(0)
    twist = EmbeddingTwist(6, model.wte.weight, source)
    hidden = torch.randn(5, 3, 8, generator=source)
    assert not twist(hidden).any(), "psi = 1 at first"
    torch.nn.init.normal_(twist.shift.last.weight, generator=source)
    together = model.head(hidden) + twist(hidden)
    torch.testing.assert_close(twist.tilted_logits(hidden), together)
    tokens = torch.randint(11, (5, 3), generator=source)
    batch = PoolBatch(tokens, hidden, 5)
    loss = loss_of(twist, batch)
    parts = [loss_of(twist, batch.rows(slice(*cut))) for cut in ((0, 3), (3, 5))]
    torch.testing.assert_close(sum(parts), loss)
    by_two = cross_entropy(together.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(loss, by_two)
    trained = list(twist.shift.parameters())
    gradients = (torch.autograd.grad(x, trained, retain_graph=True) for x in (loss, by_two))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    names = [name for name, parameter in twist.named_parameters() if parameter.requires_grad]
    assert names and all(name.startswith("shift.") for name in names)
    assert twist(hidden.bfloat16()).dtype == torch.float32
