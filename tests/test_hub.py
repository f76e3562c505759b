"""Checkpoints by name: what is asked of the Hugging Face Hub, here a directory in its place."""

import re
import shutil

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from eval.options import POCKET, PRESETS
from tinystories.load import checkpoint_directory

NAME, COMMIT = PRESETS["paper"]["lm"].split("@")


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_what_is_read_is_fetched_and_once(tmp_path, monkeypatch, weights):
    """Safetensors are preferred."""
    hub, calls = shutil.copytree(POCKET / "lm", tmp_path / "hub"), []
    (hub / "model.safetensors").rename(hub / weights)
    for name in ("pytorch_model.bin", "training_args.bin", "flax_model.msgpack"):
        (hub / name).touch()

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision))
        path = tmp_path / (revision or "main")
        path.mkdir(exist_ok=True)
        names = [file.name for file in hub.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(hub / name, path)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    wanted = {"config.json", weights, "tokenizer.json", "tokenizer_config.json"}
    checkpoint_directory.cache_clear()
    for name, revision in ((f"{NAME}@{COMMIT}", COMMIT), (NAME, None)):
        calls.clear()
        paths = [checkpoint_directory(name, "--lm") for _ in range(2)]
        assert {file.name for file in paths[0].iterdir()} == wanted and paths[0] == paths[1]
        assert calls == [(NAME, revision)] * (1 if weights == "model.safetensors" else 2)
    checkpoint_directory.cache_clear()  # else a later test of this worker finds these


@pytest.mark.parametrize("name", ["nowhere", "owner/none@main", "/no/such"])
def test_a_name_of_nothing_is_one_line(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=rf"^--lm {re.escape(name)}: no such directory, .*give"):
        checkpoint_directory(name, "--lm")
