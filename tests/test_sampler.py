"""Draws and the sampler: schemes, tokens, runs that die, chunks (unbiased: test_mutants.py)."""

import math

import pytest
import torch
from torch.nn.functional import one_hot
from worlds import ListedPotential, bias, generator, gpt_neo_world, hard_potential, table_world

from tinystories import decoder as decoders
from tsmc import draws
from tsmc.draws import BLOCK, SCHEMES, draw_categorical, systematic
from tsmc.exact import TableTwist
from tsmc.sampler import Rule, tsmc
from tsmc.sigma import Sigma
from tsmc.streams import Streams, draw_population


@pytest.mark.learned
@pytest.mark.parametrize("weights", [[0.1, 0.9], [0.0, 0.7, 0.3], [0.6, 0.05, 0.3, 0.05]])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_are_k_w_on_average_and_rows_are_independent(scheme, weights):
    """Every second row has the weights in reverse."""
    rows, particles = 40_000, len(weights)
    weights = torch.tensor([weights, weights[::-1]], dtype=torch.float64)
    ancestors = SCHEMES[scheme](weights.repeat(rows // 2, 1), generator(0))
    copies = one_hot(ancestors, particles).double().unflatten(0, (-1, 2)).sum(2)  # [R / 2, 2, K]
    error = copies.std(0) / (rows / 2) ** 0.5
    assert ((copies.mean(0) - particles * weights).abs() <= 5 * error + 1e-12).all()
    left, right = (copies - copies.mean(0)).unbind(1)
    for product in (left * right, left[1:] * right[:-1], left[1:] * left[:-1]):
        assert (product.mean(0).abs() <= 5 * product.std(0) / len(product) ** 0.5 + 1e-12).all()
    if scheme == "systematic":  # K W_k, rounded up or down
        assert ((copies - particles * weights).abs() < 1 + 1e-9).all()


def test_weights_of_dead_and_extreme_runs_are_defined_and_edges_choose_nothing_dead():
    points = torch.tensor([[0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53, 1.0]]).double()
    for row in ([0.0, 0.5, 0.0, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0]):
        chosen = draws.invert(torch.tensor([row]), points)
        assert (chosen >= 0).all() and (torch.tensor([row]).gather(1, chosen) > 0).all()
    log_weights = torch.tensor([[0.0] * 4, [-1e4] * 4, [1e4, 0.0, 0.0, 0.0]])
    log_weights[0], log_weights[1, 3] = -torch.inf, -torch.inf
    wanted = torch.tensor([[0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0], [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(draws.normalise(log_weights), wanted)
    assert draws.effective_sample_size(log_weights).tolist() == pytest.approx([0.0, 3.0, 1.0])
    wanted = torch.tensor([-torch.inf, -1e4 + math.log(0.75), 1e4 + math.log(0.25)])
    torch.testing.assert_close(draws.log_mean_exp(log_weights), wanted)


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
def test_tokens_at_edge_uniforms_are_in_range_and_possible(size):
    logits = torch.randn(50, size, generator=generator(size))
    is_ruled_out = torch.rand(50, size - 1, generator=generator(1)) < 0.7
    logits[:, 1:][is_ruled_out] = -torch.inf  # token 0 stays possible
    logits[25:] = logits[25:].roll(size // 2, 1)
    for number in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        uniform = torch.full((50, 1), number).double()
        for given in (logits, logits.double()):
            tokens, found = draw_categorical(given, uniform, torch.arange(50))
            assert (tokens >= 0).all() and (tokens < size).all()
            assert logits.gather(1, tokens[:, None]).isfinite().all()
            torch.testing.assert_close(found, given.logsumexp(-1))


def test_a_grid_of_uniforms_meets_every_group_in_proportion():
    """Uniforms at the midpoints of 1024 equal cells: leading counts are right to one draw."""
    logits = 2.5 * torch.randn(50257, generator=generator(8))
    grid = (torch.arange(1024).double() + 0.5)[:, None] / 1024
    place = torch.zeros(128, dtype=torch.long)  # all draw from the same row
    parts = [draw_categorical(logits[None], part, place)[0] for part in grid.split(128)]
    tokens = torch.cat(parts)
    assert (tokens.diff() >= 0).all()
    cumulative = logits.double().softmax(-1).cumsum(0)
    leading = tokens.bincount(minlength=50257).cumsum(0)
    assert (leading - 1024 * cumulative).abs().max() < 0.51 + 1024 * 1e-5


@pytest.mark.learned
def test_runs_that_die_where_phi_is_zero_almost_everywhere():
    model, twist, _ = table_world(2, 3, seed=6)
    potential = hard_potential({5: -1.0})
    assert bias(model, twist, potential) < 1e-12
    given = (twist, 3, 200, Rule())
    population = draw_population(Streams(), "x", None, Sigma(model, potential), *given)
    is_dead = ~population.is_alive()
    assert 0 < is_dead.sum() < 200 and torch.equal(population.ess < 1, is_dead)
    assert not population.log_z.isnan().any()
    assert (population.alive().samples == torch.tensor([1, 0, 1])).all()
    with pytest.raises(ValueError, match="all 6 runs of 2 particles ended with weight zero"):
        draw_population(Streams(), "x", None, Sigma(model, hard_potential({})), None, 2, 6, Rule())


@pytest.mark.learned
@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_twist_that_rules_out_every_continuation_kills_the_particle_not_the_run(ess_threshold):
    model, twist, potential = table_world(2, 3, seed=6)
    with torch.no_grad():
        twist.log_psi[0] = 0.0
        twist.log_psi[1] = -torch.inf  # no token may follow the prefix (0,)
    sigma, given = Sigma(model, potential), (100, Rule(ess_threshold=ess_threshold))
    alive = tsmc(sigma, twist, 6, generator(0), *given).alive()
    assert len(alive.log_z) > 90 and (alive.samples[..., 0] == 1).all()
    nothing, nan = (TableTwist(torch.full_like(twist.log_psi, x)) for x in (-torch.inf, torch.nan))
    assert not tsmc(sigma, nothing, 3, generator(0), *given).is_alive().any()
    nan_potential = ListedPotential(torch.full((8,), torch.nan).double(), 2)
    for one, psi in ((sigma, nan), (Sigma(model, nan_potential), twist)):
        with pytest.raises(ValueError, match="NaN"):
            tsmc(one, psi, 3, generator(0), *given)


def test_logits_are_made_in_slices_of_bounded_size_with_the_same_results(monkeypatch):
    model, strong, potential = gpt_neo_world(5, 3, seed=2)
    sizes = []
    twist = lambda hidden: sizes.append(5 * len(hidden)) or strong(hidden)  # noqa: E731
    sigma = Sigma(model, potential)
    wanted = tsmc(sigma, twist, 12, generator(2), 2)
    monkeypatch.setattr(decoders, "MAX_LOGITS", 40)
    found = tsmc(sigma, twist, 12, generator(2), 2)
    torch.testing.assert_close(vars(found), vars(wanted))
    assert max(sizes[3:]) <= 40 < max(sizes[:3])


def test_runs_in_chunks_are_those_of_the_sampler_chunk_by_chunk():
    (model, twist, potential), streams = table_world(3, 4), Streams(seed=0, rows=20)
    sigma, rule = Sigma(model, potential), Rule(systematic, 0.7)
    whole = draw_population(streams, "x", 1, sigma, twist, 5, 10, rule)  # 4, 4 and 2 runs
    for n, runs in enumerate((4, 4, 2)):
        part = tsmc(sigma, twist, 5, streams.stream("x", 1, n), runs, rule)
        for name, values in vars(part).items():
            assert torch.equal(values, vars(whole)[name][4 * n :][:runs]), name
    names = [("a", 0), ("a", 1), ("a", None), ("b", 0), ("a", 0, 0)]
    seeds = {Streams(seed).stream(*name).initial_seed() for seed in (0, 1) for name in names}
    assert len(seeds) == 10
