"""Tiny networks of `transformers` as p."""

import pytest
import torch
from networks import PROMPT, any_model
from torch import nn
from transformers import AutoModelForCausalLM
from worlds import generator

from eval.config import POCKET
from tinystories.any_model import AnyModel
from tinystories.errors import InputError

V, T = 3, 4
CAPPED = {"head_dim": 4, "final_logit_softcapping": 300.0}  # far above these logits
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


class Wrapped:
    """As PEFT stands around a network: with another `base_model`, and else its attributes."""

    base_model = None

    def __init__(self, network: nn.Module):
        self.get_base_model = lambda: network
        self.eval = lambda: self

    def __getattr__(self, name: str):
        return getattr(self.get_base_model(), name)

    def __call__(self, ids: torch.Tensor):
        return self.get_base_model()(ids)


@torch.no_grad()
def assert_steps_are_the_networks(model: AnyModel) -> None:
    """Every step is that of a plain forward, however the rows are reordered."""
    source, rows = generator(0), 6
    decoder, ids = model.decoder(rows), PROMPT.repeat(rows, 1)
    for _ in range(T):
        found = decoder.evaluate(model.head, slice(1, 5))
        torch.testing.assert_close(found, model.network(ids).logits[1:5, -1])
        tokens = torch.randint(V, (rows,), generator=source)
        ancestors = torch.randint(rows, (rows,), generator=source)
        ids = torch.cat([ids[ancestors], tokens[:, None]], 1)
        decoder.extend(tokens, ancestors)
    every = model.network(ids).logits[:, 2:-1].log_softmax(-1)  # [N, T, V]
    wanted = every.gather(-1, ids[:, 3:, None]).squeeze(-1)
    torch.testing.assert_close(model.log_probs(ids[:, 3:])[0], wanted)


def test_every_step_is_that_of_the_network_whatever_form_it_and_the_prompt_have(monkeypatch):
    assert_steps_are_the_networks(any_model("gpt2", PROMPT[None]))
    assert_steps_are_the_networks(any_model("llama", PROMPT.tolist()))
    assert_steps_are_the_networks(AnyModel(Wrapped(any_model("gpt2").network), PROMPT, T))
    head = AnyModel.head
    monkeypatch.setattr(AnyModel, "head", lambda *inputs: 300 * (head(*inputs) / 300).tanh())
    assert_steps_are_the_networks(any_model("gemma2", **CAPPED))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_not_refused(dtype):
    network = AutoModelForCausalLM.from_pretrained(POCKET / "lm", dtype=dtype)
    for seed in range(5):
        AnyModel(network, torch.randint(4096, (6 + seed,), generator=generator(seed)), T)


@pytest.mark.parametrize(
    ("kind", "changes", "fault"),
    [
        ("granite", {"logits_scaling": 2.0}, "write `head`"),
        ("gemma2", CAPPED, "write `head`"),
        ("openai-gpt", {}, "cache"),
        ("gpt2", {"end": None}, "give one token"),
        ("gpt2", {"end": V}, "give one token"),
        ("gpt2", {"length": 0}, "length is 0"),
        ("gpt2", {"length": 14}, "exceed the model's 16 positions"),
        ("gpt2", {"prompt": []}, "the prompt is empty"),
        ("gpt2", {"prompt": [1, 7, 2]}, "the prompt has tokens that the network lacks"),
    ],
)
def test_what_does_not_fit_or_would_have_other_numbers_is_refused(kind, changes, fault):
    with pytest.raises(InputError, match=fault):
        any_model(kind, **changes)
