"""The MLP twist, and the files of twists and adapters."""

import pytest
import torch
from networks import randomise
from safetensors.torch import load_file, save_file
from torch import nn
from worlds import generator, tiny_gpt_neo

from tinystories.checkpoint import read_metadata
from tinystories.errors import InputError
from twist.adapter import Adapter
from twist.mlp import TwistMLP
from twist.saved import TWISTS, load_pair, save_pair
from twist.value import ValueTwist


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden, tokens = torch.randn(5, 4, 8), torch.randint(7, (5, 4))
    assert torch.equal(TwistMLP(8, 6, 7, generator(0))(hidden), torch.zeros(5, 4, 7))
    twist = randomise(TwistMLP(8, 6, 7, generator(0)), 4)
    expected = twist(hidden).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(twist.of_tokens(hidden, tokens), expected)


class LinearTwist(nn.Linear):
    like = classmethod(lambda kind, tensors, network: kind(*reversed(tensors["weight"].shape)))


TWISTS["linear"] = LinearTwist  # all that the library has to know of an architecture


def pair(kind: str):
    """p^(0), an adapter of it and a twist of random weights, and states that they read."""
    base, source = tiny_gpt_neo(7), generator(0)
    is_value = "value" in kind
    memory = torch.linspace(-1, 1, 7) if is_value else None
    adapter = Adapter(base, memory, is_value, 6, source)
    own = adapter if kind == "value with adapter" else None
    twist = LinearTwist(8, 7) if kind == "linear" else TwistMLP(8, 6, 7, source)
    twist = ValueTwist(8, 5, 7, source, memory, own) if is_value else twist
    randomise(adapter.shift, 3)
    randomise(twist.network if is_value else twist, 4)
    return base, adapter, twist, torch.randn(3, 8 + is_value, generator=source)


KINDS = pytest.mark.parametrize("kind", ["MLP", "linear", "value", "value with adapter"])


@KINDS
def test_a_pair_survives_its_files(tmp_path, kind):
    base, adapter, twist, hidden = pair(kind)
    save_pair(tmp_path, adapter, None, twist)
    p, psi = load_pair(tmp_path, 1, base)
    assert torch.equal(psi(hidden), twist(hidden)) and torch.equal(p(hidden), adapter(hidden))
    assert load_pair(tmp_path, 0, base)[0] is base
    save_pair(tmp_path, adapter, None, LinearTwist(8, 7))
    if "value" in kind:
        with pytest.raises(InputError, match=": does not fit twist"):
            load_pair(tmp_path, 1, base)


@KINDS
def test_a_pair_whose_files_are_damaged_is_refused_in_one_line(tmp_path, kind):
    """Each tensor left out, of another shape or not finite; one too many; the file cut anywhere."""
    base, adapter, twist, _ = pair(kind)
    save_pair(tmp_path, adapter, None, twist)

    def refused() -> bool:
        with pytest.raises(InputError) as error:
            load_pair(tmp_path, 1, base)
        return str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)

    for path in sorted(tmp_path.iterdir()):
        tensors, content, metadata = load_file(path), path.read_bytes(), read_metadata(path)
        for name, value in tensors.items():
            others = {key: tensors[key] for key in tensors if key != name}
            longer, wrong = torch.cat([value, value[:1]]), torch.full_like(value, torch.nan)
            for changed in ({name: longer}, {name: wrong}, {name: value[None]}, {}):
                save_file(others | changed, path, metadata)
                assert refused(), (path.name, name, changed)
        save_file(tensors | {"more": torch.zeros(2)}, path, metadata)
        assert refused()
        for size in (0, 7, 100, len(content) - 1):
            path.write_bytes(content[:size])
            assert refused(), size
        path.write_bytes(content)
    load_pair(tmp_path, 1, base)
    save_file(tensors, path)  # of version 0.6
    with pytest.raises(InputError, match="not of this version"):
        load_pair(tmp_path, 1, base)
