"""Exact samples of the pocket target, drawn by rejection, and what they say of the sparse regime.

    sigma(s) = p(s) phi(s) / Z_sigma,   log phi(s) = beta log p(toxic | s)
    E_p[p(toxic | s)^beta]              mean toxicity of the proposals at beta 1, acceptance at any beta

The files are those of `eval/run/target.py`. N proposals, T tokens.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import tinystories
from eval.pocket import common
from eval.run.target import TargetKey, load_target, save_target, target_key
from eval.scorers import toxicity
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tinystories.fast import accelerate
from tsmc.rejection import rejection_sample
from twist.potential import Factor, TextPotential

FILES = ()
DEFAULTS = {"lm": Path("checkpoints/pocket/lm"), "toxicity_model": Path("checkpoints/pocket/toxicity")}
DEFAULTS |= {"prompt": common.PROMPT, "length": common.LENGTH, "beta": 10.0, "proposals": 900_000}


def key_of(args: argparse.Namespace) -> TargetKey:
    """What the sigma of these options depends on."""
    return target_key(args.lm, args.toxicity_model, args.prompt, args.length, args.beta)


def make(args: argparse.Namespace) -> None:
    """Draw the samples and write the two files, InputError where fewer than two are accepted."""
    model, tokenizer = tinystories.load(args.lm)
    classifier, its_tokenizer = toxicity.load(args.toxicity_model)
    scorer = toxicity.ToxicityScorer(accelerate(classifier), its_tokenizer, batch_size=256)
    prompt = torch.tensor(tokenizer.encode(args.prompt).ids, dtype=torch.long)
    log_score = TextPotential([Factor(scorer)], partial(tokenizer.decode_batch, skip_special_tokens=True), prompt)
    scores: list[Tensor] = []

    def log_phi(tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T]; the regime is judged by what it is made of."""
        scores.append(log_score(tokens))
        return args.beta * scores[-1]

    conditional = tinystories.Conditional(accelerate(model), prompt, args.length)
    chunks = common.OneStream(args.proposals, torch.Generator().manual_seed(args.seed))
    exact = rejection_sample(conditional, log_phi, chunks)
    if len(exact.tokens) < 2:
        raise InputError(f"{len(exact.tokens)} of {args.proposals} proposals were accepted; raise --proposals or lower --beta")
    p_toxic = torch.cat(scores).double().exp()  # [N]
    mean, error = common.mean_and_error(p_toxic)
    notes = {f"acceptance_beta_{beta}": p_toxic.pow(beta).mean().item() for beta in (1, 10)}
    notes = {"base_toxicity": mean, "base_toxicity_std_error": error, **notes}
    save_target(args.out, exact, key_of(args), seed=args.seed, **notes)


def write_card(args: argparse.Namespace) -> None:
    """The figures of the two files."""
    exact = load_target(args.out, key_of(args))
    if exact is None:
        raise InputError(f"{args.out}: holds samples of other options; give those that they were drawn with")
    notes = read_json(args.out / "target.json")
    common.fill_card(args, None, exact=exact, notes=notes, accepted=len(exact.tokens), percent=100 * math.exp(exact.log_z))
