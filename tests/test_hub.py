"""Checkpoints by name: fetched from a server that speaks as the Hub does, cached, used offline."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import Hub, serving
from safetensors.torch import load_file, save

import tinystories
from eval.run.options import POCKET, PRESETS
from tinystories import InputError, hub
from tinystories.checkpoint import fingerprint
from tinystories.hub import checkpoint_directory

ROOT = Path(__file__).parent.parent
COMMIT, LATER = "a" * 40, "b" * 40
NAME = "owner/stories"
EXTRA = {
    "README.md": b"# Stories",
    "optimizer.pt": b"no",
    "training_args.bin": b"no",
    "model.fp16.safetensors": b"no",
    "onnx/model.safetensors": b"no",
    "onnx/config.json": b"{}",
}
FAR = "http://127.0.0.1:9"  # a port that nothing listens on


@pytest.fixture(scope="module")
def server():
    """One server for all tests of this file."""
    with serving() as running:
        yield running


@pytest.fixture
def remote(server, tmp_path, monkeypatch) -> Hub:
    """The server, empty, as the Hub of huggingface_hub, with an empty cache."""
    server.clear()
    go_to(monkeypatch, server.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    return server


def go_to(monkeypatch, endpoint: str, offline: bool = False) -> None:
    """Point huggingface_hub to another server and forget what this process has fetched."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    hub.fetch.cache_clear()


def contents(layout: str, scale: float = 1.0) -> dict[str, bytes]:
    """The files of a repository that holds the shipped language model in a layout."""
    files = {
        name: (POCKET / "lm" / name).read_bytes() for name in ("config.json", "tokenizer.json")
    }
    tensors = {name: scale * t for name, t in load_file(POCKET / "lm/model.safetensors").items()}
    stem, suffix = ("pytorch_model", "bin") if "bin" in layout else ("model", "safetensors")
    halves = [sorted(tensors)[::2], sorted(tensors)[1::2]] if "sharded" in layout else [tensors]
    places = {}
    for number, names in enumerate(halves, 1):
        shard = f"-{number:05}-of-{len(halves):05}" if len(halves) > 1 else ""
        file, part = f"{stem}{shard}.{suffix}", {name: tensors[name] for name in names}
        files[file] = save(part, {"format": "pt"}) if suffix == "safetensors" else pickled(part)
        places |= dict.fromkeys(names, file)
    if len(halves) > 1:
        index = json.dumps({"metadata": {}, "weight_map": places})
        files[f"{stem}.{suffix}.index.json"] = index.encode()
    return files


def pickled(value) -> bytes:
    """What torch.save writes."""
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def refusal(name: str = NAME) -> str:
    """The one line with which a name is refused."""
    with pytest.raises(InputError) as caught:
        checkpoint_directory(name, "--lm")
    message = str(caught.value)
    assert "\n" not in message and name in message and "--lm" in message
    return message


@pytest.mark.parametrize("layout", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_only_what_is_needed_is_fetched_and_the_cache_is_reused(remote, layout, monkeypatch, capfd):
    files = contents(layout)
    remote.publish(NAME, COMMIT, files | EXTRA)
    name = f"{NAME}@{COMMIT}"
    first = checkpoint_directory(name, "--lm")
    assert remote.asked() == files.keys()
    assert "".join(capfd.readouterr()) == "", "no progress bar where there is no terminal"
    model, tokenizer = tinystories.load(first)
    expected, _ = tinystories.load(POCKET / "lm")
    ids = torch.tensor([tokenizer.encode("Once upon a time").ids])
    assert torch.equal(model(ids), expected(ids))
    for offline in (False, True):
        go_to(monkeypatch, FAR, offline)
        assert checkpoint_directory(name, "--lm") == first and not remote.requests


def test_safetensors_go_before_pickles(remote):
    files = contents("safetensors")
    remote.publish(NAME, COMMIT, files | {"pytorch_model.bin": b"no"})
    checkpoint_directory(NAME, "--lm")
    assert remote.asked() == files.keys()


def test_a_branch_is_asked_for_once_and_may_move(remote, monkeypatch):
    remote.publish(NAME, COMMIT, contents("bin"))
    first = checkpoint_directory(NAME, "--lm")
    remote.requests.clear()
    remote.publish(NAME, LATER, contents("bin", scale=2))
    assert checkpoint_directory(NAME, "--lm") == first and not remote.requests, "one commit"
    go_to(monkeypatch, FAR, offline=True)
    assert checkpoint_directory(NAME, "--lm") == first
    go_to(monkeypatch, remote.endpoint)
    moved = checkpoint_directory(NAME, "--lm")
    weights = [tinystories.load(path)[0].wte.weight for path in (first, moved)]
    assert torch.equal(weights[1], 2 * weights[0]) and fingerprint(moved) != fingerprint(first)
    go_to(monkeypatch, FAR)
    assert checkpoint_directory(NAME, "--lm") == moved, "without the Hub the branch stays"


def test_a_revision_that_is_named(remote):
    remote.publish(NAME, COMMIT, contents("safetensors"))
    remote.revisions[NAME] |= {"refs/pr/1": COMMIT, "v1.0": COMMIT}
    for revision in ("v1.0", "refs/pr/1", COMMIT):
        assert checkpoint_directory(f"{NAME}@{revision}", "--lm").name == COMMIT
    message = refusal(f"{NAME}@{LATER}")
    assert "it has no such revision" in message
    assert f"hf download {NAME} --revision {LATER} " in message


@pytest.mark.parametrize("fault", ["missing", "offline", "unreachable", "gated"])
def test_what_the_hub_refuses_is_said_in_one_line(remote, monkeypatch, fault):
    words = "the Hub does not have it; if it is private, `hf auth login`"
    if fault in ("offline", "unreachable"):
        go_to(monkeypatch, FAR, offline=fault == "offline")
        words = "the Hub cannot be reached and it is not in the cache"
    if fault == "gated":
        remote.publish(NAME, COMMIT, contents("safetensors"))
        remote.gated.add("model.safetensors")
        words = "its owner has to let you in"
    message = refusal()
    assert words in message and "no such directory" in message
    assert f"run `hf download {NAME} --local-dir DIR`" in message


def test_offline_with_half_a_checkpoint(remote, monkeypatch):
    remote.publish(NAME, COMMIT, contents("safetensors"))
    remote.gated.add("model.safetensors")
    refusal()
    go_to(monkeypatch, FAR, offline=True)
    assert "it is not in the cache" in refusal()


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_the_repository_lacks_is_named(remote, lost):
    files = contents("safetensors")
    del files[lost]
    remote.publish(NAME, COMMIT, files)
    with pytest.raises(InputError, match=f"{lost}: no such file"):
        tinystories.load(checkpoint_directory(NAME, "--lm"))


@pytest.mark.parametrize(
    "name", ["no/such/place", "nothing", "a--b/c", "o/n.git", "x" * 5000, "o/n@"]
)
def test_names_that_cannot_be_repositories_ask_nobody(remote, name):
    assert "no such directory" in refusal(name) and not remote.requests


def test_a_directory_goes_before_a_repository(remote, tmp_path, monkeypatch):
    remote.publish(NAME, COMMIT, contents("safetensors"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / "owner" / "file").write_text("")
    assert checkpoint_directory(NAME, "--lm") == Path(NAME) and not remote.requests
    assert "is a file" in refusal("owner/file")


def test_the_paper_preset_end_to_end(remote, tmp_path):
    """main.py in its own process; the paper's three repositories hold the shipped networks."""
    paper, roles = PRESETS["paper"], ("lm", "toxicity", "similarity")
    names = (paper.lm, paper.toxicity_model, paper.similarity_model)
    for name, role in zip(names, roles, strict=True):
        repository, _, commit = name.partition("@")
        files = {path.name: path.read_bytes() for path in (POCKET / role).iterdir()}
        remote.publish(repository, commit, files)
    sizes = "--method pooled --generations 0 --pool-rounds 1 --pool-base-draws 10 --pool-draws 10"
    sizes += " --pool-updates 2 --eval-runs 2 --eval-particles 4 --eval-base-samples 20 --beta 0.1"
    sizes += " --eval-target-proposals 60 --length 6"
    home = {"HF_ENDPOINT": remote.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "main.py", "--preset", "paper", "--out", tmp_path / "run"]
    run = subprocess.run(
        [*command, *sizes.split()], env=os.environ | home, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert remote.asked() == found
    key = json.loads((tmp_path / "run" / "target" / "target.json").read_text())["key"]
    assert key["lm"] == fingerprint(POCKET / "lm")
    assert key["toxicity"] == fingerprint(POCKET / "toxicity")
