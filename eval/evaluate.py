"""The rows of a job's table, Base, Target and generations: what a set of samples is worth.

Samples are the particles after the last resampling, where copies count as often as they occur.
N texts, R runs of K particles, T tokens, D width of an embedding.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.pair import Pair
from distill.paper import Paper
from eval.options import Options
from eval.world import World
from tsmc.estimate import log_mean_estimate
from tsmc.proposal import proposal_log_probs, sample_proposal, sequence_log_probs
from tsmc.rejection import exact_samples
from tsmc.sampler import Population

KL = "kl_target_proposal"
COLUMNS = {  # of the table: title and form, by the key of a row
    "toxicity": ("toxicity", ".3f"),  # mean of p(toxic | s), where the potential reads it
    "log_phi": ("log phi", ".2f"),
    "phi_positive": ("phi > 0", ".3f"),  # share of texts that the potential does not rule out
    # The mean cosine of the embeddings of two texts. To distil few distinct texts raises it.
    "similarity": ("similarity", ".3f"),
    # KL(sigma||q) = E_sigma[log p^(0) + log phi - log q] - log Z_sigma by exact samples, of the
    # proposal: weights repair a part. That of Base is KL(sigma||p).
    KL: ("KL", ".2f"),
    # The log of the mean of Z-hat over all runs, where dead ones count zero; of Base and Target
    # that of phi over draws of p^(0). Then mean and spread of log Z-hat over the runs alive.
    "log_z": ("log Z", ".2f"),
    "log_z_hat_mean": ("log Z-hat", ".2f"),
    "log_z_hat_std": ("(spread)", ".2f"),
    # Means over runs: the effective sample size at T, the share of different texts of K samples.
    "ess": ("ESS", ".1f"),
    "distinct": ("distinct", ".2f"),
    "dead_runs": ("dead", ".0f"),  # runs whose weights were all zero at some step
}
EXAMPLES = 3  # texts of a row that are shown when the job ends
ENOUGH = 200  # exact samples of the target


def texts_row(world: World, tokens: Tensor, seed: int) -> dict[str, Any]:
    """What texts tokens [N, T] are worth: means of their scores, similarity, and some of them."""
    texts = world.potential.texts(tokens)
    scores = world.score(tokens, texts)
    row: dict[str, Any] = {name: values.mean().item() for name, values in scores.items()}
    row["phi_positive"] = (scores["log_phi"] > -math.inf).double().mean().item()
    row["similarity"] = mean_pairwise_cosine(world.encode(texts))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return row | {"examples": [texts[n] for n in order[:EXAMPLES]]}


def mean_pairwise_cosine(vectors: Tensor) -> float:
    """Mean cosine over the pairs i != j of vectors [N, D], N > 1."""
    count = vectors.shape[0]
    unit = F.normalize(vectors.double(), dim=-1)  # [N, D]
    # The sum over all pairs is |sum_i e_i|^2.
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


def population_row(population: Population) -> dict[str, float]:
    """What the runs say of themselves: evidence, effective sizes, copies. Dead runs have none."""
    alive, log_z = population.alive(), log_mean_estimate(population.log_z)
    particles = population.log_weights.shape[1]
    distinct = [len(tokens.unique(dim=0)) / particles for tokens in alive.samples]  # [R]
    return {
        "log_z": log_z.value,
        "log_z_half_width": log_z.half_width(),
        "log_z_hat_mean": alive.log_z.mean().item(),
        "log_z_hat_std": alive.log_z.std().item(),
        "ess": alive.ess.mean().item(),
        "distinct": sum(distinct) / len(distinct),
        "dead_runs": len(population.log_z) - len(alive.log_z),
    }


def generation_row(
    options: Options, world: World, learner: Paper, pair: Pair, m: int
) -> dict[str, Any]:
    """The row of generation m."""
    row: dict[str, Any] = {"generation": m, "scores": learner.scored(m)}
    particles, *others = options.eval_particles
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
        kl = world.kl(log_q)
        row |= {KL: kl.value, f"{KL}_half_width": kl.half_width()}
        row["kl_target_model"] = world.kl(log_p).value  # of the model without its twist
    row |= texts_row(world, tokens, options.seed)
    if others and not learner.is_policy:  # Fig. 2: equally many particles in runs of each K
        row["populations"] = {}
        for size in options.eval_particles:
            word = f"populations of {size}"
            drawn = learner.population(pair, word, m, size, max(1, count // size))
            texts = texts_row(world, drawn.alive().samples.flatten(0, 1), options.seed)
            row["populations"][size] = texts.get("toxicity", texts["log_phi"])
    return row


def end_rows(options: Options, world: World, learner: Paper) -> dict[str, dict]:
    """The rows Base and Target; exact samples are drawn where the world has none, but need few."""
    count = options.eval_runs * options.eval_particles[0]
    draw = partial(sample_proposal, world.base, None)
    tokens = learner.streams.draw("base samples", None, count, draw).tokens  # [N, T]
    log_phi = world.potential(tokens)  # [N]
    # The mean of phi tells beforehand how many proposals are needed.
    rate = log_phi.exp().mean().item()
    proposals = min(options.eval_target_proposals, math.ceil(ENOUGH / rate) if rate > 0 else 2**63)
    if world.exact is None and proposals > 0:
        word = "target by rejection"
        exact = exact_samples(world.base, world.potential, learner.streams, word, proposals)
        world.exact = exact if len(exact.tokens) > 1 else None
    log_z = log_mean_estimate(log_phi)
    rows = {"base": texts_row(world, tokens, options.seed)}
    rows["base"] |= {"log_z": log_z.value, "log_z_half_width": log_z.half_width()}
    if (exact := world.exact) is not None:
        kl = world.kl(sequence_log_probs(world.base, exact.tokens))
        rows["base"] |= {KL: kl.value, f"{KL}_half_width": kl.half_width()}
        rows["target"] = texts_row(world, exact.tokens, options.seed)
        rows["target"]["log_z"] = exact.log_z
        rows["target"]["log_z_half_width"] = 1.96 * exact.log_z_std_error
    return rows


def table(results: dict[str, Any]) -> str:
    """The rows Base, Target and of each generation; a number with half of its 95 % interval."""
    rows = {name.title(): results[name] for name in ("base", "target") if name in results}
    rows |= {f"Generation {m}": row for m, row in enumerate(results["generations"])}
    values = {key: {row[key] for row in rows.values() if key in row} for key in COLUMNS}
    shown = [key for key in COLUMNS if values[key] - {0, 1}]  # all texts pass, no run is dead
    lines = [["", *(COLUMNS[key][0] for key in shown)]]
    for name, row in rows.items():
        cells = [format(row[key], COLUMNS[key][1]) if key in row else "" for key in shown]
        for n, key in enumerate(shown):
            if f"{key}_half_width" in row:
                cells[n] += f" ± {row[f'{key}_half_width']:.2f}"
        lines.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
