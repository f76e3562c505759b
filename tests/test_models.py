"""GPT-Neo, RoBERTa and BERT against transformers; p of GPT-Neo and of any model of transformers
against a plain forward of the network, also where texts end; what is refused."""

import math
import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from networks import LOAD, PROMPT, assert_same, tiny, write
from safetensors.torch import load_file, save_file
from worlds import INF, generator, tiny_gpt_neo

from eval.options import POCKET, PRESETS
from tinystories import decoder as decoders
from tinystories.any_model import AnyModel
from tinystories.gpt_neo import GPTNeoModel
from tinystories.load import checkpoint_directory, load_model, read_json, write_json

V, T = 3, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # some networks compute norms in float32


def gpt_neo(kind: str, window: int, prompt: torch.Tensor, end=()) -> GPTNeoModel:
    layers = {"window_size": window, "attention_types": [[[kind, "local"], 1]]}
    return GPTNeoModel(tiny_gpt_neo(V, 3, **layers).double(), prompt, 9, end)


OPT = {"ffn_dim": 16, "word_embed_proj_dim": 4}
GEMMA = {"head_dim": 4, "final_logit_softcapping": 0.5, "sliding_window": 4}
QWEN = {"head_dim": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
QWEN |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "num_hidden_layers": 4}
LLAMA4 = {"head_dim": 4, "intermediate_size_mlp": 16, "num_local_experts": 1, "pad_token_id": 0}
MODELS = {  # what a network has that others have not
    "GPT-Neo, past its window": lambda: gpt_neo("global", 1, PROMPT[:1]),
    "GPT-Neo, long prompt": lambda: gpt_neo("local", 4, PROMPT.repeat(3)),
    "GPT-Neo, texts end": lambda: gpt_neo("global", 3, PROMPT, (2, 1)),
    "opt, narrower states": lambda: AnyModel(tiny("opt", **OPT), PROMPT, T),
    "gemma2, capped": lambda: AnyModel(tiny("gemma2", **GEMMA), PROMPT, 7),
    "granite, divides": lambda: AnyModel(tiny("granite", logits_scaling=3.0), PROMPT, T),
    "llama, texts end": lambda: AnyModel(tiny("llama"), PROMPT, 8, (1,)),
    "qwen3.5, states in place": lambda: AnyModel(tiny("qwen3_5_text", **QWEN), PROMPT, T),
    "llama4, another name": lambda: AnyModel(tiny("llama4_text", **LLAMA4), PROMPT, T),
}


@pytest.mark.parametrize("share", [0.0, 0.8, 0.99])
@pytest.mark.parametrize("name", MODELS)
def test_every_step_and_gradient_is_that_of_a_plain_forward(name, share, monkeypatch):
    """However rows are reordered, and whether equal ones are computed once never, sometimes or
    always. Behind an end the first end follows for certain, from the state that the end had."""
    monkeypatch.setattr(decoders, "GROUP", 1)
    monkeypatch.setattr(decoders, "SHARING_PAYS", share)
    model, source, rows = MODELS[name](), generator(4), 7
    first_end = (model.end or (0,))[0]
    certain = torch.full((V,), -INF).double().index_fill(0, torch.tensor([first_end]), 0.0)
    is_plain = isinstance(model, GPTNeoModel)  # whose network returns nothing but logits
    plain = lambda ids: (model.network(ids) if is_plain else model.network(ids).logits)[:, -1]  # noqa: E731
    decoder, ids = decoders.Decoder(model, rows), model.prompt.repeat(rows, 1)
    start, seen = ids.shape[1], []  # P, and the states that each row was drawn from
    for t in range(model.length):
        is_finished = torch.isin(ids[:, start:], torch.tensor(model.end)).any(1)  # [N]
        wanted = plain(ids).where(~is_finished[:, None], certain).detach()
        torch.testing.assert_close(model.head(decoder.hidden), wanted, **CLOSE)
        assert share < 0.99 or len(decoder.shared) == len(ids.unique(dim=0))
        order = torch.arange(rows)
        if t % 4 == 1:
            order = torch.randint(rows, (rows,), generator=source)
        tokens = torch.randint(1, V, (rows,), generator=source)
        if model.end and t < 2:
            tokens[2:] = 0  # some texts go on
        tokens = tokens.where(~is_finished[order], first_end)
        seen = [state[order] for state in [*seen, decoder.hidden]]
        ids = torch.cat([ids[order], tokens[:, None]], 1)
        if t + 1 < model.length:
            decoder.append(tokens, order if t % 4 == 1 else None)
    tokens = ids[:, start:]
    log_p = model.log_probs(tokens)
    torch.testing.assert_close(model.hidden(tokens), torch.stack(seen, 1), **CLOSE)
    is_end = torch.isin(tokens, torch.tensor(model.end))
    is_behind = is_end.cumsum(1) > is_end.long()  # [N, T]
    assert bool(model.end) == bool(is_behind.any()) and (log_p[is_behind] == 0).all()
    steps = [plain(ids[:, :t]) for t in range(start, ids.shape[1])]
    chosen = torch.stack(steps, 1).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    chosen = chosen.where(~is_behind, 0.0)
    torch.testing.assert_close(log_p, chosen, **CLOSE)
    factors = torch.randn(log_p.shape, generator=source)
    parameters = list(model.network.parameters())
    ours, theirs = (
        torch.autograd.grad((x * factors).sum(), parameters, allow_unused=True)
        for x in (log_p, chosen)
    )
    torch.testing.assert_close(ours, theirs, **CLOSE)


# Rotary factors that change for all positions where more than 8 tokens are read at once.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0]}
LONGROPE |= {"long_factor": [3.0, 3.0], "original_max_position_embeddings": 8}
LONGROPE = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8, "pad_token_id": 0}
OTHER = "with a cache the network has other logits than its own forward"
REFUSED = [  # a kind of network, sizes, a length at which it is refused, why, one where it is not
    ("bert", {}, 4, OTHER, 0),
    ("mamba", {}, 4, OTHER, 1),
    ("phi3", LONGROPE, 9, OTHER, 5),
    ("gpt2", {}, 14, "the prompt has 3 tokens and the continuation 14.*the model has 16", 13),
]


@pytest.mark.parametrize(("kind", "sizes", "length", "fault", "shorter"), REFUSED)
def test_a_network_that_does_not_fit_at_this_length_is_refused(kind, sizes, length, fault, shorter):
    network = tiny(kind, **sizes)
    if shorter:
        AnyModel(network, PROMPT, shorter)
    with pytest.raises(ValueError, match=fault):
        AnyModel(network, PROMPT, length)
    network.get_output_embeddings().weight.data[1] = math.nan
    with pytest.raises(ValueError, match=OTHER):
        AnyModel(network, PROMPT, T)


@torch.no_grad()
def test_any_causal_language_model_is_loaded_and_only_with_its_weights(tmp_path):
    network = tiny("llama", vocab_size=4100)
    write(tmp_path, "lm", network)
    settings = (str(tmp_path), "Once upon", T)
    model, tokenizer = load_model(*settings, ("<|endoftext|>", "."))
    assert type(model) is AnyModel and model.prompt.tolist() == tokenizer.encode("Once upon").ids
    assert model.end == (0, tokenizer.token_to_id(".")) and model.vocab_size == 4096
    tokens = torch.tensor([[5, 4095, 7, 8]])
    ids = torch.cat([model.prompt[None], tokens], 1)
    logits = network(ids).logits[:, len(model.prompt) - 1 : -1, :4096]
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(model.log_probs(tokens), wanted.float())
    path, name = tmp_path / "model.safetensors", "model.norm.weight"
    others = load_file(path)
    norm = {name: others.pop(name)}
    damaged = [({}, f"missing keys: {name}"), (norm | {"x": torch.ones(9)}, "unexpected keys: x")]
    for extra, fault in [*damaged, ({name: torch.ones(9)}, f"mismatched keys:.*{name}")]:
        save_file(others | extra, path, {"format": "pt"})
        with pytest.raises(ValueError, match=fault):
            load_model(*settings)


def test_a_network_serves_several_threads():
    model = AnyModel(tiny("gemma2", **GEMMA), PROMPT, T)
    hidden = torch.randn(9, 8, generator=generator(1)).double()
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(model.logits, hidden) for _ in range(40)]
        texts = [pool.submit(model.log_probs, torch.ones(2, T, dtype=int)) for _ in range(40)]
    for found in (calls, texts):
        assert all(torch.equal(one.result(), found[0].result()) for one in found)


@pytest.mark.parametrize("kind", ["GPT2", "GPT2 behind a space", "Roberta", "Bart", "T5"])
def test_tokenizers_are_those_of_transformers_whatever_their_files(tmp_path, kind):
    """Also without tokenizer.json, and a beginning that the prompt has is not put there again."""
    bpe = read_json(POCKET / "lm" / "tokenizer.json")["model"]
    words, parts = (
        [*bpe["vocab"], "<s>", "</s>", "<pad>", "<unk>"],
        {"merges": [*map(tuple, bpe["merges"])]},
    )
    known = {word: index for index, word in enumerate(words)}
    if kind == "T5":
        known, parts = [(word.replace("Ġ", "▁"), -1.0) for word in words], {}
    if "space" in kind:
        parts["add_prefix_space"] = True
    name = f"{kind.split()[0]}Tokenizer"
    tokenizer = getattr(transformers, name)(vocab=known, **parts)
    tokenizer.add_tokens(["<chat>"])
    tokenizer.save_pretrained(tmp_path)
    if kind != "T5":
        (tmp_path / "tokenizer.json").unlink()
        write_json(tmp_path / "vocab.json", known)
        (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, bpe["merges"])))
        write_json(tmp_path / "added_tokens.json", {"<chat>": len(known)})
    tiny("llama", vocab_size=4300).float().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Once upon <chat> a time"
    ids = theirs(text).input_ids
    wanted = ids[:-1] if ids[-1] == theirs.eos_token_id else ids
    begun = theirs.bos_token + text if ids[0] == theirs.bos_token_id else text
    for prompt in (text, begun):
        model, read = load_model(str(tmp_path), prompt, 3)
        assert model.prompt.tolist() == wanted and "<chat>" in read.get_vocab()


def test_an_adapter_beside_a_model_is_refused(tmp_path):
    write(tmp_path, "lm")
    write_json(tmp_path / "adapter_config.json", {})
    with pytest.raises(ValueError, match="holds an adapter; merge it"):
        load_model(str(tmp_path), "Once", 3)


LAYOUTS = [  # a role, a shape of its network, the suffix of its weights
    ("lm", {"num_layers": 1, "num_heads": 1, "attention_types": [[["global"], 1]]}, "safetensors"),
    ("lm", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "bin"),
    ("lm", {"window_size": 1, "intermediate_size": 23}, "several files"),
    ("toxicity", {}, "safetensors"),
    ("toxicity", {"num_hidden_layers": 1, "hidden_size": 32}, "bin"),
    ("similarity", {"layer_norm_eps": 0.5, "num_attention_heads": 24}, "several files"),
]


@pytest.mark.parametrize(("role", "shape", "suffix"), LAYOUTS)
def test_networks_are_those_of_transformers(tmp_path, role, shape, suffix):
    """Beside a mask and a copy of the output layer, as in the paper's language model."""
    network = write(tmp_path, role, **shape)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if role == "lm":
        tensors["transformer.h.0.attn.attention.bias"] = torch.ones(1, 1, 24, 24).tril() > 0
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, path)
    if suffix != "safetensors":
        path.unlink()
    if suffix == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    if suffix == "several files":
        network.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(role, tmp_path, network)


BIAS, OUTPUT = "transformer.ln_f.bias", "lm_head.weight"
DAMAGE = [  # tensors, None where one is missing; the fault
    ({BIAS: None}, f"Missing key.*{BIAS}"),
    ({BIAS: torch.ones(23)}, f"size mismatch for {BIAS}"),
    ({"other": torch.ones(2)}, "Unexpected key.*other"),
    ({OUTPUT: torch.ones(4096, 24)}, "output layer is not tied"),
]


def test_weights_that_are_not_those_of_the_network_are_refused(tmp_path):
    write(tmp_path, "lm", vocab_size=4096)
    tensors = load_file(tmp_path / "model.safetensors")
    for changes, fault in DAMAGE:
        others = {name: one for name, one in (tensors | changes).items() if one is not None}
        save_file(others, tmp_path / "model.safetensors")
        with pytest.raises((RuntimeError, ValueError), match=f"(?s){fault}"):
            LOAD["lm"](tmp_path)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_what_is_read_is_fetched_from_the_hub(tmp_path, monkeypatch, weights):
    """Safetensors are preferred. A directory is itself."""
    hub, fetched, calls = shutil.copytree(POCKET / "lm", tmp_path / "hub"), tmp_path / "fetched", []
    fetched.mkdir()
    (hub / "model.safetensors").rename(hub / weights)
    for name in ("pytorch_model.bin", "flax_model.msgpack"):
        (hub / name).touch()

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision))
        names = [file.name for file in hub.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(hub / name, fetched)
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    name, _, commit = PRESETS["paper"]["lm"].partition("@")
    assert checkpoint_directory(f"{name}@{commit}") == fetched and set(calls) == {(name, commit)}
    wanted = {"config.json", weights, "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in fetched.iterdir()} == wanted
    assert checkpoint_directory(str(hub)) == hub


@pytest.mark.smollm2
def test_a_genuine_network_has_the_logits_of_its_forward(tmp_path):
    runpy.run_path("docs/smollm2.py")["main"](str(tmp_path))
    model, tokenizer = load_model(str(tmp_path), "Once upon a time, there was a", 7)
    tokens = torch.tensor([tokenizer.encode(" little girl who lived in a small").ids])
    ids = torch.cat([model.prompt[None], tokens], 1)
    with torch.no_grad():
        wanted = model.network(ids).logits[:, -8:-1].log_softmax(-1)
        wanted = wanted.gather(2, tokens[..., None])[..., 0]
        assert (model.log_probs(tokens) - wanted).abs().max() < 1e-4
