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
from tinystories.checkpoint import fingerprint, read_tensors, weight_files
from tinystories.hub import checkpoint_directory
from tinystories.tokenizer import END_OF_TEXT, encode_prompt, read_tokenizer, token_texts

PARAMETERS = {"lm": 107_111_424, "toxicity": 124_646_401, "similarity": 22_713_216}
OPTIONS = {"lm": "lm", "toxicity": "toxicity_model", "similarity": "similarity_model"}
ROLES = pytest.mark.parametrize("role", list(LOAD))


@ROLES
@pytest.mark.parametrize("is_pickled", [False, True])
def test_weights_in_either_format(tmp_path, role, is_pickled):
    network = oracle(role)
    write(tmp_path, role, network, is_pickled)
    assert_same(role, tmp_path, network)


def test_shards(tmp_path):
    network = oracle("lm")
    write(tmp_path, "lm", network)
    (tmp_path / "model.safetensors").unlink()
    network.save_pretrained(tmp_path, max_shard_size="100KB")
    assert_same("lm", tmp_path, network)
    before, shards = fingerprint(tmp_path), weight_files(tmp_path)
    assert len(shards) > 1
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"?")
    assert fingerprint(tmp_path) != before
    shards[1].unlink()
    with pytest.raises(InputError, match=rf"{shards[1].name}: no such file"):
        tinystories.load(tmp_path)


HEAD = {"transformer.wte.weight": "lm_head.weight"}
BERT = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
SPELLINGS = [("lm", "", HEAD), ("lm", "_orig_mod.", {}), ("lm", "module._orig_mod.", HEAD)]
SPELLINGS += [("similarity", "", BERT), ("toxicity", "module.", BERT)]


@pytest.mark.parametrize(("role", "prefix", "changes"), SPELLINGS)
def test_other_names_of_the_tensors(tmp_path, role, prefix, changes):
    network, renamed = oracle(role), {}
    write(tmp_path, role, network)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for right, other in changes.items():
            name = name.replace(right, other)
        renamed[prefix + name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
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
    ({"transformer.extra": torch.zeros(1)}, "left over: extra"),
    ({BIAS: torch.full((24,), torch.nan)}, "ln_f.bias holds NaN"),
    ({"lm_head.weight": torch.ones(1)}, "lm_head.weight is not wte.weight"),
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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
DAMAGE = [
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
    write(tmp_path, "lm", oracle("lm", vocab_size=4096), name == "pytorch_model.bin")
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"{name}: .*{fault}") as caught:
        tinystories.load(tmp_path)
    assert str(caught.value).isprintable() and "weights_only" not in str(caught.value)


@ROLES
def test_a_tokenizer_of_older_files_is_that_of_transformers(tmp_path, role):
    model = json.loads((POCKET / role / "tokenizer.json").read_text())["model"]
    if "merges" in model:
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    else:
        words = sorted(model["vocab"], key=model["vocab"].get)
        (tmp_path / "vocab.txt").write_text("\n".join(words))
    name = {"lm": "GPT2", "toxicity": "Roberta", "similarity": "Bert"}[role]
    options = {"tokenizer_class": f"{name}Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizer, theirs = read_tokenizer(tmp_path, 5000), AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in TEXTS:
        text = text.replace("<mask>", "")  # which transformers adds to the vocabulary
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)
    if "merges" in model:
        (tmp_path / "merges.txt").unlink()
        with pytest.raises(InputError, match=r"merges\.txt: no such file"):
            read_tokenizer(tmp_path, 5000)


def test_special_tokens_stand_before_a_prompt_but_not_behind_it():
    tokenizer = read_tokenizer(POCKET / "lm", 4096)
    plain, end = tokenizer.encode("Once upon").ids, tokenizer.token_to_id(END_OF_TEXT)
    for template, front in (("$A {}", []), ("{} $A {} {}", [end])):
        template = template.replace("{}", END_OF_TEXT)
        special = [(END_OF_TEXT, end)]
        tokenizer.post_processor = TemplateProcessing(template, special_tokens=special)
        assert encode_prompt(tokenizer, "Once upon") == front + plain
        assert encode_prompt(tokenizer, "Once upon" + END_OF_TEXT) == [*front, *plain, end]
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
    name = PRESETS["paper"][OPTIONS[role]]
    path = checkpoint_directory(name, "--lm")
    model, tokenizer = LOAD[role](path)
    # Counted as the paper does: with the head, and the pooler that is not used.
    extra = [model.transformer.wte.weight] if role == "lm" else []
    tensors = read_tensors(weight_files(path)[0])
    extra += [tensor for name, tensor in tensors.items() if "pooler." in name]
    assert sum(tensor.numel() for tensor in [*model.parameters(), *extra]) == PARAMETERS[role]
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    repository, _, revision = name.partition("@")
    theirs = AutoTokenizer.from_pretrained(repository, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]
