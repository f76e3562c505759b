"""Checkpoints as others write them, against transformers, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from networks import AUTO, LOAD, TEXTS, assert_same, oracle, write
from safetensors.torch import load_file, save_file

import tinystories
from eval.config import POCKET, PRESETS
from tinystories import InputError
from tinystories.checkpoint import fingerprint, read_tensors, weight_file
from tinystories.hub import checkpoint_directory
from tinystories.tokenizer import read_tokenizer, token_texts

PARAMETERS = {"lm": 107_111_424, "toxicity": 124_646_401, "similarity": 22_713_216}
OPTIONS = {"lm": "lm", "toxicity": "toxicity_model", "similarity": "similarity_model"}
ROLES = pytest.mark.parametrize("role", list(LOAD))


@ROLES
@pytest.mark.parametrize("is_pickled", [False, True])
def test_weights_in_either_format(tmp_path, role, is_pickled):
    network = oracle(role)
    write(tmp_path, role, network, is_pickled)
    assert_same(role, tmp_path, network)


def change_tensors(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace or add tensors of a checkpoint; None takes one out."""
    tensors = load_file(path / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def test_masks_and_a_copy_of_the_output_layer_are_no_weights(tmp_path):
    reference = oracle("lm")
    write(tmp_path, "lm", reference)
    added = {"lm_head.weight": reference.lm_head.weight.detach().clone()}
    name = "transformer.h.0.attn.attention."
    added[name + "bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    added[name + "masked_bias"] = torch.tensor(-1e9)
    change_tensors(tmp_path, added)
    assert_same("lm", tmp_path, reference)


BIAS = "transformer.ln_f.bias"
TENSORS = [
    ({BIAS: None}, "missing: transformer.ln_f.bias"),
    ({"transformer.extra": torch.zeros(1)}, "left over: transformer.extra"),
    ({BIAS: torch.full((24,), torch.nan)}, "ln_f.bias holds NaN"),
    ({BIAS: torch.ones(23)}, r"ln_f.bias has shape \[23\], not \[24\]"),
]


@pytest.mark.parametrize(("changes", "words"), TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, words):
    write(tmp_path, "lm", oracle("lm"))
    before = fingerprint(tmp_path)
    change_tensors(tmp_path, changes)
    assert fingerprint(tmp_path) != before
    with pytest.raises(InputError, match=rf"model\.safetensors: does not fit .*{words}"):
        tinystories.load(tmp_path)


def config(**changes) -> str:
    return json.dumps(json.loads((POCKET / "lm" / "config.json").read_text()) | changes)


DAMAGE = [
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
    write(tmp_path, "lm", oracle("lm", vocab_size=4096), name == "pytorch_model.bin")
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"{name}: .*{fault}") as caught:
        tinystories.load(tmp_path)
    assert str(caught.value).isprintable()


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    tokenizer = read_tokenizer(POCKET / "lm", 4096)
    written = "a \N{GRINNING FACE}\N{HANGUL SYLLABLE HAN}b"
    texts = token_texts(tokenizer, tokenizer.encode(written).ids)
    assert "".join(texts) == written
    assert [text for text in texts if text][-3:] == list(written[-3:]) and texts.count("") >= 3


@ROLES
@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    name = PRESETS["paper"][OPTIONS[role]]
    path = checkpoint_directory(name, "--lm")
    model, tokenizer = LOAD[role](path)
    # Counted as the paper does: with the head, and the pooler that is not used.
    extra = [model.transformer.wte.weight] if role == "lm" else []
    tensors = read_tensors(weight_file(path))
    extra += [tensor for name, tensor in tensors.items() if "pooler." in name]
    assert sum(tensor.numel() for tensor in [*model.parameters(), *extra]) == PARAMETERS[role]
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    repository, _, revision = name.partition("@")
    theirs = transformers.AutoTokenizer.from_pretrained(repository, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]
