"""Weighted samples of the target, of a trained pair (p, psi) or without any training.

    python -m tsmc runs/pocket "Once upon a time, there was a"
    python -m tsmc --potential without:girl "Once upon a time, there was a"

Texts are drawn by weight, their share of the weight of all particles of all runs. log Z-hat
estimates the evidence; ESS is that of the weights at the last token, averaged over the runs; 1 /
sum W^2 is how many independent samples all texts are worth at most. Without RUN the language model
proposes. Options whose default is not named are those of RUN or of main.py.
"""

import argparse
import json
import math
from pathlib import Path

from distill.options import check
from eval.run.command import one_line_errors, say
from eval.run.options import OneLineParser, RunConfig, build, default_threshold
from eval.run.run import finite_or_null
from eval.run.setup import Setup, load_sigma
from eval.trained import TrainedRun, draw, read_network
from eval.viewer import genealogy
from tinystories.checkpoint import write_text
from tinystories.errors import printable
from tsmc import SCHEMES
from twist import Drawn
from twist.pair import load_pair

SHOWN = ("prompt", "length", "seed", "resampling", "ess_threshold", "potential")
OPTIONS = (*SHOWN, "device", "lm")
FEW = 10  # independent samples below which weights are said to have collapsed


def as_text(record: dict) -> str:
    """Estimates, what to think of them, then a line for every sample."""
    sizes = f"K = {record['particles']}, T = {record['length']}, seed {record['seed']}"
    rule = f"{record['resampling']} resampling, ESS threshold {record['ess_threshold']:g}"
    ess = f"ESS {record['ess']:.1f} of {record['particles']}"
    evidence = f"log Z-hat {record['log_z_hat']:.2f} +- {record['log_z_half_width']:.2f}"
    worth = f"all texts are worth {record['pooled_ess']:.1f} samples (1 / sum W^2)"
    source = "p proposes" if record["run"] is None else f"generation {record['generation']}"
    lines = [
        printable(record["prompt"]),
        f"{source}, {record['runs']} runs of {sizes}, {rule}",
        f"{evidence}   {ess}   {worth}   distinct texts {record['distinct']}",
        *record["remarks"],
    ]
    has_toxicity = "toxicity" in record["weighted"][0]
    lines.append(f" share  log phi  {'toxicity  ' if has_toxicity else ''}text")
    for row in record["samples"]:
        toxicity = f"{row['toxicity']:8.3f}  " if has_toxicity else ""
        numbers = f"{row['weight']:6.3f}  {row['log_phi']:7.2f}  {toxicity}"
        lines.append(numbers + printable(row["text"]))
    return "\n".join([*lines, ""])


def remarks(drawn: Drawn, config: RunConfig, trained: RunConfig | None) -> list[str]:
    """What the numbers do not say by themselves, a line each."""
    lines = []
    for name in ("prompt", "potential"):
        if trained is not None and getattr(config, name) != getattr(trained, name):
            lines.append(f"p and psi were trained on another {name}: the proposal may be poor")
    if drawn.ess < FEW:
        worth = f"The weights have collapsed: all texts are worth {drawn.ess:.1f} samples"
        remedy = "raise --particles, soften the potential, or train (main.py)"
        lines.append(f"{worth}; {remedy}")
    log_phi = drawn.scores["log_phi"]
    if trained is None and log_phi.isneginf().any() and (log_phi[log_phi > -math.inf] == 0).all():
        evidence = drawn.evidence()
        low, high = (math.exp(-evidence.quantile(share)) for share in (0.975, 0.025))
        rate = f"About 1 in {math.exp(-evidence.value):.3g} texts of the model satisfies it"
        lines.append(f"{rate} (95 %: {low:.3g} to {high:.3g})")
    return lines


def load(args: argparse.Namespace) -> tuple[RunConfig, Setup, RunConfig | None, dict]:
    """The options, what is fixed, a run's own options, and the pair of each generation."""
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if args.run is None:
        config = build({"ess_threshold": default_threshold(args.potential)} | given)
        return config, load_sigma(config), None, {None: None}
    trained = [TrainedRun(args.run, m, args.device) for m in dict.fromkeys(args.generation)]
    config = trained[0].options(**given)
    setup = trained[0].setup(config)
    pairs = {one.generation: load_pair(one.path, setup.base, read_network) for one in trained}
    return config, setup, trained[0].config, pairs


def sample(args: argparse.Namespace) -> None:
    """Print what p, or each generation of a run, draws; then write its page and its picture."""
    check("--samples", args.samples, low=1)
    say("loading the networks" + (f" of {args.run}" if args.run else ""))
    config, setup, trained, pairs = load(args)
    usual = 200 if args.run is None else 50
    particles = usual if args.particles is None else args.particles
    about = {"run": args.run, "runs": args.runs}
    about |= {name: getattr(config, name) for name in SHOWN}
    about["particles"] = particles
    populations = {}
    for m, pair in pairs.items():
        drawn = draw(setup, pair, config, particles, args.runs)
        record = about | {
            "generation": m,
            "remarks": remarks(drawn, config, trained),
            "log_z_hat": drawn.log_z_hat,
            "log_z_half_width": drawn.evidence().half_width(),
            "log_z_hat_of_runs": drawn.population.log_z.tolist(),
            "ess": drawn.population.ess.mean().item(),
            "pooled_ess": drawn.ess,
            "samples": drawn.samples(args.samples),
            "distinct": len(set(drawn.texts)),
            "weighted": [drawn.row(k) for k in range(len(drawn.texts))],
        }
        print(json.dumps(finite_or_null(record)) if args.json else as_text(record), flush=True)
        populations[m] = drawn
    if args.html:
        log_z = setup.exact and setup.exact.log_z
        write_text(args.html, genealogy.page(populations, about, setup.tokenizer, log_z))
        say(f"wrote {args.html}")
    if args.picture:
        from eval.viewer.picture import draw_genealogy  # matplotlib takes a second to load

        log_phi = drawn.scores["log_phi"][:particles]  # of the first run
        draw_genealogy(drawn.trace, log_phi, setup.tokenizer, args.picture)
        say(f"wrote {args.picture}")


def is_prompt(args: argparse.Namespace) -> bool:
    """Whether the only positional argument is a prompt, because --potential can do without RUN."""
    if args.run is None or args.prompt is not None or args.potential is None:
        return False
    is_path = Path(args.run).is_dir() or ("/" in args.run and " " not in args.run)
    return not is_path


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "python -m tsmc (RUN | --potential SPEC) [PROMPT] [OPTIONS]"
    parser = OneLineParser("python -m tsmc", usage, __doc__, formatter_class=raw)
    add = parser.add_argument
    add("run", nargs="?", help="directory that main.py wrote")
    add("prompt", nargs="?", help="opening to continue")
    add("--generation", type=int, nargs="+", metavar="M", default=[None], help="default: the last")
    add("--particles", type=int, metavar="K", help="particles (default: 50; without RUN 200)")
    add("--runs", type=int, metavar="R", default=8, help="runs, pooled by Z-hat (default: 8)")
    add("--samples", type=int, metavar="N", default=10, help="samples to draw (default: 10)")
    add("--length", type=int, metavar="T", help="tokens of a continuation")
    add("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    add("--resampling", choices=tuple(SCHEMES), help="resampling scheme")
    add("--ess-threshold", type=float, metavar="SHARE", help="resample where ESS < SHARE of K")
    add("--potential", action="append", help="as in main.py --help; repeat it for a product")
    add("--lm", help="language model, without RUN; as in main.py --help")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    add("--json", action="store_true", help="print a JSON object for each generation")
    add("--html", type=Path, metavar="FILE", help="write a page of the first run's particles")
    add("--picture", type=Path, metavar="FILE", help="draw those of the last M given, as PNG")
    with one_line_errors("python -m tsmc", "lower --particles"):
        args = parser.parse_intermixed_args(arguments)
        if is_prompt(args):
            args.run, args.prompt = None, args.run
        if args.run is None and args.potential is None:
            parser.error(f"no run is named: {usage}")
        if args.run is not None and args.lm is not None:
            parser.error("--lm is for sampling without RUN; leave one of them out")
        if args.run is None and args.generation != [None]:
            parser.error("--generation is one of RUN; leave it out or name RUN")
        sample(args)


if __name__ == "__main__":
    main()
