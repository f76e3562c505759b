"""Token draws: edges, a vocabulary of 50257 in float32, and the normaliser."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import generator

import tsmc.categorical
from tsmc.categorical import BLOCK, draw_categorical

ALMOST_ONE = 1 - 2.0**-53
VOCABULARY = 50257


def draw_at(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens drawn from every row of logits [N, V] at given uniforms [N]."""
    return draw_categorical(logits, uniform.double()[:, None])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
def test_tokens_at_edge_uniforms_are_in_range_and_possible(size, uniform, dtype):
    logits = torch.randn(50, size, generator=generator(size)).to(dtype)
    is_ruled_out = torch.rand(50, size - 1, generator=generator(1)) < 0.7
    logits[:, 1:][is_ruled_out] = -torch.inf  # token 0 stays possible
    logits[25:] = logits[25:].roll(size // 2, 1)
    tokens = draw_at(logits, torch.full((50,), uniform))
    assert (tokens >= 0).all() and (tokens < size).all()
    assert logits.gather(1, tokens[:, None]).isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**31), st.floats(0, ALMOST_ONE), st.booleans())
def test_inversion_matches_the_cumulative_distribution(size, seed, uniform, is_double):
    logits = 3 * torch.randn(1, size, generator=generator(seed))
    logits = logits.double() if is_double else logits
    token = draw_at(logits, torch.tensor([uniform])).item()
    cumulative = logits.double().softmax(-1)[0].cumsum(0)
    assert cumulative[token] >= uniform - 1e-6
    assert token == 0 or cumulative[token - 1] <= uniform + 1e-6


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (5.0, 300.0), (20.0, -1e4)])
def test_normaliser_is_logsumexp(scale, shift):
    logits = scale * torch.randn(16, VOCABULARY, generator=generator(0)) + shift
    wanted, half = logits.double().logsumexp(-1), torch.full((16, 1), 0.5).double()
    found = draw_categorical(logits, half)[1].double()
    torch.testing.assert_close(found, wanted, rtol=2e-7, atol=2e-6)
    found = draw_categorical(logits.double(), half)[1]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("widest", [torch.float64, torch.float32])
def test_a_grid_of_uniforms_meets_every_group_in_proportion(widest, monkeypatch):
    """Uniforms at the midpoints of 1024 equal cells: leading counts are right to one draw.

    Two levels of sums are exact enough in float32 too, the widest type of some devices.
    """
    monkeypatch.setattr(tsmc.categorical, "widest", lambda device: widest)
    logits = 2.5 * torch.randn(VOCABULARY, generator=generator(8))
    grid = ((torch.arange(1024).double() + 0.5) / 1024).to(widest)[:, None]
    parts = [draw_categorical(logits.expand(128, -1), part)[0] for part in grid.split(128)]
    tokens = torch.cat(parts)
    assert (tokens.diff() >= 0).all()
    cumulative = logits.double().softmax(-1).cumsum(0)
    leading = tokens.bincount(minlength=VOCABULARY).cumsum(0)
    assert (leading - 1024 * cumulative).abs().max() < 0.51 + 1024 * 1e-5
