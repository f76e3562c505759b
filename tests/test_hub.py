"""Checkpoints by name: which files are fetched, once, and what is said where there are none.

A dictionary stands in for the Hub's files, chosen by the library's own patterns; the cache and the
errors are the library's. The genuine repositories are read by the tests marked `hub`.
"""

import inspect
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects
from networks import oracle, write

from eval.run.options import POCKET, PRESETS, RunConfig
from tinystories import InputError, hub
from tinystories.checkpoint import fingerprint
from tinystories.hub import checkpoint_directory

NAME = "owner/stories"
COMMIT = "a" * 40


class FakeHub:
    """Stands in for `snapshot_download`: one commit for each revision, files by commit."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.commits = {}
        self.files = {}
        self.requests = []

    def publish(self, name: str, revision: str | None, commit: str, directory: Path) -> None:
        self.commits |= {(name, revision): commit, (name, commit): commit}
        self.files[commit] = {path.name: path.read_bytes() for path in directory.iterdir()}

    def __call__(self, *arguments, **options) -> str:
        asked = inspect.signature(huggingface_hub.snapshot_download).bind(*arguments, **options)
        request = asked.arguments
        self.requests.append((request["repo_id"], request["revision"]))
        commit = self.commits[self.requests[-1]]
        patterns = {name: request[name] for name in ("allow_patterns", "ignore_patterns")}
        for name in filter_repo_objects(self.files[commit], **patterns):
            path = self.folder / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.files[commit][name])
        return str(self.folder / commit)


@pytest.fixture(autouse=True)
def nothing_fetched(tmp_path, monkeypatch):
    """An empty cache, and no server behind the library's endpoint."""
    hub.fetch.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def remote(tmp_path, monkeypatch) -> FakeHub:
    monkeypatch.setattr(hub, "snapshot_download", FakeHub(tmp_path / "snapshots"))
    return hub.snapshot_download


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_only_what_is_needed_is_fetched_and_once(remote, tmp_path, layout):
    write(tmp_path / "lm", "lm", oracle("lm"), layout)
    (tmp_path / "lm" / "generation_config.json").unlink()
    remote.publish(NAME, None, COMMIT, tmp_path / "lm")
    needed = set(remote.files[COMMIT])
    extra = ["README.md", "training_args.bin", "model.fp16.safetensors", "onnx/model.safetensors"]
    extra += ["pytorch_model.bin"] if "bin" not in layout else []  # safetensors are preferred
    remote.files[COMMIT] |= dict.fromkeys(extra, b"no")
    path = checkpoint_directory(NAME, "--lm")
    assert {file.name for file in path.iterdir()} == needed
    requests = [(NAME, None), (NAME, COMMIT)] if "bin" in layout else [(NAME, None)]
    assert checkpoint_directory(NAME, "--lm") == path and remote.requests == requests


def test_the_paper_preset(remote):
    """The paper's three repositories at their commits; they hold the shipped networks here."""
    roles = {"lm": "lm", "toxicity_model": "toxicity", "similarity_model": "similarity"}
    for option, role in roles.items():
        repository, _, commit = getattr(PRESETS["paper"], option).partition("@")
        remote.publish(repository, "main", commit, POCKET / role)
        found = RunConfig(preset="paper").checkpoint(option)
        assert found.name == commit and fingerprint(found) == fingerprint(POCKET / role)


def refusal(name: str) -> str:
    with pytest.raises(InputError) as caught:
        checkpoint_directory(name, "--lm")
    message = str(caught.value)
    assert message.isprintable() and message.startswith(f"--lm {name}: no such directory, and ")
    return message


@pytest.mark.parametrize("is_offline", [False, True])
def test_without_the_hub_the_cache_is_used(tmp_path, monkeypatch, is_offline):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    message = refusal(f"{NAME}@v1.0")
    assert "LocalEntryNotFoundError" in message
    assert f"run `hf download {NAME} --revision v1.0 --local-dir DIR`" in message
    cached = tmp_path / "cache" / "models--owner--stories"
    write(cached / "snapshots" / COMMIT, "lm", oracle("lm"))
    (cached / "refs").mkdir()
    (cached / "refs" / "v1.0").write_text(COMMIT)
    for revision in ("v1.0", COMMIT) if is_offline else ("v1.0",):  # by commit it tries for long
        path = checkpoint_directory(f"{NAME}@{revision}", "--lm")
        assert path.samefile(cached / "snapshots" / COMMIT)


def test_impossible_names_and_directories_ask_nobody(remote, tmp_path, monkeypatch):
    for name in ("no/such/place", "nothing", "x" * 5000, "o/n@"):
        assert "not a Hub repository" in refusal(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert checkpoint_directory(NAME, "--lm") == Path(NAME) and not remote.requests
