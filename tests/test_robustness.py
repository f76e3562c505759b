"""Files that are damaged at random: what is read is right, or one line names the file. Nothing else is raised.

Cases of each test: 100, or as many as TSMC_CASES says (docs/reliability.md).
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_run import KEY, TARGET
from test_toxicity import TEXTS, make_tokenizer, randomise

import tinystories
from eval.run.options import RunConfig, flags, saved_config
from eval.run.saved import load_twist, save_twist
from eval.run.state import read_state, write_state
from eval.run.target import load_target, save_target
from eval.scorers import similarity, toxicity
from eval.scorers.encoder import EncoderConfig
from tinystories import GPTNeo, GPTNeoConfig, InputError
from tinystories.checkpoint import write_json
from twist import EmbeddingTwist, TwistMLP

CASES = int(os.environ.get("TSMC_CASES", 100))
VOCABULARY = 340
cases = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LOAD = {"lm": tinystories.load, "toxicity": toxicity.load, "similarity": similarity.load}
FILES = ("config.json", "tokenizer.json", "model.safetensors")
numbers = st.integers(-5, 70) | st.sampled_from([2**31, 2**63, 10**30, -(10**30)]) | st.floats()
atoms = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(["\x1b[2J\nerror: forged", "false"])
odd = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A directory of each kind, whole."""
    root, tokenizer, source = tmp_path_factory.mktemp("good"), make_tokenizer(), torch.Generator().manual_seed(0)
    lm = GPTNeo(GPTNeoConfig(VOCABULARY, 8, 2, 2, 24, ("global", "local"), 4, 16))
    tinystories.save(root / "lm", randomise(lm, 1), tokenizer)
    for role, kind in (("toxicity", toxicity.ToxicityClassifier), ("similarity", similarity.SentenceEncoder)):
        network = randomise(kind(EncoderConfig(VOCABULARY, 8, 2, 2, 12, 24, 1, 1e-5, 1)), 2)
        {"toxicity": toxicity, "similarity": similarity}[role].save(root / role, network, tokenizer)
    save_twist(root / "mlp", TwistMLP(8, 6, 10, source))
    save_twist(root / "embedding", EmbeddingTwist(6, torch.ones(10, 8), source))
    save_target(root / "target", TARGET, KEY)
    write_json(root / "run" / "config.json", dataclasses.asdict(RunConfig()))
    write_state(root / "state" / "0-state", STATE)
    return root


STATE = {"done": 3, "records": [{"loss": 0.5}], "state": {"weights": torch.arange(40.0)}}


@pytest.fixture(scope="module")
def spoilt(good, tmp_path_factory) -> Callable[[str], Path]:
    """A fresh copy of a directory by its name."""
    root = tmp_path_factory.mktemp("spoilt")

    def copy(name: str) -> Path:
        shutil.rmtree(root / name, ignore_errors=True)
        return shutil.copytree(good / name, root / name)

    return copy


def outcome(read: Callable, directory: Path):
    """What was read; None where it was refused in one line that names a file of the directory."""
    try:
        found = read(directory)
        event("read")
        return found
    except InputError as error:
        event("refused")
        message = str(error)
        assert message.isprintable() and f"{directory}/" in message and len(message) < 1000
        return None


def assert_works(role: str, loaded) -> None:
    """A network that was loaded computes, whatever the text."""
    model, tokenizer = loaded
    for text in TEXTS:
        ids = torch.tensor(
            [tokenizer.encode(text).ids[: min(8, model.config.max_position_embeddings)]], dtype=torch.long
        )
        assert not ids.numel() or 0 <= ids.min() <= ids.max() < model.config.vocab_size
        assert isinstance(tokenizer.decode(ids[0].tolist()), str)
    if role == "lm":
        assert torch.isfinite(model(torch.arange(1)[None])).all()
    else:
        scorer = toxicity.ToxicityScorer if role == "toxicity" else similarity.SimilarityScorer
        assert torch.isfinite(scorer(model, tokenizer)(TEXTS)).all()


def change(raw, data):
    """The JSON value with one value somewhere in it replaced by an odd one, or left out."""
    if not isinstance(raw, dict | list) or not raw or data.draw(st.integers(0, 5)) == 0:
        return data.draw(odd)
    raw = raw.copy()
    place = data.draw(st.sampled_from(sorted(raw)) if isinstance(raw, dict) else st.integers(0, len(raw) - 1))
    if data.draw(st.integers(0, 5)) == 0:
        del raw[place]
    else:
        raw[place] = change(raw[place], data)
    return raw


def damage(path: Path, data, limit: int | None = None) -> None:
    """Cut the file, or replace a few bytes before `limit` by others, more or fewer."""
    content = path.read_bytes()
    start = data.draw(st.integers(0, (limit or len(content)) - 1))
    end = data.draw(st.integers(start, min(start + 4, limit or len(content))) | st.just(len(content)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=4)) + content[end:])


def header(path: Path) -> int:
    """Bytes before the numbers of a safetensors file."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@cases
@given(role=st.sampled_from(list(LOAD)), changes=st.data())
def test_configurations(spoilt, role, changes):
    directory = spoilt(role)
    raw = json.loads((directory / "config.json").read_text())
    fields = changes.draw(
        st.dictionaries(st.sampled_from([*sorted(raw), "window_size"]), odd | numbers, min_size=1, max_size=3)
    )
    (directory / "config.json").write_text(json.dumps(raw | fields))
    if (loaded := outcome(LOAD[role], directory)) is not None:
        for name, value in fields.items():
            if value is not None and hasattr(loaded[0].config, name):
                ours = getattr(loaded[0].config, name)
                assert ours == value and type(ours) in (type(value), float), name
        assert_works(role, loaded)


@cases
@given(role=st.sampled_from(list(LOAD)), changes=st.data())
def test_tokenizers(spoilt, role, changes):
    path = spoilt(role) / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()), changes)))
    if (loaded := outcome(LOAD[role], path.parent)) is not None:
        assert_works(role, loaded)


@cases
@given(role=st.sampled_from(list(LOAD)), file=st.sampled_from(FILES), changes=st.data())
def test_bytes_of_checkpoints(spoilt, good, role, file, changes):
    directory = spoilt(role)
    path = directory / file
    damage(path, changes, header(path) if file == "model.safetensors" else None)
    if (loaded := outcome(LOAD[role], directory)) is not None:
        assert_works(role, loaded)
        if file == "model.safetensors":
            expected = LOAD[role](good / role)[0].state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded[0].state_dict().items())


@cases
@given(kind=st.sampled_from(["mlp", "embedding"]), changes=st.data())
def test_twists(spoilt, good, kind, changes):
    path = spoilt(kind) / "twist.safetensors"
    damage(path, changes, header(path))
    if (twist := outcome(load_twist, path.parent)) is not None:
        expected = load_file(good / kind / path.name)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in twist.state_dict().items())


@cases
@given(file=st.sampled_from(["target.json", "samples.safetensors"]), as_json=st.booleans(), changes=st.data())
def test_targets(spoilt, file, as_json, changes):
    path = spoilt("target") / file
    if as_json and file == "target.json":
        path.write_text(json.dumps(change(json.loads(path.read_text()), changes)))
    else:
        damage(path, changes)
    if (exact := outcome(lambda directory: load_target(directory, KEY, vocab_size=100), path.parent)) is not None:
        assert torch.equal(exact.tokens, TARGET.tokens) and torch.equal(exact.log_phi, TARGET.log_phi)
        assert math.isfinite(exact.log_z) and exact.log_z_std_error >= 0


@cases
@given(as_json=st.booleans(), changes=st.data())
def test_options_of_runs(spoilt, as_json, changes):
    path = spoilt("run") / "config.json"
    if as_json:
        path.write_text(json.dumps(change(json.loads(path.read_text()), changes)))
    else:
        damage(path, changes)
    if (config := outcome(saved_config, path.parent)) is not None:
        for group, _, item in flags(RunConfig):
            value = getattr(getattr(config, group) if group else config, item.name)
            assert type(value) is (tuple if isinstance(item.default, tuple) else item.type), item.name
        write_json(path, dataclasses.asdict(config))
        assert saved_config(path.parent) == config


@cases
@given(changes=st.data())
def test_states(spoilt, changes):
    path = spoilt("state") / "0-state"
    damage(path, changes)
    if (state := outcome(lambda directory: read_state(path, torch.device("cpu")), path.parent)) is not None:
        assert repr(state) == repr(STATE)
