"""Weighted samples of the target, of a trained pair (p, psi) or without any training.

    python -m tsmc runs/pocket "Once upon a time, there was a"
    python -m tsmc --potential without:girl "Once upon a time, there was a"

Texts are drawn by weight, their share of the weight of all particles of all runs. log Z is the
evidence as estimated from all runs together; ESS is that of the weights at the last token, averaged
over the runs; 1 / sum W^2 is how many independent samples all texts are worth at most. Without RUN
the language model proposes. Options whose default is not named are those of RUN or of main.py.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from eval.command import OneLineParser, one_line_errors, say
from eval.config import RunOptions
from eval.run import finite_or_null
from eval.scorers.potentials import how_to_soften
from eval.trained import TrainedRun, draw
from eval.world import load_sigma
from tinystories.errors import InputError, printable
from tsmc import SCHEMES
from twist import Drawn

OPTIONS = ("prompt", "length", "seed", "potential", "device", "lm")
FEW = 10  # independent samples below which weights are said to have collapsed


def as_text(record: dict) -> str:
    """Estimates, what to think of them, then a line for every sample."""
    source = "p proposes" if record["run"] is None else f"generation {record['generation']}"
    sizes = f"{record['runs']} runs of K = {record['particles']}, T = {record['length']}"
    evidence = f"log Z {record['log_z']:.2f} +- {record['log_z_half_width']:.2f}"
    ess = f"ESS {record['ess']:.1f} of {record['particles']}"
    worth = f"all texts are worth {record['pooled_ess']:.1f} samples (1 / sum W^2)"
    lines = [
        printable(record["prompt"]),
        f"{source}, {sizes}, seed {record['seed']}",
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


def remarks(drawn: Drawn, options: RunOptions, trained: RunOptions | None) -> list[str]:
    """What the numbers do not say by themselves, a line each."""
    lines = []
    for name in ("prompt", "potential"):
        if trained is not None and getattr(options, name) != getattr(trained, name):
            lines.append(f"p and psi were trained on another {name}: the proposal may be poor")
    if drawn.ess < FEW:
        worth = f"The weights have collapsed: all texts are worth {drawn.ess:.1f} samples"
        softer = how_to_soften(options.potential, 8)
        lines.append(f"{worth}; raise --particles, {softer}, or train (main.py)")
    if warning := drawn.warning():
        lines.append(warning)
    log_phi = drawn.scores["log_phi"]
    if trained is None and log_phi.isneginf().any() and (log_phi[log_phi > -math.inf] == 0).all():
        evidence = drawn.evidence()
        low, high = (math.exp(-evidence.quantile(share)) for share in (0.975, 0.025))
        rate = f"About 1 in {math.exp(-evidence.value):.3g} texts of the model satisfies it"
        lines.append(f"{rate} (95 %: {low:.3g} to {high:.3g})")
    return lines


def record_of(drawn: Drawn, options: RunOptions, samples: int) -> dict[str, Any]:
    """What is printed of a population, with --json in full."""
    log_z = drawn.population.log_z
    return {
        **{name: getattr(options, name) for name in ("prompt", "length", "seed", "potential")},
        "runs": len(log_z),
        "particles": len(drawn.texts) // len(log_z),
        "log_z": drawn.evidence().value,
        "log_z_half_width": drawn.evidence().half_width(),
        "log_z_hat": log_z.tolist(),
        "ess": drawn.population.ess.mean().item(),
        "pooled_ess": drawn.ess,
        "samples": drawn.samples(samples),
        "distinct": len(set(drawn.texts)),
        "weighted": [drawn.row(k) for k in range(len(drawn.texts))],
    }


def sample(args: argparse.Namespace) -> None:
    """Print what p, or each generation of a run, draws; then draw the picture."""
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if "potential" in given:
        given["potential"] = tuple(given["potential"])
    rule: dict[str, Any] = {}
    if args.resampling is not None:
        rule["resample"] = SCHEMES[args.resampling]
    if args.ess_threshold is not None:
        rule["ess_threshold"] = args.ess_threshold
    say("loading the networks" + (f" of {args.run}" if args.run else ""))
    if args.run is None:
        options, generations = RunOptions(**given), [None]
        world = load_sigma(options)
    else:
        generations = [TrainedRun(args.run, m, args.device) for m in args.generation]
        options = generations[0].options(**given)
        world = generations[0].world(options)
    particles = args.particles
    if particles is None:
        particles = 200 if args.run is None else 50
    for one in generations:
        pair = one and one.pair(world)
        whole_rule = (one.rule(world) if one else {}) | rule
        drawn = draw(world, pair, options, particles, args.runs, **whole_rule)
        said = remarks(drawn, options, one and one.config.run)
        about = {"run": args.run, "generation": one and one.generation, "remarks": said}
        record = about | record_of(drawn, options, args.samples)
        print(json.dumps(finite_or_null(record)) if args.json else as_text(record), flush=True)
    if args.picture:
        from eval.picture import draw_genealogy  # matplotlib takes a second to load

        log_phi = drawn.scores["log_phi"][:particles]  # of the first run
        draw_genealogy(drawn.trace, log_phi, world.tokenizer, args.picture)
        say(f"wrote {args.picture}")


def is_prompt(args: argparse.Namespace) -> bool:
    """Whether the only positional argument is a prompt, because --potential can do without RUN."""
    if args.run is None or args.prompt is not None or args.potential is None:
        return False
    try:
        is_name = Path(args.run).is_dir() or ("/" in args.run and " " not in args.run)
        return args.run == "" or not is_name
    except OSError:  # too long for the name of a file
        return True


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
    add("--runs", type=int, metavar="R", default=8, help="runs, weighed by Z-hat (default: 8)")
    add("--samples", type=int, metavar="N", default=10, help="samples to draw (default: 10)")
    add("--length", type=int, metavar="T", help="tokens of a continuation")
    add("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    add("--resampling", choices=tuple(SCHEMES), help="resampling scheme")
    add("--ess-threshold", type=float, metavar="SHARE", help="resample where ESS < SHARE of K")
    add("--potential", action="append", help="as in main.py --help; repeat it for a product")
    add("--lm", help="language model, without RUN; as in main.py --help")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--json", action="store_true", help="print a JSON object for each generation")
    add("--picture", type=Path, metavar="FILE", help="draw the particles of the last M, as PNG")
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
        if args.prompt == "" and args.run is None:
            raise InputError("the prompt is empty; give at least one word")
        sample(args)


if __name__ == "__main__":
    main()
