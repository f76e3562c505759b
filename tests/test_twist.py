"""The MLP twist, and the files of twists and adapters."""

import pytest
import torch
from networks import randomise
from safetensors.torch import load_file, save_file
from worlds import generator, learn, tiny_conditional, tiny_gpt_neo

from eval.run.trained import load_model, load_twist, save_generation
from tinystories.errors import InputError
from twist.adapter import Adapter
from twist.mlp import TwistMLP
from twist.value import ValueTwist


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden, tokens = torch.randn(5, 4, 8), torch.randint(7, (5, 4))
    assert torch.equal(TwistMLP(8, 6, 7, generator(0))(hidden), torch.zeros(5, 4, 7))
    twist = randomise(TwistMLP(8, 6, 7, generator(0)), 4)
    expected = twist(hidden).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(twist.of_tokens(hidden, tokens), expected)


def test_learning_moves_the_twist_towards_the_potential():
    def potential(tokens, log_p):
        return -5.0 * (tokens != 3).float().sum(-1)

    twist = TwistMLP(8, 6, 7, generator(0))
    seen = learn(twist, tiny_conditional(0), potential, 60, 64, learning_rate=0.02)
    assert len(seen) == 60 and all(1 <= figures["ess"] <= 64.001 for figures in seen)
    first, last = (sum(figures["ess"] for figures in part) for part in (seen[:15], seen[-15:]))
    assert last > 1.5 * first, "a better proposal has more even weights"


def pair(kind: str):
    """p^(0), an adapter of it and a twist of random weights, and states that they read."""
    base, source = tiny_gpt_neo(7), generator(0)
    is_mlp = kind == "MLP"
    memory = None if is_mlp else torch.linspace(-1, 1, 7)
    adapter = Adapter(base, memory, not is_mlp, 6, source)
    own = adapter if kind == "value with adapter" else None
    twist = TwistMLP(8, 6, 7, source) if is_mlp else ValueTwist(8, 5, 7, source, memory, own)
    randomise(adapter.shift, 3)
    randomise(twist if is_mlp else twist.network, 4)
    return base, adapter, twist, torch.randn(3, 8 + (not is_mlp), generator=source)


KINDS = pytest.mark.parametrize("kind", ["MLP", "value", "value with adapter"])


@KINDS
def test_a_pair_survives_its_files(tmp_path, kind):
    base, adapter, twist, hidden = pair(kind)
    save_generation(tmp_path, adapter, None, twist)
    assert torch.equal(load_twist(tmp_path, base)(hidden), twist(hidden))
    assert torch.equal(load_model(tmp_path, 1, base)(hidden), adapter(hidden))
    assert load_model(tmp_path, 0, base) is base


@KINDS
def test_a_pair_whose_files_are_damaged_is_refused_in_one_line(tmp_path, kind):
    """Each tensor left out, of another shape or not finite; one too many; the file cut anywhere."""
    base, adapter, twist, _ = pair(kind)
    save_generation(tmp_path, adapter, None, twist)

    def refused() -> bool:
        with pytest.raises(InputError) as error:
            load_twist(tmp_path, base)
            load_model(tmp_path, 1, base)
        return str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)

    for path in sorted(tmp_path.iterdir()):
        tensors, content = load_file(path), path.read_bytes()
        for name, value in tensors.items():
            others = {key: tensors[key] for key in tensors if key != name}
            longer, wrong = torch.cat([value, value[:1]]), torch.full_like(value, torch.nan)
            for changed in ({name: longer}, {name: wrong}, {name: value[None]}, {}):
                save_file(others | changed, path)
                assert refused(), (path.name, name, changed)
        save_file(tensors | {"more": torch.zeros(2)}, path)
        assert refused()
        for size in (0, 7, 100, len(content) - 1):
            path.write_bytes(content[:size])
            assert refused(), size
        path.write_bytes(content)
    load_twist(tmp_path, base)
