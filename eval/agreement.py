"""Two ways to the same divergence, side by side: `python -m eval.agreement runs/pocket`.

    rejection    KL(sigma||q) = E_sigma[log p^(0) + log phi - log q] - log Z_sigma, log Z_sigma from base samples
    bounds       KL(sigma||q) = E_sigma[log w] - log Z_sigma, log Z_sigma between E[log Z-hat] of TSMC and of conditional TSMC

The bounds need no rejection run, only a few exact samples; their interval holds both limits with 95 % confidence. Without
resampling they are the bounds of importance sampling. For every generation that a run has saved.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from eval.metrics import kl_target_proposal
from eval.run.directory import align
from eval.run.options import DTYPES, RunConfig, saved_config
from eval.run.saved import generations, load_generation
from eval.run.setup import Ingredients, Problem, load_ingredients, sigma_key
from eval.run.target import load_target
from tinystories.errors import InputError
from tinystories.memory import keep_freed_memory
from tsmc.bounds import BoundsProblem, bidirectional_bounds
from tsmc.proposal import LanguageModel, Twist


def by_rejection(model: LanguageModel, twist: Twist | None, problem: Problem) -> list[str]:
    """The cells of one proposal's KL from exact samples."""
    kl, half_width = kl_target_proposal(model, twist, problem.base, problem.target)
    return ["rejection", f"{kl:.2f}", f"{kl - half_width:.2f} .. {kl + half_width:.2f}", ""]


def compare(
    config: RunConfig, given: Ingredients, directory: Path, m: int, args: argparse.Namespace
) -> list[list[str]]:
    """The rows of generation m."""
    problem = given.problems[0]
    (sigma, *_), twist = load_generation(given, directory, m, config.torch_device())
    rows = [[f"Generation {m}", *by_rejection(sigma.model, twist, problem)]]
    for name, threshold in (("TSMC bounds", 1.0), ("importance bounds", 0.0)):
        for particles in args.particles:
            bounded = BoundsProblem(sigma.model, twist, sigma.log_potential, particles, threshold)
            generator = config.generator("agreement", name, m, particles)
            exact = problem.target.tokens[: args.exact_samples]
            bounds = bidirectional_bounds(bounded, exact, args.runs, generator)
            low, high = bounds.kl_from_target.interval()
            width = f"{bounds.log_z.lower.value:.2f} .. {bounds.log_z.upper.value:.2f}"
            rows.append(["", f"{name}, K = {particles}", "", f"{low:.2f} .. {high:.2f}", width])
    return rows


def main() -> None:
    """Print the table of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory that main.py wrote, of a preset that ships exact samples")
    parser.add_argument("--particles", type=int, nargs="+", default=[50, 200], help="K of the bounds")
    parser.add_argument("--runs", type=int, default=20, help="runs for either bound")
    parser.add_argument("--exact-samples", type=int, default=20, help="exact samples that the upper bound starts from")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="type of the networks' weights (default: the run's)")
    args = parser.parse_args()
    try:
        if min(*args.particles, args.runs, args.exact_samples) < 2:
            raise InputError("--particles, --runs and --exact-samples must be at least 2")
        keep_freed_memory()
        config = saved_config(args.run)
        config = dataclasses.replace(config, dtype=args.dtype or config.dtype)
        given = load_ingredients(config)
        own = args.run / "target"
        problem = given.problems[0]
        target = problem.target or (load_target(own, sigma_key(config, problem.prompt)) if own.is_dir() else None)
        if target is None:
            raise InputError(
                f"{args.run}: there are no exact samples for its options; name a run that main.py finished"
            )
        problem.target = target.to(problem.base.prompt.device)
        lines = [["", "by", "KL(sigma||q)", "95 % interval", "log Z_sigma"]]
        lines.append(["Base, q = p", *by_rejection(problem.base, None, problem)])
        for m, directory in generations(args.run).items():
            lines += compare(config, given, directory, m, args)
    except InputError as error:
        print(f"eval.agreement: error: {error}", file=sys.stderr)
        sys.exit(2)
    z, error = problem.target.log_z, problem.target.log_z_std_error
    print(align(lines))
    print(f"log Z_sigma by rejection: {z:.3f} +- {1.96 * error:.3f}")


if __name__ == "__main__":
    main()
