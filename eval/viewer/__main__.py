"""Samples of a trained pair (p, psi): `python -m tsmc runs/pocket "Once upon a time, there was a"`.

    weight    share of the weight of all particles of all runs, by which the texts are drawn
    log phi   the potential
    toxicity  p(toxic | text), whatever the potential is

log Z-hat estimates the evidence of the target; ESS is that of the weights at the last token,
averaged over the runs. Options whose default is not named are the run's own.
"""

import argparse
import json
from pathlib import Path

from eval.run.command import one_line_errors, say
from eval.run.options import OneLineParser, check
from eval.run.run import finite_or_null
from eval.trained import TrainedRun
from eval.viewer import genealogy
from tinystories.checkpoint import write_text
from tinystories.errors import printable
from tsmc import SCHEMES

OPTIONS = ("prompt", "particles", "length", "seed", "resampling", "ess_threshold", "potential")


def as_text(record: dict) -> str:
    """Estimates, then a line for every sample."""
    sizes = f"K = {record['particles']}, T = {record['length']}, seed {record['seed']}"
    rule = f"{record['resampling']} resampling, ESS threshold {record['ess_threshold']:g}"
    ess = f"ESS {record['ess']:.1f} of {record['particles']}"
    lines = [
        printable(record["prompt"]),
        f"generation {record['generation']}, {record['runs']} runs of {sizes}, {rule}",
        f"log Z-hat {record['log_z_hat']:.2f}   {ess}   distinct texts {record['distinct']}",
    ]
    if record["prompt"] != record["trained_on"]:
        lines.append("p and psi were trained on another prompt: the proposal may be a poor one")
    nothing = "All weights are zero; use more particles or another prompt."
    lines.append("weight  log phi  toxicity  text" if record["samples"] else nothing)
    for row in record["samples"]:
        numbers = f"{row['weight']:6.3f}  {row['log_phi']:7.2f}  {row['toxicity']:8.3f}"
        lines.append(f"{numbers}  {printable(row['text'])}")
    return "\n".join([*lines, ""])


def sample(args: argparse.Namespace) -> None:
    """Print what each generation draws, then write its page and its picture."""
    check("--samples", args.samples, low=1)
    trained = [TrainedRun(args.run, m, args.device) for m in dict.fromkeys(args.generation)]
    config = trained[0].options(**{name: getattr(args, name) for name in OPTIONS})
    say(f"loading the networks of {args.run}")
    setup = trained[0].setup(config)
    about = {"run": str(args.run), "runs": args.runs, "trained_on": trained[0].config.prompt}
    about |= {name: getattr(config, name) for name in OPTIONS}
    populations = {}
    for pair in trained:
        drawn = pair.draw(config, setup, args.runs)
        record = about | {
            "generation": pair.generation,
            "log_z_hat": drawn.log_z_hat,
            "log_z_hat_of_runs": drawn.population.log_z.tolist(),
            "ess": drawn.population.ess.mean().item(),
            "samples": drawn.samples(args.samples),
            "distinct": len(set(drawn.texts)),
            "weighted": [drawn.row(k) for k in range(len(drawn.texts))],
        }
        print(json.dumps(finite_or_null(record)) if args.json else as_text(record), flush=True)
        populations[pair.generation] = drawn
    if args.html:
        log_z = setup.exact and setup.exact.log_z
        write_text(args.html, genealogy.page(populations, about, setup.tokenizer, log_z))
        say(f"wrote {args.html}")
    if args.picture:
        from eval.viewer.picture import draw_genealogy  # matplotlib takes a second to load

        log_phi = drawn.log_phi[: config.particles]  # of the first run
        draw_genealogy(drawn.trace, log_phi, setup.tokenizer, args.picture)
        say(f"wrote {args.picture}")


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "python -m tsmc RUN [PROMPT] [OPTIONS]"
    parser = OneLineParser("python -m tsmc", usage, __doc__, formatter_class=raw)
    add = parser.add_argument
    add("run", type=Path, nargs="?", help="directory that main.py wrote")
    add("prompt", nargs="?", help="opening to continue")
    add("--generation", type=int, nargs="+", metavar="M", default=[None], help="default: the last")
    add("--particles", type=int, metavar="K", default=50, help="particles (default: 50)")
    add("--runs", type=int, metavar="R", default=8, help="runs, pooled by Z-hat (default: 8)")
    add("--samples", type=int, metavar="N", default=10, help="samples to draw (default: 10)")
    add("--length", type=int, metavar="T", help="tokens of a continuation")
    add("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    add("--resampling", choices=tuple(SCHEMES), help="resampling scheme")
    add("--ess-threshold", type=float, metavar="SHARE", help="resample where ESS < SHARE of K")
    add("--potential", action="append", help="as in main.py --help; repeat it for a product")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    add("--json", action="store_true", help="print a JSON object for each generation")
    add("--html", type=Path, metavar="FILE", help="write a page of the first run's particles")
    add("--picture", type=Path, metavar="FILE", help="draw those of the last M given, as PNG")
    with one_line_errors("python -m tsmc", "lower --particles"):
        args = parser.parse_intermixed_args(arguments)
        if args.run is None:
            parser.error(f"no run is named: {usage}")
        sample(args)


if __name__ == "__main__":
    main()
