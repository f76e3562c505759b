"""A run that is killed, interrupted, starved of disk or damaged ends as if nothing had happened, or one line names the file."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from jobs import lines_of, start, wait_for

from eval.run.directory import RunDirectory
from eval.run.options import RunConfig
from eval.run.state import read_state, write_state
from eval.run.steps import Progress, RunSteps
from main import main
from tinystories.errors import InputError

SIZES = [
    *("--generations", "1", "--eval-runs", "6", "--eval-particles", "6", "--eval-base-samples", "24", "--rows", "16"),
    *("--length", "6", "--eval-target-proposals", "200", "--beta", "0.3", "--save-every", "0"),
]
SMALL = [
    *("--method", "distilled", *SIZES),
    *("--ctl-updates", "12", "--ctl-batch-size", "12", "--particles", "8", "--distill-runs", "6"),
    *("--distill-updates", "8", "--distill-batch-size", "8"),
]
POOLED = [
    *("--method", "pooled", *SIZES, "--pool-rounds", "2", "--pool-updates", "6", "--pool-batch-size", "8"),
    *("--pool-base-draws", "60", "--pool-draws", "40"),
]
PRODUCTS = ("results.json", "samples.jsonl", "metrics.jsonl", "generation-1/model.safetensors")


def undisturbed(place: Path, options: list[str]) -> Path:
    """A run that nothing happens to."""
    process = start([*options, "--out", str(place / "run")], place / "errors")
    process.join()
    assert process.exitcode == 0, (place / "errors").read_text()
    return place / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run by Algorithm 1 that nothing happens to."""
    return undisturbed(tmp_path_factory.mktemp("whole"), SMALL)


@pytest.fixture(scope="module")
def whole_pooled(tmp_path_factory) -> Path:
    """The run with a pool that nothing happens to."""
    return undisturbed(tmp_path_factory.mktemp("pooled"), POOLED)


def assert_same(run: Path, whole: Path) -> None:
    """Everything that the run has made is what the whole run made, and nothing is left over."""
    for name in PRODUCTS:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    assert not (run / "resume").exists() and [path.name for path in run.rglob(".*")] == [".lock"]


@pytest.mark.parametrize(("options", "fixture"), [(SMALL, "whole"), (POOLED, "whole_pooled")])
def test_kills_change_nothing(tmp_path, request, options, fixture):
    """20 kills, or as many as TSMC_KILLS says, spread over the run."""
    whole = request.getfixturevalue(fixture)
    moments, steps, kills = random.Random(0), lines_of(whole), int(os.environ.get("TSMC_KILLS", 20))
    run, arguments = tmp_path / "run", [*options, "--out", str(tmp_path / "run")]
    for kill in range(kills):
        process = start(arguments, tmp_path / "errors")
        wait_for(process, run, round(steps * (kill + moments.random()) / kills))
        time.sleep(moments.random() * 0.05)
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0
            break
        if (run / "resume" / "start").exists():
            arguments = ["--resume", str(run)]
        else:
            shutil.rmtree(run, ignore_errors=True)
    process = start(arguments, tmp_path / "errors")
    process.join()
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
    assert kill >= 0.75 * kills - 1, "the run has outlived most of the kills"
    assert_same(run, whole)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, whole):
    run = tmp_path / "run"
    process = start([*SMALL, "--out", str(run), "--save-every", "1000"], tmp_path / "errors")
    wait_for(process, run, 20)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    last = (tmp_path / "errors").read_text().splitlines()[-1]
    assert process.exitcode == 130 and f"continue with --resume {run}" in last
    assert lines_of(run) < lines_of(whole)
    process = start(["--resume", str(run)], tmp_path / "errors")
    process.join()
    assert process.exitcode == 0
    assert_same(run, whole)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, whole):
    """No file may grow beyond a limit: the language model's checkpoint does."""
    run = tmp_path / "run"
    process = start([*SMALL, "--out", str(run)], tmp_path / "errors", file_limit=5_000_000)
    process.join()
    last = (tmp_path / "errors").read_text().splitlines()[-1]
    assert process.exitcode == 2 and "cannot be written" in last and str(run) in last and "free space" in last
    process = start(["--resume", str(run)], tmp_path / "errors")
    process.join()
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
    assert_same(run, whole)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory) -> Path:
    """A run that was killed in the last generation."""
    place = tmp_path_factory.mktemp("halfway")
    run = place / "run"
    process = start([*SMALL, "--out", str(run)], place / "errors")
    while process.is_alive() and not (run / "resume" / "1-twist-learning").exists():
        time.sleep(0.0005)
    process.kill()
    process.join()
    return run


def test_any_damaged_file_is_healed_or_named(tmp_path, halfway, whole):
    names = sorted(str(path.relative_to(halfway)) for path in halfway.rglob("[!.]*") if path.is_file())
    assert "config.json" in names and "resume/0-twist-learning" in names and "generation-0/model.safetensors" in names
    processes = {}
    for number, name in enumerate(names):
        run = tmp_path / str(number)
        shutil.copytree(halfway, run)
        content = bytearray((run / name).read_bytes())
        content[len(content) // 2] ^= 1
        (run / name).write_bytes(content)
        processes[name] = run, start(["--resume", str(run)], run / "errors")
        processes[name][1].join()
    named = set()
    for name, (run, process) in processes.items():
        last = (run / "errors").read_text().splitlines()[-1]
        if process.exitcode == 0:
            for product in PRODUCTS:
                assert (run / product).read_bytes() == (whole / product).read_bytes(), name
        else:
            assert process.exitcode == 2 and Path(name).name in last, (name, last)
            named.add(name)
    assert {"config.json", "resume/start", "resume/0-twist-learning"} <= named


def refusal(*arguments: str) -> str:
    """The one line of error with which the main job ends."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    errors_said = [line for line in errors.getvalue().splitlines() if "error:" in line]
    assert len(errors_said) == 1 and errors.getvalue().endswith(f"{errors_said[0]}\n")
    return errors_said[0]


def test_a_failed_step_names_its_phase_and_keeps_the_last_good_state(tmp_path):
    run = tmp_path / "run"
    line = refusal(*SMALL, "--out", str(run), "--ctl-learning-rate", "1", "--ctl-updates", "400")
    assert "generation 0  twist learning, step" in line and "lower the learning rate" in line and "exploded" in line
    saved = read_state(run / "resume" / "0-twist-learning", torch.device("cpu"))
    assert saved["done"] == int(line.split("step ")[1].split(":")[0]) - 1
    assert all(tensor.isfinite().all() for tensor in saved["state"]["twist"].values())


def test_two_processes_never_write_into_one_directory(halfway):
    start = read_state(halfway / "resume" / "start", torch.device("cpu"))
    with RunDirectory(halfway, RunConfig(), {}):
        assert "another process is writing there" in refusal("--resume", str(halfway))
    assert start["config.json"] == read_state(halfway / "resume" / "start", torch.device("cpu"))["config.json"]


def test_resuming_what_is_no_run_or_with_other_options_is_refused(tmp_path, halfway):
    assert "no such file" in refusal("--resume", str(tmp_path / "nothing"))
    assert "--seed" in refusal("--resume", str(halfway), "--seed", "3")
    (tmp_path / "config.json").write_text(json.dumps({"seed": "many"}))
    assert "config.json" in refusal("--resume", str(tmp_path))


def test_a_run_that_has_finished_prints_its_table_again(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    main(["--resume", str(whole)])
    assert "Generation 1" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


def test_states_that_outlived_their_run_are_removed(tmp_path, whole, capsys):
    for name, keep in (("plain", False), ("kept", True)):
        shutil.copytree(whole, tmp_path / name)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"keep_states": keep}))
        (tmp_path / name / "resume").mkdir()
        (tmp_path / name / "resume" / "start").write_text("")
        main(["--resume", str(tmp_path / name)])
        assert "Generation 1" in capsys.readouterr().out
        assert (tmp_path / name / "resume").exists() == keep


def test_a_run_killed_at_once_says_what_can_be_done(tmp_path, halfway):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(halfway / "config.json", run)
    line = refusal("--resume", str(run))
    assert str(run / "resume" / "start") in line and "delete its directory and start it again" in line
    again = refusal("--out", str(run))
    assert "choose another directory" in again and "--resume" not in again
    assert "continue its run with --resume" in refusal("--out", str(halfway))


def test_a_full_standard_error_does_not_end_a_run(tmp_path, whole):
    process = start([*SMALL, "--out", str(tmp_path / "run")], Path("/dev/full"))
    process.join()
    assert process.exitcode == 0
    assert_same(tmp_path / "run", whole)


def steps_of(path: Path, generation: int, name: str, **options) -> RunSteps:
    """Three steps of a phase of a new run with these options, not yet taken."""
    identity = {"lm": "a"}
    config = RunConfig(out=str(path), save_every=0.0, **options)
    directory = RunDirectory.resume(path, config, identity) if path.exists() else RunDirectory.create(config, identity)
    directory.lock.release()
    return RunSteps(Progress(directory, name, generation, 3), {"twist": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("generation", "name", "options", "accepted"),
    [
        (0, "twist learning", {}, True),
        (1, "twist learning", {}, False),
        (0, "distillation", {}, False),
        (0, "twist learning", {"seed": 1}, False),
        (0, "twist learning", {"rows": 10}, False),
        (0, "twist learning", {"lora": True, "effective_potential": False}, True),
    ],
)
def test_a_state_of_another_phase_or_run_is_refused(tmp_path, generation, name, options, accepted):
    """A run that differs in what only matters later may take the state over: the study's variants do."""
    steps = steps_of(tmp_path / "one", 0, "twist learning")
    assert list(steps) == [0, 1, 2]
    other = steps_of(tmp_path / "other", generation, name, **options)
    shutil.copy(steps.progress.path, other.progress.path)
    if accepted:
        assert list(other) == []
    else:
        with pytest.raises(
            InputError, match=rf"{generation}-{name.replace(' ', '-')}: belongs to another phase or run"
        ):
            list(other)


@pytest.mark.parametrize(
    ("name", "option", "accepted"),
    [
        ("sampling", {"lora": True}, True),
        ("sampling prompt-2", {"effective_potential": False}, True),
        ("distillation", {"effective_potential": False}, True),
        ("distillation", {"lora": True}, False),
        ("twist learning", {"effective_potential": False}, False),
        ("evaluation", {"lora": True}, False),
    ],
)
def test_a_variant_takes_over_only_what_it_shares(tmp_path, name, option, accepted):
    ours, theirs = steps_of(tmp_path / "one", 1, name), steps_of(tmp_path / "other", 1, name, **option)
    assert (ours.progress.of == theirs.progress.of) == accepted


def test_states_copied_within_a_run_are_refused(tmp_path, halfway):
    run = tmp_path / "run"
    shutil.copytree(halfway, run)
    shutil.copy(run / "resume" / "0-twist-learning", run / "resume" / "1-twist-learning")
    assert f"{run / 'resume' / '1-twist-learning'}: belongs to another phase" in refusal("--resume", str(run))


def test_a_run_whose_directory_goes_stops(tmp_path):
    process = start([*SMALL, "--out", str(tmp_path / "run")], tmp_path / "errors")
    wait_for(process, tmp_path / "run", 5)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    process.join()
    last = (tmp_path / "errors").read_text().splitlines()[-1]
    assert process.exitcode == 2 and f"{tmp_path / 'run'}: is no longer there" in last


def test_changed_checkpoints_are_refused(tmp_path):
    config = RunConfig(out=str(tmp_path / "run"))
    with RunDirectory.create(config, {"lm": "a"}):
        pass
    with pytest.raises(InputError, match="lm has changed"):
        RunDirectory.resume(tmp_path / "run", config, {"lm": "b"})


def test_a_run_that_other_code_began_says_so(tmp_path, monkeypatch, capsys):
    config, origin = RunConfig(out=str(tmp_path / "run")), {"lm": "0"}
    RunDirectory.create(config, origin)
    RunDirectory.resume(Path(config.out), config, origin)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("eval.run.directory.CODE", ("tsmc",))
    RunDirectory.resume(Path(config.out), config, origin)
    assert re.fullmatch(r"this run began with .*'code': '\w{12}'.* goes on with .*\n", capsys.readouterr().err)


def test_a_state_survives_its_file_and_runs_no_code(tmp_path):
    value = {"done": 3, "records": [{"loss": 0.5}], "state": {"weights": torch.arange(4)}}
    write_state(tmp_path / "state", value)
    again = read_state(tmp_path / "state", torch.device("cpu"))
    assert again["records"] == value["records"] and torch.equal(again["state"]["weights"], torch.arange(4))
    write_state(tmp_path / "state", {"call": os.system})
    with pytest.raises(InputError, match=r"state: cannot be read"):
        read_state(tmp_path / "state", torch.device("cpu"))
