"""Files damaged at random: what is read is right, or it is refused in one line that names it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import LOAD, SAVE, SCORER, TEXTS, VOCAB_SIZE, randomise, write_tokenizer

from eval.scorers.encoder import EncoderConfig
from eval.scorers.similarity import SentenceEncoder
from eval.scorers.toxicity import ToxicityClassifier
from tinystories import GPTNeo, GPTNeoConfig, InputError

checks = list(HealthCheck)
cases = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=checks)
FILES = ("config.json", "tokenizer.json", "model.safetensors")
numbers = st.integers(-5, 70) | st.sampled_from([2**31, 2**63, 10**30, -(10**30)]) | st.floats()
words = st.text(max_size=8) | st.sampled_from(["\x1b[2J\nerror: forged", "false"])
atoms = st.none() | st.booleans() | numbers | words
names = st.text(max_size=4)
odd = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A whole checkpoint in each role."""
    root = tmp_path_factory.mktemp("good")
    sizes = EncoderConfig(VOCAB_SIZE, 8, 2, 2, 12, 24, 1, 1e-5, 1)
    networks = {
        "lm": GPTNeo(GPTNeoConfig(VOCAB_SIZE, 8, 2, 2, 24, ("global", "local"), 4, 16)),
        "toxicity": ToxicityClassifier(sizes),
        "similarity": SentenceEncoder(sizes),
    }
    for role, network in networks.items():
        (root / role).mkdir()
        SAVE[role](root / role, randomise(network, 1), write_tokenizer(root / role, role))
    return root


def copy_of(good: Path, role: str) -> Path:
    """A fresh copy of the checkpoint in a role, which may be damaged."""
    path = good / f"damaged-{role}"
    shutil.rmtree(path, ignore_errors=True)
    return shutil.copytree(good / role, path)


def load(role: str, directory: Path):
    """A network that computes, whatever the text; None if it is refused in one line."""
    try:
        model, tokenizer = LOAD[role](directory)
    except InputError as error:
        message = str(error)
        assert str(directory) in message and message.isprintable() and len(message) < 5000
        return None
    limit = min(8, model.config.max_position_embeddings)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids[:limit]
        assert all(0 <= token < model.config.vocab_size for token in ids)
        assert isinstance(tokenizer.decode(ids), str)
    if role == "lm":
        assert torch.isfinite(model(torch.arange(9)[None])).all()
    else:
        assert torch.isfinite(SCORER[role](model, tokenizer)(TEXTS)).all()
    return model


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


def damage(path: Path, data) -> None:
    """Cut the file, or replace a few bytes by others, more or fewer.

    The numbers of a safetensors file stay as they are: they carry no checksum.
    """
    content = path.read_bytes()
    limit = len(content)
    if path.suffix == ".safetensors":
        limit = 8 + int.from_bytes(content[:8], "little")
    start = data.draw(st.integers(0, limit - 1))
    end = data.draw(st.integers(start, min(start + 4, limit)) | st.just(len(content)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=4)) + content[end:])


@cases
@given(role=st.sampled_from(list(LOAD)), changes=st.data())
def test_configurations(good, role, changes):
    directory = copy_of(good, role)
    raw = json.loads((directory / "config.json").read_text())
    names = st.sampled_from([*sorted(raw), "window_size"])
    fields = changes.draw(st.dictionaries(names, odd | numbers, min_size=1, max_size=3))
    (directory / "config.json").write_text(json.dumps(raw | fields))
    model = load(role, directory)
    if model is not None:
        for name, value in fields.items():
            if value is not None and name != "tie_word_embeddings":
                assert getattr(model.config, name, value) == value, name


@cases
@given(role=st.sampled_from(list(LOAD)), changes=st.data())
def test_tokenizers(good, role, changes):
    path = copy_of(good, role) / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()), changes)))
    load(role, path.parent)


@cases
@given(role=st.sampled_from(list(LOAD)), file=st.sampled_from(FILES), changes=st.data())
def test_bytes_of_checkpoints(good, role, file, changes):
    path = copy_of(good, role) / file
    damage(path, changes)
    model = load(role, path.parent)
    if model is not None and file == "model.safetensors":
        expected = LOAD[role](good / role)[0].state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
