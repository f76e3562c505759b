"""The potential of texts, the effective potential, the MLP twist and its file."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import generator, learn, tiny_conditional

from eval.run.trained import load_twist, save_twist
from tinystories.errors import InputError
from twist.mlp import TwistMLP
from twist.potential import TextPotential, power


def random_twist(seed: int = 0) -> TwistMLP:
    """A twist for `tiny_conditional` that is not psi = 1."""
    source = generator(seed)
    twist = TwistMLP(8, 6, 7, source)
    torch.nn.init.normal_(twist.last.weight, generator=source)
    torch.nn.init.normal_(twist.last.bias, generator=source)
    return twist


def letters(rows: list[list[int]]) -> list[str]:
    """Texts of rows of tokens: token i is the i-th letter."""
    return [" ".join("abcdefg"[token] for token in row) for row in rows]


def test_each_distinct_text_is_scored_once_with_its_prompt():
    asked = []

    def scorer(texts):
        asked.extend(texts)
        return -torch.arange(1.0, len(texts) + 1)

    potential = TextPotential([power(scorer, 10.0)], letters, torch.tensor([1, 2]))
    assert potential(torch.tensor([[3, 4], [5, 6], [3, 4]])).tolist() == [-10.0, -20.0, -10.0]
    assert asked == ["b c d e", "b c f g"]


def test_beta_zero_is_the_base_model_even_where_the_score_is_zero():
    nothing = power(lambda texts: torch.full((len(texts),), -torch.inf), 0.0)
    potential = TextPotential([nothing], letters, torch.tensor([1]))
    assert potential(torch.tensor([[3], [4]])).tolist() == [0.0, 0.0]


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden, tokens = torch.randn(5, 4, 8), torch.randint(7, (5, 4))
    assert torch.equal(TwistMLP(8, 6, 7, generator(0))(hidden), torch.zeros(5, 4, 7))
    twist = random_twist()
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


def test_a_twist_survives_its_file_and_one_that_does_not_fit_is_refused(tmp_path):
    twist, hidden = random_twist(), torch.randn(3, 8)
    save_twist(tmp_path, twist)
    assert torch.equal(load_twist(tmp_path)(hidden), twist(hidden))
    tensors = load_file(tmp_path / "twist.safetensors")
    changed = tensors | {"second.weight": torch.zeros(2, 2)}
    for wrong, words in ((changed, r"second\.weight has shape"), ({"other": torch.zeros(2)}, "")):
        save_file(wrong, tmp_path / "twist.safetensors")
        with pytest.raises(InputError, match=rf"twist\.safetensors: not a twist \(.*{words}"):
            load_twist(tmp_path)
