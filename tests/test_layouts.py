"""Checkpoints as others write them, against transformers; what is refused; older tokenizers."""

import io
from pathlib import Path

import pytest
import torch
import transformers
from networks import AUTO, LOAD, TEXTS, assert_same, oracle, write, write_vocabulary
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

import tinystories
from eval.config import PRESETS
from tinystories import InputError
from tinystories.checkpoint import fingerprint, read_tensors, weight_files
from tinystories.hub import checkpoint_directory
from tinystories.tokenizer import END_OF_TEXT, encode_prompt, read_tokenizer, token_texts

PARAMETERS = {"lm": 107_111_424, "toxicity": 124_646_401, "similarity": 22_713_216}
OPTIONS = {"lm": "lm", "toxicity": "toxicity_model", "similarity": "similarity_model"}
LAYOUTS = {"safetensors": torch.float32, "bin": torch.float16, "old bin": torch.float32}
LAYOUTS |= {"shards": torch.bfloat16}
ROLES = pytest.mark.parametrize("role", list(LOAD))


@ROLES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, role, layout):
    write(tmp_path, role, oracle(role), layout, LAYOUTS[layout])
    assert_same(role, tmp_path, AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval())
    if layout == "shards":
        before, shards = fingerprint(tmp_path), weight_files(tmp_path)
        assert len(shards) > 1
        shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"?")
        assert fingerprint(tmp_path) != before
        shards[1].unlink()
        with pytest.raises(InputError, match=rf"{shards[1].name}: no such file"):
            LOAD[role](tmp_path)


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


def pickled(value) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
WEIGHTS = "pytorch_model.bin"
DAMAGE = [
    ("model.safetensors", POINTER, "is a Git-LFS pointer; run git lfs pull"),
    (WEIGHTS, POINTER, "is a Git-LFS pointer; run git lfs pull"),
    ("tokenizer.json", POINTER, "is a Git-LFS pointer; run git lfs pull"),
    (WEIGHTS, pickled(Path("code")), "its tensors cannot be read"),
    (WEIGHTS, pickled({"wte.weight": 1.0}), "its tensors cannot be read"),
    (WEIGHTS, b"not a pickle", "its tensors cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "fault"), DAMAGE)
def test_a_file_that_is_not_what_it_is_called_is_named(tmp_path, name, content, fault):
    """Nothing but tensors is read, and PyTorch's advice to load unsafely is not passed on."""
    write(tmp_path, "lm", oracle("lm"), "bin" if name == WEIGHTS else "")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name}: {fault}") as caught:
        tinystories.load(tmp_path)
    assert "weights_only" not in str(caught.value)


OLDER = [("gpt2", {"add_prefix_space": True}), ("gpt2", {}), ("roberta", {}), ("bert", {})]


@pytest.mark.parametrize(("kind", "options"), OLDER)
def test_a_tokenizer_of_older_files_is_that_of_transformers(tmp_path, kind, options):
    write_vocabulary(tmp_path, kind, **options)
    tokenizer = read_tokenizer(tmp_path, 300)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)
    if kind != "bert":
        (tmp_path / "merges.txt").unlink()
        with pytest.raises(InputError, match=r"merges\.txt: no such file"):
            read_tokenizer(tmp_path, 300)


def test_special_tokens_stand_before_a_prompt_but_not_behind_it(tmp_path):
    write_vocabulary(tmp_path, "gpt2")
    tokenizer = read_tokenizer(tmp_path, 300)
    plain, end = tokenizer.encode("Once upon").ids, tokenizer.token_to_id(END_OF_TEXT)
    special = [(END_OF_TEXT, end)]
    for template, front in (("$A {}", []), ("{} $A {} {}", [end])):
        template = template.replace("{}", END_OF_TEXT)
        tokenizer.post_processor = TemplateProcessing(template, special_tokens=special)
        assert encode_prompt(tokenizer, "Once upon") == front + plain
        assert encode_prompt(tokenizer, "Once upon" + END_OF_TEXT) == [*front, *plain, end]
        with pytest.raises(InputError, match="the prompt is empty"):
            encode_prompt(tokenizer, "")


def test_a_character_of_several_tokens_stands_at_the_last_of_them(tmp_path):
    write_vocabulary(tmp_path, "gpt2")
    tokenizer = read_tokenizer(tmp_path, 300)
    ids = tokenizer.encode("a \N{GRINNING FACE}\N{HANGUL SYLLABLE HAN}b").ids
    found = token_texts(tokenizer, ids)
    assert found == [
        "a",
        " ",
        "",
        "",
        "",
        "\N{GRINNING FACE}",
        "",
        "",
        "\N{HANGUL SYLLABLE HAN}",
        "b",
    ]
    assert token_texts(tokenizer, ids[:4]) == ["a", " ", "", ""]


@ROLES
@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    name = PRESETS["paper"][OPTIONS[role]]
    path = checkpoint_directory(name, "--lm")
    model, tokenizer = LOAD[role](path)
    extra = [model.wte.weight] if role == "lm" else []  # counted as the paper does: with the head
    tensors = read_tensors(weight_files(path)[0])
    extra += [tensor for name, tensor in tensors.items() if "pooler." in name]
    assert sum(tensor.numel() for tensor in [*model.parameters(), *extra]) == PARAMETERS[role]
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    repository, _, revision = name.partition("@")
    theirs = transformers.AutoTokenizer.from_pretrained(repository, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]
