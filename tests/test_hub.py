"""Checkpoints by name: which files are fetched, once, and at which commit."""

import re

import pytest
from huggingface_hub.utils import filter_repo_objects

from eval.config import POCKET, PRESETS
from tinystories import InputError, hub
from tinystories.hub import checkpoint_directory

NAME, COMMIT = PRESETS["paper"]["lm"].split("@")


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A stand-in for the Hub: the files of the paper's language model, and what was asked for."""
    files = {path.name: path.read_bytes() for path in (POCKET / "lm").iterdir()}
    requests = []

    def snapshot_download(repo_id: str, *, revision: str, allow_patterns: list[str]) -> str:
        requests.append(repo_id)
        assert repo_id == NAME, "no such repository"
        for name in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / revision).mkdir(exist_ok=True)
            (tmp_path / revision / name).write_bytes(files[name])
        return str(tmp_path / revision)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    hub.fetch.cache_clear()
    yield files, requests
    hub.fetch.cache_clear()  # else a later test of this worker finds what only this one has


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_what_is_needed_is_fetched_and_once(remote, weights):
    files, requests = remote
    files[weights] = files.pop("model.safetensors")
    files |= {"training_args.bin": b"no", "README.md": b"no"}
    files.setdefault("pytorch_model.bin", b"no")  # safetensors are preferred
    path = checkpoint_directory(f"{NAME}@{COMMIT}", "--lm")
    assert path.name == COMMIT
    wanted = {"config.json", weights, "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in path.iterdir()} == wanted
    before = len(requests)
    assert checkpoint_directory(f"{NAME}@{COMMIT}", "--lm") == path and len(requests) == before


@pytest.mark.parametrize("name", ["nowhere", "owner/none@main"])
def test_a_name_of_nothing_is_one_line(remote, name):
    with pytest.raises(InputError, match=rf"^--lm {re.escape(name)}: no such directory, .*give"):
        checkpoint_directory(name, "--lm")
