"""Weighted samples of the target, of a trained pair (p^(m), psi^(m)) or without any training.

    python -m eval.sample runs/pocket --samples 20
    python -m eval.sample --potential keyword:submarine
    python -m eval.sample runs/pocket --picture particles.html

Texts are drawn by weight, their share of the weight of all particles of all runs. log Z is the
evidence as estimated from all runs together; ESS is that of the weights at the last token, averaged
over the runs; 1 / sum W^2 is how many independent samples all texts are worth at most; Pareto k
says how heavy the tail of the weights is. Without JOB the language model proposes, or where the
potential has hints (keyword) draws that are forced to hold them. Options that are not given are
those of JOB, without JOB those of main.py. --picture shows the particles of one run, step by step.
"""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from distill import LEARNERS, Pair, Weighted, load_pair, sample
from distill.learner import AT_END
from distill.options import check, option
from eval.command import OneLineParser, one_line_errors, printable, say
from eval.job import PAIR, count_generations
from eval.options import Options, add_arguments, saved_options
from eval.picture import draw_picture
from eval.world import check_unchanged, load_plain_world
from tsmc import SCHEMES, Rule
from tsmc.estimate import Estimate

OPTIONS = ("prompt", "length", "end", "seed", "potential", "lm", "device")  # of main.py


@dataclass(frozen=True)
class Draws:
    """What is drawn, and how; what the command line leaves out depends on JOB."""

    generation: int = option(0, "the pair (p^(m), psi^(m)) that draws [the last]", low=0)
    particles: int = option(50, "K, particles of a run")
    runs: int = option(8, "R, runs, weighed by Z-hat [8, without JOB 40]")
    samples: int = option(10, "texts to draw by their weights")
    resampling: str = option("multinomial", "resampling scheme [JOB's]", choices=tuple(SCHEMES))
    ess_threshold: float = option(0.0, "resample where ESS / K is lower; 1: always [JOB's]", high=1)
    picture: str = option("", "an HTML file to write, with every step of one run")

    def __post_init__(self):
        check(self)


class TrainedJob:
    """The pair (p^(m), psi^(m)) of a job of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; ValueError names what is missing."""
        folder = Path(directory)
        self.options = dataclasses.replace(saved_options(folder), device=device)
        last = count_generations(folder) - 1
        self.generation = last if generation is None else generation
        if last < 0:
            raise ValueError(f"{folder}: holds no generation; name a job that has finished one")
        if not 0 <= self.generation <= last:
            raise ValueError(f"generation {generation} is not in {folder}; it holds 0 to {last}")
        self.pair = folder / f"generation-{self.generation}" / PAIR
        self.world = lru_cache(maxsize=1)(load_plain_world)
        check_unchanged(folder, self.world(self.options))

    def rule(self) -> Rule:
        """How its runs resample, unless another rule is given."""
        return LEARNERS[self.options.learner].rule(self.options.learning)

    def sample(
        self, particles: int = 50, runs: int = 8, rule: Rule | None = None, **changes: Any
    ) -> Weighted:
        """R = runs runs of K = particles texts, which resample by a rule, else that of the job.

        `changes` are options of the job, as a prompt, length or seed. ValueError for options out of
        range, and where all weights are zero.
        """
        seed = changes.pop("seed", self.options.seed)  # which loads no other networks
        world = self.world(dataclasses.replace(self.options, **changes))
        pair = load_pair(self.pair, world.base)
        given = (world.base, world.potential, pair, particles, runs, seed, world.scores)
        return sample(*given, rule or self.rule())


def report(drawn: Weighted, is_trained: bool, samples: int) -> str:
    """Estimates, what they do not say by themselves, then a line for every sample."""
    rows = drawn.samples(samples)
    evidence = drawn.evidence()
    numbers = [f"log Z {evidence.value:.2f} +- {evidence.half_width():.2f}"]
    numbers.append(f"ESS {drawn.population.ess.mean().item():.1f}")
    numbers.append(f"all texts are worth {drawn.ess:.1f} samples (1 / sum W^2)")
    if math.isfinite(drawn.pareto_k):
        numbers.append(f"Pareto k {drawn.pareto_k:.2f}")
    numbers.append(f"distinct texts {len(set(drawn.texts))}")
    lines = ["   ".join(numbers)]
    if warning := drawn.warning():
        lines.append(warning)
    elif not is_trained and set(drawn.scores["log_phi"].tolist()) == {0.0, -math.inf}:
        lines.append(rate(evidence))
    has_toxicity = "toxicity" in drawn.scores
    lines.append(f" share  log phi  {'toxicity  ' if has_toxicity else ''}text")
    for row in rows:
        toxicity = f"{row['toxicity']:8.3f}  " if has_toxicity else ""
        numbers = f"{row['weight']:6.3f}  {row['log_phi']:7.2f}  {toxicity}"
        lines.append(numbers + printable(row["text"]))
    return "\n".join(lines)


def rate(evidence: Estimate) -> str:
    """What log Z of a hard potential says: how many texts of p satisfy it."""
    line = f"About 1 in {rounded(math.exp(-evidence.value))} texts of the model passes the test"
    if not evidence.half_width() < math.log(10):  # nor where it is NaN
        return f"{line}, but the runs do not agree within a factor of ten; use more --runs"
    low, high = (math.exp(max(0.0, -evidence.quantile(share))) for share in (0.975, 0.025))
    return f"{line} (95 %: {rounded(low)} to {rounded(high)})"


def rounded(number: float) -> str:
    """Three digits of a number, as 1,330 or 1.11."""
    return f"{float(f'{number:.3g}'):,.10g}"


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "python -m eval.sample (JOB | --potential SPEC) [OPTIONS]"
    parser = OneLineParser("python -m eval.sample", usage, __doc__, formatter_class=raw)
    parser.add_argument("job", nargs="?", metavar="JOB", help="folder that main.py wrote")
    add_arguments(parser, Draws)
    add_arguments(parser, Options, OPTIONS)
    with one_line_errors("python -m eval.sample"):
        args = parser.parse_args(arguments)
        found = {name: value for name, value in vars(args).items() if value is not None}
        changes = {name: found.pop(name) for name in OPTIONS if name in found}
        changes |= {name: tuple(v) for name, v in changes.items() if isinstance(v, list)}
        job = found.pop("job", None)
        draws = Draws(**{"runs": 8 if job else 40} | found)
        rule = {"resample": SCHEMES.get(args.resampling), "ess_threshold": args.ess_threshold}
        rule = {name: value for name, value in rule.items() if value is not None}
        if job is None:
            if "potential" not in changes:
                parser.error(f"no job is named: {usage}")
            if args.generation is not None:
                parser.error("--generation is one of JOB; leave it out or name JOB")
            options = Options(**changes)
            world = load_plain_world(options)
            pair, usual = None, AT_END
            source = "forced draws propose" if world.potential.hints else "p proposes"
        else:
            if "lm" in changes:
                parser.error("--lm is for sampling without JOB; leave one of them out")
            trained = TrainedJob(job, args.generation, changes.get("device", "auto"))
            options = dataclasses.replace(trained.options, **changes)
            world = trained.world(options)
            pair, usual = load_pair(trained.pair, world.base), trained.rule()
            source = f"generation {trained.generation}"
        path = Path(draws.picture)
        if draws.picture and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"--picture {path}: give a file in a folder that is there")
        is_forced = pair is None and bool(world.potential.hints)
        if is_forced and draws.picture:
            parser.error("--picture shows steps, which forced draws have not; name JOB")
        chosen = None if is_forced and not rule else dataclasses.replace(usual, **rule)
        sizes = (draws.particles, draws.runs, options.seed)
        drawn = sample(world.base, world.potential, pair, *sizes, world.scores, chosen)
        shown = f"{draws.runs} runs of K = {draws.particles}, T = {options.length}"
        print(f"{printable(options.prompt)}\n{source}, {shown}, seed {options.seed}")
        print(report(drawn, job is not None, draws.samples), flush=True)
        if draws.picture:
            pair = pair or Pair(world.base, None)
            title = f"{source}{f' of {job}' if job else ''}, {', '.join(options.potential)}"
            given = (world, pair, draws.particles, chosen or usual, options.seed)
            draw_picture(path, title, *given)
            say(f"one run of K = {draws.particles}, step by step, is in {path}")


if __name__ == "__main__":
    main()
