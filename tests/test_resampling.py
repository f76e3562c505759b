"""Resampling schemes: exact expectations and variances, edges, and large populations in float32."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot
from worlds import Paths, ancestor_breakpoints, generator

from tsmc.resampling import SCHEMES, effective_sample_size, log_mean_exp, normalise

ALMOST_ONE = 1 - 2.0**-53


def counts_of_all_paths(scheme: str, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [R] and copies [R, K] over all random paths of one population, weights [K]."""
    particles = len(weights)
    runs = particles if scheme == "systematic" else particles**particles
    paths, rows = Paths(runs, runs), weights.expand(runs, -1)
    paths.choose(ancestor_breakpoints(scheme, rows))
    with mock.patch.object(torch, "rand", paths.rand):
        ancestors = SCHEMES[scheme](rows, generator(0))
    return paths.probabilities(), one_hot(ancestors, particles).sum(1).double()


WEIGHTS = [[0.5, 0.5], [0.1, 0.9], [0.2, 0.3, 0.5], [0.0, 0.7, 0.3], [1.0, 0.0, 0.0]]
WEIGHTS += [[0.25] * 4, [0.6, 0.05, 0.3, 0.05]]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_expected_copies_and_the_variance_of_any_mean(scheme, weights):
    """Copies are K W_k on average; the variance is that of independent draws, or smaller.

    Of systematic resampling the variance may be larger for some functions.
    """
    weights = torch.tensor(weights, dtype=torch.float64)
    particles = len(weights)
    chances, copies = counts_of_all_paths(scheme, weights)
    torch.testing.assert_close(chances @ copies, particles * weights, rtol=0, atol=1e-12)
    random = torch.randn(9, particles, generator=generator(0))
    functions = torch.cat([torch.eye(particles), random]).double()
    sums = copies @ functions.T
    variance = chances @ sums.square() - (chances @ sums).square()
    mean = functions @ weights
    independent = particles * (functions.square() @ weights - mean.square())
    if scheme == "multinomial":
        torch.testing.assert_close(variance, independent, rtol=0, atol=1e-12)
    elif scheme != "systematic":
        assert (variance <= independent + 1e-12).all()


@st.composite
def populations(draw):
    """Weights [R, K] with zeros among them, in either precision."""
    particles = draw(st.integers(1, 12))
    weight = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
    row = st.lists(weight, min_size=particles, max_size=particles).filter(any)
    rows = draw(st.lists(row, min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    weights = torch.tensor(rows, dtype=dtype)
    return weights / weights.sum(-1, keepdim=True)


@settings(max_examples=60, deadline=None)
@given(populations(), st.sampled_from(sorted(SCHEMES)), st.integers(0, 2**31))
def test_ancestors_are_in_range_and_alive(weights, scheme, seed):
    particles = weights.shape[1]
    ancestors = SCHEMES[scheme](weights, generator(seed))
    assert ancestors.shape == weights.shape and ancestors.dtype == torch.long
    assert (ancestors >= 0).all() and (ancestors < particles).all()
    assert (weights.gather(1, ancestors) > 0).all()
    copies = one_hot(ancestors, particles).sum(1)
    expected = particles * weights.double()
    slack = 1e-5 * particles
    if scheme in ("systematic", "residual"):
        assert (copies >= (expected - slack).floor()).all()
    if scheme == "systematic":
        assert (copies <= (expected + slack).ceil()).all()
    if scheme == "stratified":
        assert ((copies - expected).abs() <= slack + 2).all()


EDGES = [[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.25, 0.25, 0.5], [1 / 3, 1 / 3, 1 / 3, 0.0], [1.0]]


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.25, 0.5, 0.75, ALMOST_ONE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_uniforms_on_the_edges_choose_nothing_dead_or_out_of_range(scheme, uniform):
    def rand(*shape: int, **_) -> torch.Tensor:
        return torch.full(shape, uniform, dtype=torch.float64)

    for row in EDGES:
        weights = torch.tensor([row])
        with mock.patch.object(torch, "rand", rand):
            ancestors = SCHEMES[scheme](weights, generator(0))
        assert (ancestors >= 0).all() and (ancestors < weights.shape[1]).all()
        assert (weights.gather(1, ancestors) > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_runs_of_a_batch_are_independent_of_each_other(scheme):
    weights = normalise(torch.randn(2, 1000, generator=generator(0)))
    same = weights[:1].expand(2, -1).contiguous()
    first, second = SCHEMES[scheme](same, generator(1))
    assert not torch.equal(first, second)
    alone = SCHEMES[scheme](weights[:1], generator(1))[0]
    assert torch.equal(alone, SCHEMES[scheme](weights, generator(1))[0])
    for particles in (1, 3, 7, 49, 100) if scheme != "multinomial" else ():
        everyone = SCHEMES[scheme](normalise(torch.zeros(2, particles)), generator(1))
        assert torch.equal(everyone, torch.arange(particles).expand(2, -1)), "equal weights"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hundred_thousand_particles_in_float32(scheme):
    particles = 100_000
    log_weights = 2 * torch.randn(1, particles, generator=generator(2))
    log_weights[0, ::3] = -torch.inf
    exact = log_weights.double().softmax(-1)[0]
    ancestors = SCHEMES[scheme](normalise(log_weights), generator(3))[0]
    assert ancestors.min() >= 0 and ancestors.max() < particles and (exact[ancestors] > 0).all()
    copies = ancestors.bincount(minlength=particles).double()
    most = {"systematic": 1.01, "stratified": 2.01, "residual": 9, "multinomial": particles}
    assert (copies - particles * exact).abs().max() < most[scheme]
    groups = exact.argsort().view(100, -1)  # light particles with light, heavy with heavy
    expected = particles * exact[groups].sum(-1)
    observed = copies[groups].sum(-1)[expected > 5]
    expected = expected[expected > 5]
    statistic = (observed - expected).square().div(expected).sum()
    assert statistic < 150  # chi-square with at most 99 degrees of freedom, level 1e-3


def test_weights_of_dead_and_extreme_runs_are_defined():
    rows = [[-torch.inf] * 4, [-1e4, -1e4, -1e4, -torch.inf], [1e4, 0.0, 0.0, 0.0]]
    log_weights = torch.tensor(rows)
    wanted = torch.tensor([[0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0], [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(normalise(log_weights), wanted)
    wanted = torch.tensor([0.0, 3.0, 1.0])
    torch.testing.assert_close(effective_sample_size(log_weights), wanted)
    logs = torch.tensor([0.75, 0.25]).log()
    wanted = torch.tensor([-torch.inf, -1e4 + logs[0], 1e4 + logs[1]])
    torch.testing.assert_close(log_mean_exp(log_weights), wanted)
