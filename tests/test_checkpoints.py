"""Checkpoints as others write them, against transformers: networks, tokens, the Hub."""

import json
import shutil

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from networks import LOAD, TEXTS, assert_same, write
from safetensors.torch import load_file, save_file

from eval.options import POCKET, PRESETS
from tinystories.load import checkpoint_directory, read_tokenizer

LAYOUTS = [  # a role, a shape of its network, the suffix of its weights
    ("lm", {"num_layers": 1, "num_heads": 1, "attention_types": [[["global"], 1]]}, "safetensors"),
    ("lm", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "bin"),
    ("lm", {"window_size": 1, "intermediate_size": 23}, "several files"),
    ("toxicity", {}, "safetensors"),
    ("toxicity", {"num_hidden_layers": 1, "hidden_size": 32}, "bin"),
    ("similarity", {}, "several files"),
    ("similarity", {"layer_norm_eps": 0.5, "num_attention_heads": 24}, "safetensors"),
]
MASK = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()


@pytest.mark.parametrize(("role", "shape", "suffix"), LAYOUTS)
def test_networks_are_those_of_transformers(tmp_path, role, shape, suffix):
    """Beside a mask and a copy of the output layer, as in the paper's language model."""
    network = write(tmp_path, role, **shape)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if role == "lm":
        tensors["transformer.h.0.attn.attention.bias"] = MASK
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


def test_a_tokenizer_of_older_files_is_that_of_transformers(tmp_path):
    model = json.loads((POCKET / "lm" / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = read_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in [*TEXTS, "one<|endoftext|>two"]:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)


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
