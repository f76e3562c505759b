"""Conditional runs: the mean of 1 / Z-hat over all random paths, also where runs can die, and what becomes of the reference."""

import pytest
import torch
from worlds import ListedPotential, every_conditional_path, every_path, generator, table_world

from tinystories.errors import InputError
from tsmc.conditional import conditional_tsmc
from tsmc.exact import Target
from tsmc.sampler import tsmc
from tsmc.trace import Trace

ADAPTIVE = 0.9  # two particles resample where the smaller weight is under a third


def mean_inverse(model, twist, potential, target, particles, ess_threshold) -> float:
    """log E[1 / Z-hat] of conditional runs, each given a sample of sigma."""
    chances, population = every_conditional_path(model, twist, potential, target, particles, ess_threshold)
    return (chances * (-population.log_z).exp()).sum().log().item()


@pytest.mark.parametrize(
    ("length", "particles", "ess_threshold"),
    [(2, 2, 1.0), (2, 2, ADAPTIVE), (2, 2, 0.0), (3, 2, 1.0), (3, 2, ADAPTIVE), (3, 2, 0.0), (2, 3, 1.0), (3, 1, 1.0)],
)
def test_the_mean_of_one_over_z_hat_is_that_of_one_over_z(length, particles, ess_threshold):
    model, twist, potential = table_world(length, length, seed=2)
    target = Target(model, potential)
    inverse = mean_inverse(model, twist, potential, target, particles, ess_threshold)
    assert inverse == pytest.approx(-target.log_z, abs=1e-12)


def hard_world(vocab_size: int, length: int):
    """A table, a twist, and a potential that rules out all but two sequences."""
    model, twist, _ = table_world(vocab_size, length, seed=6)
    log_phi = torch.full((vocab_size**length,), -torch.inf).double()
    log_phi[[2, -2]] = torch.tensor([-1.0, -0.3]).double()
    return model, twist, ListedPotential(log_phi, vocab_size)


@pytest.mark.parametrize(("length", "particles"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
def test_where_runs_can_die_it_is_the_chance_to_live_over_z(length, particles, ess_threshold):
    model, twist, potential = hard_world(2, length)
    target = Target(model, potential)
    chances, population = every_path(model, twist, potential, particles, ess_threshold=ess_threshold)
    alive = chances[population.is_alive()].sum()
    inverse = mean_inverse(model, twist, potential, target, particles, ess_threshold)
    assert 0.05 < alive < 0.95
    assert inverse == pytest.approx(alive.log().item() - target.log_z, abs=1e-12)


def test_where_runs_of_many_particles_can_die_the_sample_mean_agrees():
    """40,000 runs of each kind of 6 particles: within four standard errors, which are under 2 % of the value."""
    model, twist, potential = hard_world(3, 3)
    target, runs = Target(model, potential), 40_000
    alive = tsmc(model, twist, potential, 6, generator(0), runs).is_alive().double()
    references = target.sample(runs, generator(1))
    inverse = (target.log_z - conditional_tsmc(model, twist, potential, references, 6, generator(2)).log_z).exp()
    error = ((alive.var() + inverse.var()) / runs).sqrt()
    assert error < 0.02 * alive.mean() and alive.mean() < 0.8
    assert (inverse.mean() - alive.mean()).abs() < 4 * error


def test_the_reference_stays_and_has_offspring():
    model, twist, potential = table_world(3, 4, seed=5)
    reference = Target(model, potential).sample(300, generator(0))
    trace = Trace()
    population = conditional_tsmc(model, twist, potential, reference, 5, generator(1), observer=trace)
    assert torch.equal(population.tokens[:, 0], reference) and torch.equal(population.samples[:, 0], reference)
    assert (trace.lineages()[:, :, 0] == 0).all()
    assert (trace.ancestors[:, :, 1:] == 0).any(-1).any(-1).all()


@pytest.mark.parametrize("shape", [(3, 1), (3, 3), (3,), (3, 2, 1)])
def test_a_reference_of_the_wrong_shape_is_refused(shape):
    model, twist, potential = table_world(2, 2)
    with pytest.raises(InputError, match=r"reference has shape \[3.*\] where \[3, 2\] is needed"):
        conditional_tsmc(model, twist, potential, torch.zeros(shape, dtype=torch.long), 2, generator(0))


@pytest.mark.parametrize(("runs", "particles", "ess_threshold"), [(0, 2, 1.0), (3, 0, 1.0), (3, 2, 1.5), (3, 2, -0.1)])
def test_options_out_of_range_are_refused(runs, particles, ess_threshold):
    model, twist, potential = table_world(2, 2)
    reference = torch.zeros(runs, 2, dtype=torch.long)
    with pytest.raises(InputError):
        conditional_tsmc(model, twist, potential, reference, particles, generator(0), ess_threshold)
