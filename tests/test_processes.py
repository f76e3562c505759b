"""Two processes share one run: they compute what one computes; if one is lost the other ends."""

import json
import signal
from pathlib import Path

import pytest
import torch
from jobs import JOBS, Moment, ended, run_main, start, start_together
from safetensors.torch import load_file, save_file

from eval.run import processes
from eval.run.options import RunConfig
from eval.run.run import Run
from tsmc.runs import Phases


def numbers(folder: Path) -> None:
    """Draws of one and of three chunks, and a phase of process 0, which saves them."""
    processes.join(torch.device("cpu"))

    def draw(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"tokens": torch.randn(size, generator=generator)}

    with Run(RunConfig(out=str(folder / "run"), quiet=True, rows=3), None, {}) as run:
        found = {str(total): run.draw("draw", total, total, draw)["tokens"] for total in (2, 8)}
        trained = run.once("fit", 0, 1, lambda source, report: draw(5, source))
        found["fit"] = trained["tokens"]
    save_file(found, folder / f"found-{processes.rank()}.safetensors")
    processes.leave()


def test_draws_do_not_depend_on_the_number_of_processes(tmp_path):
    """All have what is drawn and what process 0 has learned; a plain `Phases` has the same."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert ended(*start_together(tmp_path / "two", tmp_path, function=numbers)) == [0, 0]
    numbers(tmp_path / "one")
    wanted = load_file(tmp_path / "one" / "found-0.safetensors")
    for rank in range(2):
        found = load_file(tmp_path / "two" / f"found-{rank}.safetensors")
        assert found.keys() == wanted.keys() and all(found[k].equal(wanted[k]) for k in found)
    plain = Phases(0, rows=3).draw(
        "draw", 8, 8, lambda size, source: {"tokens": torch.randn(size, generator=source)}
    )
    assert torch.equal(plain["tokens"], wanted["8"])


def assert_alike(found, expected) -> None:
    """What JSON files hold is equal, numbers up to the rounding of float32."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        for pair in zip(found, expected, strict=True):
            assert_alike(*pair)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-5)
    else:
        assert found == expected


def assert_same_run(one: Path, two: Path) -> None:
    """Samples, figures, results and weights of two runs agree."""
    assert_alike(*(json.loads((run / "results.json").read_text()) for run in (two, one)))
    for name in ("samples.jsonl", "metrics.jsonl"):
        found, expected = ((run / name).read_text().splitlines() for run in (two, one))
        assert_alike(list(map(json.loads, found)), list(map(json.loads, expected)))
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
