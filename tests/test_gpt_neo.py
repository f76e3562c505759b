"""GPT-Neo, plain and fast, against transformers on random and shipped checkpoints; its cache; files that do not fit."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from worlds import generator, tiny_gpt_neo

import tinystories
from tinystories import Conditional, InputError, fast
from tinystories import decoder as decoder_module
from tinystories.fast import accelerate
from tinystories.load import END_OF_TEXT

POCKET = Path(__file__).parent.parent / "checkpoints" / "pocket" / "lm"
SIZES = {"vocab_size": 61, "max_position_embeddings": 24}
SHAPES = [
    {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "attention_types": [[["global"], 1]]},
    {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 3,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    {
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 16,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 7,
    },
    {"num_layers": 3, "hidden_size": 20, "num_heads": 2, "attention_types": [[["local"], 3]], "window_size": 1},
    {
        "num_layers": 3,
        "hidden_size": 16,
        "num_heads": 4,
        "attention_types": [[["local"], 1], [["global"], 2]],
        "window_size": 64,
    },
    {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "intermediate_size": 23,
    },
]


def write_tokenizer(path: Path, vocab_size: int = 61) -> None:
    """A word-level tokenizer.json of given size, end of text first."""
    words = {END_OF_TEXT: 0} | {f"w{number}": number for number in range(1, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))


def theirs(path: Path, dtype=torch.float32, head: bool = True, **shape) -> transformers.PreTrainedModel:
    """A random transformers model of large weights, saved at `path` in `dtype`; the saved numbers in float32."""
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(**(SIZES | shape))
    model = transformers.GPTNeoForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    model.to(dtype)
    (model if head else model.transformer).save_pretrained(path)
    write_tokenizer(path)
    return model.float().eval()


@pytest.fixture(params=["plain", "fast"])
def version(request, monkeypatch):
    """What turns a plain model into the version that is tested; all products of the fast one go to oneDNN."""
    monkeypatch.setattr(fast, "SMALLEST", 1)
    return {"plain": lambda model: model, "fast": accelerate}[request.param]


def assert_same_logits(
    path: Path, reference, vocab_size: int = 61, positions: int = 24, tolerance: float = 2e-5
) -> None:
    """Our loaded model, plain and fast, gives their logits on random tokens, to `tolerance` of the logits' scale."""
    plain, _ = tinystories.load(path)
    ids = torch.randint(vocab_size, (3, positions), generator=generator(1))
    with torch.no_grad():
        wanted = reference(ids).logits
        for model in (plain, accelerate(copy.deepcopy(plain))):
            ours = model(ids)
            assert ours.dtype == torch.float32
            assert (ours - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['num_layers']}x{shape['hidden_size']}")
def test_logits_of_random_checkpoints(tmp_path, shape, tied):
    assert_same_logits(tmp_path, theirs(tmp_path, tie_word_embeddings=tied, **shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_disk(tmp_path, dtype):
    reference = theirs(tmp_path, dtype, **SHAPES[1])
    assert load_file(tmp_path / "model.safetensors")["transformer.wte.weight"].dtype == dtype
    assert_same_logits(tmp_path, reference)


def test_names_without_the_prefix(tmp_path):
    reference = theirs(tmp_path, head=False, **SHAPES[1])
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, reference)


def test_mask_buffers_and_a_copy_of_the_tied_head_are_no_weights(tmp_path):
    reference = theirs(tmp_path, **SHAPES[1])
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        tensors[f"transformer.h.{layer}.attn.attention.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
        tensors[f"transformer.h.{layer}.attn.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, reference)


def test_a_head_that_contradicts_the_tie_is_refused(tmp_path):
    theirs(tmp_path, **SHAPES[1])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, tmp_path / "model.safetensors")
    assert "lm_head.weight differs" in error_of(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_we_save(tmp_path, tied, dtype):
    theirs(tmp_path / "first", dtype, tie_word_embeddings=tied, **SHAPES[2])
    model, tokenizer = tinystories.load(tmp_path / "first")
    tinystories.save(tmp_path / "second", model, tokenizer, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second", dtype=torch.float32).eval()
    assert_same_logits(tmp_path / "second", loaded)
    assert_same_logits(tmp_path / "first", loaded)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "second")
    assert words.encode("w3 w60 w1") == tokenizer.encode("w3 w60 w1").ids == [3, 60, 1]


@pytest.mark.skipif(not (POCKET / "model.safetensors").is_file(), reason="the pocket checkpoint is not there")
def test_logits_of_the_pocket_checkpoint():
    reference = transformers.AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32).eval()
    assert_same_logits(POCKET, reference, reference.config.vocab_size, reference.config.max_position_embeddings)


@pytest.mark.parametrize("attention_layers", [("global", "local"), ("local", "local"), ("global", "global")])
@pytest.mark.parametrize("prompt", [1, 2, 9])
@pytest.mark.parametrize("most", [0.0, 0.8, 1.0])
@torch.no_grad()
def test_cached_equals_uncached_after_any_reordering_and_past_the_window(
    version, prompt, attention_layers, most, monkeypatch
):
    """Whether equal rows are computed once never, sometimes or always; tokens are few, so that many rows are equal."""
    monkeypatch.setattr(decoder_module, "GROUP", 1)
    monkeypatch.setattr(decoder_module, "MOST", most)
    model = version(tiny_gpt_neo(11, seed=3, window_size=4, attention_layers=attention_layers).double())
    source, rows, length = generator(4), 7, 15
    conditional = Conditional(model, torch.randint(11, (prompt,), generator=source), length)
    decoder, tokens = conditional.decoder(rows), torch.empty(rows, 0, dtype=torch.long)
    for t in range(length):
        step = torch.randint(2, (rows,), generator=source)
        tokens = torch.cat([tokens, step[:, None]], 1)
        _, logits, hidden = conditional.log_probs(tokens)
        torch.testing.assert_close(decoder.logits, logits[:, -1], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(decoder.hidden, hidden[:, -1], rtol=1e-10, atol=1e-10)
        ancestors = torch.randint(rows, (rows,), generator=source) if t % 4 else None
        tokens = tokens if ancestors is None else tokens[ancestors]
        if t + 1 < length:
            decoder.extend(tokens[:, -1], ancestors)
            distinct = len(tokens.unique(dim=0))
            assert most != 1.0 or len(decoder.states) == distinct, "each text is computed once"
            assert most != 0.0 or len(decoder.states) == rows


@torch.no_grad()
def test_a_cache_reordered_twice_is_one_reordered_by_both(version):
    """To more rows, to fewer and in another order, before any layer is computed and behind several tokens."""
    model, source = version(tiny_gpt_neo(11, seed=5, window_size=3).double()), generator(1)
    ids = torch.randint(11, (1, 4), generator=source)
    orders = [torch.tensor([0] * 5), torch.tensor([4, 1, 1, 0, 3, 2, 2]), torch.tensor([6, 0, 3]), torch.tensor([2, 1])]
    cache = model.new_cache()
    model(ids, cache)
    cache = cache.continued(7, 8)
    rows = ids
    for first, second in (orders[:2], orders[2:]):
        cache.reorder(first)
        cache.reorder(second)
        step = torch.randint(11, (len(second), 1), generator=source)
        rows = torch.cat([rows[first][second], step], 1)
        torch.testing.assert_close(model(step, cache), model(rows)[:, -1:], rtol=1e-10, atol=1e-10)


def test_merged_states_fill_groups_and_many_are_left_apart():
    tokens = torch.tensor([3, 1, 3, 1] * 25)
    parents, chosen, state_of = decoder_module.merge(torch.zeros(100, dtype=torch.long), tokens, 11)
    assert len(parents) == len(chosen) == decoder_module.GROUP and (parents == 0).all()
    assert torch.equal(chosen[state_of], tokens) and state_of.unique().tolist() == [0, 1]
    chosen, state_of = decoder_module.merge(torch.zeros(200, dtype=torch.long), torch.arange(200) % 70, 70)[1:]
    assert len(chosen) == 2 * decoder_module.GROUP and torch.equal(chosen[state_of], torch.arange(200) % 70)
    few = decoder_module.merge(torch.zeros(4, dtype=torch.long), tokens[:4], 11)
    assert [part.tolist() for part in few] == [[0] * 4, [3, 1, 3, 1], [0, 1, 2, 3]]
    stood_at = torch.arange(100) // 2
    parents, chosen, state_of = decoder_module.merge(stood_at, torch.arange(100) % 2, 11)
    assert torch.equal(parents, stood_at) and torch.equal(state_of, torch.arange(100))


@torch.no_grad()
@pytest.mark.parametrize("is_continued", [False, True])
def test_cache_in_chunks_of_any_size(version, is_continued):
    model = version(tiny_gpt_neo(11, seed=5, window_size=3).double())
    ids = torch.randint(11, (2, 12), generator=generator(0))
    ids[1, :4] = ids[0, :4]
    cache = model.new_cache()
    first = model(ids[:1, :4], cache).expand(2, -1, -1)
    if is_continued:
        cache = cache.continued(2, 8)
        cache.reorder(torch.tensor([0, 0]))
    parts = [model(part, cache) for part in ids[:, 4:].split([1, 2, 4, 1], dim=1)]
    assert cache.length == 12
    torch.testing.assert_close(torch.cat([first, *parts], 1), model(ids), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_rows_do_not_depend_on_the_batch(version):
    model = version(tiny_gpt_neo(11, seed=6))
    ids = torch.randint(11, (5, 10), generator=generator(0))
    alone = torch.cat([model(row[None]) for row in ids])
    torch.testing.assert_close(model(ids), alone, rtol=1e-5, atol=1e-5)


def test_log_probs_are_those_of_the_logits_and_carry_gradients(version):
    model = Conditional(version(tiny_gpt_neo(11)), torch.tensor([4, 2]), 5)
    tokens = torch.randint(11, (3, 5), generator=generator(0))
    log_p, logits, hidden = model.log_probs(tokens)
    torch.testing.assert_close(log_p, logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0])
    torch.testing.assert_close(model.model.head(hidden), logits)
    log_p.sum().backward()
    assert all(parameter.grad is not None for parameter in model.model.parameters())


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("prompt", [1, 2, 9])
@pytest.mark.parametrize("length", [1, 6])
def test_the_shared_prompt_changes_neither_probabilities_nor_gradients(version, prompt, length, window):
    model, source = version(tiny_gpt_neo(11, seed=2, window_size=window).double()), generator(0)
    prompt, tokens = torch.randint(11, (prompt,), generator=source), torch.randint(11, (4, length), generator=source)
    model.requires_grad_()
    ids = torch.cat([prompt.expand(4, -1), tokens], 1)
    logits = model(ids)[:, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    log_p, shared_logits, _ = Conditional(model, prompt, length).log_probs(tokens)
    torch.testing.assert_close(log_p, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shared_logits, logits, rtol=1e-10, atol=1e-10)
    factors, parameters = torch.randn(4, length, generator=source), list(model.parameters())
    gradients = (torch.autograd.grad((x * factors).sum(), parameters) for x in (log_p, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_bfloat16_is_near_float32_and_sums_in_float32(version):
    model = version(tiny_gpt_neo(11, seed=4, hidden_size=32, num_heads=4))
    prompt, tokens = torch.tensor([4, 2, 7]), torch.randint(11, (20, 6), generator=generator(0))
    wanted, logits, _ = Conditional(model, prompt, 6).log_probs(tokens)
    rounded = Conditional(model.to(torch.bfloat16), prompt, 6)
    log_p, rounded_logits, hidden = rounded.log_probs(tokens)
    assert hidden.dtype == torch.bfloat16 and log_p.dtype == rounded_logits.dtype == torch.float32
    assert (rounded_logits - logits).abs().mean() < 0.03 * logits.abs().mean()
    assert (log_p - wanted).abs().mean() < 0.1
    decoder = rounded.decoder(20)
    for t in range(6):
        steps = decoder.logits.log_softmax(-1).gather(1, tokens[:, t : t + 1])[:, 0]
        assert decoder.logits.dtype == torch.float32 and (steps - log_p[:, t]).abs().mean() < 0.1
        if t < 5:
            decoder.extend(tokens[:, t])


@torch.no_grad()
def test_attention_is_computed_in_float32_and_unscaled_whatever_the_type(version):
    attention = version(tiny_gpt_neo(11, hidden_size=32, num_heads=4).to(torch.bfloat16)).h[0].attn
    x = torch.randn(3, 9, 32, generator=generator(0)).to(torch.bfloat16)
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (layer(x).double().unflatten(-1, (4, -1)).transpose(1, 2) for layer in layers)
    scores = (q @ k.mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    wanted = attention.out_proj(mixed.to(torch.bfloat16))
    assert (attention(x, None) - wanted).abs().mean() < 1e-4 * wanted.abs().mean()


@pytest.fixture
def checkpoint(tmp_path):
    """A good checkpoint directory to be spoilt."""
    theirs(tmp_path, **SHAPES[1])
    return tmp_path


def respoil(path: Path, change) -> None:
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def reconfigure(path: Path, **changes) -> None:
    """Change fields of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def error_of(path: Path) -> str:
    """The one line that loading a bad checkpoint raises."""
    with pytest.raises(InputError) as caught:
        tinystories.load(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    return str(caught.value)


def set_to(name: str, value):
    """A change that sets one tensor."""
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("transformer.ln_f.bias"), ["missing: ln_f.bias"]),
        (set_to("transformer.extra", torch.zeros(1)), ["left over: extra"]),
        (set_to("transformer.ln_f.bias", torch.zeros(5)), ["ln_f.bias has shape [5]", "implies [24]"]),
        (set_to("transformer.ln_f.bias", torch.full((24,), torch.nan)), ["ln_f.bias holds NaN"]),
        (set_to("transformer.ln_f.bias", torch.full((24,), torch.inf)), ["ln_f.bias holds NaN or infinite"]),
        (set_to("transformer.ln_f.bias", torch.ones(24).to(torch.float8_e5m2)), ["ln_f.bias is of torch.float8_e5m2"]),
        (set_to("\x1b[31m\nerror: forged", torch.zeros(1)), [r"left over: \x1b[31m\nerror: forged)"]),
        (lambda tensors: tensors.clear(), ["missing: h.0.attn.k_proj.weight, ", " more)"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint, change, words):
    respoil(checkpoint, change)
    message = error_of(checkpoint)
    assert all(word in message for word in [*words, str(checkpoint / "model.safetensors")])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 62}, "wte.weight has shape [61, 24]"),
        ({"hidden_size": 12}, "has shape"),
        ({"num_layers": 1, "attention_types": [[["global"], 1]]}, "left over: h.1."),
        ({"num_layers": 3}, "attention_types must name num_layers = 3"),
        ({"attention_types": [[["global", "sparse"], 1]]}, "attention_types"),
        ({"attention_types": "global"}, "not a gpt_neo configuration"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "wide"),
        ({"num_heads": 5}, "multiple of num_heads"),
        ({"num_heads": 0}, "num_heads is 0, not a whole number from 1"),
        ({"window_size": 0}, "window_size is 0"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"activation_function": "relu"}, "relu"),
        ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"vocab_size": 1e308}, "vocab_size is 1e+308, not a whole number"),
        ({"vocab_size": 20.0}, "vocab_size is 20.0"),
        ({"num_heads": True}, "num_heads is True"),
        ({"max_position_embeddings": 2**63}, "max_position_embeddings is 9223372036854775808"),
        ({"window_size": 10**30}, "window_size is 1000"),
        ({"intermediate_size": -4}, "intermediate_size is -4"),
        ({"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon is inf, not a finite number above 0"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan"),
        ({"attention_types": [[[["a"]], 4]]}, "attention_types must name num_layers = 2"),
        ({"attention_types": [[["global"], 10**12]]}, "attention_types must name num_layers = 2"),
        ({"num_layers": 10**9}, "num_layers is 1000000000, not a whole number from 1 to 1000"),
        ({"model_type": "\x1b[2J\n"}, r"model_type is '\x1b[2J\n', not gpt_neo"),
    ],
)
def test_configurations_that_contradict_the_weights_or_themselves(checkpoint, changes, words):
    reconfigure(checkpoint, **changes)
    assert words in error_of(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["absent", "empty", "truncated", "garbage", "deep", "directory", "pipe"])
def test_damaged_files_are_named(checkpoint, name, damage):
    path = checkpoint / name
    content = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage == "pipe":  # to open one would wait for ever
        os.mkfifo(path)
    elif damage != "absent":
        path.write_bytes(
            {
                "empty": b"",
                "truncated": content[: len(content) // 2],
                "garbage": b"\xff\x00{" * 99,
                "deep": b"[" * 200_000 + b"]" * 200_000,
            }[damage]
        )
    assert str(path) in error_of(checkpoint)


def test_tampered_safetensors_header(checkpoint):
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[0:8] = (2**40).to_bytes(8, "little")
    (checkpoint / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in error_of(checkpoint)


def test_tokenizer_larger_than_the_vocabulary(checkpoint):
    write_tokenizer(checkpoint, 62)
    assert "62 tokens where config.json has 61" in error_of(checkpoint)


@pytest.mark.parametrize(
    ("prompt", "length", "words"), [(0, 4, "the prompt is empty"), (30, 4, "exceed the model's 32 positions")]
)
def test_prompts_that_do_not_fit(prompt, length, words):
    with pytest.raises(InputError, match=words) as caught:
        Conditional(tiny_gpt_neo(11), torch.zeros(prompt, dtype=torch.long), length)
    assert "--" not in str(caught.value), "a library knows no command line"


def test_prompt_and_continuation_may_fill_every_position(version):
    model = Conditional(version(tiny_gpt_neo(11)), torch.zeros(28, dtype=torch.long), 4)
    decoder = model.decoder(2)
    for _ in range(4):
        decoder.extend(torch.tensor([1, 2]))
    with pytest.raises(InputError, match="33 tokens exceed this model's 32 positions"):
        decoder.extend(torch.tensor([1, 2]))
