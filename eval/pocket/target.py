"""Exact samples of the pocket target, drawn by rejection; their files are those of `eval/run/target.py`.

    sigma(s) = p(s) phi(s) / Z_sigma,   log phi(s) = beta log p(toxic | s)
    E_p[p(toxic | s)^beta]              mean toxicity of the proposals at beta 1, acceptance at any beta

N proposals, T tokens.
"""

import math
from argparse import Namespace
from functools import partial

import torch
from torch import Tensor

import tinystories
from eval.pocket import common
from eval.run.target import load_target, save_target, target_key
from eval.scorers import toxicity
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tinystories.fast import accelerate
from tsmc.estimate import mean_estimate
from tsmc.rejection import rejection_sample
from twist.factors import Factor, TextPotential


def make(args: Namespace) -> None:
    """Draw the samples and write the two files; InputError where fewer than two are accepted."""
    model, tokenizer = tinystories.load(args.lm)
    classifier, its_tokenizer = toxicity.load(args.toxicity_model)
    scorer = toxicity.ToxicityScorer(accelerate(classifier), its_tokenizer, batch_size=256)
    prompt = torch.tensor(tokenizer.encode(args.prompt).ids, dtype=torch.long)
    log_score = TextPotential([Factor(scorer)], partial(tokenizer.decode_batch, skip_special_tokens=True), prompt)
    scores: list[Tensor] = []  # log p(toxic | s) of every proposal, by which the regime is judged

    def log_phi(tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T]"""
        scores.append(log_score(tokens))
        return args.beta * scores[-1]

    generator = torch.Generator().manual_seed(args.seed)
    conditional = tinystories.Conditional(accelerate(model), prompt, args.length)
    exact = rejection_sample(conditional, log_phi, common.OneStream(args.proposals, generator))
    if len(exact.tokens) < 2:
        few = f"{len(exact.tokens)} of {args.proposals} proposals were accepted"
        raise InputError(f"{few}; raise --proposals or lower --beta")
    p_toxic = torch.cat(scores).double().exp()  # [N]
    mean = mean_estimate(p_toxic)
    notes = {"base_toxicity": mean.value, "base_toxicity_std_error": mean.std_error}
    notes |= {f"acceptance_beta_{beta}": p_toxic.pow(beta).mean().item() for beta in (1, 10)}
    key = target_key(args.lm, args.toxicity_model, args.prompt, args.length, args.beta)
    save_target(args.out, exact, key, seed=args.seed, **notes)


def write_card(args: Namespace) -> None:
    """What the two files say."""
    key = target_key(args.lm, args.toxicity_model, args.prompt, args.length, args.beta)
    exact, notes = load_target(args.out, key), read_json(args.out / "target.json")
    if exact is None or (exact.num_proposals, notes["seed"]) != (args.proposals, args.seed):
        raise InputError(f"{args.out}: was drawn with other options; give those")
    percent = 100 * math.exp(exact.log_z)
    common.fill_card(args, None, exact=exact, notes=notes, accepted=len(exact.tokens), percent=percent)
