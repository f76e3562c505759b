"""The examples of docs/potentials.md by enumeration: JSON documents, and p to a power."""

import re
from pathlib import Path

import pytest
import torch
from worlds import bias, generator

from tinystories.decoder import NO_END
from tsmc.draws import effective_sample_size
from tsmc.exact import TableModel, Target, all_sequences
from tsmc.proposal import sample_proposal
from twist import TextPotential

PAGE = (Path(__file__).parents[1] / "docs" / "potentials.md").read_text(encoding="utf-8")
EXAMPLE: dict = {}
for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
    exec(block, EXAMPLE)
CHARACTERS, END = "1-", 2


def table_model(length, end):
    return TableModel(TableModel.random(3, length, generator(0)).table, length, end)


def decode(rows):
    """Texts of rows of tokens, the characters 1 and -; the first token of each is the prompt."""
    return ["".join(CHARACTERS[token] for token in row[1:]) for row in rows]


def json_world(length):
    """A random model, its potential, all texts as (text, whether it is finished), and p of each."""
    model = table_model(length, END)
    pairs, rows = [], []
    for row in all_sequences(3, length).tolist():
        size = row.index(END) if END in row else length
        if set(row[size:]) <= {END}:  # nothing but ends follows the first one
            pairs.append((decode([[0, *row[:size]]])[0], size < length))
            rows.append(row)
    p = model.log_probs(torch.tensor(rows))[0].sum(1).exp()
    return model, TextPotential([EXAMPLE["document"]], decode, model.prompt, END), pairs, p


def test_sampler_and_prefix_part_are_exact():
    model, potential, pairs, p = json_world(3)
    z = p[torch.tensor(EXAMPLE["document"](pairs)) == 0].sum()
    target = Target(model, lambda tokens, log_p: potential(tokens))
    assert target.log_z == pytest.approx(z.log().item(), abs=1e-12)
    given = (model, None, lambda tokens, log_p: potential(tokens), target)
    assert bias(*given, log_prefix=potential.log_prefix) < 1e-12


@pytest.mark.parametrize("end", [NO_END, 1])
def test_a_power_of_p_is_sampled_at_a_temperature(end):
    """Sigma is the normalised power, and the twist makes the weights more even."""
    model = table_model(3, end)
    log_phi, twist = EXAMPLE["power"](model, 3.0, 1.0)
    target = Target(model, log_phi)
    log_power = 3.0 * target.log_p[-1]  # of all 27 texts
    assert target.log_z == pytest.approx(log_power.logsumexp(0).item(), abs=1e-12)
    torch.testing.assert_close(target.log_sigma[-1], log_power.log_softmax(0))
    assert bias(model, twist, log_phi, target, ess_threshold=0.0) < 1e-12
    ess = []
    for psi in (None, twist):
        drawn = sample_proposal(model, psi, 2000, generator(0))
        log_p, log_q = drawn.log_p.sum(1), drawn.log_q.sum(1)
        ess.append(effective_sample_size(log_p + log_phi(drawn.tokens, log_p) - log_q).item())
    assert ess[1] > 1.2 * ess[0]
