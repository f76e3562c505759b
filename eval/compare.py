"""Runs side by side: `python -m eval.compare RUN RUN ...`, with rows for other methods.

Runs that differ in their seed alone are averaged: each number is the mean over them with half of
its 95 % interval (Student's t over seeds). All runs must have the same sigma. A row Target or Base
is that of the first run. --texts adds a row for the texts of any method, a text in each line with
its prompt, and \\n for a line break. --log-q adds KL(sigma||q) of any method: a file with log q of
each exact sample of the first run's sigma, a number in each line, in the order of its file (or of
checkpoints/pocket/target), a safetensors file with the tokens.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from eval.command import OneLineParser, one_line_errors
from eval.config import RunOptions, saved_config
from eval.evaluate import target_row
from eval.metrics import describe, kl_of_log_q
from eval.table import aligned, columns, named_rows, read_results
from eval.world import World, load_world, sigma_key
from tinystories.checkpoint import read_json, reading
from tinystories.errors import InputError, shortened
from tsmc.runs import Streams

NEUTRAL = ("seed", "out", "device", "target", "generations")


def kinds_of(runs: list[Path]) -> dict[str, list[dict]]:
    """The named rows of the runs of each kind, by a title for the kind.

    InputError where two runs have other sigmas, or two of a kind the same seed.
    """
    kinds: dict[str, dict[int, dict]] = {}  # by its options: the rows of each seed
    first: dict[str, Any] = {}
    for run in runs:
        config = saved_config(run)
        sigma = sigma_key(config.run, read_json(run / "config.json").get("networks", {}))
        sigma["dtype"] = config.run.dtype
        first = first or sigma
        for name in [*first, *sigma]:
            if sigma.get(name) != first.get(name):
                fault = f"{run}: differs from {runs[0]} in {name}, so its sigma is another"
                raise InputError(f"{fault}; compare runs of one target")
        options = config.as_json().items()
        own = {name: value for name, value in options if name not in NEUTRAL}
        kind = kinds.setdefault(json.dumps(own), {})
        if config.run.seed in kind:
            raise InputError(f"{run}: another run has its seed; name each seed once")
        kind[config.run.seed] = named_rows(read_results(run))
    learners = [json.loads(own)["learner"] for own in kinds]
    named = {}
    for number, (name, kind) in enumerate(zip(learners, kinds.values(), strict=True), 1):
        title = name if learners.count(name) == 1 else f"{name} ({number})"
        named[title] = list(kind.values())
    return named


def read_texts(path: Path, prompt: str) -> list[str]:
    """The lines of a file that are not empty; InputError for fewer than two, or another prompt."""
    with reading(path, "cannot be read as texts", "give a whole text in each line, as UTF-8"):
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # with or without its mark
        texts = [line.replace("\\n", "\n") for line in lines if line.strip()]
        if len(texts) < 2:
            raise ValueError(f"it holds {len(texts)} texts, at least 2 are needed")
        if others := [text for text in texts if not text.startswith(prompt)]:
            raise ValueError(f"{shortened(others[0])!r} does not begin with {prompt!r}")
        return texts


def add_texts(
    rows: dict[str, list[dict]], files: list[Path], options: RunOptions, world: World
) -> None:
    """A row for each file of texts, and Target's noise level for as many as the smallest has."""
    texts = {path: read_texts(path, options.prompt) for path in files}
    if world.exact is not None:
        target = world.score(world.exact.tokens)
        rows["Target"] = [target_row(world, target, min(map(len, texts.values())))]
    for path, own in texts.items():
        samples = world.score_texts(own)
        rows[str(path)] = [describe(samples, world.encode(own), world.exact_vectors)]


def add_log_q(rows: dict[str, list[dict]], path: Path, world: World) -> None:
    """A row with KL(sigma||q) of a file of log q."""
    if world.exact is None:
        fault = "the first run has no exact samples, so there is no KL"
        raise InputError(f"--log-q {path}: {fault}; name another run first")
    count = len(world.exact.tokens)
    with reading(path, "holds no log q", f"give {count} lines, a number in each"):
        numbers = [float(line) for line in path.read_text().split()]
        log_q = torch.tensor(numbers, dtype=torch.float64, device=world.exact.tokens.device)
        if log_q.shape != (count,) or not bool((log_q <= 0).all()):
            raise ValueError(f"it has {len(log_q)} numbers, or some above 0")
    kl = kl_of_log_q(log_q, world.base, world.exact)
    rows[str(path)] = [{"kl_target_proposal": kl.value}]


def add_best_of(rows: dict[str, list[dict]], count: int, options: RunOptions, world: World) -> None:
    """A row for the best by phi of `count` texts of p, as many times as a row has texts / 5."""
    groups = options.row_size() // 5
    streams = Streams(options.seed, options.torch_device())
    tokens = world.draw_base(streams, "best of n", groups * count)  # [groups n, T]
    best = world.potential(tokens).view(groups, count).argmax(1)  # [groups]
    samples = world.score(tokens.view(groups, count, -1)[torch.arange(groups), best])
    row = describe(samples, world.encode(samples.texts), world.exact_vectors)
    rows[f"Best of {count}"] = [row]


def main(arguments: list[str] | None = None) -> None:
    """Print the tables; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.compare"):
        raw = argparse.RawDescriptionHelpFormatter
        parser = OneLineParser("python -m eval.compare", description=__doc__, formatter_class=raw)
        add = parser.add_argument
        add("runs", nargs="+", type=Path, help="finished runs of main.py")
        add("--texts", nargs="+", type=Path, default=[], help="UTF-8, a text in each line")
        add("--best-of", type=int, metavar="N", help="a row for the best of N texts of p")
        add("--log-q", type=Path, help="log q of each exact sample, a number in each line")
        args = parser.parse_args(arguments)
        rows: dict[str, list[dict]] = {}
        for title, runs in kinds_of(args.runs).items():
            for name in runs[0]:
                if name in ("Base", "Target"):
                    rows.setdefault(name, [runs[0][name]])
                elif all(name in one for one in runs):
                    rows[f"{title}, {name.lower()}"] = [one[name] for one in runs]
        if args.texts or args.best_of is not None or args.log_q:
            options = saved_config(args.runs[0]).change(device="auto").run
            world = load_world(options, args.runs[0])  # with its exact samples
            if args.texts:
                add_texts(rows, args.texts, options, world)
            if args.best_of is not None:
                add_best_of(rows, args.best_of, options, world)
            if args.log_q:
                add_log_q(rows, args.log_q, world)
        first = {name: found[0] for name, found in rows.items()}
        shown = columns(first, read_results(args.runs[0]))
        print(aligned(rows, shown))


if __name__ == "__main__":
    main()
