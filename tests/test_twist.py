"""The twist, and the files of a pair (p^(m), psi^(m))."""

import pytest
import torch
from networks import randomise
from safetensors.torch import load_file, save_file
from worlds import generator, log_q, tiny_conditional

from tinystories.errors import InputError
from twist.adapter import Adapter, adapted
from twist.mlp import FORMS, TwistMLP
from twist.pair import Pair, load_pair, save_pair


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden = torch.randn(5, 4, 8, generator=generator(1))
    tokens = torch.arange(20).view(5, 4) % 7
    assert torch.equal(TwistMLP(8, 7, generator(0))(hidden), torch.zeros(5, 4, 7))
    twist = randomise(TwistMLP(8, 7, generator(0)), 4)
    expected = twist(hidden).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(twist.of_tokens(hidden, tokens), expected)


BASE = tiny_conditional(0)
FILES = {  # what a generation consists of, beside pair.json
    "psi over p^(0)": {"twist.safetensors"},
    "psi over p^(1)": {"twist.safetensors", "model.safetensors"},
    "psi = 1 over p^(0)": set(),
    "q with surrogate": {"model.safetensors"},
    "q without surrogate": {"model.safetensors"},
}
KINDS = pytest.mark.parametrize("kind", FILES)


def pair_of(kind: str) -> Pair:
    """A pair of random weights."""
    if kind.startswith("psi"):
        twist = None if "= 1" in kind else randomise(TwistMLP(8, 7, generator(0)), 4)
        return Pair(BASE if kind.endswith("p^(0)") else tiny_conditional(1), twist)
    scores = torch.linspace(-1, 1, 7) if kind == "q with surrogate" else None
    adapter = Adapter(BASE.output_embeddings, scores, generator(0))
    randomise(adapter.shift, 3)
    return Pair(adapted(BASE, adapter), None)


@KINDS
def test_a_pair_survives_its_files(tmp_path, kind):
    pair = pair_of(kind)
    save_pair(tmp_path, pair, BASE)
    assert {path.name for path in tmp_path.iterdir()} == FILES[kind] | {"pair.json"}
    other = "q with surrogate" if kind.startswith("psi") else "psi over p^(1)"
    save_pair(tmp_path, pair_of(other), BASE)
    save_pair(tmp_path, pair, BASE)  # replaces it
    again = load_pair(tmp_path, BASE)
    assert (again.model is BASE) == (pair.model is BASE)
    assert (again.twist is None) == (pair.twist is None)
    assert torch.equal(log_q(again), log_q(pair))
    is_base = (log_q(again) - log_q(Pair(BASE, None))).abs().max() < 0.1
    assert is_base == (kind == "psi = 1 over p^(0)")


@KINDS
def test_a_pair_whose_files_are_damaged_is_refused_in_one_line(tmp_path, kind):
    """Each tensor left out, of another shape or not finite; the file cut or gone."""
    save_pair(tmp_path, pair_of(kind), BASE)

    def is_refused() -> bool:
        with pytest.raises(InputError) as error:
            load_pair(tmp_path, BASE)
        message = str(error.value)
        return message.startswith(str(tmp_path)) and path.name in message and "\n" not in message

    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        tensors = load_file(path) if path.suffix == ".safetensors" else {}
        for name, value in tensors.items():
            others = {key: tensors[key] for key in tensors if key != name}
            longer, wrong = torch.cat([value, value[:1]]), torch.full_like(value, torch.nan)
            for changed in ({name: longer}, {name: wrong}, {}):
                save_file(others | changed, path)
                assert is_refused(), (path.name, name, changed)
        path.write_bytes(content[:-2])
        assert is_refused()
        path.unlink()
        assert is_refused()
        path.write_bytes(content)


def test_a_form_that_is_not_known_is_named(tmp_path, monkeypatch):
    class Other(TwistMLP):
        """One's own form, a class and an entry."""

    monkeypatch.setitem(FORMS, "other", Other)
    save_pair(tmp_path, Pair(BASE, Other(8, 7, generator(0))), BASE)
    assert type(load_pair(tmp_path, BASE).twist) is Other
    monkeypatch.delitem(FORMS, "other")
    with pytest.raises(InputError, match=rf"^{tmp_path}/twist.safetensors: .*KeyError: .other"):
        load_pair(tmp_path, BASE)
