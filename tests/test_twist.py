"""The twist, and the file of a pair (p^(m), psi^(m))."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import generator, log_q, tiny_conditional

from tinystories.files import read_metadata
from twist.adapter import Adapter, adapted
from twist.mlp import TwistMLP
from twist.pair import Pair, load_pair, save_pair


def randomised(module, seed):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator(seed))
    return module


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden = torch.randn(5, 4, 8, generator=generator(1))
    tokens = torch.arange(20).view(5, 4) % 7
    twist = TwistMLP(8, 7, generator(0))
    assert torch.equal(twist(hidden), torch.zeros(5, 4, 7))
    expected = randomised(twist, 4)(hidden).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(twist.of_tokens(hidden, tokens), expected)


BASE = tiny_conditional(0)
TWIST = randomised(TwistMLP(8, 7, generator(0)), 4)
PAIRS = {
    "psi over p^(0)": Pair(BASE, TWIST),
    "psi over p^(1)": Pair(tiny_conditional(1), TWIST),
    "psi = 1 over p^(0)": Pair(BASE, None),
    "p^(1) alone": Pair(tiny_conditional(1), None),
}
for name, scores in (("q", None), ("q with surrogate", torch.linspace(-1, 1, 7))):
    adapter = Adapter(BASE, scores, generator(0))
    randomised(adapter.shift, 3)
    PAIRS[name] = Pair(adapted(BASE, adapter), None)


@pytest.mark.parametrize("kind", PAIRS)
def test_a_pair_survives_its_file_and_a_damaged_one_is_refused_in_one_line(tmp_path, kind):
    """Each tensor left out, of another shape or not finite; the file cut, of other things, gone."""
    pair, path = PAIRS[kind], tmp_path / "pair.safetensors"
    for one in (*PAIRS.values(), pair):  # the last one replaces the others
        save_pair(path, one, BASE)
    again = load_pair(path, BASE)
    assert (again.model is BASE) == (pair.model is BASE)
    assert (again.twist is None) == (pair.twist is None)
    torch.testing.assert_close(log_q(again), log_q(pair), rtol=0, atol=1e-5)
    assert list(tmp_path.iterdir()) == [path]
    content, tensors, told = path.read_bytes(), load_file(path), read_metadata(path)

    def is_refused() -> bool:
        with pytest.raises(ValueError) as error:
            load_pair(path, BASE)
        return str(error.value).startswith(str(path)) and str(error.value).isprintable()

    for name, value in tensors.items():
        others = {key: tensors[key] for key in tensors if key != name}
        longer, wrong = torch.cat([value, value[:1]]), torch.full_like(value, torch.nan)
        for changed in ({name: longer}, {name: wrong}, {}):
            save_file(others | changed, path, told)
            assert is_refused(), (name, changed)
    for wrong, said in ((tensors | {"x.y": torch.ones(1)}, told), (tensors, None)):
        save_file(wrong, path, said)
        assert is_refused()
    path.write_bytes(content[:-2])
    assert is_refused()
    path.unlink()
    assert is_refused()
