"""A run that is killed, interrupted or starved of disk goes on as if nothing had happened.

Two processes share one run: they compute what one computes; if one is lost the other ends.
"""

import json
import re
import shutil
import signal
from pathlib import Path

import filelock
import pytest
import torch
from jobs import JOBS, PUBLISHED, Moment, ended, products, refusal, run_main, start, start_together
from safetensors.torch import load_file

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


def test_ctrl_c_says_how_to_go_on(tmp_path, copied, wholes):
    moment = Moment("1-evaluation.safetensors", False, signal.SIGINT)
    assert ended(start(resume(copied), tmp_path, moment=moment)) == [130]
    (line,) = (tmp_path / "errors-0").read_text().splitlines()
    assert line.endswith(f"interrupted; continue with --resume {copied}")
    assert not (copied / "resume" / moment.file).exists() and not list(copied.rglob(f"*{PARTIAL}"))
    run_main(resume(copied))
    assert_same(copied, wholes["published"])


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, copied, wholes):
    """No file may grow beyond a limit: the fine-tuned model does."""
    assert ended(start(resume(copied), tmp_path, file_limit=5_000_000)) == [2]
    (line,) = (tmp_path / "errors-0").read_text().splitlines()
    assert f"{copied / 'generation-1' / 'model.safetensors'}: cannot be written" in line
    assert "free space" in line and not list(copied.rglob(f"*{PARTIAL}"))
    run_main(resume(copied))
    assert_same(copied, wholes["published"])


def test_two_processes_never_write_into_one_directory(copied):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with filelock.FileLock(copied / ".lock"):
        assert f"{copied}: another process is writing there" in refusal(*resume(copied))
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def test_all_files_but_the_phases_are_written_anew(copied, wholes):
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
    assert_same(copied, wholes["published"])


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
        ({"networks": {}}, "a network or potential has changed since the run began"),
        ({}, "config.json: cannot be read as JSON"),
    ],
)
def test_an_edited_config_is_refused(copied, change, words):
    path = copied / "config.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | change) if change else text[:-9])
    assert re.search(words, refusal(*resume(copied)))


def test_a_failed_step_names_its_phase(tmp_path):
    arguments = [*PUBLISHED, "--ctl-learning-rate", 1, "--ctl-updates", 400]
    line = refusal(*arguments, "--out", tmp_path / "run")
    assert "generation 0, twist learning: " in line and "lower the learning rate" in line
    assert not (tmp_path / "run" / "resume" / "0-twist-learning.safetensors").exists()


FLOAT = re.compile(r"-?\d+(?:\.\d+(?:e[+-]\d+)?|e[+-]\d+)")  # in JSON


def assert_same_run(one: Path, two: Path) -> None:
    """Samples, figures, results and weights of two runs agree up to the rounding of float32."""
    for name in ("results.json", "samples.jsonl", "metrics.jsonl"):
        texts = [(run / name).read_text() for run in (two, one)]
        found, expected = ([float(number) for number in FLOAT.findall(text)] for text in texts)
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-5), name
        assert FLOAT.sub("#", texts[0]) == FLOAT.sub("#", texts[1])
    for path in one.glob("generation-*/*.safetensors"):
        expected, found = load_file(path), load_file(two / path.relative_to(one))
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_a_job_of_two_makes_the_run_of_one_even_if_it_is_killed(tmp_path, options):
    """Two begin, one is lost and the other ends; one goes on and is killed; two finish the run."""
    one, two = tmp_path / "one", tmp_path / "two"
    run_main([*options, "--out", one])
    first, second = (Moment(f"1-{name}.safetensors", True) for name in ("sampling", "distillation"))
    jobs = start_together([*options, "--out", two], tmp_path, moment=first)
    assert ended(*jobs) == [-signal.SIGKILL, 2]
    (line,) = (tmp_path / "errors-1").read_text().splitlines()
    assert "another process of this job has ended" in line and "--resume" in line
    arguments = ["--resume", two, "--quiet"]
    assert ended(start(arguments, tmp_path, moment=second)) == [-signal.SIGKILL]
    assert ended(*start_together(arguments, tmp_path)) == [0, 0]
    assert (tmp_path / "output-1").read_text() == ""
    assert_same_run(one, two)
