"""Bidirectional bounds: exact expectations by enumeration, intervals against the oracle, and few exact samples."""

import math

import pytest
import torch
from worlds import ListedPotential, every_conditional_path, every_path, generator, in_chunks, table_world

from tinystories.errors import InputError
from tsmc.bounds import BoundsProblem, bidirectional_bounds
from tsmc.estimate import Bracket, Estimate, difference, mean_estimate, student_quantile
from tsmc.exact import Target
from tsmc.rejection import log_mean_with_error, rejection_sample
from tsmc.sampler import Sigma
from tsmc.table import TableTwist


def exact_bounds(model, twist, potential, target, particles, ess_threshold) -> tuple[float, float]:
    """E[log Z-hat] of plain and of conditional runs, over all random paths."""
    chances, population = every_path(model, twist, potential, particles, ess_threshold=ess_threshold)
    lower = (chances * population.log_z).sum().item()
    chances, population = every_conditional_path(model, twist, potential, target, particles, ess_threshold)
    return lower, (chances * population.log_z).sum().item()


@pytest.mark.parametrize("ess_threshold", [1.0, 0.9, 0.0])
def test_expectations_bracket_the_evidence_and_close_in_with_more_particles(ess_threshold):
    model, twist, potential = table_world(2, 2, seed=2)
    target = Target(model, potential)
    gaps = []
    for particles in (1, 2, 3):
        lower, upper = exact_bounds(model, twist, potential, target, particles, ess_threshold)
        assert lower < target.log_z < upper
        gaps.append(upper - lower)
    assert gaps[0] > gaps[1] > gaps[2]


def test_one_particle_gives_both_divergences():
    model, twist, potential = table_world(3, 3, seed=2)
    target = Target(model, potential)
    log_q = target.tree.prefix_log_q(twist)[-1].detach()
    lower, upper = exact_bounds(model, twist, potential, target, 1, 0.0)
    assert target.log_z - lower == pytest.approx(target.kl_from(log_q), abs=1e-12)
    assert upper - target.log_z == pytest.approx(target.kl_to(log_q), abs=1e-12)


def assert_inside(value: float, bracket: Bracket, level: float = 0.99) -> None:
    low, high = bracket.interval(level)
    assert low <= value <= high


@pytest.mark.parametrize("exact_samples", [2, 5, 400])
@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_intervals_contain_the_exact_values(ess_threshold, exact_samples):
    model, twist, potential = table_world(3, 4, seed=12)
    target, source = Target(model, potential), generator(exact_samples)
    problem = BoundsProblem(Sigma(model, potential), twist, 8, ess_threshold, max_rows=500)
    bounds = bidirectional_bounds(problem, target.sample(exact_samples, source), 300, source)
    log_q = target.tree.prefix_log_q(twist)[-1].detach()
    assert_inside(target.log_z, bounds.log_z)
    assert_inside(target.kl_to(log_q), bounds.kl_from_target)
    assert_inside(target.kl_from(log_q), bounds.kl_from_proposal)
    if exact_samples == 400:
        low, high = bounds.log_z.interval()
        assert high - low < 4 and bounds.gap > 0


def test_the_gap_closes_with_more_particles():
    model, twist, potential = table_world(3, 4, seed=12)
    target = Target(model, potential)

    def gap(particles: int) -> float:
        problem = BoundsProblem(Sigma(model, potential), twist, particles)
        return bidirectional_bounds(problem, target.sample(200, generator(1)), 400, generator(2)).gap

    assert gap(2) > 2 * gap(16) > 4 * gap(128) > -0.01


def test_optimal_twist_closes_the_gap_and_both_divergences():
    model, _, potential = table_world(3, 3, seed=4)
    target = Target(model, potential)
    problem = BoundsProblem(Sigma(model, potential), TableTwist(target.optimal_log_psi()), 4)
    bounds = bidirectional_bounds(problem, target.sample(5, generator(0)), 20, generator(1))
    assert bounds.gap == pytest.approx(0, abs=1e-10)
    for bracket, value in ((bounds.log_z, target.log_z), (bounds.kl_from_proposal, 0), (bounds.kl_from_target, 0)):
        assert bracket.interval() == pytest.approx((value, value), abs=1e-9)


def test_one_exact_sample_has_a_value_but_no_upper_limit_and_none_is_an_error():
    model, twist, potential = table_world(2, 3, seed=5)
    target, problem = Target(model, potential), BoundsProblem(Sigma(model, potential), twist, 4)
    bounds = bidirectional_bounds(problem, target.sample(1, generator(0)), 50, generator(1))
    assert math.isfinite(bounds.log_z.upper.value) and math.isfinite(bounds.log_z.interval()[0])
    assert bounds.log_z.interval()[1] == math.inf and bounds.kl_from_target.interval() == (0.0, math.inf)
    with pytest.raises(InputError, match="at least one exact sample"):
        bidirectional_bounds(problem, target.sample(0, generator(0)), 50, generator(1))


def test_dead_runs_leave_a_trivial_lower_bound_and_an_infinite_divergence():
    model, _, _ = table_world(2, 3, seed=6)
    log_phi = torch.full((8,), -torch.inf).double()
    log_phi[5] = 0.0
    potential = ListedPotential(log_phi, 2)
    target, problem = Target(model, potential), BoundsProblem(Sigma(model, potential), None, 2)
    bounds = bidirectional_bounds(problem, target.sample(5, generator(0)), 50, generator(1))
    assert bounds.log_z.interval()[0] == -math.inf and bounds.log_z.interval()[1] > target.log_z
    assert bounds.kl_from_proposal.interval() == (math.inf, math.inf)
    low, high = bounds.kl_from_target.interval()
    assert low <= -target.log_z + 1e-9 and high == math.inf


def test_intervals_cover_as_often_as_they_say():
    """120 experiments with 4 exact samples and 8 runs each: at a level of 90 %, under 96 hits has probability 1e-4."""
    model, twist, potential = table_world(2, 3, seed=7, scale=0.8)
    target, source = Target(model, potential), generator(5)
    problem, hits = BoundsProblem(Sigma(model, potential), twist, 4), torch.zeros(3)
    log_q = target.tree.prefix_log_q(twist)[-1].detach()
    exact = (target.log_z, target.kl_from(log_q), target.kl_to(log_q))
    for _ in range(120):
        bounds = bidirectional_bounds(problem, target.sample(4, source), 8, source, proposals=20)
        brackets = (bounds.log_z, bounds.kl_from_proposal, bounds.kl_from_target)
        intervals = [bracket.interval(0.9) for bracket in brackets]
        hits += torch.tensor([low <= value <= high for (low, high), value in zip(intervals, exact, strict=True)])
    assert (hits >= 96).all()


@pytest.mark.parametrize(
    ("dof", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (1e5, 1.960)]
)
def test_student_quantiles(dof, quantile):
    assert student_quantile(0.975, dof) == pytest.approx(quantile, rel=1e-3)
    assert student_quantile(0.025, dof) == pytest.approx(-quantile, rel=1e-3)
    assert student_quantile(0.5, dof) == pytest.approx(0, abs=1e-3)


def test_estimates():
    mean = mean_estimate(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert mean.value == 3 and mean.std_error == pytest.approx((14 / 3 / 4) ** 0.5) and mean.dof == 3
    both = difference(mean, Estimate(1.0, mean.std_error, 3))
    assert both.value == 2 and both.std_error == pytest.approx(mean.std_error * 2**0.5) and both.dof == pytest.approx(6)
    assert difference(mean, Estimate(-math.inf, 0.0, math.inf)).value == math.inf
    assert mean_estimate(torch.tensor([-torch.inf, 1.0])).quantile(0.9) == -math.inf
    assert mean_estimate(torch.tensor([4.0])).quantile(0.1) == -math.inf


def test_rejection_gives_exact_samples_and_the_evidence():
    model, _, potential = table_world(2, 3, seed=8)
    target = Target(model, potential)
    result = rejection_sample(model, potential, in_chunks(20000, 3000, generator(0)))
    assert abs(result.log_z - target.log_z) < 4 * result.log_z_std_error < 0.1
    counts = (result.tokens @ torch.tensor([4, 2, 1])).bincount(minlength=8)
    expected = len(result.tokens) * target.log_sigma[-1].exp()
    assert (counts - expected).square().div(expected).sum() < 24.32  # chi-square, 7 degrees of freedom, level 0.001
    torch.testing.assert_close(result.log_phi, potential(result.tokens))


def test_rejection_with_potentials_of_zero_one_and_more():
    model, _, _ = table_world(2, 3)

    def sample(log_phi: float, count: int = 50):
        potential = ListedPotential(torch.full((8,), log_phi), 2)
        return rejection_sample(model, potential, in_chunks(count, 1000, generator(0)))

    for log_phi, accepted, log_z in ((-torch.inf, 0, -math.inf), (0.0, 50, 0.0)):
        result = sample(log_phi)
        assert len(result.tokens) == accepted and result.log_z == pytest.approx(log_z, abs=1e-6)
        assert not math.isnan(result.log_z_std_error)
    for log_phi, message in ((0.1, "subtract an upper bound"), (math.nan, "is NaN")):
        with pytest.raises(InputError, match=message):
            sample(log_phi)
    with pytest.raises(InputError, match="at least one proposal"):
        sample(0.0, count=0)
    assert log_mean_with_error(torch.tensor([-2.0])) == (-2.0, math.inf)
