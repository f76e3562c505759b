"""Bidirectional bounds and rejection: exact expectations, and intervals against the oracle."""

import math

import pytest
import torch
import worlds
from worlds import ListedPotential, generator, table_world

from tinystories.errors import InputError
from tsmc.bounds import BoundsProblem, bidirectional_bounds
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.exact import Target
from tsmc.rejection import draw_accepted, exact_samples, log_mean_with_error
from tsmc.runs import Phases
from tsmc.sampler import Sigma


@pytest.mark.parametrize("ess_threshold", [1.0, 0.9, 0.0])
def test_expectations_bracket_the_evidence_and_approach_it_with_more_particles(ess_threshold):
    """E[log Z-hat] of plain and of conditional runs, over all random paths."""
    world = table_world(2, 2, seed=2)
    log_z, gaps = Target(world[0], world[2]).log_z, []
    for particles in (1, 2, 3):
        every = (worlds.every_path, worlds.every_conditional_path)
        both = [paths(*world, particles, ess_threshold=ess_threshold) for paths in every]
        lower, upper = ((chances * runs.log_z).sum().item() for chances, runs in both)
        assert lower < log_z < upper
        gaps.append(upper - lower)
    assert gaps[0] > gaps[1] > gaps[2]


@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_intervals_cover_as_often_as_they_say_and_are_narrow(ess_threshold):
    """120 experiments with 4 exact samples and 8 runs each.

    At a level of 90 %, fewer than 96 hits have a probability of 1e-4.
    """
    model, twist, potential = table_world(2, 3, seed=7, scale=0.8)
    target, source = Target(model, potential), generator(5)
    problem = BoundsProblem(Sigma(model, potential), twist, 4, ess_threshold, max_rows=30)
    hits = torch.zeros(3)
    log_q = target.tree.prefix_log_q(twist)[-1].detach()
    exact = torch.tensor([target.log_z, target.kl_from(log_q), target.kl_to(log_q)])
    for _ in range(120):
        bounds = bidirectional_bounds(problem, target.sample(4, source), 8, source, proposals=20)
        brackets = (bounds.log_z, bounds.kl_from_proposal, bounds.kl_from_target)
        low, high = torch.tensor([bracket.interval(0.9) for bracket in brackets]).T
        hits += (low <= exact) & (exact <= high)
    assert (hits >= 96).all()
    bounds = bidirectional_bounds(problem, target.sample(400, source), 300, source)
    low, high = bounds.log_z.interval()
    assert high - low < 1


def test_estimates():
    mean = mean_estimate(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert mean.value == 3 and mean.dof == 3
    assert mean.std_error == pytest.approx((14 / 3 / 4) ** 0.5)
    both = difference(mean, Estimate(1.0, mean.std_error, 3))
    assert both.value == 2 and both.dof == pytest.approx(6)
    assert both.std_error == pytest.approx(mean.std_error * 2**0.5)
    assert difference(mean, Estimate(-math.inf, 0.0, math.inf)).value == math.inf
    assert mean_estimate(torch.tensor([-torch.inf, 1.0])).quantile(0.9) == -math.inf
    assert mean_estimate(torch.tensor([4.0])).quantile(0.1) == -math.inf


def test_rejection_gives_exact_samples_and_the_evidence_from_all_chunks():
    model, _, potential = table_world(2, 3, seed=8)
    target = Target(model, potential)

    def draw(size, source) -> dict:
        return draw_accepted(model, potential, size, source)

    result = exact_samples(Phases(rows=3000).draw("rejection", None, 20000, draw))
    assert abs(result.log_z - target.log_z) < 4 * result.log_z_std_error < 0.1
    shares = worlds.sequence_numbers(result.tokens, 2).bincount(minlength=8) / len(result.tokens)
    sigma = target.log_sigma[-1].exp()
    error = (sigma * (1 - sigma) / len(result.tokens)).sqrt()
    assert ((shares - sigma).abs() < 4 * error).all()
    torch.testing.assert_close(result.log_phi, potential(result.tokens))
    assert result.num_proposals == 20000 and 0 < len(result.tokens) < 20000


def test_rejection_with_potentials_of_zero_one_and_more():
    model, _, _ = table_world(2, 3)

    def sample(log_phi: float):
        potential = ListedPotential(torch.full((8,), log_phi), 2)
        return exact_samples(draw_accepted(model, potential, 50, generator(0)))

    for log_phi, accepted, log_z in ((-torch.inf, 0, -math.inf), (0.0, 50, 0.0)):
        result = sample(log_phi)
        assert len(result.tokens) == accepted and result.log_z == pytest.approx(log_z, abs=1e-6)
        assert not math.isnan(result.log_z_std_error)
    for log_phi, message in ((0.1, "subtract an upper bound"), (math.nan, "is NaN")):
        with pytest.raises(InputError, match=message):
            sample(log_phi)
    assert log_mean_with_error(torch.tensor([-2.0])) == (-2.0, math.inf)
