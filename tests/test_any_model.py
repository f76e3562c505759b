"""GPT-Neo and networks of `transformers` as p, against their own plain forward."""

import sys

import pytest
import torch
from networks import PROMPT, any_model, tiny, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from worlds import generator, tiny_gpt_neo

from eval.options import POCKET
from tinystories import Conditional, load_model
from tinystories import decoder as decoder_module
from tinystories.any_model import AnyModel, is_close
from tinystories.gpt_neo import KeyValueCache


@pytest.mark.parametrize(("prompt", "kind"), [(1, "global"), (9, "local")])
@pytest.mark.parametrize("share", [0.0, 0.8, 0.99])
@torch.no_grad()
def test_cached_equals_uncached_after_any_reordering(prompt, kind, share, monkeypatch):
    """Whether equal rows are computed once never, sometimes or always; many rows are equal."""
    monkeypatch.setattr(decoder_module, "GROUP", 1)
    monkeypatch.setattr(decoder_module, "SHARING_PAYS", share)
    network = tiny_gpt_neo(11, seed=3, window_size=4, attention_layers=(kind, "local")).double()
    source, rows, length = generator(4), 7, 15
    model = Conditional(network, torch.randint(11, (prompt,), generator=source), length)
    decoder, tokens = model.decoder(rows), torch.empty(rows, 0, dtype=torch.long)
    for t in range(length):
        step = torch.randint(2, (rows,), generator=source)
        tokens = torch.cat([tokens, step[:, None]], 1)
        _, logits, hidden = model.log_probs(tokens)
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(decoder.hidden, hidden[:, -1], **close)
        for part in (slice(None), slice(2, 5), slice(6, 7)):
            states, place = decoder.distinct(part)
            torch.testing.assert_close(model.head(states)[place], logits[part, -1], **close)
        ancestors = torch.randint(rows, (rows,), generator=source) if t % 4 else None
        tokens = tokens if ancestors is None else tokens[ancestors]
        if t + 1 < length:
            decoder.append(tokens[:, -1], ancestors)
            states = {0.0: rows, 0.99: len(tokens.unique(dim=0))}
            assert len(decoder.states) == states.get(share, len(decoder.states))


@pytest.mark.parametrize(("window", "prompt", "length"), [(1, 1, 6), (3, 9, 6), (64, 9, 1)])
def test_the_shared_prompt_changes_neither_probabilities_nor_gradients(window, prompt, length):
    network, source = tiny_gpt_neo(11, seed=2, window_size=window).double(), generator(0)
    prompt = torch.randint(11, (prompt,), generator=source)
    tokens = torch.randint(11, (4, length), generator=source)
    logits = network(torch.cat([prompt.expand(4, -1), tokens], 1))[:, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    log_p, shared_logits, _ = Conditional(network, prompt, length).log_probs(tokens)
    torch.testing.assert_close(log_p, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shared_logits, logits, rtol=1e-10, atol=1e-10)
    factors = torch.randn(4, length, generator=source)
    pair = ((x * factors).sum() for x in (log_p, wanted))
    ours, theirs = (torch.autograd.grad(x, list(network.parameters())) for x in pair)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_attention_is_computed_in_float32_and_unscaled_whatever_the_type():
    network = tiny_gpt_neo(11, hidden_size=32, num_heads=4).to(torch.bfloat16)
    attention = network.transformer.h[0].attn["attention"]
    x = torch.randn(3, 9, 32, generator=generator(0)).to(torch.bfloat16)
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (layer(x).double().unflatten(-1, (4, -1)).transpose(1, 2) for layer in layers)
    scores = (q @ k.mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    wanted = attention.out_proj(mixed.to(torch.bfloat16))
    assert (attention(x, KeyValueCache()) - wanted).abs().mean() < 1e-4 * wanted.abs().mean()


V, T = 3, 4
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


class Changed(AnyModel):
    """p at a temperature of one half, without token 1."""

    def head(self, hidden):
        return (2 * super().head(hidden)).index_fill(-1, torch.tensor([1]), -torch.inf)


CHOICE = [  # what a network has that others have not
    ("llama", {"prompt": PROMPT[None]}),
    ("phi", {"prompt": PROMPT.tolist()}),  # a bias in the output layer
    ("opt", {"ffn_dim": 16, "word_embed_proj_dim": 4}),  # other names, narrower states
    ("cohere", {"logit_scale": 0.5}),
    ("gemma2", {"head_dim": 4, "final_logit_softcapping": 0.5, "sliding_window": 4}),
    ("gpt2", None),  # with a changed head
]


@pytest.mark.parametrize(("kind", "changes"), CHOICE)
@torch.no_grad()
def test_every_step_is_that_of_a_plain_forward_however_rows_are_reordered(kind, changes):
    model, factor, mask = Changed(tiny("gpt2"), PROMPT, T), 2, torch.tensor([0, -torch.inf, 0])
    if changes is not None:
        model, factor, mask = any_model(kind, **changes), 1, torch.zeros(V)
    source, rows = generator(0), 6
    decoder, ids = model.decoder(rows), PROMPT.repeat(rows, 1)
    for _ in range(T):
        states, place = decoder.distinct(slice(1, 5))
        wanted = factor * model.network(ids).logits[1:5, -1] + mask
        torch.testing.assert_close(model.head(states)[place], wanted)
        tokens = torch.randint(V, (rows,), generator=source)
        ancestors = torch.randint(rows, (rows,), generator=source)
        ids = torch.cat([ids[ancestors], tokens[:, None]], 1)
        decoder.append(tokens, ancestors)
    log_p, logits, hidden = model.log_probs(ids[:, 3:])
    wanted = factor * model.network(ids).logits[:, 2:-1] + mask
    torch.testing.assert_close(logits, wanted)
    wanted = wanted.log_softmax(-1).gather(-1, ids[:, 3:, None]).squeeze(-1)
    torch.testing.assert_close(log_p, wanted)
    assert hidden.shape[-1] == model.width


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
    ({"end": (0, V)}, r"end is \(0, 3\); give tokens"),
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
