"""Exact samples of the pocket target, drawn by rejection (`tsmc/rejection.py`).

    sigma(s) = p(s) phi(s) / Z_sigma,   log phi(s) = beta log p(toxic | s)

They are refused with other checkpoints than the two that they were made with.
"""

from argparse import ArgumentParser, Namespace
from functools import partial

import torch

from eval.pocket import common
from eval.run.options import RunConfig
from eval.run.setup import load_setup, sigma_key
from eval.run.target import save_target
from tinystories.errors import InputError
from tsmc import in_chunks
from tsmc.rejection import draw_accepted, exact_samples


def add_options(parser: ArgumentParser) -> None:
    add, pocket = common.add_options, common.POCKET
    add(parser, lm=str(pocket / "lm"), toxicity_model=str(pocket / "toxicity"), beta=10.0, seed=0)
    add(parser, prompt=common.PROMPT, length=common.LENGTH, proposals=900_000, out=pocket / "target")


def make(args: Namespace) -> dict:
    """Write the samples and `target.json`; the evidence."""
    names = ("lm", "toxicity_model", "prompt", "length", "beta")
    config = RunConfig(device="cpu", **{name: getattr(args, name) for name in names})
    setup = load_setup(config)
    generator = torch.Generator().manual_seed(args.seed)
    draw = partial(draw_accepted, setup.base, setup.potential)
    exact = exact_samples(in_chunks(draw, args.proposals, common.CHUNK, lambda chunk: generator))
    if len(exact.tokens) < 2:
        raise InputError(f"{len(exact.tokens)} accepted; raise --proposals or lower --beta")
    save_target(args.out, exact, sigma_key(config), seed=args.seed)
    return {"accepted": len(exact.tokens), "log_z": exact.log_z}
