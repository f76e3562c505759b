"""Checkpoints by name: fetched from a server that speaks as the Hub does, cached, used offline."""

from pathlib import Path

import pytest
import torch
from hub_server import Hub, serving
from networks import oracle, write

import tinystories
from eval.run.options import POCKET, PRESETS, RunConfig
from tinystories import InputError, hub
from tinystories.checkpoint import fingerprint
from tinystories.hub import checkpoint_directory

COMMIT, LATER = "a" * 40, "b" * 40
NAME = "owner/stories"
EXTRA = ("README.md", "training_args.bin", "model.fp16.safetensors", "onnx/model.safetensors")
FAR = "http://127.0.0.1:9"  # a port that nothing listens on


@pytest.fixture
def remote(tmp_path, monkeypatch) -> Hub:
    """An empty server as the Hub of huggingface_hub, with an empty cache."""
    with serving() as server:
        go_to(monkeypatch, server.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def go_to(monkeypatch, endpoint: str, offline: bool = False) -> None:
    """Point huggingface_hub to another server and forget what this process has fetched."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    hub.fetch.cache_clear()


@pytest.fixture
def contents(tmp_path):
    """contents(layout): the needed files of a random checkpoint in that layout."""

    def make(layout: str = "", **shape) -> dict[str, bytes]:
        directory = tmp_path / f"{layout}{len(shape)}"
        write(directory, "lm", oracle("lm", **shape), layout)
        names = {path.name for path in directory.iterdir()} - {"generation_config.json"}
        return {name: (directory / name).read_bytes() for name in names}

    return make


def refusal(name: str = NAME) -> str:
    """The one line with which a name is refused."""
    with pytest.raises(InputError) as caught:
        checkpoint_directory(name, "--lm")
    message = str(caught.value)
    assert "\n" not in message and name in message and "--lm" in message
    return message


@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin", "sharded bin"])
def test_only_what_is_needed_is_fetched_and_the_cache_is_reused(
    remote, contents, layout, monkeypatch, capfd
):
    files, extra = contents(layout), dict.fromkeys(EXTRA, b"no")
    if "bin" not in layout:
        extra["pytorch_model.bin"] = b"no"  # safetensors are preferred
    remote.publish(NAME, COMMIT, files | extra)
    name = f"{NAME}@{COMMIT}"
    capfd.readouterr()
    first = checkpoint_directory(name, "--lm")
    assert remote.asked() == files.keys()
    assert "".join(capfd.readouterr()) == "", "no progress bar where there is no terminal"
    ids = torch.arange(20)[None]
    with torch.no_grad():
        wanted = oracle("lm")(ids).logits
        torch.testing.assert_close(tinystories.load(first)[0](ids), wanted, rtol=0, atol=1e-4)
    for offline in (False, True):
        go_to(monkeypatch, FAR, offline)
        assert checkpoint_directory(name, "--lm") == first and not remote.requests


def test_a_branch_is_asked_for_once_and_may_move(remote, contents, monkeypatch):
    remote.publish(NAME, COMMIT, contents())
    first = checkpoint_directory(NAME, "--lm")
    remote.requests.clear()
    remote.publish(NAME, LATER, contents(num_heads=2))
    assert checkpoint_directory(NAME, "--lm") == first and not remote.requests, "one commit"
    go_to(monkeypatch, FAR, offline=True)
    assert checkpoint_directory(NAME, "--lm") == first
    go_to(monkeypatch, remote.endpoint)
    moved = checkpoint_directory(NAME, "--lm")
    assert moved.name == LATER and fingerprint(moved) != fingerprint(first)
    go_to(monkeypatch, FAR)
    assert checkpoint_directory(NAME, "--lm") == moved, "without the Hub the branch stays"


def test_a_revision_that_is_named(remote, contents):
    remote.publish(NAME, COMMIT, contents())
    remote.revisions[NAME] |= {"refs/pr/1": COMMIT, "v1.0": COMMIT}
    for revision in ("v1.0", "refs/pr/1", COMMIT):
        assert checkpoint_directory(f"{NAME}@{revision}", "--lm").name == COMMIT
    message = refusal(f"{NAME}@{LATER}")
    assert "it has no such revision" in message
    assert f"hf download {NAME} --revision {LATER} " in message


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "the Hub does not have it; if it is private, `hf auth login`"),
        ("offline", "the Hub cannot be reached and it is not in the cache"),
        ("unreachable", "the Hub cannot be reached and it is not in the cache"),
        ("gated", "its owner has to let you in"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(remote, contents, monkeypatch, fault, words):
    if fault in ("offline", "unreachable"):
        go_to(monkeypatch, FAR, offline=fault == "offline")
    if fault == "gated":
        remote.publish(NAME, COMMIT, contents())
        remote.gated.add("model.safetensors")
    message = refusal()
    assert words in message and "no such directory" in message
    assert f"run `hf download {NAME} --local-dir DIR`" in message
    if fault == "gated":
        go_to(monkeypatch, FAR, offline=True)
        assert "it is not in the cache" in refusal(), "half a checkpoint is none"


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_the_repository_lacks_is_named(remote, contents, lost):
    files = contents()
    del files[lost]
    remote.publish(NAME, COMMIT, files)
    with pytest.raises(InputError, match=f"{lost}: no such file"):
        tinystories.load(checkpoint_directory(NAME, "--lm"))


def test_names_that_cannot_be_repositories_and_directories_ask_nobody(
    remote, tmp_path, monkeypatch
):
    for name in ("no/such/place", "nothing", "a--b/c", "o/n.git", "x" * 5000, "o/n@"):
        assert "no such directory" in refusal(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert checkpoint_directory(NAME, "--lm") == Path(NAME)
    (tmp_path / "owner" / "file").write_text("")
    assert "is a file" in refusal("owner/file") and not remote.requests


def test_the_paper_preset(remote):
    """The paper's three repositories at their commits; they hold the shipped networks here."""
    roles = {"lm": "lm", "toxicity_model": "toxicity", "similarity_model": "similarity"}
    for option, role in roles.items():
        repository, _, commit = getattr(PRESETS["paper"], option).partition("@")
        files = {path.name: path.read_bytes() for path in (POCKET / role).iterdir()}
        remote.publish(repository, commit, files)
        found = RunConfig(preset="paper").checkpoint(option)
        assert found.name == commit and fingerprint(found) == fingerprint(POCKET / role)
