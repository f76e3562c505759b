"""The potential, the effective potential, the MLP twist and its file."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import Recorded, learn, letters

import tinystories
from eval.pocket.lm import initialise
from eval.run.saved import load_twist, save_twist
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeoConfig
from tsmc import sample_proposal
from tsmc.steps import Steps
from twist import TextPotential, TwistMLP, base_potential, effective_potential, power
from twist.ctl import ctl_loss, negative_log_weights, positive_log_weights, weigh


def tiny(seed: int, length: int = 4) -> tinystories.Conditional:
    """A random GPT-Neo of 7 tokens after a two-token prompt."""
    model = tinystories.GPTNeo(GPTNeoConfig(7, 8, 2, 2, 16, ("global", "local"), 4, 16))
    initialise(model, torch.Generator().manual_seed(seed))
    for parameter in model.parameters():
        parameter.data.mul_(8)  # far from uniform
    return tinystories.Conditional(model.eval(), torch.tensor([1, 2]), length)


def twist_with_random_output(seed: int = 0) -> TwistMLP:
    generator = torch.Generator().manual_seed(seed)
    twist = TwistMLP(8, 6, 7, generator)
    torch.nn.init.normal_(twist.last.weight, generator=generator)
    torch.nn.init.normal_(twist.last.bias, generator=generator)
    return twist


def test_each_distinct_text_is_scored_once_with_its_prompt():
    asked = []

    def scorer(texts):
        asked.extend(texts)
        return -torch.arange(1.0, len(texts) + 1)

    potential = TextPotential([power(scorer, 10.0)], letters, torch.tensor([1, 2]))
    log_phi = potential(torch.tensor([[3, 4], [5, 6], [3, 4]]))
    assert asked == ["b c d e", "b c f g"]
    assert log_phi.tolist() == [-10.0, -20.0, -10.0]


def test_beta_zero_is_the_base_model_even_where_the_score_is_zero():
    nothing = power(lambda texts: torch.full((len(texts),), -torch.inf), 0.0)
    potential = TextPotential([nothing], letters, torch.tensor([1]))
    assert potential(torch.tensor([[3], [4]])).tolist() == [0.0, 0.0]


def test_the_effective_potential_keeps_sigma():
    base, refined = tiny(0), tiny(1)
    tokens = sample_proposal(base, None, 50, torch.Generator().manual_seed(0)).tokens
    log_p0, log_p1 = base.log_probs(tokens)[0].sum(-1), refined.log_probs(tokens)[0].sum(-1)

    def log_phi(s):
        return -s.sum(-1).float()

    sigma = log_p0 + base_potential(log_phi)(tokens, log_p0)
    again = log_p1 + effective_potential(log_phi, base)(tokens, log_p1)
    assert (log_p0 - log_p1).abs().max() > 1
    torch.testing.assert_close(sigma, again)


def test_a_fresh_twist_is_one_everywhere():
    twist = TwistMLP(8, 6, 7, torch.Generator().manual_seed(0))
    assert torch.equal(twist(torch.randn(3, 8)), torch.zeros(3, 7))


def test_chosen_tokens_equal_the_full_output():
    twist, hidden = twist_with_random_output(), torch.randn(5, 4, 8)
    tokens = torch.randint(7, (5, 4))
    expected = twist(hidden).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(twist.of_tokens(hidden, tokens), expected)


def test_the_positive_weights_ignore_how_the_generation_was_reached():
    """w = p^(0) phi / q whatever p^(m) is."""
    base, refined, twist = tiny(0), tiny(1), twist_with_random_output()
    batch = sample_proposal(refined, twist, 30, torch.Generator().manual_seed(3), keep_hidden=True)

    def log_phi(s):
        return -s.sum(-1).float()

    expected = base.log_probs(batch.tokens)[0].sum(-1) + log_phi(batch.tokens) - batch.log_q.sum(-1)
    torch.testing.assert_close(positive_log_weights(batch, effective_potential(log_phi, base)), expected)


def test_no_gradient_flows_through_the_weights():
    model, twist = tiny(0), twist_with_random_output()
    batch = sample_proposal(model, twist, 30, torch.Generator().manual_seed(3), keep_hidden=True)
    positive = torch.randn(30, requires_grad=True)
    negative = negative_log_weights(batch).requires_grad_()
    ctl_loss(twist, weigh(batch, positive, negative)).backward()
    assert positive.grad is None and negative.grad is None and twist.last.weight.grad.abs().sum() > 0


def test_learning_reports_every_update_and_moves_the_twist():
    twist, steps = TwistMLP(8, 6, 7, torch.Generator().manual_seed(0)), Recorded(60)

    def log_phi(tokens, log_p):
        return -5.0 * (tokens != 3).float().sum(-1)

    learn(twist, tiny(0), log_phi, steps, 64, learning_rate=0.02)
    seen = steps.reports
    assert len(seen) == 60 and all(1 <= figures["ess"] <= 64.001 for figures in seen)
    first, last = (sum(f["ess"] for f in part) / 15 for part in (seen[:15], seen[-15:]))
    assert last > 1.5 * first, "a better proposal has more even weights"


def test_a_nan_potential_stops_learning_before_the_step():
    twist = TwistMLP(8, 6, 7, torch.Generator())
    with pytest.raises(InputError, match=r"^twist learning: a weight is NaN .*learning rate or check the potential$"):
        learn(twist, tiny(0), lambda tokens, log_p: torch.full((len(tokens),), torch.nan), Steps(3), 100)
    assert (twist.last.weight == 0).all()


def test_a_twist_survives_its_file(tmp_path):
    twist, hidden = twist_with_random_output(), torch.randn(3, 8)
    save_twist(tmp_path, twist)
    assert torch.equal(load_twist(tmp_path)(hidden), twist(hidden))


def test_a_twist_that_does_not_fit_names_the_tensor(tmp_path):
    save_twist(tmp_path, twist_with_random_output())
    tensors = load_file(tmp_path / "twist.safetensors")
    save_file(tensors | {"second.weight": torch.zeros(2, 2)}, tmp_path / "twist.safetensors")
    with pytest.raises(InputError, match=r"twist\.safetensors: not a twist \(second\.weight has shape"):
        load_twist(tmp_path)
    save_file({"other": torch.zeros(2)}, tmp_path / "twist.safetensors")
    with pytest.raises(InputError, match="not a twist"):
        load_twist(tmp_path)
