"""Checkpoints by name: which files are fetched, once, and at which commits.

A dictionary stands in for the Hub's files, chosen by the library's own patterns.
"""

import re

import pytest
from huggingface_hub.utils import filter_repo_objects

from eval.config import POCKET, PRESETS
from tinystories import InputError, hub
from tinystories.checkpoint import fingerprint
from tinystories.hub import checkpoint_directory

ROLES = {"lm": "lm", "toxicity_model": "toxicity", "similarity_model": "similarity"}
ONE = PRESETS["paper"]["lm"]


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """The files of each repository by name, and what has been asked for; one for each role."""
    files, requests = {}, []
    for option, role in ROLES.items():
        repository = PRESETS["paper"][option].partition("@")[0]
        files[repository] = {path.name: path.read_bytes() for path in (POCKET / role).iterdir()}

    def snapshot_download(repo_id: str, *, revision: str, allow_patterns: list[str]) -> str:
        requests.append(repo_id)
        place = tmp_path / "snapshots" / repo_id / revision
        place.mkdir(parents=True, exist_ok=True)
        for name in filter_repo_objects(files[repo_id], allow_patterns=allow_patterns):
            (place / name).write_bytes(files[repo_id][name])
        return str(place)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    hub.fetch.cache_clear()
    yield files, requests
    hub.fetch.cache_clear()  # else a later test of this worker finds what only this one has


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_what_is_needed_is_fetched_and_once(remote, weights):
    files, requests = remote
    mine = files[ONE.partition("@")[0]]
    mine[weights] = mine.pop("model.safetensors")
    mine |= {"training_args.bin": b"no", "README.md": b"no"}
    if weights == "model.safetensors":  # which is preferred
        mine["pytorch_model.bin"] = b"no"
    path = checkpoint_directory(ONE, "--lm")
    assert {file.name for file in path.iterdir()} == {"config.json", weights, "tokenizer.json"}
    before = len(requests)
    assert checkpoint_directory(ONE, "--lm") == path and len(requests) == before


@pytest.mark.parametrize("option", ROLES)
def test_the_paper_preset(remote, option):
    """The paper's three repositories at their commits; they hold the shipped networks here."""
    name = PRESETS["paper"][option]
    found = checkpoint_directory(name, "--lm")
    assert found.name == name.partition("@")[2]
    assert fingerprint(found) == fingerprint(POCKET / ROLES[option])


@pytest.mark.parametrize("name", ["nowhere", "owner/none@main"])
def test_a_name_of_nothing_is_one_line(remote, name):
    with pytest.raises(InputError, match=rf"^--lm {re.escape(name)}: no such directory, .*give"):
        checkpoint_directory(name, "--lm")
