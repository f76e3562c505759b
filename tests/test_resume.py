"""A run that is killed, interrupted or starved of disk goes on as if nothing had happened."""

import json
import re
import shutil
import signal
from pathlib import Path

import filelock
import pytest
from jobs import JOBS, PUBLISHED, Moment, ended, products, refusal, run_main, start

import tinystories
from eval.run.options import POCKET
from eval.run.run import read_phase
from tinystories.checkpoint import PARTIAL
from tinystories.errors import InputError

KILLED = [-signal.SIGKILL]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory) -> dict[str, Path]:
    """A finished run of each job."""
    runs = {job: tmp_path_factory.mktemp("whole") / job for job in JOBS}
    for job, run in runs.items():
        run_main([*JOBS[job], "--out", run])
    return runs


@pytest.fixture
def whole(wholes) -> Path:
    return wholes["published"]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory) -> Path:
    """A run that was killed in its last generation, before it was measured."""
    place = tmp_path_factory.mktemp("halfway")
    moment = Moment("1-twist-learning.safetensors", True)
    assert ended(start([*PUBLISHED, "--out", place / "run"], place, moment=moment)) == KILLED
    return place / "run"


@pytest.fixture
def copied(tmp_path, halfway) -> Path:
    return shutil.copytree(halfway, tmp_path / "run")


def resume(run: Path) -> list:
    return ["--resume", run, "--quiet"]


def assert_same(run: Path, whole: Path) -> None:
    """The run has made to the byte what the whole run made, and nothing is left over."""
    assert products(run) == products(whole)
    assert not (run / "resume").exists() and [path.name for path in run.rglob(".*")] == [".lock"]


FIRST = [("config.json", True), ("start-base-samples.safetensors", True)]
FIRST += [("start-target-by-rejection.safetensors", False)]
MOMENTS = {  # a file, and whether the kill comes after it
    "published": [
        *FIRST,
        ("0-twist-learning.safetensors", True),
        ("generation-0/twist.safetensors", False),
        ("1-sampling.safetensors", True),
        ("1-distillation.safetensors", False),
        ("generation-1/model.safetensors", False),
        ("generation-1/twist.safetensors", False),
        ("1-bare-model.safetensors", True),
        ("results.json", False),
    ],
    "pooled": [
        *FIRST,
        ("0-ladder-1-surrogate.safetensors", True),
        ("0-ladder-1.safetensors", True),
        ("0-distillation.safetensors", False),
        ("generation-0/adapter.safetensors", True),
        ("1-sampling.safetensors", True),
        ("generation-1/adapter.safetensors", False),
        ("1-evaluation.safetensors", True),
    ],
}


@pytest.mark.parametrize("job", JOBS)
def test_kills_while_files_are_written_change_nothing(tmp_path, wholes, job):
    arguments = [*JOBS[job], "--out", tmp_path / "run"]
    for moment in MOMENTS[job]:
        assert ended(start(arguments, tmp_path, moment=Moment(*moment))) == KILLED, moment
        arguments = resume(tmp_path / "run")
    run_main(arguments)
    assert_same(tmp_path / "run", wholes[job])


def test_ctrl_c_says_how_to_go_on(tmp_path, copied, whole):
    moment = Moment("1-evaluation.safetensors", False, signal.SIGINT)
    assert ended(start(resume(copied), tmp_path, moment=moment)) == [130]
    (line,) = (tmp_path / "errors-0").read_text().splitlines()
    assert line.endswith(f"interrupted; continue with --resume {copied}")
    assert not (copied / "resume" / moment.file).exists() and not list(copied.rglob(f"*{PARTIAL}"))
    run_main(resume(copied))
    assert_same(copied, whole)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, copied, whole):
    """No file may grow beyond a limit: the fine-tuned model does."""
    assert ended(start(resume(copied), tmp_path, file_limit=5_000_000)) == [2]
    (line,) = (tmp_path / "errors-0").read_text().splitlines()
    assert f"{copied / 'generation-1' / 'model.safetensors'}: cannot be written" in line
    assert "free space" in line and not list(copied.rglob(f"*{PARTIAL}"))
    run_main(resume(copied))
    assert_same(copied, whole)


def test_two_processes_never_write_into_one_directory(copied):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with filelock.FileLock(copied / ".lock"):
        assert f"{copied}: another process is writing there" in refusal(*resume(copied))
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def test_all_files_but_the_phases_are_written_anew(copied, whole):
    for path in copied.rglob("*"):
        is_phase = path.parent.name == "resume"
        if path.is_file() and not is_phase and path.name not in ("config.json", ".lock"):
            path.write_bytes(path.read_bytes()[:50])
    (copied / "resume" / "0-twist-learning.safetensors").unlink()
    (copied / "generation-0" / f".model.safetensors.7{PARTIAL}").write_text("half")
    (copied / "generation-0" / ".mine").write_text("stays")
    run_main(resume(copied))
    assert (copied / "generation-0" / ".mine").read_text() == "stays"
    (copied / "generation-0" / ".mine").unlink()
    assert_same(copied, whole)


def test_a_damaged_phase_is_named(copied):
    """A flipped bit in the tensors of each phase, and anywhere in the metadata of a small one."""
    for path in sorted((copied / "resume").iterdir()):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")  # of the tensors
        identity = json.loads(content[8:start])["__metadata__"]["identity"]
        read_phase(path, identity)
        for place in [start, len(content) - 1, *range(start if "1-sampling" in path.name else 0)]:
            damaged = bytearray(content)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=rf"{path.name}: .*delete it to repeat its phase"):
                read_phase(path, identity)
        path.write_bytes(content)
    path.write_bytes(damaged)
    assert f"{path}: cannot be read" in refusal(*resume(copied))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 0.4}, "resume/start-base-samples.safetensors: .*another phase or run"),
        ({"length": 6.5}, "--length is 6.5; give a value of type int"),
        ({"surrogate": "no"}, "--surrogate is 'no'; give a value of type bool"),
        ({"potential": "toxicity"}, "--potential is 'toxicity'; give a value of type tuple"),
        ({"beta": 10**400}, r"config.json: holds no options of a run \(OverflowError"),
        ({"ctl_updates": 0}, "--ctl-updates is 0; give at least 1"),
        ({}, "config.json: cannot be read as JSON"),
    ],
)
def test_edited_options_are_refused(copied, change, words):
    path = copied / "config.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | change) if change else text[:-9])
    assert re.search(words, refusal(*resume(copied)))


def test_a_network_that_has_changed_is_refused(tmp_path):
    shutil.copytree(POCKET / "lm", tmp_path / "lm")
    arguments = [*PUBLISHED, "--lm", tmp_path / "lm", "--out", tmp_path / "run"]
    moment = Moment("start-base-samples.safetensors", True)
    assert ended(start(arguments, tmp_path, moment=moment)) == KILLED
    model, tokenizer = tinystories.load(tmp_path / "lm")
    model.ln_f.bias.data[0] += 1e-4
    tinystories.save(tmp_path / "lm", model, tokenizer)
    line = refusal(*resume(tmp_path / "run"))
    assert "a network or potential has changed since the run began" in line


def test_a_failed_step_names_its_phase(tmp_path):
    arguments = [*PUBLISHED, "--ctl-learning-rate", 1, "--ctl-updates", 400]
    line = refusal(*arguments, "--out", tmp_path / "run")
    assert "generation 0, twist learning: " in line and "lower the learning rate" in line
    assert not (tmp_path / "run" / "resume" / "0-twist-learning.safetensors").exists()
