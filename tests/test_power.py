"""The example of docs/potentials.md: p to a power, with an untrained twist, by enumeration."""

import re
from pathlib import Path

import pytest
import torch
from worlds import bias, generator

from tinystories.decoder import NO_END
from tsmc.draws import effective_sample_size
from tsmc.exact import TableModel, Target
from tsmc.proposal import sample_proposal

PAGE = (Path(__file__).parents[1] / "docs" / "potentials.md").read_text(encoding="utf-8")
EXAMPLE: dict = {}
for block in re.findall(r"```python\n(def power.*?)```", PAGE, re.DOTALL):
    exec(block, EXAMPLE)


def table_model(length, end):
    return TableModel(TableModel.random(3, length, generator(0)).table, length, end)


@pytest.mark.parametrize("end", [NO_END, 1])
def test_sigma_is_the_normalised_power_of_p(end):
    model = table_model(3, end)
    target = Target(model, EXAMPLE["power"](model, 3.0, 1.0)[0])
    log_power = 3.0 * target.log_p[-1]  # of all 27 texts
    assert target.log_z == pytest.approx(log_power.logsumexp(0).item(), abs=1e-12)
    torch.testing.assert_close(target.log_sigma[-1], log_power.log_softmax(0))


@pytest.mark.parametrize("end", [NO_END, 1])
@pytest.mark.parametrize("threshold", [1.0, 0.0])
def test_the_sampler_is_unbiased(end, threshold):
    model = table_model(2, end)
    log_phi, twist = EXAMPLE["power"](model, 3.0, 1.0)
    assert bias(model, twist, log_phi, ess_threshold=threshold) < 1e-12


def test_the_twist_draws_at_a_temperature_and_makes_the_weights_even():
    model = table_model(5, NO_END)
    log_phi, twist = EXAMPLE["power"](model, 3.0, 1.0)
    ess = []
    for psi in (None, twist):
        drawn = sample_proposal(model, psi, 2000, generator(0))
        log_p, log_q = drawn.log_p.sum(1), drawn.log_q.sum(1)
        ess.append(effective_sample_size(log_p + log_phi(drawn.tokens, log_p) - log_q).item())
    logits = model.head(model.states(drawn.tokens))  # [N, T, V]
    log_half = (2 * logits).log_softmax(-1).gather(-1, drawn.tokens[..., None])[..., 0]
    torch.testing.assert_close(drawn.log_q, log_half)
    assert ess[1] > 1.5 * ess[0]
