"""The rows of a job's table. Samples are the particles after the last resampling, copies included.
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
from tsmc.draws import log_mean_exp
from tsmc.estimate import Estimate, log_mean_estimate
from tsmc.mixture import PLAIN, mixture_log_weights
from tsmc.proposal import proposal_log_probs, sample_proposal, sequence_log_probs
from tsmc.rejection import exact_samples
from tsmc.sampler import Population, tsmc
from twist.potential import each_once

KL, DRAW = "kl_target_proposal", "kl_draw"
COLUMNS = {  # of the table: title and form, by the key of a row
    "toxicity": ("toxicity", ".3f"),  # mean of p(toxic | s), where the potential reads it
    "every_step": ("toxicity, SMC", ".3f"),  # that of runs that resample at every step
    "log_phi": ("log phi", ".2f"),
    "phi_positive": ("phi > 0", ".3f"),  # share of texts that the potential does not rule out
    # KL(sigma||q) = E_sigma[log p^(0) + log phi - log q] - log Z_sigma; of Base KL(sigma||p).
    KL: ("KL", ".2f"),
    # KL(sigma||law) of a draw by weight from K particles, of which a part are draws of p^(0).
    DRAW: ("KL of a draw", ".2f"),
    "log_z": ("log Z", ".2f"),  # by draws of q and p^(0), or by runs that resample before T
    "ess": ("ESS", ".1f"),  # the effective sample size at T, a mean over runs
    # The mean cosine of the embeddings of two texts. To distil few distinct texts raises it.
    "similarity": ("similarity", ".3f"),
    "distinct": ("distinct", ".2f"),  # share of different texts of K samples, a mean over runs
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
    """Mean cosine over pairs i != j of vectors [N, D], N > 1; of all pairs the sum is |sum e|^2."""
    unit = F.normalize(vectors.double(), dim=-1)  # [N, D]
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (len(unit) * (len(unit) - 1)))


def with_interval(key: str, estimate: Estimate) -> dict[str, float]:
    """A number of a row and its 95 % interval."""
    row = {key: estimate.value, f"{key}_half_width": estimate.half_width()}
    return row | ({f"{key}_above": estimate.above()} if estimate.stretch > 1 else {})


def population_row(population: Population) -> dict[str, float]:
    """What the runs say of themselves: evidence, effective sizes, copies. Dead runs have none."""
    alive = population.alive()
    distinct = [len(tokens.unique(dim=0)) / len(tokens) for tokens in alive.samples]  # [R]
    return {
        "log_z_hat_mean": alive.log_z.mean().item(),
        "log_z_hat_std": alive.log_z.std().item(),
        "ess": alive.ess.mean().item(),
        "distinct": sum(distinct) / len(distinct),
        "dead_runs": len(population.log_z) - len(alive.log_z),
    }


def log_importance(pair: Pair, tokens: Tensor, log_sigma: Tensor) -> Tensor:
    """log w_q = log p^(0) phi / q [N] of texts tokens [N, T] with log_sigma = log p^(0) phi [N]."""
    _, log_q = proposal_log_probs(pair.model, pair.twist, tokens)  # [N]
    return (log_sigma - log_q).masked_fill(log_sigma == -math.inf, -math.inf)  # also where q = 0


def weighted_draws(world: World, pair: Pair, population: Population) -> list[tuple]:
    """log w_q and log phi of N = R K draws of q, and of the N draws of p of row Base, all [N]."""
    log_phi = world.potential(population.tokens.flatten(0, 1))
    tokens, plain_phi, log_sigma = world.plain
    plain_w = log_importance(pair, tokens, log_sigma)
    return [(population.log_weights.flatten(), log_phi), (plain_w, plain_phi)]


def mixture_row(world: World, drawn: list, particles: int, over_q: Tensor | None) -> dict:
    """log Z by `weighted_draws`; KL(sigma||law) of a draw by weight from K = particles, n of p and
    K - n of q: law(s) = (K - n) q(s) E[w(s) / (w(s) + w of the others)] + n p(s) E[the same]."""
    more = math.ceil(PLAIN / (1 - PLAIN) * particles)  # of p beside K of q
    share = more / (particles + more)
    log_w, plain_w = (mixture_log_weights(*one, share).view(-1, particles) for one in drawn)
    row = with_interval("log_z", log_mean_estimate(torch.cat([log_w, plain_w[:, :more]], 1)))
    n = round(PLAIN * particles)  # as `eval.sample` draws them
    if over_q is not None and n > 0:
        share = n / particles
        log_w, plain_w = (mixture_log_weights(*one, share).view(-1, particles) for one in drawn)
        exact_w = mixture_log_weights(over_q, world.exact.log_phi, share)  # [N]
        log_law = []  # the terms of log law / p phi [N]
        for size, of_q, over in ((particles - n, 1, over_q), (n, 0, world.exact.log_phi)):
            others = torch.cat([log_w[:, n + of_q :], plain_w[:, 1 - of_q : n]], 1)  # [R, K - 1]
            log_shares = F.logsigmoid(exact_w[:, None] - others.logsumexp(1))  # [N, R]
            log_law.append(math.log(size) - over + log_mean_exp(log_shares))
        row |= with_interval(DRAW, world.kl(-torch.logaddexp(*log_law)))
    return row


def generation_row(options: Options, world: World, learner: Paper, pair: Pair, m: int) -> dict:
    """The row of generation m."""
    row: dict[str, Any] = {"generation": m, "scores": learner.scored(m)}
    particles, exact, over_q = options.eval_particles, world.exact, None
    if exact is not None:
        log_model, log_q = proposal_log_probs(pair.model, pair.twist, exact.tokens)  # [N], [N]
        log_sigma = sequence_log_probs(world.base, exact.tokens) + exact.log_phi  # [N] plus log Z
        over_q = log_sigma - log_q
        row |= with_interval(KL, world.kl(over_q))
        row["kl_target_model"] = world.kl(log_sigma - log_model).value  # without its twist
    if learner.is_policy:  # all its texts count, those with phi = 0 as well
        draw = partial(sample_proposal, pair.model, None)
        tokens = learner.streams.draw("evaluation", m, options.eval_runs * particles, draw).tokens
    else:
        population = learner.population(pair, "evaluation", m, particles, options.eval_runs)
        tokens = population.alive().samples.flatten(0, 1)  # [R K, T]
        row |= population_row(population)
        if learner.is_independent(pair) and options.effective_potential:  # of the same sigma
            draw_plain(options, world, learner)
            row |= mixture_row(world, weighted_draws(world, pair, population), particles, over_q)
        else:
            row |= with_interval("log_z", log_mean_estimate(population.log_z))
        if "toxicity" in world.scores:
            sigma = learner.sigma(pair.model)
            draw = lambda n, source: tsmc(sigma, pair.twist, particles, source, n)  # noqa: E731
            drawn = learner.streams.draw("every step", m, options.eval_runs, draw, particles)
            texts = world.potential.texts(drawn.samples.flatten(0, 1))
            row["every_step"] = each_once(world.scores["toxicity"], texts).mean().item()
    return row | texts_row(world, tokens, options.seed)


def draw_plain(options: Options, world: World, learner: Paper) -> None:
    """The draws of p^(0) of row Base, as many as those of q, unless the world has them."""
    if world.plain is None:
        count = options.eval_runs * options.eval_particles
        draw = partial(sample_proposal, world.base, None)
        drawn = learner.streams.draw("base samples", None, count, draw)
        log_phi = world.potential(drawn.tokens)
        world.plain = drawn.tokens, log_phi, drawn.log_p.sum(1) + log_phi


def end_rows(options: Options, world: World, learner: Paper) -> dict[str, dict]:
    """The rows Base and Target; exact samples are drawn where the world has none, but need few."""
    draw_plain(options, world, learner)
    tokens, log_phi, _ = world.plain  # [N, T], [N]
    # The mean of phi tells beforehand how many proposals are needed.
    rate = log_phi.exp().mean().item()
    proposals = min(options.eval_target_proposals, math.ceil(ENOUGH / rate) if rate > 0 else 2**63)
    if world.exact is None and proposals > 0:
        word = "target by rejection"
        exact = exact_samples(world.base, world.potential, learner.streams, word, proposals)
        world.exact = exact if len(exact.tokens) > 1 else None
    base = texts_row(world, tokens, options.seed)
    rows = {"base": base | with_interval("log_z", log_mean_estimate(log_phi))}
    if (exact := world.exact) is not None:
        rows["base"] |= with_interval(KL, world.kl(exact.log_phi))  # q = p
        log_z = Estimate(exact.log_z, exact.log_z_std_error, math.inf)
        rows["target"] = texts_row(world, exact.tokens, options.seed)
        rows["target"] |= with_interval("log_z", log_z)
    return rows


def table(results: dict[str, Any]) -> str:
    """The rows Base, Target and of each generation; numbers with their 95 % intervals."""
    rows = {name.title(): results[name] for name in ("base", "target") if name in results}
    rows |= {f"Generation {m}": row for m, row in enumerate(results["generations"])}
    values = {key: {row[key] for row in rows.values() if key in row} for key in COLUMNS}
    # Not what toxicity or KL says more plainly; nor that all texts pass, or that no run is dead.
    hidden = {"log_phi"} if values["toxicity"] - {0, 1} else set()
    hidden |= {"ess", "similarity", "distinct"} if values[KL] else set()
    shown = [key for key in COLUMNS if key not in hidden and values[key] - {0, 1}]
    lines = [["", *(COLUMNS[key][0] for key in shown)]]
    for name, row in rows.items():
        cells = [format(row[key], COLUMNS[key][1]) if key in row else "" for key in shown]
        for n, key in enumerate(shown):
            below = row.get(f"{key}_half_width")
            if f"{key}_above" in row:
                cells[n] += f" [{row[key] - below:.2f}, {row[key] + row[f'{key}_above']:.2f}]"
            elif below is not None:
                cells[n] += f" ± {below:.2f}"
        lines.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
