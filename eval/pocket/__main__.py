"""Make the pocket checkpoints anew: `python -m eval.pocket WHAT --help` (`docs/pocket.md`).

Each command trains or draws, and writes the result and its `figures.json` into --out. The defaults
are those of the shipped checkpoints. `target` draws exact samples of sigma by rejection, which
belong to the two checkpoints that it names only.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from eval.pocket import lm, similarity, toxicity
from eval.run.command import one_line_errors
from eval.run.options import POCKET, OneLineParser, RunConfig
from eval.run.run import finite_or_null
from eval.run.setup import load_setup, save_target, sigma_key
from tinystories.checkpoint import write_json
from tinystories.errors import InputError
from tsmc.rejection import draw_accepted, exact_samples
from tsmc.runs import chunk_sizes, joined


def draw_target(args: Namespace, generator: torch.Generator) -> dict:
    """Write the exact samples and return their number and log Z_sigma."""
    names = ("lm", "toxicity_model", "prompt", "length", "beta")
    config = RunConfig(device="cpu", **{name: getattr(args, name) for name in names})
    setup = load_setup(config)
    base, potential = setup.base, setup.potential
    sizes = chunk_sizes(args.proposals, lm.CHUNK)
    drawn = [draw_accepted(base, potential, size, generator) for size in sizes]
    exact = exact_samples(joined(drawn))
    if len(exact.tokens) < 2:
        raise InputError(f"{len(exact.tokens)} accepted; raise --proposals or lower --beta")
    save_target(args.out, exact, sigma_key(config), seed=args.seed)
    return {"accepted": len(exact.tokens), "log_z": exact.log_z}


MAKE = {"lm": lm.make, "toxicity": toxicity.make, "similarity": similarity.make}
MAKE["target"] = draw_target


def add(parser: ArgumentParser, *paths: str, **defaults: float | str | Path) -> None:
    """Options --NAME: paths that must be given, and values that need not be."""
    for name in paths:
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in defaults.items():
        options = {"type": type(default), "default": default, "help": "default: %(default)s"}
        parser.add_argument("--" + name.replace("_", "-"), **options)


def main(arguments: list[str] | None = None) -> None:
    """Command line to checkpoint and figures; bad input ends with one line and exit code 2."""
    parser = OneLineParser(prog="python -m eval.pocket", description=__doc__.splitlines()[0])
    group = parser.add_subparsers(dest="command", metavar="WHAT", required=True)
    parsers = {name: group.add_parser(name, description=MAKE[name].__doc__) for name in MAKE}
    add(parsers["lm"], "stories", "heldout", "out", seed=0, vocab_size=4096, width=192, layers=4)
    add(parsers["lm"], heads=6, window=32, context=128, rows=32)
    add(parsers["lm"], steps=8000, peak=2e-3, weight_decay=0.1)
    add(parsers["toxicity"], "labelled", "stories", "heldout", "out", seed=0, lm=POCKET / "lm")
    add(parsers["toxicity"], vocab_size=5000, tokens=64, word_dropout=0.03, samples=60_000)
    add(parsers["toxicity"], hard_samples=2000, batch_size=128, steps=2000, peak=1e-3)
    add(parsers["toxicity"], weight_decay=0.05, calibration_samples=100_000, fresh_samples=200_000)
    add(parsers["similarity"], "teacher", "stories", "heldout", "out", seed=0, validation=1000)
    add(parsers["similarity"], vocab_size=4000, width=128, layers=3, heads=4, positions=128)
    add(parsers["similarity"], openings=100_000, rows=256, steps=1500, peak=2e-3, weight_decay=0.01)
    add(parsers["target"], lm=str(POCKET / "lm"), toxicity_model=str(POCKET / "toxicity"))
    add(parsers["target"], prompt=lm.PROMPT, length=lm.LENGTH, beta=10.0, proposals=900_000)
    add(parsers["target"], seed=0, out=POCKET / "target")
    with one_line_errors("python -m eval.pocket"):
        args = parser.parse_args(arguments)
        args.out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
        figures = MAKE[args.command](args, torch.Generator().manual_seed(args.seed))
        write_json(args.out / "figures.json", finite_or_null(figures))
        print(f"{args.out}: {figures}")


if __name__ == "__main__":
    main()
