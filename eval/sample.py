"""Weighted samples of the target, of a trained pair (p^(m), psi^(m)) or without any training.

    python -m eval.sample runs/pocket --samples 20
    python -m eval.sample --potential without:girl --prompt "One day, there was a"

Texts are drawn by weight, their share of the weight of all particles of all runs. log Z is the
evidence as estimated from all runs together; ESS is that of the weights at the last token, averaged
over the runs; 1 / sum W^2 is how many independent samples all texts are worth at most. Without RUN
the language model proposes. Options that are not given are those of RUN or of main.py.
"""

import argparse
import dataclasses
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from eval.command import OneLineParser, one_line_errors, say
from eval.config import LEARNERS, RunOptions, saved_config
from eval.run import count_generations
from eval.world import World, check_unchanged, identity, load_sigma
from tinystories.errors import InputError, printable
from tsmc import SCHEMES
from twist import Drawn, load_pair, sample

OPTIONS = ("prompt", "length", "seed", "potential", "device", "lm")


class TrainedRun:
    """The pair (p^(m), psi^(m)) of a run of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; InputError names what is missing."""
        run = Path(directory)
        self.config = saved_config(run).change(device=device)
        count = count_generations(run)
        if count == 0:
            raise InputError(f"{run}: holds no saved generation; name a run that has finished one")
        self.generation = count - 1 if generation is None else generation
        if not 0 <= self.generation < count:
            fault = f"generation {self.generation} is not in {run}"
            raise InputError(f"{fault}; it holds 0 to {count - 1}")
        check_unchanged(run, identity(self.config.run))
        self.folder = run / f"generation-{self.generation}"  # of the pair
        self.rule = LEARNERS[self.config.run.learner][0].rule(self.config.learner)
        self.world = lru_cache(maxsize=1)(load_sigma)

    def sample(self, particles: int = 50, runs: int = 8, **changes: Any) -> Drawn:
        """R = runs populations of K = particles texts; `changes` are a prompt, length or seed.

        InputError for options out of range, and where all weights are zero.
        """
        options = dataclasses.replace(self.config.run, **changes)
        return draw(self.world(options), self.folder, options.seed, particles, runs, **self.rule)


def draw(
    world: World, folder: Path | None, seed: int, particles: int, runs: int, **rule: Any
) -> Drawn:
    """R = runs populations of K = particles of the pair in a folder; without one p^(0) proposes."""
    pair = None if folder is None else load_pair(folder, world.base)
    scores = {}
    if world.log_toxicity is not None:
        scores["toxicity"] = lambda texts: world.log_toxicity(texts).exp()
    return sample(world.base, world.potential, pair, particles, runs, seed, scores, **rule)


def report(drawn: Drawn, is_trained: bool, samples: int) -> str:
    """Estimates, what they do not say by themselves, then a line for every sample."""
    rows = drawn.samples(samples)
    evidence = drawn.evidence()
    log_phi = drawn.scores["log_phi"]
    log_z = f"log Z {evidence.value:.2f} +- {evidence.half_width():.2f}"
    ess = f"ESS {drawn.population.ess.mean().item():.1f}"
    worth = f"all texts are worth {drawn.ess:.1f} samples (1 / sum W^2)"
    lines = [f"{log_z}   {ess}   {worth}   distinct texts {len(set(drawn.texts))}"]
    if warning := drawn.warning():
        lines.append(warning)
    if not is_trained and log_phi.isneginf().any() and (log_phi[log_phi > -math.inf] == 0).all():
        low, high = (math.exp(-evidence.quantile(share)) for share in (0.975, 0.025))
        rate = f"About 1 in {math.exp(-evidence.value):.3g} texts of the model satisfies it"
        lines.append(f"{rate} (95 %: {low:.3g} to {high:.3g})")
    has_toxicity = "toxicity" in drawn.scores
    lines.append(f" share  log phi  {'toxicity  ' if has_toxicity else ''}text")
    for row in rows:
        toxicity = f"{row['toxicity']:8.3f}  " if has_toxicity else ""
        numbers = f"{row['weight']:6.3f}  {row['log_phi']:7.2f}  {toxicity}"
        lines.append(numbers + printable(row["text"]))
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Print what p, or a generation of a run, draws; then draw the picture."""
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if "potential" in given:
        given["potential"] = tuple(given["potential"])
    say("loading the networks" + (f" of {args.run}" if args.run else ""))
    if args.run is None:
        options, folder, rule, source = RunOptions(**given), None, {}, "p proposes"
    else:
        trained = TrainedRun(args.run, args.generation)
        options = dataclasses.replace(trained.config.run, **given)
        folder, rule, source = trained.folder, trained.rule, f"generation {trained.generation}"
    if args.resampling is not None:
        rule["resample"] = SCHEMES[args.resampling]
    world = load_sigma(options)
    drawn = draw(world, folder, options.seed, args.particles, args.runs, **rule)
    sizes = f"{args.runs} runs of K = {args.particles}, T = {options.length}"
    found = report(drawn, folder is not None, args.samples)
    heading = f"{printable(options.prompt)}\n{source}, {sizes}, seed {options.seed}"
    print(f"{heading}\n{found}", flush=True)
    if args.picture:
        from eval.figures import draw_genealogy  # matplotlib takes a second to load

        log_phi = drawn.scores["log_phi"][: args.particles]  # of the first run
        draw_genealogy(drawn.trace, log_phi, world.tokenizer, args.picture)
        say(f"wrote {args.picture}")


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "python -m eval.sample (RUN | --potential SPEC) [OPTIONS]"
    parser = OneLineParser("python -m eval.sample", usage, __doc__, formatter_class=raw)
    add = parser.add_argument
    add("run", nargs="?", help="directory that main.py wrote")
    add("--prompt", help="opening to continue")
    add("--generation", type=int, metavar="M", help="default: the last")
    add("--particles", type=int, metavar="K", default=50, help="particles (default: 50)")
    add("--runs", type=int, metavar="R", default=8, help="runs, weighed by Z-hat (default: 8)")
    add("--samples", type=int, metavar="N", default=10, help="samples to draw (default: 10)")
    add("--length", type=int, metavar="T", help="tokens of a continuation")
    add("--seed", type=int, help="seed of everything random")
    add("--resampling", choices=tuple(SCHEMES), help="resampling scheme")
    add("--potential", action="append", help="as in main.py --help; repeat it for a product")
    add("--lm", help="language model, without RUN; as in main.py --help")
    add("--device", help="auto, cpu, cuda or cuda:N")
    add("--picture", type=Path, metavar="FILE", help="draw the particles as PNG")
    with one_line_errors("python -m eval.sample", "lower --particles"):
        args = parser.parse_args(arguments)
        if args.run is None and args.potential is None:
            parser.error(f"no run is named: {usage}")
        if args.run is None and args.generation is not None:
            parser.error("--generation is one of RUN; leave it out or name RUN")
        if args.run is not None and args.lm is not None:
            parser.error("--lm is for sampling without RUN; leave one of them out")
        run(args)


if __name__ == "__main__":
    main()
