"""Two processes share one run: they compute what one computes, and the loss of one ends the other."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from jobs import DISTILLED, POOLED, Moment, ended, run_main, start, start_together
from safetensors.torch import load_file, save_file

from distill.finetune import Student
from distill.self_distill import batches_of, negative_log_likelihood
from eval.run import processes
from eval.run.options import RunConfig
from eval.run.run import Run
from eval.run.setup import load_setup
from tsmc.proposal import sample_proposal
from twist.ctl import ctl_loss
from twist.mlp import TwistMLP

CONFIG = RunConfig(length=5, beta=0.3, rows=3)


def shares(path: Path) -> None:
    """Gradients and draws of which each process computes its part; process 0 saves them."""
    processes.join(torch.device("cpu"))
    setup = load_setup(CONFIG)
    found = {}
    for batch_size in (7, 1):  # one row is fewer than there are processes
        generator = torch.Generator().manual_seed(0)
        psi = TwistMLP(setup.model.config.hidden_size, 16, setup.base.vocab_size, generator)
        torch.nn.init.normal_(psi.last.weight, generator=generator)
        processes.share_gradients(psi)
        draw_batch = processes.ctl_batches(setup.sigma(), psi, max(2, batch_size), generator)
        ctl_loss(psi, draw_batch()).backward()
        found |= {f"ctl {batch_size} {k}": p.grad for k, p in psi.named_parameters()}
        samples = sample_proposal(setup.base, None, 9, generator).tokens
        student = Student(setup.model, 1e-3, 0.0, True, generator)
        processes.share_gradients(student.network)
        draw_own = processes.own_rows(batches_of(samples, batch_size, generator))
        batch = draw_own(0)
        loss = negative_log_likelihood(student.after(setup.base), batch.tokens, batch.batch_size)
        loss.backward()
        found[f"loss {batch_size}"] = torch.tensor(processes.total(loss.detach()))
        gradients = torch.cat([p.grad.flatten() for p in student.parameters])
        found[f"distillation {batch_size}"] = gradients

    def draw(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"tokens": sample_proposal(setup.base, None, size, generator).tokens}

    with Run(RunConfig(out=str(path)), None, {}) as run:
        for total in (2, 8):  # one chunk, and three uneven ones
            found[f"drawn {total}"] = run.draw(f"draw {total}", 0, total, 3, ("draw",), draw)["tokens"]
    if processes.rank() == 0:
        save_file(found, path / "found.safetensors")
    processes.leave()
