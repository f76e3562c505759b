"""Checkpoints by name: which files are fetched, once, and at which commits.

A dictionary stands in for the Hub's files, chosen by the library's own patterns.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from networks import oracle, write

from eval.config import POCKET, PRESETS
from tinystories import hub
from tinystories.checkpoint import fingerprint, write_json
from tinystories.hub import checkpoint_directory


class FakeHub:
    """Stands in for `snapshot_download`: the files of each repository by name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests = []

    def publish(self, name: str, directory: Path) -> None:
        paths = [path for path in directory.rglob("*") if path.is_file()]
        names = [path.relative_to(directory).as_posix() for path in paths]
        self.files[name] = dict(zip(names, map(Path.read_bytes, paths), strict=True))

    def __call__(self, repo_id: str, *, revision: str | None = None, **patterns) -> str:
        self.requests.append((repo_id, revision))
        place = self.folder / repo_id / (revision or "a" * 40)
        for name in filter_repo_objects(self.files[repo_id], **patterns):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(self.files[repo_id][name])
        return str(place)


@pytest.fixture
def remote(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "snapshot_download", FakeHub(tmp_path / "snapshots"))
    hub.fetch.cache_clear()
    yield hub.snapshot_download
    hub.fetch.cache_clear()  # else a later test of this worker finds what only this one has


@pytest.mark.parametrize("layout", ["safetensors", "bin", "shards"])
def test_only_what_is_needed_is_fetched_and_once(remote, tmp_path, layout):
    write(tmp_path / "lm", "lm", oracle("lm"), layout)
    (tmp_path / "lm" / "generation_config.json").unlink()
    write_json(tmp_path / "lm" / "1_Pooling" / "config.json", {})
    remote.publish("owner/stories", tmp_path / "lm")
    needed = set(remote.files["owner/stories"])
    extra = ["README.md", "training_args.bin", "model.fp16.safetensors", "onnx/model.safetensors"]
    extra += ["pytorch_model.bin"] if "bin" not in layout else []  # safetensors are preferred
    remote.files["owner/stories"] |= dict.fromkeys(extra, b"no")
    path = checkpoint_directory("owner/stories", "--lm")
    assert {file.relative_to(path).as_posix() for file in path.rglob("*.*")} == needed
    before = len(remote.requests)
    assert checkpoint_directory("owner/stories", "--lm") == path and len(remote.requests) == before


def test_the_paper_preset(remote):
    """The paper's three repositories at their commits; they hold the shipped networks here."""
    roles = {"lm": "lm", "toxicity_model": "toxicity", "similarity_model": "similarity"}
    for option, role in roles.items():
        name = PRESETS["paper"][option]
        repository, _, commit = name.partition("@")
        remote.publish(repository, POCKET / role)
        found = checkpoint_directory(name, "--lm")
        assert found.name == commit and fingerprint(found) == fingerprint(POCKET / role)
