"""Weighted samples of the target, of a trained pair (p^(m), psi^(m)) or without any training.

    python -m eval.sample runs/pocket --samples 20
    python -m eval.sample --potential keyword:submarine

Texts are drawn by weight, their share of the weight of all particles of all runs. log Z is the
evidence as estimated from all runs together; ESS is that of the weights at the last token, averaged
over the runs; 1 / sum W^2 is how many independent samples all texts are worth at most; Pareto k
says how heavy the tail of the weights is. Without RUN the language model proposes, or where the
potential has hints (keyword) draws that are forced to hold them. Options that are not given are
those of RUN, without RUN those of main.py.
"""

import argparse
import dataclasses
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from distill import LEARNERS
from eval.command import OneLineParser, one_line_errors, printable, say
from eval.options import RunOptions, add_argument, saved_config
from eval.run import count_generations
from eval.world import World, check_unchanged, load_sigma
from tsmc import SCHEMES
from tsmc.estimate import Estimate
from twist import Drawn, Pair, load_pair, sample
from twist.factors import regex

OPTIONS = ("prompt", "length", "end", "seed", "potential", "lm", "device")  # of main.py
FACTOR = math.log(10)  # a share with a wider interval is not known


class TrainedRun:
    """The pair (p^(m), psi^(m)) of a run of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; ValueError names what is missing."""
        run = Path(directory)
        self.config = saved_config(run).change(device=device)
        count = count_generations(run)
        if count == 0:
            raise ValueError(f"{run}: holds no saved generation; name a run that has finished one")
        self.generation = count - 1 if generation is None else generation
        if not 0 <= self.generation < count:
            fault = f"generation {self.generation} is not in {run}"
            raise ValueError(f"{fault}; it holds 0 to {count - 1}")
        self.pair = run / f"generation-{self.generation}" / "pair.safetensors"
        self.world = lru_cache(maxsize=1)(load_sigma)
        check_unchanged(run, self.world(self.config.run))

    def sample(self, particles: int = 50, runs: int = 8, **changes: Any) -> Drawn:
        """R = runs populations of K = particles texts.

        `changes` are options of the run, as a prompt, length or seed, or of `tsmc`: resample,
        ess_threshold. ValueError for options out of range, and where all weights are zero.
        """
        rule = LEARNERS[self.config.run.learner].rule(self.config.learner)
        rule |= {name: changes.pop(name) for name in rule if name in changes}
        options = dataclasses.replace(self.config.run, **changes)
        world = self.world(options)
        pair = load_pair(self.pair, world.base)
        return draw(world, pair, particles, runs, options.seed, **rule)


def draw(
    world: World, pair: Pair | None, particles: int, runs: int, seed: int, **rule: Any
) -> Drawn:
    """R = runs populations of K = particles of a pair, or without training, with toxicities."""
    scores = {}
    if world.log_toxicity is not None:
        scores["toxicity"] = lambda texts: world.log_toxicity(texts).exp()
    return sample(world.base, world.potential, pair, particles, runs, seed, scores, **rule)


def rate(evidence: Estimate) -> str:
    """What log Z of a hard potential says: how many texts of p satisfy it."""
    line = f"About 1 in {math.exp(-evidence.value):.3g} texts of the model satisfies it"
    if not evidence.half_width() < FACTOR:  # nor where it is NaN
        return f"{line}, but the runs do not agree within a factor of ten; use more --runs"
    low, high = (math.exp(max(0.0, -evidence.quantile(share))) for share in (0.975, 0.025))
    return f"{line} (95 %: {low:.3g} to {high:.3g})"


def report(drawn: Drawn, is_trained: bool, samples: int, event: str | None = None) -> str:
    """Estimates, what they do not say by themselves, then a line for every sample."""
    rows = drawn.samples(samples)
    evidence = drawn.evidence()
    log_phi = drawn.scores["log_phi"]
    numbers = [f"log Z {evidence.value:.2f} +- {evidence.half_width():.2f}"]
    numbers.append(f"ESS {drawn.population.ess.mean().item():.1f}")
    numbers.append(f"all texts are worth {drawn.ess:.1f} samples (1 / sum W^2)")
    if math.isfinite(drawn.pareto_k):
        numbers.append(f"Pareto k {drawn.pareto_k:.2f}")
    numbers.append(f"distinct texts {len(set(drawn.texts))}")
    lines = ["   ".join(numbers)]
    if warning := drawn.warning():
        lines.append(warning)
    if not is_trained and log_phi.isneginf().any() and (log_phi[log_phi > -math.inf] == 0).all():
        lines.append(rate(evidence))
    if event is not None:
        found = drawn.probability(lambda text: re.search(event, text) is not None)
        low, high = found.quantile(0.025), found.quantile(0.975)
        lines.append(f"P({event}) {found.value:.3f} (95 %: {low:.3f} to {high:.3f})")
    has_toxicity = "toxicity" in drawn.scores
    lines.append(f" share  log phi  {'toxicity  ' if has_toxicity else ''}text")
    for row in rows:
        toxicity = f"{row['toxicity']:8.3f}  " if has_toxicity else ""
        shown = printable(row["text"])
        lines.append(f"{row['weight']:6.3f}  {row['log_phi']:7.2f}  {toxicity}{shown}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples and picture; bad input ends with one line and exit code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "python -m eval.sample (RUN | --potential SPEC) [OPTIONS]"
    parser = OneLineParser("python -m eval.sample", usage, __doc__, formatter_class=raw)
    add = parser.add_argument
    add("run", nargs="?", help="directory that main.py wrote")
    add("--generation", type=int, metavar="M", help="default: the last")
    add("--particles", type=int, metavar="K", default=50, help="particles (default: 50)")
    add("--runs", type=int, metavar="R", help="runs, weighed by Z-hat (default: 8, without RUN 40)")
    add("--samples", type=int, metavar="N", default=10, help="samples to draw (default: 10)")
    add("--event", metavar="PATTERN", help="estimate how often a regular expression is found")
    add("--resampling", choices=tuple(SCHEMES), help="resampling scheme")
    add("--threshold", type=float, help="resample where ESS / K is lower; 1: at every step")
    add("--picture", type=Path, metavar="FILE", help="draw the particles as PNG")
    for field in dataclasses.fields(RunOptions):
        if field.name in OPTIONS:
            add_argument(parser, field)
    with one_line_errors("python -m eval.sample", "lower --particles"):
        args = parser.parse_args(arguments)
        given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        rule: dict[str, Any] = {}
        if args.resampling is not None:
            rule["resample"] = SCHEMES[args.resampling]
        if args.threshold is not None:
            rule["ess_threshold"] = args.threshold
        if args.run is None and args.potential is None:
            parser.error(f"no run is named: {usage}")
        if args.run is None and args.generation is not None:
            parser.error("--generation is one of RUN; leave it out or name RUN")
        if args.run is not None and args.lm is not None:
            parser.error("--lm is for sampling without RUN; leave one of them out")
        if args.threshold is not None and not 0 <= args.threshold <= 1:
            parser.error(f"--threshold is {args.threshold}; give a share of K from 0 to 1")
        if args.event is not None:
            regex(args.event)  # ValueError where it is none
        say("loading the networks" + (f" of {args.run}" if args.run else ""))
        runs = args.runs if args.runs is not None else (40 if args.run is None else 8)
        if args.run is None:
            options = RunOptions(**given)
            world = load_sigma(options)
            drawn = draw(world, None, args.particles, runs, options.seed, **rule)
            source = "p proposes" if drawn.trace else "forced draws propose"
            if not drawn.trace and (rule or args.picture):
                fault = "forced draws have no genealogy, and resample at the end alone"
                parser.error(f"{fault}; leave out --picture, --resampling and --threshold")
        else:
            trained = TrainedRun(args.run, args.generation)
            options = dataclasses.replace(trained.config.run, **given)
            world = trained.world(options)
            drawn = trained.sample(args.particles, runs, **given, **rule)
            source = f"generation {trained.generation}"
        found = report(drawn, args.run is not None, args.samples, args.event)
        shown = f"{runs} runs of K = {args.particles}, T = {options.length}"
        heading = f"{printable(options.prompt)}\n{source}, {shown}, seed {options.seed}"
        print(f"{heading}\n{found}", flush=True)
        if args.picture:
            from eval.figures import draw_genealogy  # matplotlib takes a second to load

            log_phi = drawn.scores["log_phi"][: args.particles]  # of the first run
            draw_genealogy(drawn.trace, log_phi, world.tokenizer, args.picture)
            say(f"wrote {args.picture}")


if __name__ == "__main__":
    main()
