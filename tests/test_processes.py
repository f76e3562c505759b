"""Two processes share one run: they compute what one computes; if one is lost the other ends."""

import json
import signal
from pathlib import Path

import pytest
import torch
from jobs import JOBS, POOLED, Moment, ended, run_main, start, start_together
from safetensors.torch import load_file, save_file

from distill.finetune import Student
from distill.self_distill import adapter_loss, batches_of, model_loss
from eval.run import processes
from eval.run.options import RunConfig
from eval.run.run import Run
from eval.run.setup import load_setup
from tsmc.proposal import sample_proposal
from twist.adapter import Adapter
from twist.ctl import batches_from_proposal, ctl_loss
from twist.mlp import TwistMLP


def shares(folder: Path) -> None:
    """Gradients and draws of which each process computes its part; process 0 saves them."""
    processes.join(torch.device("cpu"))
    setup = load_setup(RunConfig(length=5, beta=0.3))
    model, base = setup.model, setup.base
    found = {}
    for batch_size in (7, 1):  # of a single sequence, one of two processes has none
        generator = torch.Generator().manual_seed(0)
        psi = TwistMLP(model.config.hidden_size, 16, base.vocab_size, generator)
        torch.nn.init.normal_(psi.last.weight, generator=generator)
        processes.share_gradients(psi)
        sizes = (batch_size + 1, generator, processes.share(batch_size + 1), processes.all_rows)
        draw_batch = batches_from_proposal(setup.sigma(model, psi), psi, *sizes)
        ctl_loss(psi, draw_batch()).backward()
        gradients = [parameter.grad.flatten() for parameter in psi.parameters()]
        found[f"twist learning {batch_size}"] = torch.cat(gradients)
        samples = sample_proposal(base, None, 9, generator).tokens
        student = Student(model, 1e-3, 0.0, True, generator)
        processes.share_gradients(student.network)
        adapter = Adapter(model, None, False, 16, generator)
        torch.nn.init.normal_(adapter.shift.last.weight, generator=generator)
        processes.share_gradients(adapter)
        sizes = (batch_size, 1, generator, base, processes.share(batch_size))
        batch = batches_of(samples, torch.ones(9), *sizes)(0)
        for name, loss, trained in (
            ("LoRA", model_loss(student.after(base), batch), student.parameters),
            ("adapter", adapter_loss(adapter, batch), adapter.shift.parameters()),
        ):
            loss.backward()
            gradients = [parameter.grad.flatten() for parameter in trained]
            found[f"{name} {batch_size}"] = torch.cat(gradients)
            found[f"loss of {name} {batch_size}"] = torch.tensor(processes.total(loss.detach()))

    def draw(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"tokens": sample_proposal(base, None, size, generator).tokens}

    with Run(RunConfig(out=str(folder / "run"), quiet=True), None, {}) as run:
        for total in (2, 8):  # a single chunk, and three
            drawn = run.draw(f"draw {total}", 0, total, 3, ("draw",), draw)
            found[f"drawn {total}"] = drawn["tokens"]
    if processes.rank() == 0:
        save_file(found, folder / "found.safetensors")
    processes.leave()


def test_gradients_and_samples_do_not_depend_on_the_number_of_processes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert ended(*start_together(tmp_path / "two", tmp_path, function=shares)) == [0, 0]
    shares(tmp_path / "one")
    one, two = (load_file(tmp_path / name / "found.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and len(one["drawn 8"]) == 8
    for name, value in one.items():
        scale = value.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5 * scale)


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


def with_own_seed(arguments: list) -> None:
    run_main([*arguments, "--seed", processes.rank()])


def test_processes_that_were_started_differently_say_so(tmp_path):
    arguments = [*POOLED, "--out", tmp_path / "run"]
    jobs = start_together(arguments, tmp_path, function=with_own_seed)
    assert ended(*jobs) == [2, 2]
    for rank in range(2):
        (line,) = (tmp_path / f"errors-{rank}").read_text().splitlines()
        assert "have different options; start them alike" in line
    assert not (tmp_path / "run").exists()
