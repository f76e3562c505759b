"""Files damaged at random: what is read is right, or it is refused in one line that names it."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import LOAD, SAVE, SCORER, TEXTS, VOCAB_SIZE, randomise, write_tokenizer

from eval.run.options import RunConfig, saved_config
from eval.run.phases import read_phase, write_phase
from eval.run.target import TargetKey, load_target, save_target
from eval.run.trained import load_twist, save_twist
from eval.scorers.encoder import EncoderConfig
from eval.scorers.similarity import SentenceEncoder
from eval.scorers.toxicity import ToxicityClassifier
from tinystories import GPTNeo, GPTNeoConfig, InputError
from tinystories.checkpoint import write_json
from tsmc.rejection import ExactSamples
from twist.embedding import EmbeddingTwist
from twist.mlp import TwistMLP

checks = list(HealthCheck)
cases = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=checks)
FILES = ("config.json", "tokenizer.json", "model.safetensors")
KEY = TargetKey("a" * 64, "b" * 64, "Once", 3, 10.0)
TARGET = ExactSamples(
    torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04
)
STATE = {"weights": torch.arange(40.0), "steps": torch.tensor(3)}
numbers = st.integers(-5, 70) | st.sampled_from([2**31, 2**63, 10**30, -(10**30)]) | st.floats()
words = st.text(max_size=8) | st.sampled_from(["\x1b[2J\nerror: forged", "false"])
atoms = st.none() | st.booleans() | numbers | words
odd = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A directory of each kind, whole."""
    root = tmp_path_factory.mktemp("good")
    source = torch.Generator().manual_seed(0)
    sizes = EncoderConfig(VOCAB_SIZE, 8, 2, 2, 12, 24, 1, 1e-5, 1)
    networks = {
        "lm": GPTNeo(GPTNeoConfig(VOCAB_SIZE, 8, 2, 2, 24, ("global", "local"), 4, 16)),
        "toxicity": ToxicityClassifier(sizes),
        "similarity": SentenceEncoder(sizes),
    }
    for role, network in networks.items():
        (root / role).mkdir()
        SAVE[role](root / role, randomise(network, 1), write_tokenizer(root / role, role))
    save_twist(root / "mlp", TwistMLP(8, 6, 10, source))
    save_twist(root / "embedding", EmbeddingTwist(6, torch.ones(10, 8), source))
    save_target(root / "target", TARGET, KEY)
    write_json(root / "run" / "config.json", dataclasses.asdict(RunConfig()))
    write_phase(root / "phase" / "0.safetensors", STATE, "one", [{"loss": 0.5}])
    return root


@pytest.fixture(scope="module")
def spoilt(good, tmp_path_factory) -> Callable[[str], Path]:
    """A fresh copy of a directory by its name."""
    root = tmp_path_factory.mktemp("spoilt")

    def copy(name: str) -> Path:
        shutil.rmtree(root / name, ignore_errors=True)
        return shutil.copytree(good / name, root / name)

    return copy


def outcome(read: Callable, directory: Path):
    """What was read; None if it was refused in one line that names the file or the option."""
    try:
        return read(directory)
    except InputError as error:
        message = str(error)
        assert str(directory) in message or message.startswith("--")
        assert message.isprintable() and len(message) < 5000
        return None


def assert_works(role: str, loaded) -> None:
    """A network that was loaded computes, whatever the text."""
    model, tokenizer = loaded
    limit = min(8, model.config.max_position_embeddings)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids[:limit]
        assert all(0 <= token < model.config.vocab_size for token in ids)
        assert isinstance(tokenizer.decode(ids), str)
    if role == "lm":
        assert torch.isfinite(model(torch.arange(9)[None])).all()
    else:
        assert torch.isfinite(SCORER[role](model, tokenizer)(TEXTS)).all()


def change(raw, data):
    """The JSON value with one value somewhere in it replaced by an odd one, or left out."""
    if not isinstance(raw, dict | list) or not raw or data.draw(st.integers(0, 5)) == 0:
        return data.draw(odd)
    raw = raw.copy()
    places = sorted(raw) if isinstance(raw, dict) else range(len(raw))
    place = data.draw(st.sampled_from(places))
    if data.draw(st.integers(0, 5)) == 0:
        del raw[place]
    else:
        raw[place] = change(raw[place], data)
    return raw


def damage(path: Path, data, limit: int | None = None) -> None:
    """Cut the file, or replace a few bytes before `limit` by others, more or fewer."""
    content = path.read_bytes()
    limit = limit or len(content)
    start = data.draw(st.integers(0, limit - 1))
    end = data.draw(st.integers(start, min(start + 4, limit)) | st.just(len(content)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=4)) + content[end:])


def header(path: Path) -> int:
    """Bytes before the numbers of a safetensors file: the numbers carry no checksum."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@cases
@given(role=st.sampled_from(list(LOAD)), changes=st.data())
def test_configurations(spoilt, role, changes):
    directory = spoilt(role)
    raw = json.loads((directory / "config.json").read_text())
    names = st.sampled_from([*sorted(raw), "window_size"])
    fields = changes.draw(st.dictionaries(names, odd | numbers, min_size=1, max_size=3))
    (directory / "config.json").write_text(json.dumps(raw | fields))
    loaded = outcome(LOAD[role], directory)
    if loaded is not None:
        for name, value in fields.items():
            if value is not None and name != "tie_word_embeddings":
                assert getattr(loaded[0].config, name, value) == value, name
        assert_works(role, loaded)


@cases
@given(role=st.sampled_from(list(LOAD)), changes=st.data())
def test_tokenizers(spoilt, role, changes):
    path = spoilt(role) / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()), changes)))
    loaded = outcome(LOAD[role], path.parent)
    if loaded is not None:
        assert_works(role, loaded)


@cases
@given(role=st.sampled_from(list(LOAD)), file=st.sampled_from(FILES), changes=st.data())
def test_bytes_of_checkpoints(spoilt, good, role, file, changes):
    path = spoilt(role) / file
    damage(path, changes, header(path) if file == "model.safetensors" else None)
    loaded = outcome(LOAD[role], path.parent)
    if loaded is not None:
        assert_works(role, loaded)
        if file == "model.safetensors":
            expected = LOAD[role](good / role)[0].state_dict()
            found = loaded[0].state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


READERS = {
    "mlp/twist.safetensors": load_twist,
    "embedding/twist.safetensors": load_twist,
    "target/samples.safetensors": lambda directory: load_target(directory, KEY, 100),
    "target/target.json": lambda directory: load_target(directory, KEY, 100),
    "phase/0.safetensors": lambda directory: read_phase(directory / "0.safetensors", "one", "cpu"),
    "run/config.json": saved_config,
}


def numbers_of(found) -> str:
    """What was read, as text."""
    tensors = found.state_dict() if isinstance(found, torch.nn.Module) else found
    return repr(sorted(tensors.items()) if isinstance(tensors, dict) else tensors)


@cases
@given(file=st.sampled_from(sorted(READERS)), changes=st.data())
def test_files_of_runs(spoilt, good, file, changes):
    """Binary files are read as they were written; in JSON another value may be a value too."""
    name, _, kind = file.partition("/")
    path = spoilt(name) / kind
    if path.suffix == ".json" and changes.draw(st.booleans()):
        path.write_text(json.dumps(change(json.loads(path.read_text()), changes)))
    else:
        damage(path, changes, header(path) if name in ("mlp", "embedding") else None)
    found = outcome(READERS[file], path.parent)
    if found is not None and path.suffix == ".safetensors":
        assert numbers_of(found) == numbers_of(READERS[file](good / name))
