"""The twist, and the files of a pair (p^(m), psi^(m))."""

import pytest
import torch
from networks import randomise
from safetensors.torch import load_file, save_file
from worlds import generator, rare_potential, tiny_conditional

from distill import Paper, PaperOptions, Streams
from tinystories.checkpoint import read_metadata
from tinystories.errors import InputError
from tsmc.exact import Target, Tree
from twist.adapter import Adapted, Adapter
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
FILES = {  # what a generation consists of
    "psi over p^(0)": {"twist.safetensors"},
    "psi over p^(1)": {"twist.safetensors", "model.safetensors"},
    "psi = 1 over p^(0)": {"twist.safetensors"},
    "q with surrogate": {"adapter.safetensors"},
    "q without surrogate": {"adapter.safetensors"},
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
    return Pair(Adapted(BASE, adapter), None)


@KINDS
@torch.no_grad()
def test_a_pair_survives_its_files(tmp_path, kind):
    pair = pair_of(kind)
    other = "q with surrogate" if kind.startswith("psi") else "psi over p^(0)"
    save_pair(tmp_path, pair_of(other), BASE)  # which the next one replaces
    save_pair(tmp_path, pair, BASE)
    assert {path.name for path in tmp_path.iterdir()} == FILES[kind]
    # The order of several entries differs from process to process, and so would the bytes.
    assert all(len(read_metadata(path)) == 1 for path in tmp_path.iterdir())
    again = load_pair(tmp_path, BASE)
    assert (again.model is BASE) == (pair.model is BASE)
    assert (again.twist is None) == (pair.twist is None)
    log_q, wanted = (Tree(one.model).prefix_log_q(one.twist)[-1] for one in (again, pair))
    assert torch.equal(log_q, wanted)
    is_base = (log_q - Tree(BASE).prefix_log_q()[-1]).abs().max() < 0.1
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
        tensors, content, metadata = load_file(path), path.read_bytes(), read_metadata(path)
        for name, value in tensors.items():
            others = {key: tensors[key] for key in tensors if key != name}
            longer, wrong = torch.cat([value, value[:1]]), torch.full_like(value, torch.nan)
            for changed in ({name: longer}, {name: wrong}, {}):
                save_file(others | changed, path, metadata)
                assert is_refused(), (path.name, name, changed)
        path.write_bytes(content[:-1])
        assert is_refused()
        path.unlink()
        assert is_refused()
        path.write_bytes(content)


class Linear(torch.nn.Module):
    """log psi = h A."""

    def __init__(self, width: int, vocab_size: int, generator: torch.Generator):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(width, vocab_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.a

    def of_tokens(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self(hidden).gather(-1, tokens[..., None]).squeeze(-1)


def test_another_form_is_a_class_and_an_entry(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMS, "linear", Linear)
    options = PaperOptions(twist="linear", ctl_updates=60, ctl_learning_rate=1e-2)
    pair = Paper(BASE, rare_potential, options, Streams(0)).first_twist()
    target = Target(BASE, rare_potential)
    log_q = Tree(BASE).prefix_log_q(pair.twist)[-1]
    assert target.kl_to(log_q) < 0.7 * target.kl_to(target.log_p[-1])
    save_pair(tmp_path, pair, BASE)
    again = load_pair(tmp_path, BASE)
    assert type(again.twist) is Linear
    assert torch.equal(Tree(BASE).prefix_log_q(again.twist)[-1], log_q)
    monkeypatch.delitem(FORMS, "linear")
    with pytest.raises(InputError, match=rf"^{tmp_path}/twist.safetensors: .*KeyError: .linear"):
        load_pair(tmp_path, BASE)
