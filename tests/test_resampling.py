"""What every scheme promises, however it draws; edges; large populations in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot
from worlds import generator

from tsmc.resampling import SCHEMES, effective_sample_size, invert, log_mean_exp, normalise

SPREAD = {"stratified": 2, "systematic": 1}
"""By how much copies may differ from K W_k."""
EVEN = [*SPREAD, "residual"]
"""Copies vary no more than those of independent draws; equal weights give one copy each."""
WEIGHTS = [[0.5, 0.5], [0.1, 0.9], [0.2, 0.3, 0.5], [0.0, 0.7, 0.3], [1.0, 0.0, 0.0]]
WEIGHTS += [[0.25] * 4, [0.6, 0.05, 0.3, 0.05]]


@pytest.mark.parametrize("weights", WEIGHTS)
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
    if scheme in EVEN:
        assert (copies.var(0) <= 1.05 * particles * weights * (1 - weights) + 1e-12).all()


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
def test_ancestors_are_in_range_alive_and_those_of_the_generator(weights, scheme, seed):
    particles = weights.shape[1]
    ancestors = SCHEMES[scheme](weights, generator(seed))
    assert ancestors.shape == weights.shape and ancestors.dtype == torch.long
    assert (ancestors >= 0).all() and (ancestors < particles).all()
    assert (weights.gather(1, ancestors) > 0).all()
    assert torch.equal(ancestors, SCHEMES[scheme](weights, generator(seed)))
    copies = one_hot(ancestors, particles).sum(1)
    expected = particles * weights.double()
    slack = 1e-5 * particles
    if scheme in ("systematic", "residual"):
        assert (copies >= (expected - slack).floor()).all()
    if scheme == "systematic":
        assert (copies <= (expected + slack).ceil()).all()
    assert ((copies - expected).abs() <= slack + SPREAD.get(scheme, particles)).all()


EDGES = [[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.25, 0.25, 0.5], [1 / 3, 1 / 3, 1 / 3, 0.0], [1.0]]


@pytest.mark.parametrize("weights", EDGES)
def test_points_on_the_edges_choose_nothing_dead_or_out_of_range(weights):
    weights = torch.tensor([weights])
    points = torch.tensor([[0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53, 1.0]]).double()
    chosen = invert(weights, points)
    assert (chosen >= 0).all() and (weights.gather(1, chosen) > 0).all()


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
