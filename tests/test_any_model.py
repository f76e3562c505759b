"""Tiny networks of `transformers` as p, and a twist in their own `generate`."""

from types import SimpleNamespace

import pytest
import torch
from networks import PROMPT, any_model, randomise
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from worlds import generator

from eval.config import POCKET
from tinystories.any_model import AnyModel, TwistProcessor
from tinystories.errors import InputError

V, T = 3, 4
PSI = randomise(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, V)), 3).double()
CAPPED = {"head_dim": 4, "final_logit_softcapping": 300.0}  # far above these logits
each_kind = pytest.mark.parametrize("kind", ["gpt2", "llama"])
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


class Wrapped:
    """As PEFT stands around a network: with another `base_model`, and else its attributes."""

    base_model = None

    def __init__(self, network: nn.Module):
        self.get_base_model = lambda: network

    def __getattr__(self, name: str):
        return getattr(self.get_base_model(), name)

    def __call__(self, ids: Tensor):
        return self.get_base_model()(ids)

    def eval(self):
        return self


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


@each_kind
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[None], PROMPT.tolist(), [PROMPT.tolist()]])
def test_every_step_is_that_of_the_network_whatever_form_the_prompt_has(kind, prompt):
    model = any_model(kind, prompt)
    assert torch.equal(model.prompt, PROMPT)
    assert_steps_are_the_networks(model)


@each_kind
def test_a_network_in_a_wrapper_of_adapters_is_found(kind):
    assert_steps_are_the_networks(AnyModel(Wrapped(any_model(kind).network), PROMPT, T))


def test_the_cache_goes_by_its_new_name_where_there_is_one():
    """As from transformers 5.24 on, where the old name warns."""
    network = any_model("gpt2").network
    forward = network.transformer.forward

    def renamed(ids, cache=None, use_cache=None):
        return forward(ids, cache, use_cache=use_cache)

    network.forward = lambda ids: SimpleNamespace(logits=network.lm_head(forward(ids)[0]))
    network.transformer.forward = renamed
    assert_steps_are_the_networks(AnyModel(network, PROMPT, T))


@each_kind
def test_generate_draws_from_q(kind):
    model = any_model(kind)
    model.network.generation_config.update(temperature=0.7, top_p=0.8, repetition_penalty=1.5)
    options = {"do_sample": True, "max_new_tokens": T, "output_scores": True}
    options |= {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}
    options |= {"logits_processor": [TwistProcessor(model.network, PSI)]}
    made = model.network.generate(PROMPT.repeat(5, 1), return_dict_in_generate=True, **options)
    _, logits, hidden = model.log_probs(made.sequences[:, 3:])
    log_q = (logits + PSI(hidden)).log_softmax(-1)
    found = torch.stack(made.scores, 1).log_softmax(-1)  # float32 in `generate`
    torch.testing.assert_close(found.double(), log_q, rtol=0, atol=1e-5)
    assert (log_q - logits.log_softmax(-1)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "changes", "fault"),
    [
        ("granite", {"logits_scaling": 2.0}, "write `head`"),
        ("gemma2", CAPPED, "write `head`"),
        ("openai-gpt", {}, "cache"),
    ],
)
def test_networks_whose_numbers_would_be_others_are_refused(kind, changes, fault):
    with pytest.raises(InputError, match=fault):
        any_model(kind, **changes)


def test_capped_logits_with_a_head_that_caps_them(monkeypatch):
    head = AnyModel.head
    monkeypatch.setattr(AnyModel, "head", lambda *inputs: 300 * (head(*inputs) / 300).tanh())
    assert_steps_are_the_networks(any_model("gemma2", **CAPPED))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_not_refused(dtype):
    network = AutoModelForCausalLM.from_pretrained(POCKET / "lm", dtype=dtype)
    for seed in range(5, 12):
        AnyModel(network, torch.randint(4096, (1 + seed,), generator=generator(seed)), T)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"end": None}, "give one token"),
        ({"end": V}, "give one token"),
        ({"end": [2]}, "give one token"),
        ({"length": 0}, "length is 0"),
        ({"length": 2.5}, "length is 2.5"),
        ({"length": 14}, "exceed the model's 16 positions"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, 7, 2]}, "the prompt has token 7"),
        ({"prompt": PROMPT.repeat(2, 1)}, r"the prompt has shape \[2, 3\]"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(changes, fault):
    arguments = {"prompt": PROMPT, "length": T} | changes
    with pytest.raises(InputError, match=fault):
        AnyModel(any_model("gpt2").network, **arguments)
