"""Samples of a trained pair: `python -m tsmc runs/pocket "Once upon a time, there was a"`.

    weighted particles   K sequences at t = T and their normalised weights, before the last resampling
    samples              drawn at random from the last resampling: equally weighted, repeats included

The seed, the generation and the prompt decide what is drawn; nothing is picked out afterwards. One population a prompt.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

from eval.run import options
from eval.run.command import one_line_errors, printable, say
from eval.run.directory import finite_or_null
from eval.run.options import MOST, OneLineParser, RunConfig, saved_config
from eval.run.saved import chosen_generation, load_generation
from eval.run.setup import Setup, load_setup
from eval.run.table import align
from eval.viewer import genealogy
from eval.viewer.draws import Draws, draw
from eval.viewer.watch import Watch
from tinystories import InputError
from tinystories.checkpoint import write_text
from tinystories.fast import keep_freed_memory
from tsmc import SCHEMES, Chunks, Trace

OPTIONS = ("particles", "length", "seed", "resampling", "ess_threshold", "device")
"""Options of a run that may differ from the run's own."""

EPILOG = """A line stands for a distinct sequence. `drawn` counts how often it is among the samples, which are a random part of
the last resampling: equally weighted, repeats included. `weight` is the sequence's share of all weight before that
resampling, `log phi` the potential and `score` the toxicity p(toxic | s). log Z-hat estimates the evidence
of the target, ESS is that of the weights at the last token. Exit codes: 2 bad input, 130 Ctrl-C, 141 nobody reads on."""


def number(text: str) -> int:
    """A number of a generation; argparse shows the message where it is none."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number; give the run and the prompts before --generation"
        ) from error


def make_parser() -> OneLineParser:
    """Every option with its help."""
    parser = OneLineParser(
        prog="python -m tsmc",
        description="Sample from a pair (p, psi) that main.py has trained, and watch the particles.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, help="directory that main.py wrote")
    add(
        "prompts",
        nargs="*",
        metavar="prompt",
        help="openings to continue, a population for each (default: the run's own)",
    )
    several = "which saved pairs, side by side in --html; --watch and --picture take one (default: the last)"
    add("--generation", type=number, nargs="+", metavar="M", help=f"{several}; prompts go before it")
    add("--particles", type=int, default=50, metavar="K", help="K (default: %(default)s)")
    add("--runs", type=int, default=8, metavar="R", help="independent runs, pooled by Z-hat (default: %(default)s)")
    add("--samples", type=int, metavar="N", help="samples to print, at most K (default: 10)")
    add("--length", type=int, metavar="T", help="tokens of a continuation (default: the run's own)")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of everything random; other prompts change nothing (default: %(default)s)",
    )
    add("--resampling", choices=tuple(SCHEMES), help="resampling scheme (default: the run's own)")
    threshold = "resample where ESS < this share of K: 1 always, 0 at the end alone (default: the run's own)"
    add("--ess-threshold", type=float, metavar="SHARE", help=threshold)
    add(
        "--potential",
        action="append",
        help="the potential to weigh by, as in main.py --help; again for a product (default: the run's own)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    add(
        "--json",
        action="store_true",
        help="a JSON object for each generation and prompt, one a line, every distinct sequence included",
    )
    add("--watch", action="store_true", help="show the particles step by step before the samples")
    add(
        "--delay",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="--watch on a terminal: time a step (default: %(default)s)",
    )
    add("--html", type=Path, metavar="FILE", help="write a page with the genealogy of the particles of the first run")
    add("--picture", type=Path, metavar="FILE", help="write a picture (PNG) of the first prompt's genealogy")
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, prompts and options in any order, but no prompt behind the numbers of --generation.

    InputError names an option whose value is out of range.
    """
    args = make_parser().parse_intermixed_args(arguments)
    args.samples = min(10, args.particles) if args.samples is None else args.samples
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """InputError for values out of range, options that exclude each other, and files that are none."""
    least, most = {"particles": 1, "samples": 1, "runs": 1, "length": 1}, {"seed": math.inf, "ess_threshold": 1}
    for name in ("particles", "samples", "runs", "length", "seed", "delay", "ess_threshold"):
        limits = {"at_least": least.get(name, 0), "at_most": most.get(name, MOST)}
        if getattr(args, name) is not None:
            options.check("--" + name.replace("_", "-"), getattr(args, name), limits)
    if args.samples > args.particles:
        raise InputError(f"--samples {args.samples} exceeds --particles {args.particles}; raise --particles")
    for flag in ("watch", "picture"):
        if len(set(args.generation or ())) > 1 and getattr(args, flag):
            raise InputError(f"--{flag} shows a single generation; give --generation one number")
    if args.json and args.watch:
        raise InputError("--json and --watch both want standard output; give one of them")
    for prompt in args.prompts:
        if not prompt.isprintable():
            raise InputError(f"the prompt {prompt!r} holds characters that cannot be printed; give plain text")
    for flag in ("html", "picture"):
        if (path := getattr(args, flag)) and path.exists() and not path.is_file():
            raise InputError(f"--{flag} {path}: is no file that could be replaced; choose another name")


def row(draws: Draws, place: int) -> dict:
    """A distinct sequence, ready for JSON: null for what is not finite."""
    return finite_or_null(dataclasses.asdict(draws.distinct[place]))


def as_json(draws: Draws, about: dict) -> str:
    """One line: the options, the estimates, the samples, and every distinct sequence by descending weight."""
    of_runs = draws.population.alive().log_z.double()
    record = {
        "prompt": draws.prompt,
        **about,
        "log_z_hat": finite_or_null(draws.population.log_mean_z()),
        "log_z_hat_mean": of_runs.mean().item() if len(of_runs) else None,
        "log_z_hat_std": of_runs.std().item() if len(of_runs) > 1 else None,
        "ess": draws.population.ess.mean().item(),
        "dead_runs": draws.dead_runs,
        "samples": [] if draws.dead else [row(draws, place) for place in draws.samples],
        "distinct": [row(draws, place) for place in range(len(draws.distinct))],
    }
    return json.dumps(record, allow_nan=False)


def as_text(draws: Draws, about: dict) -> str:
    """Estimates, then a line for every distinct sequence among the samples, heaviest first."""
    rule = f"{about['resampling']} resampling, ESS threshold {about['ess_threshold']:g}"
    sizes = f"{about['runs']} runs of K = {about['particles']}, T = {about['length']}"
    ess, dead = draws.population.ess.mean().item(), draws.dead_runs
    estimates = f"log Z-hat {draws.population.log_mean_z():.2f}   ESS {ess:.1f} of {about['particles']}"
    heading = [
        printable(draws.prompt),
        f"generation {about['generation']}, {sizes}, seed {about['seed']}, {rule}",
        f"{estimates}   distinct sequences {len(draws.distinct)}" + (f"   dead {dead}/{about['runs']}" if dead else ""),
    ]
    if draws.prompt not in about["trained_on"]:
        heading.append(
            "p and psi were trained on another prompt: the weights are right, but the proposal may be a poor one"
        )
    if draws.dead:
        words = "Every particle has weight zero: none of them is a sample of the target. Try more particles or another prompt."
        return "\n".join([*heading, words])
    cells, texts = [["drawn", "weight", "log phi", "score"]], ["text"]
    for place in sorted(set(draws.samples)):
        sequence = draws.distinct[place]
        numbers = f"{sequence.weight:.3f}", f"{sequence.log_phi:.2f}", f"{sequence.score:.3f}"
        cells.append([str(draws.samples.count(place)), *numbers])
        texts.append(printable(sequence.text))
    table = align(cells).splitlines()
    lines = [f"{line.ljust(len(table[0]))}  {text}" for line, text in zip(table, texts, strict=True)]
    return "\n".join([*heading, *lines])


def draw_generation(
    args: argparse.Namespace, own: RunConfig, config: RunConfig, setup: Setup, m: int, directory: Path
) -> list[Draws]:
    """Draw a population of generation m after every prompt, print it, and return the first run of each.

    `own` are the options of the run itself, `config` those of this command.
    """
    sigmas, twist = load_generation(setup, directory, m, config.torch_device())
    about = {"run": str(args.run), "generation": m, "trained_on": list(own.prompt), "runs": args.runs}
    about |= {name: getattr(config, name) for name in (*OPTIONS, "potential")}
    rule = {"resample": SCHEMES[config.resampling], "ess_threshold": config.ess_threshold}
    drawn = []
    for problem, sigma in zip(setup.problems, sigmas, strict=True):
        watch = Watch(problem.prompt, setup.tokenizer, config.length, args.delay) if args.watch else Trace()
        purpose = ("sample", m, problem.prompt)  # the same whatever other prompts and generations there are
        others = Chunks(args.runs - 1, own.rows // args.particles, config.streams(*purpose))
        sizes = args.particles, args.samples
        shown, pooled = draw(problem, sigma, twist, *sizes, config.generator(*purpose), watch, others, **rule)
        drawn.append(shown)
        text = as_json(pooled, about) if args.json else as_text(pooled, about)
        print(text if args.json or len(drawn) == 1 else f"\n{text}", flush=True)
    return drawn


def sample(args: argparse.Namespace) -> None:
    """Load the pairs, draw and print the populations of each, write the page and the picture."""
    chosen = dict(chosen_generation(args.run, m, "--generation") for m in args.generation or [None])
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    own = saved_config(args.run)
    given |= {"prompt": tuple(args.prompts) or own.prompt, "potential": tuple(args.potential or own.potential)}
    config = dataclasses.replace(own, dtype="float32", **given)
    say(f"loading the networks of {args.run}")
    setup, drawn = load_setup(config), {}
    for m, directory in chosen.items():
        if len(chosen) > 1 and not args.json:
            print("\n" * bool(drawn) + f"Generation {m}\n")
        drawn[m] = draw_generation(args, own, config, setup, m, directory)
    if args.html:
        about = {"run": str(args.run), "runs": args.runs} | {name: getattr(config, name) for name in OPTIONS}
        log_z_sigma = {problem.prompt: problem.exact.log_z for problem in setup.problems if problem.exact}
        text = genealogy.page(drawn, about, setup.tokenizer, log_z_sigma)
        write_text(args.html.resolve(), text)  # a link stays one
        say(f"wrote {args.html}")
    if args.picture:
        from eval.viewer.picture import draw_genealogy  # matplotlib takes a second to load

        draw_genealogy(drawn[m][0], setup.tokenizer, args.picture)
        say(f"wrote {args.picture}")


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    with one_line_errors("python -m tsmc", "lower --particles"):
        args = parse(arguments)
        keep_freed_memory()
        sample(args)


if __name__ == "__main__":
    main()
