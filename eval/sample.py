"""Weighted samples of the target, of a trained pair (p^(m), psi^(m)) or without any training.

    python -m eval.sample runs/pocket --samples 20
    python -m eval.sample --potential keyword:dog

Of the weight of all runs, particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

so the more runs, the nearer are draws by W to sigma. log Z is the evidence as estimated from all
runs together; 1 / sum W^2 is how many independent samples all texts are worth at most. Without JOB
the language model proposes. Options that are not typed are those of JOB, without JOB those of
main.py. R runs, K particles, T tokens.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.pair import Pair, load_pair
from eval.job import PAIR, ROW, command
from eval.options import Options, Parser, add_options, build
from eval.world import World, load_sampling_world, sigma_of
from tinystories.load import read_json
from tsmc.draws import SCHEMES
from tsmc.estimate import Estimate, log_mean_estimate
from tsmc.proposal import sequence_log_probs
from tsmc.sampler import Population, Rule, draw_population
from tsmc.sigma import Sigma
from tsmc.streams import Streams

CHANGES = ("prompt", "length", "end", "seed", "potential", "lm", "device", "dtype")
CHANGES += ("resampling", "ess_threshold", "beta", "toxicity_model")


@dataclass(frozen=True)
class Weighted:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    scores: dict[str, Tensor]  # "log_phi", "log_p" of p^(0) [R K], "toxicity" where phi reads it
    shares: Tensor  # [R, K] float64, W
    population: Population
    is_independent: bool  # whether the particles of a run are, because none resampled before T

    @property
    def ess(self) -> float:
        """1 / sum W^2: how many independent samples the texts are worth at most."""
        return 1 / self.shares.square().sum().item()

    def samples(self, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """`count` independent draws by the weights, for large R K from sigma: text, W, scores."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(self.shares.flatten(), count, True, generator=generator)
        rows = []
        for k in drawn.tolist():
            row = {"text": self.texts[k], "share": self.shares.flatten()[k].item()}
            rows.append(row | {name: values[k].item() for name, values in self.scores.items()})
        return rows

    def evidence(self) -> Estimate:
        """log of the mean of Z-hat over the runs, with its error; a dead run counts as zero.

        Independent particles count one by one, with as many degrees of freedom as effective texts.
        The interval holds less often where few texts have most of the weight, and no rule can know
        of a part of sigma that no draw has met.
        """
        if self.is_independent:
            return log_mean_estimate(self.population.log_weights.flatten(), self.ess)
        return log_mean_estimate(self.population.log_z)

    def probability(self, event: Callable[[str], float]) -> Estimate:
        """P(event(text)) under sigma, or its mean where event gives numbers: the share of the
        weight, with its error over runs, or over independent particles.

        The error is at least that of ESS independent texts, because runs agree too well where a few
        texts have nearly all the weight.
        """
        holds = torch.tensor([float(event(text)) for text in self.texts]).double()
        holds = holds.view_as(self.shares)
        value = (self.shares * holds).sum().item()
        residuals = self.shares * (holds - value)  # [R, K] of the ratio of two means
        residuals = residuals.flatten() if self.is_independent else residuals.sum(1)
        count = len(residuals)
        error = math.sqrt(count) * residuals.std().item() if count > 1 else math.inf
        # This remains where the event holds for none of the texts, or for all.
        least = math.sqrt(max(0.0, value * (1 - value)) / self.ess + 1 / self.ess**2)
        return Estimate(value, max(error, least), max(1.0, count - 1.0))


def weigh(world: World, population: Population, is_independent: bool) -> Weighted:
    """The texts of a population of sigma with their shares and scores."""
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    texts = world.potential.texts(tokens)
    scores = world.score(tokens, texts) | {"log_p": sequence_log_probs(world.base, tokens).cpu()}
    return Weighted(texts, scores, population.shares(), population, is_independent)


def sample(
    world: World, pair: Pair, particles: int, runs: int, rule: Rule, streams: Streams
) -> Weighted:
    """R = runs runs of K = particles of (p^(m), psi^(m)), as weighted samples of sigma."""
    sigma = Sigma(pair.model, world.base, world.potential)
    settings = (pair.twist, particles, runs, rule)
    population = draw_population(streams, "sample", None, sigma, *settings)
    return weigh(world, population, rule.threshold(sigma) == 0)


class TrainedJob:
    """The pair (p^(m), psi^(m)) of a job of main.py, and the world that it was trained in."""

    def __init__(self, folder: str | Path, generation: int | None = None, **changes: Any):
        """The last generation unless another is named; `changes` are options of the job, as a
        prompt, a length or a device. ValueError where its networks have changed."""
        folder = Path(folder)
        saved = read_json(folder / "config.json")
        networks = {name: changes[name] for name in ("lm", "toxicity_model") if name in changes}
        if sigma_of(build(Options, saved | networks)) != saved["sigma"]:
            raise ValueError(f"{folder}: its networks or its potential have changed since it began")
        self.generation = len(list(folder.glob(f"generation-*/{ROW}"))) - 1
        self.generation = self.generation if generation is None else generation
        self.options = build(Options, saved | changes)
        self.world = load_sampling_world(self.options)
        self.pair, _ = load_pair(folder / f"generation-{self.generation}" / PAIR, self.world.base)

    def sample(
        self,
        particles: int = 50,
        runs: int = 8,
        seed: int | None = None,
        rule: Rule | None = None,
    ) -> Weighted:
        """R = runs runs of K = particles texts, by default with the job's seed and rule."""
        options = self.options
        streams = Streams(options.seed if seed is None else seed, self.world.base.prompt.device)
        rule = rule or Rule(SCHEMES[options.resampling], options.ess_threshold)
        return sample(self.world, self.pair, particles, runs, rule, streams)


def report(drawn: Weighted, count: int, seed: int) -> str:
    """Estimates, then a line for each of `count` samples."""
    evidence = drawn.evidence()
    estimates = f"log Z {evidence.value:.2f} ± {evidence.half_width():.2f}"
    ess = drawn.population.ess.mean().item()
    lines = [f"{estimates}   ESS {ess:.1f}   all texts are worth {drawn.ess:.1f} samples"]
    if set(drawn.scores["log_phi"].tolist()) <= {0.0, -math.inf}:  # texts pass, or do not
        limits = (evidence.value + sign * evidence.half_width() for sign in (0, 1, -1))
        one, low, high = (f"{float(f'{math.exp(-limit):.3g}'):,.10g}" for limit in limits)
        lines.append(f"About 1 in {one} texts of the model passes the test ({low} to {high})")
    has_toxicity = "toxicity" in drawn.scores
    lines.append(f" share  log phi  {'toxicity  ' if has_toxicity else ''}text")
    for row in drawn.samples(count, seed):
        toxicity = f"{row['toxicity']:8.3f}  " if has_toxicity else ""
        text = " ".join(row["text"].split())
        lines.append(f"{row['share']:6.3f}  {row['log_phi']:7.2f}  {toxicity}{text}")
    return "\n".join(lines)


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser of how much is drawn, and of options that may be changed for it."""
    raw = argparse.RawDescriptionHelpFormatter
    settings = {"description": description, "argument_default": argparse.SUPPRESS}
    parser = Parser(formatter_class=raw, allow_abbrev=False, **settings)
    parser.add_argument("--particles", type=int, default=50, help="K, particles of a run [50]")
    parser.add_argument("--runs", type=int, default=40, help="R, runs, weighed by Z-hat [40]")
    parser.add_argument("--samples", type=int, default=10, help="texts to draw by weight [10]")
    add_options(parser, Options, CHANGES)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    with command("eval.sample"):
        parser = parser_of(__doc__)
        parser.add_argument("job", nargs="?", type=Path, default=None, help="folder of main.py")
        parser.add_argument("--generation", type=int, help="the pair that draws [the last]")
        typed = vars(parser.parse_args(arguments))
        job, generation = typed.pop("job"), typed.pop("generation", None)
        sizes = (typed.pop("particles"), typed.pop("runs"))
        count = typed.pop("samples")
        if job is not None:
            trained = TrainedJob(job, generation, **typed)
            print(f"generation {trained.generation} of {job}, {sizes[1]} runs of K = {sizes[0]}")
            print(report(trained.sample(*sizes), count, trained.options.seed))
            return
        options = build(Options, {"resampling": "systematic"} | typed)
        world = load_sampling_world(options)
        rule = Rule(SCHEMES[options.resampling], options.ess_threshold)
        streams = Streams(options.seed, world.base.prompt.device)
        drawn = sample(world, Pair(world.base, None), *sizes, rule, streams)
        print(f"p proposes, {sizes[1]} runs of K = {sizes[0]}")
        print(report(drawn, count, options.seed))


if __name__ == "__main__":
    main()
