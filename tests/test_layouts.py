"""Checkpoints as others write them, against transformers; what is refused; older tokenizers."""

import json
from pathlib import Path

import pytest
import torch
from networks import AUTO, LOAD, TEXTS, assert_same, oracle, write
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import tinystories
from eval.config import POCKET, PRESETS
from tinystories import InputError
from tinystories.checkpoint import fingerprint, weight_files
from tinystories.hub import checkpoint_directory
from tinystories.tokenizer import END_OF_TEXT, encode_prompt, read_tokenizer, token_texts

ROLES = pytest.mark.parametrize("role", list(LOAD))
HEAD = {"transformer.wte.weight": "lm_head.weight"}
BERT = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
LAYOUTS = [  # a role, a shape of its network, how its tensors are named
    ("lm", {"num_layers": 1, "num_heads": 1, "attention_types": [[["global"], 1]]}, "", {}),
    ("lm", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "_orig_mod.", {}),
    ("lm", {"window_size": 1, "intermediate_size": 23}, "module._orig_mod.", HEAD),
    ("toxicity", {"num_hidden_layers": 1, "num_attention_heads": 1, "pad_token_id": 3}, "", {}),
    ("toxicity", {"num_attention_heads": 8}, "module.", BERT),
    ("similarity", {"layer_norm_eps": 0.5, "num_attention_heads": 24}, "", BERT),
]
MASK = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
UNUSED = {"attention.bias": MASK, "attention.masked_bias": torch.tensor(-1e9)}


@pytest.mark.parametrize(("role", "shape", "prefix", "changes"), LAYOUTS)
def test_networks_of_other_shapes_and_other_names(tmp_path, role, shape, prefix, changes):
    """Beside masks and a copy of the output layer, which are no weights of their own."""
    network, renamed = oracle(role, **shape), {}
    write(tmp_path, role, network)
    tensors = load_file(tmp_path / "model.safetensors")
    if role == "lm":
        tensors |= {f"transformer.h.0.attn.{name}": mask for name, mask in UNUSED.items()}
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    for name, tensor in tensors.items():
        for right, other in changes.items():
            name = name.replace(right, other)
        renamed[prefix + name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    assert_same(role, tmp_path, network)


def test_weights_in_a_pickle_and_in_shards(tmp_path):
    network = oracle("lm")
    write(tmp_path, "lm", network, is_pickled=True)
    assert_same("lm", tmp_path, network)
    (tmp_path / "pytorch_model.bin").unlink()
    network.save_pretrained(tmp_path, max_shard_size="100KB")
    assert_same("lm", tmp_path, network)
    before, shards = fingerprint(tmp_path), weight_files(tmp_path)
    assert len(shards) > 1
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"?")
    assert fingerprint(tmp_path) != before
    shards[1].unlink()
    with pytest.raises(InputError, match=rf"{shards[1].name}: no such file"):
        tinystories.load(tmp_path)


def config(**changes) -> str:
    return json.dumps(json.loads((POCKET / "lm" / "config.json").read_text()) | changes)


BIAS = "transformer.ln_f.bias"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
DAMAGE = [  # a file; its content, None where it is missing, or some of its tensors; the fault
    ("model.safetensors", {BIAS: None}, "does not fit .*missing: transformer.ln_f.bias"),
    ("model.safetensors", {"transformer.extra": torch.zeros(1)}, "left over: extra"),
    ("model.safetensors", {BIAS: torch.full((24,), torch.nan)}, "ln_f.bias holds NaN"),
    ("model.safetensors", {"lm_head.weight": torch.ones(1)}, "lm_head.weight is not wte.weight"),
    ("model.safetensors", {BIAS: torch.ones(23)}, r"ln_f.bias has shape \[23\], not \[24\]"),
    ("model.safetensors", POINTER, "is a Git-LFS pointer; run git lfs pull"),
    ("pytorch_model.bin", POINTER, "is a Git-LFS pointer; run git lfs pull"),
    ("tokenizer.json", POINTER, "is a Git-LFS pointer; run git lfs pull"),
    ("model.safetensors", None, "no such file"),
    ("pytorch_model.bin", "not a pickle", "its tensors cannot be read"),
    ("config.json", "{", "cannot be read as JSON"),
    ("config.json", config(model_type="gpt2"), "model_type is 'gpt2', .*any_model.py"),
    ("config.json", config(num_layers="4"), "not GPT-Neo"),
    ("tokenizer.json", None, "no such file; let `AutoTokenizer`"),
    ("tokenizer.json", "{}", "no tokenizer for this network"),
    ("tokenizer.json", (POCKET / "toxicity" / "tokenizer.json").read_text(), "has vocab_size 4096"),
]


@pytest.mark.parametrize(("name", "content", "fault"), DAMAGE)
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path, name, content, fault):
    path = tmp_path / name
    write(tmp_path, "lm", oracle("lm", vocab_size=4096), name == "pytorch_model.bin")
    if isinstance(content, dict):
        tensors = load_file(path) | content
        save_file({key: value for key, value in tensors.items() if value is not None}, path)
    elif content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(InputError, match=f"{name}: .*{fault}") as caught:
        tinystories.load(tmp_path)
    assert str(caught.value).isprintable() and "weights_only" not in str(caught.value)


def write_older_files(path: Path, role: str) -> None:
    """The tokenizer of a role in the files of older checkpoints."""
    model = json.loads((POCKET / role / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    name = {"lm": "GPT2", "toxicity": "Roberta"}[role]
    options = {"tokenizer_class": f"{name}Tokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.mark.parametrize("role", ["lm", "toxicity"])
def test_a_tokenizer_of_older_files_is_that_of_transformers(tmp_path, role):
    write_older_files(tmp_path, role)
    tokenizer, theirs = read_tokenizer(tmp_path, 5000), AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in TEXTS:
        text = text.replace("<mask>", "")  # which transformers adds to the vocabulary
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)
    if role == "lm":
        (tmp_path / "merges.txt").unlink()
        with pytest.raises(InputError, match=r"merges\.txt: no such file"):
            read_tokenizer(tmp_path, 5000)


def test_special_tokens_stand_before_a_prompt_but_not_behind_it():
    tokenizer = read_tokenizer(POCKET / "lm", 4096)
    plain, end = tokenizer.encode("Once upon").ids, tokenizer.token_to_id(END_OF_TEXT)
    assert encode_prompt(tokenizer, "Once upon" + END_OF_TEXT) == [*plain, end]
    template, special = f"{END_OF_TEXT} $A {END_OF_TEXT} {END_OF_TEXT}", [(END_OF_TEXT, end)]
    tokenizer.post_processor = TemplateProcessing(template, special_tokens=special)
    assert encode_prompt(tokenizer, "Once upon") == [end, *plain]
    assert encode_prompt(tokenizer, "Once upon" + END_OF_TEXT) == [end, *plain, end]
    assert encode_prompt(tokenizer, "") == []


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    tokenizer = read_tokenizer(POCKET / "lm", 4096)
    written = "a \N{GRINNING FACE}\N{HANGUL SYLLABLE HAN}b"
    texts = token_texts(tokenizer, tokenizer.encode(written).ids)
    assert "".join(texts) == written
    assert [text for text in texts if text][-3:] == list(written[-3:]) and texts.count("") >= 3


@ROLES
@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    name = PRESETS["paper"]["lm" if role == "lm" else f"{role}_model"]
    path = checkpoint_directory(name, "--lm")
    _, tokenizer = LOAD[role](path)
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    repository, _, revision = name.partition("@")
    theirs = AutoTokenizer.from_pretrained(repository, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]
