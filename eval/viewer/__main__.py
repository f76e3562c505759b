"""Samples of a trained pair (p, psi): `python -m tsmc runs/pocket "Once upon a time, there was a"`.

    drawn     how often a text occurs among N samples, which are drawn by their weights
    weight    its share of the weight of all particles of all runs
    log phi   its potential
    score     its toxicity p(toxic | text), whatever the potential is

log Z-hat estimates the evidence of the target; ESS is that of the weights at the last token,
averaged over the runs. `load_run(RUN).sample(...)` draws the same particles.
"""

import argparse
import json
from pathlib import Path

from eval.run.command import one_line_errors, say
from eval.run.options import OneLineParser, check, saved_config
from eval.run.setup import load_setup
from eval.run.trained import Drawn, chosen_generation, draw, with_options
from eval.viewer import genealogy
from tinystories import InputError
from tinystories.checkpoint import write_text
from tinystories.errors import printable
from tinystories.fast import keep_freed_memory
from tsmc import SCHEMES

OPTIONS = ("prompt", "particles", "length", "seed", "resampling", "ess_threshold", "potential")
"""Options of a run that may differ from the run's own."""


def make_parser() -> OneLineParser:
    """Every option with its help."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser("python -m tsmc", description=__doc__, formatter_class=raw)
    add, own = parser.add_argument, "(default: the run's own)"
    add("run", type=Path, help="directory that main.py wrote")
    add("prompt", nargs="?", help=f"opening to continue {own}")
    text = "which saved pairs, side by side in --html (default: the last)"
    add("--generation", type=int, nargs="+", metavar="M", default=[None], help=text)
    add("--particles", type=int, metavar="K", default=50, help="particles (default: 50)")
    text = "independent runs, pooled by Z-hat (default: 8)"
    add("--runs", type=int, metavar="R", default=8, help=text)
    add("--samples", type=int, metavar="N", default=10, help="samples to draw (default: 10)")
    add("--length", type=int, metavar="T", help=f"tokens of a continuation {own}")
    add("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    add("--resampling", choices=tuple(SCHEMES), help=f"resampling scheme {own}")
    text = f"resample where ESS < this share of K: 1 always, 0 only at the end {own}"
    add("--ess-threshold", type=float, metavar="SHARE", help=text)
    text = f"potential, as in main.py --help; give it again for a product {own}"
    add("--potential", action="append", help=text)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    add("--json", action="store_true", help="print a JSON object for each generation")
    text = "write a page with the genealogy of the particles of the first run"
    add("--html", type=Path, metavar="FILE", help=text)
    text = "write this genealogy, of the last M given, as a picture (PNG)"
    add("--picture", type=Path, metavar="FILE", help=text)
    return parser


def as_json(drawn: Drawn, samples: list[str], about: dict) -> str:
    """One line: options, log Z-hat of all runs together and of each, samples, distinct texts."""
    estimates = {
        "log_z_hat": drawn.log_z_hat,
        "log_z_hat_of_runs": drawn.population.log_z.tolist(),
        "ess": drawn.population.ess.mean().item(),
    }
    record = about | estimates | {"samples": samples, "distinct": drawn.distinct()}
    return json.dumps(genealogy.rounded(record, 12), allow_nan=False)


def as_text(drawn: Drawn, samples: list[str], about: dict) -> str:
    """Estimates, then a line for every distinct text among the samples, heaviest first."""
    sizes = "{runs} runs of K = {particles}, T = {length}, seed {seed}".format(**about)
    rule = "{resampling} resampling, ESS threshold {ess_threshold:g}".format(**about)
    distinct, dead = drawn.distinct(), (~drawn.population.is_alive()).sum().item()
    ess = f"ESS {drawn.population.ess.mean().item():.1f} of {about['particles']}"
    estimates = f"log Z-hat {drawn.log_z_hat:.2f}   {ess}   distinct texts {len(distinct)}"
    lines = [
        printable(about["prompt"]),
        f"generation {about['generation']}, {sizes}, {rule}",
        estimates + (f"   runs of weight zero {dead}" if dead else ""),
    ]
    if about["prompt"] != about["trained_on"]:
        lines.append("p and psi were trained on another prompt: the proposal may be a poor one")
    if not samples:
        return "\n".join([*lines, "All weights are zero; use more particles or another prompt."])
    lines.append("drawn  weight  log phi  score  text")
    for row in distinct:
        if count := samples.count(row["text"]):
            numbers = f"{row['weight']:6.3f}  {row['log_phi']:7.2f}  {row['score']:5.3f}"
            lines.append(f"{count:5}  {numbers}  {printable(row['text'])}")
    return "\n".join(lines)


def sample(args: argparse.Namespace) -> None:
    """Draw and print the populations of every chosen generation; write the page and the picture."""
    check("--samples", args.samples, low=1)
    for flag, path in (("--html", args.html), ("--picture", args.picture)):
        if path and path.exists() and not path.is_file():
            raise InputError(f"{flag} {path}: is not a regular file; choose another name")
    chosen = dict(chosen_generation(args.run, m, "--generation") for m in args.generation)
    own = saved_config(args.run)
    args.potential = args.potential and tuple(args.potential)
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    config = with_options(own, device=args.device, **given)
    say(f"loading the networks of {args.run}")
    setup, drawn = load_setup(config), {}
    about = {"run": str(args.run), "runs": args.runs, "trained_on": own.prompt}
    about |= {name: getattr(config, name) for name in OPTIONS}
    for m, directory in chosen.items():
        drawn[m] = draw(config, setup, m, directory, args.runs)
        samples = drawn[m].samples(args.samples, config.generator("samples", m, config.prompt))
        show, end = (as_json, "\n") if args.json else (as_text, "\n\n")
        print(show(drawn[m], samples, about | {"generation": m}), end=end, flush=True)
    if args.html:
        log_z_sigma = setup.exact and setup.exact.log_z
        write_text(args.html, genealogy.page(drawn, about, setup.tokenizer, log_z_sigma))
        say(f"wrote {args.html}")
    if args.picture:
        from eval.viewer.picture import draw_genealogy  # matplotlib takes a second to load

        draw_genealogy(drawn[m].trace, setup.tokenizer, args.picture)
        say(f"wrote {args.picture}")


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    with one_line_errors("python -m tsmc", "lower --particles"):
        args = make_parser().parse_intermixed_args(arguments)
        keep_freed_memory()
        sample(args)


if __name__ == "__main__":
    main()
