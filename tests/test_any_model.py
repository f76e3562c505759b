"""Networks of `transformers` as p: tiny random ones, against their own plain forward."""

import sys

import pytest
import torch
from networks import PROMPT, any_model, tiny, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from worlds import generator

from eval.options import POCKET
from tinystories import Conditional, load_model
from tinystories.any_model import AnyModel, is_close

V, T = 3, 4
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


class Changed(AnyModel):
    """p at a temperature of one half, without token 1."""

    def head(self, hidden):
        return (2 * super().head(hidden)).index_fill(-1, torch.tensor([1]), -torch.inf)


@torch.no_grad()
def assert_steps_are_the_networks(model: AnyModel, change=lambda logits: logits) -> None:
    """Every step is that of a plain forward, however the rows are reordered."""
    source, rows = generator(0), 6
    decoder, ids = model.decoder(rows), PROMPT.repeat(rows, 1)
    for _ in range(T):
        states, place = decoder.distinct(slice(1, 5))
        wanted = change(model.network(ids).logits[1:5, -1])
        torch.testing.assert_close(model.head(states)[place], wanted)
        tokens = torch.randint(V, (rows,), generator=source)
        ancestors = torch.randint(rows, (rows,), generator=source)
        ids = torch.cat([ids[ancestors], tokens[:, None]], 1)
        decoder.append(tokens, ancestors)
    log_p, logits, hidden = model.log_probs(ids[:, 3:])
    wanted = change(model.network(ids).logits[:, 2:-1])
    torch.testing.assert_close(logits, wanted)
    wanted = wanted.log_softmax(-1).gather(-1, ids[:, 3:, None]).squeeze(-1)
    torch.testing.assert_close(log_p, wanted)
    assert hidden.shape[-1] == model.width


CHOICE = [  # what a network has that others have not
    ("llama", {"prompt": PROMPT[None]}),
    ("phi", {"prompt": PROMPT.tolist()}),  # a bias in the output layer
    ("opt", {"ffn_dim": 16, "word_embed_proj_dim": 4}),  # other names, narrower states
    ("cohere", {"logit_scale": 0.5}),
    ("gemma2", {"head_dim": 4, "final_logit_softcapping": 0.5, "sliding_window": 4}),
]


@pytest.mark.parametrize(("kind", "changes"), CHOICE)
def test_every_step_is_that_of_the_network(kind, changes):
    assert_steps_are_the_networks(any_model(kind, **changes))


def test_every_step_is_that_of_a_changed_head():
    masked = torch.tensor([0, -torch.inf, 0])
    assert_steps_are_the_networks(Changed(tiny("gpt2"), PROMPT, T), lambda x: 2 * x + masked)


@pytest.mark.parametrize("make", [AnyModel, Changed])
@pytest.mark.parametrize("kind", ["bert", "mamba"])
def test_what_looks_ahead_or_keeps_no_cache_is_refused_whatever_the_head(kind, make):
    with pytest.raises(ValueError, match=r"with its cache of keys and values .* other logits"):
        make(tiny(kind), PROMPT, T)


def test_logits_that_are_not_made_of_states_are_refused_where_no_head_makes_them():
    def double(_, ids, output):
        output.logits = output.logits * (2 if ids else 1)

    network = tiny("gpt2")
    network.register_forward_hook(double)
    with pytest.raises(ValueError, match="write `head`"):
        AnyModel(network, PROMPT, T)
    Changed(network, PROMPT, T)


def test_masks_must_stand_at_equal_places_and_nan_is_near_nothing():
    logits = torch.tensor([1.0, -torch.inf, 2.0])
    assert is_close(logits, logits, torch.float32)
    for entry, value in ((0, -torch.inf), (1, 0.0), (0, torch.nan), (0, 1.01), (2, torch.inf)):
        other = logits.index_fill(0, torch.tensor([entry]), value)
        assert not is_close(other, logits, torch.float32)
        assert not is_close(logits, other, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_not_refused(dtype):
    network = AutoModelForCausalLM.from_pretrained(POCKET / "lm", dtype=dtype)
    for seed in range(3):
        AnyModel(network, torch.randint(4096, (6 + seed,), generator=generator(seed)), T)


@torch.no_grad()
def test_several_tokens_end_a_text_and_tokens_without_a_text_are_never_drawn():
    model = any_model("gpt2", end=[0, 1], vocab_size=2)
    tokens = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    logits = model.network(PROMPT[None]).logits[0, -1, :2]  # [2]
    log_p, all_logits, _ = model.log_probs(tokens)
    torch.testing.assert_close(log_p[:, 0], logits.log_softmax(0))
    assert model.end == (0, 1) and not log_p[:, 1:].any() and all_logits.shape[-1] == 2


WRONG = [
    ({"end": None}, "end is None; give tokens"),
    ({"end": (0, V)}, "give tokens"),
    ({"length": 0}, "length is 0"),
    ({"length": 14}, "exceed the model's 16 positions"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": [1, 7, 2]}, "the prompt has tokens that the network lacks"),
    ({"prompt": [1.5, 2.7]}, r"the prompt is \[1.5, 2.7\]; give tokens"),
    ({"prompt": {"input_ids": [1]}}, "give tokens .*the input_ids of the tokenizer"),
    ({"prompt": torch.ones(2, 1).long()}, r"the prompt is tensor\(\[\[1\], \[1\]\]\); give"),
]


@pytest.mark.parametrize(("changes", "fault"), WRONG)
def test_what_does_not_fit_is_one_line(changes, fault):
    with pytest.raises(ValueError, match=fault):
        any_model("gpt2", **changes)


@torch.no_grad()
def test_a_directory_of_any_causal_language_model_is_loaded(tmp_path, monkeypatch, capsys):
    """Its network has room for more tokens than the tokenizer knows."""
    network = tiny("llama", vocab_size=4100)
    write(tmp_path, "lm", network)
    given = (str(tmp_path), "--lm", "Once upon", T)
    capsys.readouterr()
    model, tokenizer = load_model(*given, ("<|endoftext|>", "."))
    assert capsys.readouterr().err == "", "no bar"
    assert model.prompt.tolist() == tokenizer.encode("Once upon").ids
    assert model.end == (0, tokenizer.token_to_id(".")) and model.vocab_size == 4096
    tokens = torch.tensor([[5, 4095, 7, 8]])
    ids = torch.cat([model.prompt[None], tokens], 1)
    logits = network(ids).logits[:, len(model.prompt) - 1 : -1, :4096]
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(model.log_probs(tokens)[0], wanted.float())

    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"config\.json: .*weights are missing: lm_head.weight"):
        load_model(*given)
    monkeypatch.setitem(sys.modules, "tinystories.any_model", None)
    with pytest.raises(ValueError, match=r"^--lm .*kind llama needs transformers.*pip install"):
        load_model(*given)


def test_a_gpt_neo_is_read_by_hand_and_what_its_tokenizer_lacks_or_would_join_is_one_line():
    path = str(POCKET / "lm")
    model, tokenizer = load_model(path, "--lm", "there was a\n", T, ("Once",))
    assert type(model) is Conditional and model.end == (tokenizer.token_to_id("Once"),)
    with pytest.raises(ValueError, match="--end <stop>: is not one of the tokenizer's tokens"):
        load_model(path, "--lm", "Once", T, ("<|endoftext|>", "<stop>"))
    with pytest.raises(ValueError, match="the prompt ends in a space; leave the space out"):
        load_model(path, "--lm", "there was a ", T)
