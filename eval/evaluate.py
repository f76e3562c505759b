"""The rows of a job's table: Base, Target and generations (`metrics.py` has the columns).

N texts, R runs of K particles, T tokens.
"""

import math
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.pair import Pair
from distill.paper import Paper
from eval.metrics import KL, describe, population_row
from eval.options import Options
from eval.world import World
from tsmc.estimate import log_mean_estimate
from tsmc.proposal import proposal_log_probs, sample_proposal, sequence_log_probs
from tsmc.rejection import exact_samples

EXAMPLES = 3  # texts of a row that are shown when the job ends
ENOUGH = 200  # exact samples of the target
FEW = 10  # base samples with phi > 0; from fewer little can be learned


def texts_row(world: World, tokens: Tensor, seed: int) -> dict[str, Any]:
    """What texts [N, T] are worth, and some of them."""
    texts = world.potential.texts(tokens)
    row = describe(world.score(tokens, texts), world.encode(texts))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return row | {"examples": [texts[n] for n in order[:EXAMPLES]]}


def kl_row(world: World, log_q: Tensor, key: str = KL) -> dict[str, float]:
    """The column KL and its interval, from log q [N] of the exact samples."""
    kl = world.kl(log_q)
    return {key: kl.value, f"{key}_half_width": kl.half_width()}


def generation_row(
    options: Options, world: World, learner: Paper, pair: Pair, m: int
) -> dict[str, Any]:
    """The row of generation m."""
    row: dict[str, Any] = {"generation": m, "scores": learner.scored(m)}
    particles, *sizes = options.eval_particles
    count = options.eval_runs * particles
    if learner.is_policy:  # all its texts count, those with phi = 0 as well
        draw = partial(sample_proposal, pair.model, None)
        tokens = learner.streams.draw("evaluation", m, count, draw).tokens
    else:
        population = learner.population(pair, "evaluation", m, particles, options.eval_runs)
        tokens = population.alive().samples.flatten(0, 1)  # [R K, T]
        row |= population_row(population)
    if world.exact is not None:
        log_p, log_q = proposal_log_probs(pair.model, pair.twist, world.exact.tokens)  # [N], [N]
        row |= kl_row(world, log_q)
        row["kl_target_model"] = world.kl(log_p).value  # of the model without its twist
    row |= texts_row(world, tokens, options.seed)
    if sizes and not learner.is_policy:  # Fig. 2: equally many particles in runs of other K
        row["populations"] = {}
        for size in options.eval_particles:
            word = f"populations of {size}"
            drawn = learner.population(pair, word, m, size, max(1, count // size))
            texts = texts_row(world, drawn.alive().samples.flatten(0, 1), options.seed)
            row["populations"][size] = texts.get("toxicity", texts["log_phi"])
    return row


def end_rows(options: Options, world: World, learner: Paper) -> dict[str, dict]:
    """The rows Base and Target, where p^(0) and sigma stand.

    Where the world has no exact samples, they are drawn, if 200 of them need few enough draws.
    """
    count = options.eval_runs * options.eval_particles[0]
    draw = partial(sample_proposal, world.base, None)
    tokens = learner.streams.draw("base samples", None, count, draw).tokens  # [N, T]
    log_phi = world.potential(tokens)  # [N]
    if (alive := int((log_phi > -math.inf).sum())) < FEW:
        rate = f"{alive} of {count} texts of p have phi > 0, which is little to learn from"
        print(f"{rate}; soften the potential, or give it hints (beyond/)", file=sys.stderr)
    # The mean of phi tells beforehand how many proposals are needed.
    proposals = options.eval_target_proposals
    if (rate := log_phi.exp().mean().item()) > 0:
        proposals = min(proposals, math.ceil(ENOUGH / rate))
    if world.exact is None and proposals > 0:
        word = "target by rejection"
        exact = exact_samples(world.base, world.potential, learner.streams, word, proposals)
        world.exact = exact if len(exact.tokens) > 1 else None
    log_z = log_mean_estimate(log_phi)
    rows = {"base": texts_row(world, tokens, options.seed)}
    rows["base"] |= {"log_z": log_z.value, "log_z_half_width": log_z.half_width()}
    if world.exact is not None:
        exact = world.exact
        rows["base"] |= kl_row(world, sequence_log_probs(world.base, exact.tokens))
        rows["target"] = texts_row(world, exact.tokens, options.seed)
        half_width = 1.96 * exact.log_z_std_error
        rows["target"] |= {"log_z": exact.log_z, "log_z_half_width": half_width}
    return rows
