"""Every layout of a checkpoint against transformers, older tokenizers, and what is refused."""

from pathlib import Path

import pytest
import torch
import transformers
from networks import AUTO, LOAD, TEXTS, assert_same, oracle, write, write_vocabulary

import tinystories
from eval.run.options import PRESETS, RunConfig
from tinystories import InputError
from tinystories.checkpoint import read_tensors, weight_file
from tinystories.tokenizer import read_tokenizer

PARAMETERS = {"lm": 107_111_424, "toxicity": 124_646_401, "similarity": 22_713_216}
OPTIONS = {"lm": "lm", "toxicity": "toxicity_model", "similarity": "similarity_model"}
LAYOUTS = {"safetensors": torch.float32, "bin": torch.float16, "old bin": torch.float32}
ROLES = pytest.mark.parametrize("role", list(LOAD))


@ROLES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, role, layout):
    write(tmp_path, role, oracle(role), layout, LAYOUTS[layout])
    assert_same(role, tmp_path, AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval())


def test_of_a_pickle_only_tensors_are_read(tmp_path):
    write(tmp_path, "lm", oracle("lm"), "bin")
    for value in (Path("code"), {"wte.weight": 1.0}):
        torch.save(value, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match=r"pytorch_model\.bin: its tensors cannot be read"):
            tinystories.load(tmp_path)


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


@ROLES
@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    path = RunConfig(preset="paper").checkpoint(OPTIONS[role])
    model, tokenizer = LOAD[role](path)
    extra = [model.wte.weight] if role == "lm" else []  # counted as the paper does: with the head
    tensors = read_tensors(weight_file(path))
    extra += [tensor for name, tensor in tensors.items() if "pooler." in name]
    assert sum(tensor.numel() for tensor in [*model.parameters(), *extra]) == PARAMETERS[role]
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    name, _, revision = getattr(PRESETS["paper"], OPTIONS[role]).partition("@")
    theirs = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]
