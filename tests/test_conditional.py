"""Conditional runs: the mean of 1 / Z-hat over all random paths, and the reference."""

import pytest
import torch
import worlds
from worlds import ADAPTIVE, generator, hard_potential, table_world

from tsmc.exact import Target
from tsmc.sampler import tsmc
from tsmc.trace import Trace

SIZES = [(length, 2, ess) for length in (2, 3) for ess in (1.0, ADAPTIVE, 0.0)]
SIZES += [(2, 3, 1.0), (3, 1, 1.0)]


def mean_inverse(*world, ess_threshold) -> float:
    """log E[1 / Z-hat] of conditional runs, each given a sample of sigma."""
    chances, population = worlds.every_conditional_path(*world, ess_threshold=ess_threshold)
    return (chances * (-population.log_z).exp()).sum().log().item()


@pytest.mark.parametrize(("length", "particles", "ess_threshold"), SIZES)
def test_the_mean_of_one_over_z_hat_is_that_of_one_over_z(length, particles, ess_threshold):
    model, twist, potential = table_world(length, length, seed=2)
    target = Target(model, potential)
    world = (model, twist, potential, target, particles)
    inverse = mean_inverse(*world, ess_threshold=ess_threshold)
    assert inverse == pytest.approx(-target.log_z, abs=1e-12)


@pytest.mark.parametrize(("length", "particles"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
def test_where_runs_can_die_it_is_the_chance_to_live_over_z(length, particles, ess_threshold):
    model, twist, _ = table_world(2, length, seed=6)
    potential = hard_potential(2, length, {2: -1.0, 2**length - 2: -0.3})
    target = Target(model, potential)
    chances, population = worlds.every_path(
        model, twist, potential, particles, ess_threshold=ess_threshold
    )
    alive = chances[population.is_alive()].sum()
    world = (model, twist, potential, target, particles)
    inverse = mean_inverse(*world, ess_threshold=ess_threshold)
    assert 0.05 < alive < 0.95
    assert inverse == pytest.approx(alive.log().item() - target.log_z, abs=1e-12)


def test_where_runs_of_many_particles_can_die_the_sample_mean_agrees():
    """40,000 runs of each kind: within four standard errors, which are under 2 % of the value."""
    model, twist, _ = table_world(3, 3, seed=6)
    potential = hard_potential(3, 3, {2: -1.0, 25: -0.3})
    target, runs = Target(model, potential), 40_000
    alive = tsmc(model, twist, potential, 6, generator(0), runs).is_alive().double()
    reference = target.sample(runs, generator(1))
    given = tsmc(model, twist, potential, 6, generator(2), runs, reference=reference)
    inverse = (target.log_z - given.log_z).exp()
    error = ((alive.var() + inverse.var()) / runs).sqrt()
    assert error < 0.02 * alive.mean() and alive.mean() < 0.8
    assert (inverse.mean() - alive.mean()).abs() < 4 * error


def test_the_reference_stays_and_has_offspring():
    model, twist, potential = table_world(3, 4, seed=5)
    reference = Target(model, potential).sample(300, generator(0))
    trace = Trace()
    options = {"runs": 300, "reference": reference, "observer": trace}
    population = tsmc(model, twist, potential, 5, generator(1), **options)
    assert torch.equal(population.tokens[:, 0], reference)
    assert torch.equal(population.samples[:, 0], reference)
    assert (trace.lineages()[:, :, 0] == 0).all()
    assert (trace.ancestors[:, :, 1:] == 0).any(-1).any(-1).all()
