"""Two ways to the same divergence, side by side: `python -m eval.agreement runs/pocket`.

    rejection    KL(sigma||q) = E_sigma[log p^(0) + log phi - log q] - log Z_sigma, log Z_sigma from base samples
    bounds       KL(sigma||q) = E_sigma[log w] - log Z_sigma, log Z_sigma between E[log Z-hat] of TSMC and of conditional TSMC

The bounds need no rejection run, only a few exact samples; their interval holds both limits with 95 % confidence. Without
resampling they are the bounds of importance sampling. For every generation that a run has saved.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from eval.metrics import kl_target_proposal
from eval.run.command import one_line_errors, say
from eval.run.options import DTYPES, OneLineParser, saved_config
from eval.run.saved import generations, load_generation
from eval.run.setup import Problem, load_setup, sigma_key
from eval.run.table import align
from eval.run.target import load_target
from tinystories.errors import InputError
from tinystories.fast import keep_freed_memory
from tsmc.bounds import BoundsProblem, bidirectional_bounds
from tsmc.interfaces import LanguageModel, Twist
from tsmc.sampler import Sigma


def by_rejection(model: LanguageModel, twist: Twist | None, problem: Problem) -> list[str]:
    """The cells of one proposal's KL from exact samples."""
    kl, half_width = kl_target_proposal(model, twist, problem.base, problem.exact)
    return ["rejection", f"{kl:.2f}", f"{kl - half_width:.2f} .. {kl + half_width:.2f}", ""]


def by_bounds(
    sigma: Sigma, twist: Twist, exact_samples: Tensor, args: argparse.Namespace, stream: Callable[..., torch.Generator]
) -> Iterator[list[str]]:
    """The cells of one proposal's KL from bounds, with resampling at every step and without, for every K."""
    for name, threshold in (("TSMC bounds", 1.0), ("importance bounds", 0.0)):
        for particles in args.particles:
            problem = BoundsProblem(sigma, twist, particles, threshold)
            bounds = bidirectional_bounds(problem, exact_samples, args.runs, stream(name, particles))
            low, high = bounds.kl_from_target.interval()
            width = f"{bounds.log_z.lower.value:.2f} .. {bounds.log_z.upper.value:.2f}"
            yield [f"{name}, K = {particles}", "", f"{low:.2f} .. {high:.2f}", width]


def parse_arguments() -> argparse.Namespace:
    """Command line; InputError for sizes with which no interval can be had."""
    parser = OneLineParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("run", type=Path, help="directory that main.py wrote, of a preset that ships exact samples")
    parser.add_argument("--particles", type=int, nargs="+", default=[50, 200], help="K of the bounds")
    parser.add_argument("--runs", type=int, default=20, help="runs for either bound")
    parser.add_argument("--exact-samples", type=int, default=20, help="exact samples that the upper bound starts from")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="type of the networks' weights (default: the run's)")
    args = parser.parse_args()
    if min(*args.particles, args.runs, args.exact_samples) < 2:
        raise InputError("--particles, --runs and --exact-samples must be at least 2")
    return args


def compare(args: argparse.Namespace) -> None:
    """Print the table of one run."""
    config = saved_config(args.run)
    config = dataclasses.replace(config, dtype=args.dtype or config.dtype)
    say(f"loading the networks of {args.run}")
    setup, own = load_setup(config), args.run / "target"
    problem = setup.problems[0]
    exact = problem.exact or (load_target(own, sigma_key(config, problem.prompt)) if own.is_dir() else None)
    if exact is None:
        raise InputError(f"{args.run}: there are no exact samples for its options; name a run that main.py finished")
    problem.exact = exact.to(problem.base.prompt.device)
    lines = [["", "by", "KL(sigma||q)", "95 % interval", "log Z_sigma"]]
    say("Base: its KL from the exact samples")
    lines.append(["Base, q = p", *by_rejection(problem.base, None, problem)])
    for m, directory in generations(args.run).items():
        (sigma, *_), twist = load_generation(setup, directory, m, config.torch_device())
        lines.append([f"Generation {m}", *by_rejection(sigma.model, twist, problem)])

        def stream(name: str, particles: int, m: int = m) -> torch.Generator:
            return config.generator("agreement", name, m, particles)

        few = problem.exact.tokens[: args.exact_samples]
        say(f"generation {m}: {args.runs} runs for either bound, with and without resampling")
        lines += [["", *cells] for cells in by_bounds(sigma, twist, few, args, stream)]
    print(align(lines))
    print(f"log Z_sigma by rejection: {exact.log_z:.3f} +- {1.96 * exact.log_z_std_error:.3f}")


def main() -> None:
    """Command line to table; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.agreement"):
        args = parse_arguments()
        keep_freed_memory()
        compare(args)


if __name__ == "__main__":
    main()
