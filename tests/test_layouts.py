"""Checkpoints as others write them, against transformers; what is refused; tokens and texts."""

import json

import pytest
import torch
from networks import AUTO, LOAD, TEXTS, assert_same, oracle, write
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import tinystories
from eval.options import POCKET, PRESETS
from tinystories.load import (
    END_OF_TEXT,
    checkpoint_directory,
    encode_prompt,
    read_tokenizer,
)

LAYOUTS = [  # a role, a shape of its network, the suffix of its weights
    ("lm", {"num_layers": 1, "num_heads": 1, "attention_types": [[["global"], 1]]}, "safetensors"),
    ("lm", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "bin"),
    ("lm", {"window_size": 1, "intermediate_size": 23}, "safetensors"),
    ("toxicity", {"num_hidden_layers": 1, "pad_token_id": 3}, "bin"),
    ("similarity", {"layer_norm_eps": 0.5, "num_attention_heads": 24}, "safetensors"),
]
BESIDE = {"attn.attention.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()}
BESIDE["attn.attention.masked_bias"] = torch.tensor(-1e9)


@pytest.mark.parametrize(("role", "shape", "suffix"), LAYOUTS)
def test_networks_are_those_of_transformers(tmp_path, role, shape, suffix):
    """Beside masks and a copy of the output layer, as in the paper's language model."""
    network = oracle(role, **shape)
    write(tmp_path, role, network)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if role == "lm":
        tensors |= {f"transformer.h.0.{name}": tensor for name, tensor in BESIDE.items()}
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, path)
    if suffix == "bin":
        path.unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_same(role, tmp_path, network)


def config(**changes) -> str:
    return json.dumps(json.loads((POCKET / "lm" / "config.json").read_text()) | changes)


BIAS = "transformer.ln_f.bias"
DAMAGE = [  # a file; its content, None where it is missing, or some of its tensors; the fault
    ("model.safetensors", {BIAS: None}, r"does not fit .*Missing key.*transformer\.ln_f\.bias"),
    ("model.safetensors", {BIAS: torch.full((24,), torch.nan)}, r"ln_f\.bias holds NaN"),
    ("model.safetensors", "not tensors", "its tensors cannot be read"),
    ("model.safetensors", None, "no such file"),
    ("config.json", "{", "cannot be read as JSON"),
    ("config.json", config(model_type="gpt2"), "not GPT-Neo .*model_type is 'gpt2'"),
    ("tokenizer.json", None, "no such file; let `AutoTokenizer`"),
    ("tokenizer.json", "{}", "no tokenizer for this network"),
    ("tokenizer.json", (POCKET / "toxicity" / "tokenizer.json").read_text(), "has 4096 tokens"),
]


@pytest.mark.parametrize(("name", "content", "fault"), DAMAGE)
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path, name, content, fault):
    path = tmp_path / name
    write(tmp_path, "lm", oracle("lm", vocab_size=4096))
    if isinstance(content, dict):
        tensors = load_file(path) | content
        save_file({key: value for key, value in tensors.items() if value is not None}, path)
    elif content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"{name}: .*{fault}") as caught:
        tinystories.load(tmp_path)
    assert str(caught.value).isprintable()  # one line


def test_a_tokenizer_of_older_files_is_that_of_transformers(tmp_path):
    model = json.loads((POCKET / "lm" / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer, theirs = read_tokenizer(tmp_path, 4096), AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in [*TEXTS, f"one{END_OF_TEXT}two"]:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)


def test_prompts_end_without_special_tokens():
    tokenizer = read_tokenizer(POCKET / "lm", 4096)
    plain, end = tokenizer.encode("Once upon").ids, tokenizer.token_to_id(END_OF_TEXT)
    assert encode_prompt(tokenizer, "Once upon" + END_OF_TEXT) == [*plain, end]
    template, special = f"{END_OF_TEXT} $A {END_OF_TEXT} {END_OF_TEXT}", [(END_OF_TEXT, end)]
    tokenizer.post_processor = TemplateProcessing(template, special_tokens=special)
    assert encode_prompt(tokenizer, "Once upon") == [end, *plain]
    assert encode_prompt(tokenizer, "Once upon" + END_OF_TEXT) == [end, *plain, end]
    assert encode_prompt(tokenizer, "") == []


@pytest.mark.parametrize("role", list(LOAD))
@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    name = PRESETS["paper"]["lm" if role == "lm" else f"{role}_model"]
    path = checkpoint_directory(name, "--lm")
    _, tokenizer = LOAD[role](path)
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    repository, _, revision = name.partition("@")
    theirs = AutoTokenizer.from_pretrained(repository, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]
