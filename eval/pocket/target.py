"""Exact samples of the pocket target, drawn by rejection (`tsmc/rejection.py`).

sigma(s) = p(s) phi(s) / Z_sigma,   log phi(s) = beta log p(toxic | s)
"""

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

import torch

import tinystories
from eval.pocket import common
from eval.run.target import TargetKey, save_target
from eval.scorers import toxicity
from tinystories.checkpoint import fingerprint
from tinystories.errors import InputError
from tinystories.fast import pack
from tsmc import in_chunks
from tsmc.rejection import draw_accepted, exact_samples
from twist.potential import TextPotential, power

POCKET = Path("checkpoints/pocket")


def add_options(parser: ArgumentParser) -> None:
    """The options, with the values of the shipped samples."""
    add = common.add_options
    add(parser, lm=POCKET / "lm", toxicity_model=POCKET / "toxicity", out=POCKET / "target", seed=0)
    add(parser, prompt=common.PROMPT, length=common.LENGTH, beta=10.0, proposals=900_000)


def make(args: Namespace) -> dict:
    """Write the samples and `target.json`; how many there are, and their evidence."""
    model, tokenizer = tinystories.load(args.lm)
    classifier, its_tokenizer = toxicity.load(args.toxicity_model)
    scorer = toxicity.ToxicityScorer(pack(classifier), its_tokenizer, batch_size=256)
    prompt = torch.tensor(tokenizer.encode(args.prompt).ids)
    decode = partial(tokenizer.decode_batch, skip_special_tokens=True)
    log_phi = TextPotential([power(scorer, args.beta)], decode, prompt)
    draw = partial(
        draw_accepted, tinystories.Conditional(pack(model), prompt, args.length), log_phi
    )
    generator = torch.Generator().manual_seed(args.seed)
    exact = exact_samples(in_chunks(draw, args.proposals, common.CHUNK, lambda chunk: generator))
    if len(exact.tokens) < 2:
        raise InputError(f"{len(exact.tokens)} accepted; raise --proposals or lower --beta")
    networks = fingerprint(args.lm), fingerprint(args.toxicity_model)
    save_target(
        args.out, exact, TargetKey(*networks, args.prompt, args.length, args.beta), seed=args.seed
    )
    return {
        "accepted": len(exact.tokens),
        "log_z": exact.log_z,
        "log_z_std_error": exact.log_z_std_error,
    }
