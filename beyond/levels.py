"""Does a twist know which beginnings are good? log psi^(m) beside that of the best twist (eq. 3).

    log psi*(s_{1:t}) = log E_{p^(m)}[phi^(m) | s_{1:t}]
                      = log p^(0) / p^(m) (s_{1:t}) + log E_{p^(0)}[phi | s_{1:t}]             eq. 8

Beginnings are drawn from q^(m). The last expectation is a mean over R texts that begin so, finished
by a proposal q of the same job that finds sigma, weighted by p^(0) phi / q of what it has added.
N beginnings, T tokens.
"""

import math

import torch
from torch import Generator, Tensor

from distill.pair import Pair
from eval.sample import TrainedJob
from eval.world import World
from tinystories.decoder import Decoder
from tsmc.draws import log_mean_exp, uniforms
from tsmc.proposal import extend, sample_proposal

STEPS = (5, 10, 15)  # t
BEGINNINGS, FINISHED = 20, 100  # N, R


@torch.no_grad()
def log_mean_phi(world: World, pair: Pair, beginning: Tensor, generator: Generator) -> float:
    """log E_{p^(0)}[phi | s_{1:t}] of a beginning [t], by R texts that q of a pair finishes."""
    start, length = len(beginning), world.base.length
    tokens = beginning.expand(FINISHED, -1)  # [R, t]
    log_q = torch.zeros(FINISHED, device=tokens.device)
    decoder = Decoder(pair.model, FINISHED)
    for t in range(length):
        if t >= start:
            step = extend(pair.model, decoder, pair.twist, uniforms(FINISHED, 1, generator))
            tokens = torch.cat([tokens, step.tokens[:, None]], 1)
            log_q = log_q + step.log_q
        if t < length - 1:
            decoder.append(tokens[:, t])
    log_p = world.base.log_probs(tokens)[:, start:].sum(1)  # [R]
    return log_mean_exp((log_p - log_q + world.potential(tokens))[None]).item()


@torch.no_grad()
def compare_levels(trained: TrainedJob, finisher: Pair) -> dict[str, float]:
    """At each t of STEPS how log psi and log psi* of N beginnings agree, and how many are good."""
    pair, base = trained.pair, trained.world.base
    generator = Generator(base.prompt.device).manual_seed(trained.options.seed)
    drawn = sample_proposal(pair.model, pair.twist, BEGINNINGS, generator)
    log_ratio = (base.log_probs(drawn.tokens) - drawn.log_p).cumsum(1)  # [N, T] log p^(0) / p^(m)
    found = {}
    for t in STEPS:
        means = [log_mean_phi(trained.world, finisher, s[:t], generator) for s in drawn.tokens]
        best = log_ratio[:, t - 1].double() + torch.tensor(means, device=log_ratio.device)  # [N]
        both = torch.stack([drawn.log_psi[:, t - 1].double(), best])  # [2, N]
        found[f"correlation {t}"] = both.corrcoef()[0, 1].item()
        # Others lead nowhere: their psi* is below a hundredth of the largest.
        found[f"good {t}"] = (best > best.max() - math.log(100)).double().mean().item()
    return found
