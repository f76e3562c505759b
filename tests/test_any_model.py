"""GPT-Neo and networks of `transformers` as p, against their own plain forward."""

import shutil
import sys

import pytest
import torch
from networks import LONGROPE, POINTER, PROMPT, any_model, tiny, write
from safetensors.torch import load_file, save_file
from tinystories.files import read_json, write_json
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from worlds import generator, tiny_gpt_neo

from eval.options import POCKET, Options
from eval.world import load_plain_world
from tinystories import Conditional, GPTNeoModel, load_model
from tinystories import decoder as decoders
from tinystories.any_model import AnyModel, is_close
from tinystories.gpt_neo import KeyValueCache
from tinystories.load import check_prompt, read_tokenizer

V, T = 3, 4
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


class Changed(AnyModel):
    """p at a temperature of one half, without token 2."""

    def head(self, hidden):
        return (2 * super().head(hidden)).index_fill(-1, torch.tensor([2]), -torch.inf)


def gpt_neo(kind: str, window: int, prompt: torch.Tensor) -> Conditional:
    layers = {"window_size": window, "attention_layers": (kind, "local")}
    return GPTNeoModel(tiny_gpt_neo(V, 3, **layers).double(), prompt, 9)


OPT = {"ffn_dim": 16, "word_embed_proj_dim": 4}
GEMMA = {"head_dim": 4, "final_logit_softcapping": 0.5, "sliding_window": 4}
LLAMA4 = {"head_dim": 4, "intermediate_size_mlp": 16, "num_local_experts": 1, "pad_token_id": 0}
MODELS = {  # what a network has that others have not
    "GPT-Neo": lambda: gpt_neo("global", 1, PROMPT[:1]),
    "GPT-Neo, long prompt": lambda: gpt_neo("local", 4, PROMPT.repeat(3)),
    "llama": lambda: any_model("llama", PROMPT[None]),
    "phi, a bias in the output layer": lambda: any_model("phi", PROMPT.tolist()),
    "opt, other names, narrower states": lambda: any_model("opt", **OPT),
    "cohere": lambda: any_model("cohere", logit_scale=0.5),
    "gemma2": lambda: any_model("gemma2", **GEMMA),
    "granite, divides": lambda: any_model("granite", logits_scaling=3.0),
    "hyperclovax, multiplies": lambda: any_model("hyperclovax", logits_scaling=3.0),
    "llama4, a body by another name": lambda: any_model("llama4_text", **LLAMA4),
    "phi3, long factors": lambda: any_model("phi3", PROMPT.repeat(3), **LONGROPE),
    "gpt2, with a changed head": lambda: Changed(tiny("gpt2"), PROMPT, T),
}


@pytest.mark.parametrize("share", [0.0, 0.8, 0.99])
@pytest.mark.parametrize("name", MODELS)
def test_every_step_and_gradient_is_that_of_a_plain_forward(name, share, monkeypatch):
    """However rows are reordered, and whether equal ones are computed once never, sometimes or
    always; many rows are equal."""
    monkeypatch.setattr(decoders, "GROUP", 1)
    monkeypatch.setattr(decoders, "SHARING_PAYS", share)
    model, source, rows = MODELS[name](), generator(4), 7

    def plain(ids: torch.Tensor) -> torch.Tensor:
        output = model.network(ids)
        logits = getattr(output, "logits", output)  # [N, P + t, V]
        if isinstance(model, Changed):
            logits = 2 * logits + torch.tensor([0, 0, -torch.inf])
        return logits

    decoder, ids = model.decoder(rows), model.prompt.repeat(rows, 1)
    start = ids.shape[1]  # P
    for t in range(model.length):
        with torch.no_grad():
            wanted = plain(ids)[:, -1]
            for states, some, place in decoder.distinct():
                torch.testing.assert_close(model.head(states)[place], wanted[some])
        tokens = torch.randint(2, (rows,), generator=source)
        ancestors = torch.randint(rows, (rows,), generator=source) if t % 4 else None
        ids = torch.cat([ids if ancestors is None else ids[ancestors], tokens[:, None]], 1)
        if t + 1 < model.length:
            decoder.append(tokens, ancestors)
            states = {0.0: rows, 0.99: len(ids.unique(dim=0))}
            assert len(decoder.states) == states.get(share, len(decoder.states))
    log_p, hidden = model.log_probs(ids[:, start:]), model.states(ids[:, start:])
    logits = model.head(hidden)
    wanted = plain(ids)[:, start - 1 : -1]
    torch.testing.assert_close(logits, wanted)
    chosen = wanted.log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)
    torch.testing.assert_close(log_p, chosen)
    assert hidden.shape[-1] == model.width
    factors = torch.randn(log_p.shape, generator=source)
    pair = ((x * factors).sum() for x in (log_p, chosen))
    parameters = list(model.network.parameters())
    ours, theirs = (torch.autograd.grad(x, parameters, allow_unused=True) for x in pair)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [AnyModel, Changed])
@pytest.mark.parametrize("kind", ["bert", "mamba"])
def test_what_looks_ahead_or_keeps_no_cache_is_refused_whatever_the_head(kind, make):
    with pytest.raises(ValueError, match=r"with its cache of keys and values .* other logits"):
        make(tiny(kind), PROMPT, T)


LENGTHS = {"phi3": (6, LONGROPE), "moshi": (2, {"sliding_window": 4, "ffn_dim": 16})}


@pytest.mark.parametrize("kind", LENGTHS)
def test_states_that_depend_on_the_length_are_refused_from_the_length_on_where_they_do(kind):
    """For the network of a later generation as well."""
    longest, changes = LENGTHS[kind]
    network = tiny(kind, **changes)
    AnyModel(network, PROMPT, longest)
    fault = f"from token {longest + 1} on .* a length of {longest}$"
    with pytest.raises(ValueError, match=fault):
        AnyModel(network, PROMPT, 9)
    with pytest.raises(ValueError, match=fault):
        any_model("llama", length=9).with_network(network)


def test_logits_that_are_not_made_of_states_are_refused_where_no_head_makes_them():
    def double(_, ids, output):
        output.logits = output.logits * (2 if ids else 1)

    network = tiny("gpt2")
    network.register_forward_hook(double)
    with pytest.raises(ValueError, match="write `head`"):
        AnyModel(network, PROMPT, T)
    Changed(network, PROMPT, T)
    network.lm_head.weight.data[1] = torch.nan
    with pytest.raises(ValueError, match="logits are NaN or infinite"):
        Changed(network, PROMPT, T)


def test_masks_must_stand_at_equal_places_and_nan_is_near_nothing():
    logits = torch.tensor([1.0, -torch.inf, 2.0])
    assert is_close(logits, logits, torch.float32)
    for entry, value in ((0, -torch.inf), (1, 0.0), (0, torch.nan), (0, 1.01), (2, torch.inf)):
        other = logits.index_fill(0, torch.tensor([entry]), value)
        assert not is_close(other, logits, torch.float32)
        assert not is_close(logits, other, torch.float32)


WRONG = [
    ({"end": (0, V)}, r"end is \(0, 3\); give tokens"),
    ({"length": 14}, "exceed the model's 16 positions"),
    ({"prompt": [1, 7, 2]}, "the prompt has tokens that the network lacks"),
    ({"prompt": [1.5, 2.7]}, r"the prompt is \[1.5, 2.7\]; give tokens"),
    ({"prompt": torch.ones(2, 1).long()}, r"the prompt is tensor\(\[\[1\], \[1\]\]\); give"),
]


@pytest.mark.parametrize(("changes", "fault"), WRONG)
def test_what_does_not_fit_is_one_line(changes, fault):
    with pytest.raises(ValueError, match=fault):
        any_model("gpt2", **changes)


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


@torch.no_grad()
def test_a_directory_of_any_causal_language_model_is_loaded(tmp_path, monkeypatch):
    """Its network has room for more tokens than the tokenizer knows."""
    network = tiny("llama", vocab_size=4100)
    write(tmp_path, "lm", network)
    given = (str(tmp_path), "--lm", "Once upon", T)
    model, tokenizer = load_model(*given, ("<|endoftext|>", "."))
    assert model.prompt.tolist() == tokenizer.encode("Once upon").ids
    assert model.end == (0, tokenizer.token_to_id(".")) and model.vocab_size == 4096
    tokens = torch.tensor([[5, 4095, 7, 8]])
    ids = torch.cat([model.prompt[None], tokens], 1)
    logits = network(ids).logits[:, len(model.prompt) - 1 : -1, :4096]
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(model.log_probs(tokens), wanted.float())

    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", config | {"quantization_config": GPTQ})
    with pytest.raises(ValueError, match=r"ImportError: .*GPTQ.*optimum.*; install what it lacks"):
        load_model(*given)
    write_json(tmp_path / "config.json", config)
    path, norm = tmp_path / "model.safetensors", "model.norm.weight"
    weights = load_file(path)
    save_file(weights | {norm: torch.full_like(weights[norm], torch.nan)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.norm.weight holds NaN.* another checkpoint$"):
        load_model(*given)
    del weights["lm_head.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match="weights are missing: lm_head"):
        load_model(*given)
    path.write_text(POINTER)
    with pytest.raises(ValueError, match=r"model.safetensors: .* run `git lfs pull`$"):
        load_model(*given)
    monkeypatch.setitem(sys.modules, "tinystories.any_model", None)
    with pytest.raises(ValueError, match=r"^--lm .*kind llama needs transformers.*pip install"):
        load_model(*given)


def test_ends_that_nobody_names_are_told_where_p_writes_them(tmp_path, capsys):
    lm = shutil.copytree(POCKET / "lm", tmp_path / "lm")
    write_json(lm / "tokenizer_config.json", {"eos_token": {"content": "."}})
    write_json(lm / "generation_config.json", {"eos_token_id": [0, 9999]})
    named = "% of its texts, and goes on unseen; give --end '<|endoftext|>' '.'"
    for end, told in (((), named), ((".",), "")):
        load_plain_world(Options(lm=str(lm), end=end, potential=("keyword:dog",)))
        said = capsys.readouterr().err
        assert told in said and ("--end" in said) == bool(told)


WORDS = {"[UNK]": 0, "the": 1, "cat": 2}
LETTERS = [("<unk>", 0.0), *((letter, -3.0) for letter in "▁thecat")]
TOKENIZERS = [
    (WordLevel(WORDS, unk_token="[UNK]"), Whitespace()),
    (WordLevel(WORDS | {"moon": 3}, unk_token="moon"), Whitespace()),
    (Unigram(LETTERS, 0), Metaspace()),
    (Unigram(LETTERS), Metaspace()),
    (BPE({letter: n for n, (letter, _) in enumerate(LETTERS)}, []), Metaspace()),
]


@pytest.mark.parametrize(("model", "words"), TOKENIZERS)
def test_a_prompt_that_the_tokenizer_cannot_write_is_refused(model, words):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    check_prompt(tokenizer, " the cat")
    for prompt, part in (("the cat 猫", ".*猫.*"), ("dogs the", ".*og.*")):
        with pytest.raises(ValueError, match=f"has no token for '{part}' of the prompt"):
            check_prompt(tokenizer, prompt)
    with pytest.raises(ValueError, match="the prompt is empty; give at least one word"):
        check_prompt(tokenizer, "")
    check_prompt(read_tokenizer(POCKET / "lm", 4096), "\n\n猫 😀 [UNK]<|endoftext|>")


def test_a_gpt_neo_is_read_by_hand_and_a_space_that_its_tokenizer_would_join_is_refused():
    path = str(POCKET / "lm")
    model, tokenizer = load_model(path, "--lm", "there was a\n", T, ("Once",))
    assert type(model) is GPTNeoModel and model.end == (tokenizer.token_to_id("Once"),)
    with pytest.raises(ValueError, match="the prompt ends in a space; leave the space out"):
        load_model(path, "--lm", "there was a ", T)
