"""Draws, streams, estimates, rejection, and runs that die (unbiased: test_unbiased.py)."""

import math

import pytest
import torch
from torch.nn.functional import one_hot
from worlds import INF, ListedPotential, bias, generator, hard_potential, table_world

from tsmc import draws
from tsmc.draws import BLOCK, SCHEMES, draw_categorical, systematic
from tsmc.estimate import Estimate, log_mean_estimate, mean_estimate
from tsmc.exact import TableTwist, Target
from tsmc.rejection import draw_accepted, exact_samples
from tsmc.sampler import Rule, draw_population, tsmc
from tsmc.sigma import Sigma
from tsmc.streams import CHUNK, Streams


@pytest.mark.learned
@pytest.mark.parametrize("weights", [[0.1, 0.9], [0.0, 0.7, 0.3], [0.6, 0.05, 0.3, 0.05]])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_are_k_w_on_average_and_rows_are_independent(scheme, weights):
    """Every second row has the weights in reverse."""
    rows, particles = 20_000, len(weights)
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


def test_weights_of_dead_and_extreme_runs_are_defined_and_zero_weights_are_never_drawn():
    points = torch.tensor([[0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53, 1.0]]).double()
    for row in ([0.0, 0.5, 0.0, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0]):
        chosen = draws.invert(torch.tensor([row]), points)
        assert (chosen >= 0).all() and (torch.tensor([row]).gather(1, chosen) > 0).all()
    log_weights = torch.tensor([[-INF] * 4, [-1e4, -1e4, -1e4, -INF], [1e4, 0.0, 0.0, 0.0]])
    wanted = torch.tensor([[0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0], [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(draws.normalise(log_weights), wanted)
    assert draws.effective_sample_size(log_weights).tolist() == pytest.approx([0.0, 3.0, 1.0])
    wanted = torch.tensor([-INF, -1e4 + math.log(0.75), 1e4 + math.log(0.25)])
    torch.testing.assert_close(draws.log_mean_exp(log_weights), wanted)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_tokens_at_edge_uniforms_are_in_range_and_possible(size):
    logits = torch.randn(50, size, generator=generator(size))
    is_ruled_out = torch.rand(50, size - 1, generator=generator(1)) < 0.7
    logits[:, 1:][is_ruled_out] = -INF  # token 0 stays possible
    logits[25:] = logits[25:].roll(size // 2, 1)
    for number in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        uniform = torch.full((50, 1), number).double()
        for given in (logits, logits.double()):
            tokens, log_normaliser = draw_categorical(given, uniform, torch.arange(50))
            assert (tokens >= 0).all() and (tokens < size).all()
            assert logits.gather(1, tokens[:, None]).isfinite().all()
            torch.testing.assert_close(log_normaliser, given.logsumexp(-1))
    tokens, log_normaliser = draw_categorical(logits - INF, uniform, torch.arange(50))
    assert (tokens == 0).all() and (log_normaliser == -INF).all()


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
def test_runs_die_where_phi_is_zero_almost_everywhere():
    model, twist, _ = table_world(2, 3, seed=6)
    potential = hard_potential({5: -1.0})
    assert bias(model, twist, potential) < 1e-12
    sizes = (twist, 3, 200, Rule())
    population = draw_population(Streams(), "x", None, Sigma(model, model, potential), *sizes)
    is_dead = population.log_z == -INF
    assert 0 < is_dead.sum() < 200 and torch.equal(population.ess < 1, is_dead)
    assert not population.log_z.isnan().any()
    assert (population.alive().samples == torch.tensor([1, 0, 1])).all()
    shares = population.shares()
    assert shares.sum().item() == pytest.approx(1) and (shares[is_dead] == 0).all()
    nothing = Sigma(model, model, hard_potential({}))
    with pytest.raises(ValueError, match="all 6 runs of 2 particles ended with weight zero"):
        draw_population(Streams(), "x", None, nothing, None, 2, 6, Rule())


@pytest.mark.learned
@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_a_twist_that_rules_out_every_continuation_kills_the_particle_not_the_run(ess_threshold):
    model, twist, potential = table_world(2, 3, seed=6)
    with torch.no_grad():
        twist.log_psi[0] = 0.0
        twist.log_psi[1] = -INF  # no token may follow the prefix (0,)
    sigma, sizes = Sigma(model, model, potential), (100, Rule(ess_threshold=ess_threshold))
    alive = tsmc(sigma, twist, 6, generator(0), *sizes).alive()
    assert len(alive.log_z) > 90 and (alive.samples[..., 0] == 1).all()
    nothing, nan = (TableTwist(torch.full_like(twist.log_psi, x)) for x in (-INF, torch.nan))
    assert len(tsmc(sigma, nothing, 3, generator(0), *sizes).alive().log_z) == 0
    nan_phi = ListedPotential(torch.full((8,), torch.nan).double(), 2)
    for one, psi in ((sigma, nan), (Sigma(model, model, nan_phi), twist)):
        with pytest.raises(ValueError, match="NaN"):
            tsmc(one, psi, 3, generator(0), *sizes)


def test_runs_in_chunks_are_those_of_the_sampler_chunk_by_chunk():
    model, twist, potential = table_world(3, 4)
    streams, sigma, rule = Streams(0), Sigma(model, model, potential), Rule(systematic, 0.7)
    particles = CHUNK // 4
    whole = draw_population(streams, "x", 1, sigma, twist, particles, 10, rule)  # 4, 4 and 2 runs
    for n, runs in enumerate((4, 4, 2)):
        part = tsmc(sigma, twist, particles, streams.stream("x", 1, n), runs, rule)
        for name, values in vars(part).items():
            assert torch.equal(values, vars(whole)[name][4 * n :][:runs]), name
    names = [("a", 0), ("a", 1), ("a", None), ("b", 0), ("a", 0, 0)]
    seeds = {Streams(seed).stream(*name).initial_seed() for seed in (0, 1) for name in names}
    assert len(seeds) == 10


@pytest.mark.learned
@pytest.mark.parametrize("end", [(), (1,)])
def test_rejection_draws_sigma_and_knows_its_evidence(end):
    model, _, potential = table_world(3, 3, end=end)
    target = Target(model, potential)
    found = exact_samples(model, potential, Streams(0), "x", 20_000)
    numbers = found.tokens @ torch.tensor([9, 3, 1])
    assert torch.equal(found.log_phi, potential.log_phi[numbers])
    sigma = target.log_sigma[-1].exp()
    frequency = numbers.bincount(minlength=27) / len(numbers)
    assert ((frequency - sigma).abs() <= 5 * (sigma / len(numbers)).sqrt()).all()
    assert abs(found.log_z - target.log_z) < 5 * found.log_z_std_error < 0.1
    with pytest.raises(ValueError, match="exact samples need log phi <= 0"):
        draw_accepted(model, lambda tokens: 1e-3 + 0.0 * tokens.sum(1), 5, generator(0))


@pytest.mark.parametrize("dof", [1, 2, 7, 30, 31, 60, 10**6])
def test_half_widths_are_quantiles_of_students_t(dof):
    """They hold 95 % of its density, integrated with t = sqrt(dof) tan x."""
    limit = math.atan(Estimate(0.0, 1.0, dof).half_width() / math.sqrt(dof))
    x = torch.linspace(0, limit, 100_001, dtype=torch.float64)
    half = torch.linspace(0, math.pi / 2, 1_000_001, dtype=torch.float64)
    inside, whole = (torch.trapezoid(y.cos() ** (dof - 1), y) for y in (x, half))
    assert (inside / whole).item() == pytest.approx(0.95, abs=2e-5)


@pytest.mark.learned
def test_estimates_have_the_error_of_repeated_samples():
    values = torch.randn(2000, 50, generator=generator(0), dtype=torch.float64)
    for estimate, exact in ((mean_estimate, 0.0), (log_mean_estimate, 0.5)):
        found = [estimate(row) for row in values]
        covered = sum(abs(one.value - exact) < one.half_width() for one in found) / 2000
        assert 0.87 < covered < 0.965
        assert {one.dof for one in found} == {49}
    assert mean_estimate(torch.tensor([1.0])).std_error == INF
    assert mean_estimate(torch.tensor([0.0, -INF])) == Estimate(-INF, 0.0, 1.0)
    assert log_mean_estimate(torch.tensor([-INF] * 3)) == Estimate(-INF, INF, 2.0)
    assert log_mean_estimate(values[0], 7.5).dof == 6.5
