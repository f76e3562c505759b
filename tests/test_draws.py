"""Random draws: what every scheme of resampling promises; tokens of a vocabulary of 50257."""

import math

import pytest
import torch
from torch.nn.functional import one_hot
from worlds import generator

from tsmc import draws
from tsmc.draws import BLOCK, SCHEMES, draw_categorical


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
