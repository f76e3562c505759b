"""Weighted samples of the target, by a trained pair (p^(m), psi^(m)).

    python -m eval.sample runs/pocket --samples 20

Of the weight of all runs, particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

so the more runs, the nearer are draws by W to sigma. Where no run resamples before T, n of K are
draws of p^(0) (`tsmc/mixture.py`). Options not typed are those of the job. R runs, K particles.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.pair import Pair, load_pair
from distill.paper import Paper
from eval.evaluate import log_importance
from eval.job import PAIR, ROW, command
from eval.options import Options, Parser, add_options, build, read_job
from eval.world import World, load_sampling_world, sigma_of
from tsmc import draws
from tsmc.estimate import Estimate, log_mean_estimate
from tsmc.mixture import PLAIN, mixture_log_weights
from tsmc.proposal import sample_proposal, sequence_log_probs
from tsmc.streams import Streams

CHANGES = ("prompt", "length", "end", "seed", "potential", "lm", "device", "dtype")
CHANGES += ("resampling", "ess_threshold", "beta", "toxicity_model")


@dataclass(frozen=True)
class Weighted:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    scores: dict[str, Tensor]  # "log_phi", "log_p" of p^(0) [R K], "toxicity" where phi reads it
    log_weights: Tensor  # [R, K]
    log_z: Tensor  # [R] log Z-hat
    is_independent: bool  # whether the particles of a run are, because none resampled before T

    @cached_property
    def shares(self) -> Tensor:
        """Each particle's share W of the weight of all runs [R, K] float64."""
        runs = draws.normalise(self.log_z.cpu().double())  # [R]
        return runs[:, None] * draws.normalise(self.log_weights.cpu().double())

    @property
    def ess(self) -> float:
        """1 / sum W^2: how many independent samples the texts are worth at most."""
        return 1 / self.shares.square().sum().item()

    def samples(self, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """`count` independent draws by the weights, for large R K from sigma: text, W, scores."""
        shares, generator = self.shares.flatten(), torch.Generator().manual_seed(seed)
        rows = []
        for k in torch.multinomial(shares, count, True, generator=generator).tolist():
            row = {"text": self.texts[k], "share": shares[k].item()}
            rows.append(row | {name: values[k].item() for name, values in self.scores.items()})
        return rows

    def evidence(self) -> Estimate:
        """log of the mean of Z-hat over the runs, or over all particles that are independent."""
        return log_mean_estimate(self.log_weights if self.is_independent else self.log_z)

    def probability(self, event: Callable[[str], float]) -> Estimate:
        """P(event(text)) under sigma, or its mean where event gives numbers, by the weights."""
        holds = torch.tensor([float(event(text)) for text in self.texts]).double()
        holds = holds.view_as(self.shares)
        value = (self.shares * holds).sum().item()
        residuals = self.shares * (holds - value)  # [R, K] of the ratio of two means
        residuals = residuals.flatten() if self.is_independent else residuals.sum(1)
        count = len(residuals)
        error = math.sqrt(count) * residuals.std().item() if count > 1 else math.inf
        # It is at least that of ESS independent texts: runs agree too well where a few texts have
        # nearly all the weight, and where the event holds for none of the texts, or for all.
        least = math.sqrt(max(0.0, value * (1 - value)) / self.ess + 1 / self.ess**2)
        error = self.evidence().stretch * max(error, least)  # unseen texts may be of either kind
        return Estimate(value, error, max(1.0, count - 1.0))


def sample(world: World, pair: Pair, options: Options, particles: int, runs: int) -> Weighted:
    """R = runs runs of K = particles of a pair, by the seed and the rule of options."""
    streams = Streams(options.seed, world.base.prompt.device)
    learner = Paper(world.base, world.potential, options, streams)  # which draws any pair
    is_independent = learner.is_independent(pair)
    plain = round(PLAIN * particles) if is_independent else 0  # n
    population = learner.population(pair, "sample", None, particles - plain, runs)
    tokens, log_weights, log_z = population.tokens, population.log_weights, population.log_z
    if plain > 0:
        draw = partial(sample_proposal, world.base, None)
        others = streams.draw("plain draws", None, runs * plain, draw).tokens  # [R n, T]
        tokens = torch.cat([tokens, others.view(runs, plain, -1)], 1)  # [R, K, T]
    texts = world.potential.texts(tokens.flatten(0, 1))
    scores = world.score(tokens.flatten(0, 1), texts)
    scores["log_p"] = sequence_log_probs(world.base, tokens.flatten(0, 1)).cpu()
    if plain > 0:
        log_phi = scores["log_phi"].to(log_weights).view(runs, particles)
        log_sigma = log_phi + scores["log_p"].to(log_weights).view(runs, particles)
        log_w = log_importance(pair, others, log_sigma[:, -plain:].flatten())
        log_weights = torch.cat([log_weights, log_w.view(runs, plain)], 1)  # [R, K] over q
        log_weights = mixture_log_weights(log_weights, log_phi, plain / particles)
        log_z = draws.log_mean_exp(log_weights)
    return Weighted(texts, scores, log_weights, log_z, is_independent)


class TrainedJob:
    """The pair (p^(m), psi^(m)) of a job of main.py, and the world that it was trained in."""

    def __init__(self, folder: str | Path, generation: int | None = None, **changes: Any):
        """The last generation unless another is named; `changes` are options, as a seed."""
        folder = Path(folder)
        saved = read_job(folder)
        self.options = build(Options, saved | changes | {"effective_potential": True})
        now = sigma_of(self.options)["files"]
        if any(now.get(name, known) != known for name, known in saved["sigma"]["files"].items()):
            raise ValueError(f"{folder}: its networks or its potential have changed since it began")
        last = len(list(folder.glob(f"generation-*/{ROW}"))) - 1
        self.generation = last if generation is None else generation
        self.world = load_sampling_world(self.options)
        self.pair, _ = load_pair(folder / f"generation-{self.generation}" / PAIR, self.world.base)

    def sample(self, particles: int = 50, runs: int = 40) -> Weighted:
        """R = runs runs of K = particles texts."""
        return sample(self.world, self.pair, self.options, particles, runs)


def report(drawn: Weighted, count: int, seed: int) -> str:
    """Estimates, then a line for each of `count` different samples."""
    evidence = drawn.evidence()
    needed = drawn.ess * math.exp(min(-evidence.value, 700.0))
    worth = f"{len(drawn.texts):,} draws are worth at most {drawn.ess:.1f} exact samples"
    lines = [f"log Z {evidence}", worth, f"rejection needs {needed:,.0f} draws for as many"]
    rows = list({row["text"]: row for row in drawn.samples(20 * count, seed)}.values())[:count]
    columns = [name for name in ("log_phi", "toxicity") if any(row.get(name) for row in rows)]
    lines.append(" share  " + "".join(f"{name:8}  " for name in columns) + "text")
    for row in rows:
        cells = "".join(f"{row[name]:8.3f}  " for name in columns)
        lines.append(f"{row['share']:6.3f}  {cells}{' '.join(row['text'].split())}")
    return "\n".join(lines)


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser of how much is drawn, and of options that may be changed for it."""
    settings: dict[str, Any] = {"argument_default": argparse.SUPPRESS, "allow_abbrev": False}
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=description, formatter_class=raw, **settings)
    parser.add_argument("--particles", type=int, default=50, help="K, particles of a run [50]")
    parser.add_argument("--runs", type=int, default=40, help="R, runs, weighed by Z-hat [40]")
    parser.add_argument("--samples", type=int, default=10, help="different texts to draw [10]")
    add_options(parser, Options, CHANGES)
    return parser


def parsed(parser: Any, arguments: list[str] | None) -> tuple[dict[str, Any], int, int, int]:
    """What is typed, beside K, R and the number of texts, each at least 1."""
    typed = vars(parser.parse_args(arguments))
    sizes = [typed.pop(name) for name in ("particles", "runs", "samples")]
    if min(sizes) < 1:
        parser.error("--particles, --runs and --samples are at least 1")
    return typed, *sizes


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    with command("eval.sample"):
        parser = parser_of(__doc__)
        parser.add_argument("job", type=Path, help="folder that main.py has written")
        parser.add_argument("--generation", type=int, default=None, help="which pair [the last]")
        typed, particles, runs, count = parsed(parser, arguments)
        trained = TrainedJob(typed.pop("job"), typed.pop("generation"), **typed)
        print(report(trained.sample(particles, runs), count, trained.options.seed))


if __name__ == "__main__":
    main()
