"""Jobs side by side: `python -m eval.compare JOB JOB ...`, with rows for other methods.

Jobs that differ in their seed alone are averaged: each number is the mean over them with half of
its 95 % interval (Student's t over seeds). All jobs must have the same sigma. A row Target or Base
is that of the first job. --texts adds a row for the texts of any method, a text in each line with
its prompt, and \\n for a line break. --log-q adds KL(sigma||q) of any method: a file with log q of
each exact sample of the first job's sigma, a number in each line, in the order of its file (or of
checkpoints/pocket/target), a safetensors file with the tokens. --best-of N adds the best by phi of
N texts of p, whose density follows from F(r) = P(log phi <= r) of a text of p:

    q(s) = p(s) (F(r)^N - F(r-)^N) / (F(r) - F(r-)),   r = log phi(s),   F(r-) = P(log phi < r)
"""

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eval.command import OneLineParser, one_line_errors
from eval.evaluate import target_row
from eval.options import Options, saved_options
from eval.table import aligned, columns, named_rows, read_results
from eval.world import World, check_unchanged, load_world, sigma_of
from tinystories.files import reading
from tsmc import Streams, sample_proposal

NEUTRAL = ("seed", "out", "device", "target", "generations")


def kinds_of(jobs: list[Path]) -> dict[str, list[dict]]:
    """The named rows of the jobs of each kind, by a title for the kind.

    ValueError where one is not finished, or has other options of sigma, or two of a kind one seed.
    """
    kinds: dict[str, dict[int, dict]] = {}  # by its options: the rows of each seed
    first = sigma_of(saved_options(jobs[0]))
    for job in jobs:
        options = saved_options(job)
        for name, value in sigma_of(options).items():
            if value != first.get(name):
                fault = f"{job}: differs from {jobs[0]} in {name}, so its sigma is another"
                raise ValueError(f"{fault}; compare jobs of one target")
        others = {name: v for name, v in options.as_json().items() if name not in NEUTRAL}
        kind = kinds.setdefault(json.dumps(others), {})
        if options.seed in kind:
            raise ValueError(f"{job}: another job has its seed; name each seed once")
        kind[options.seed] = named_rows(read_results(job))
    learners = [json.loads(own)["learner"] for own in kinds]
    named = {}
    for number, (name, kind) in enumerate(zip(learners, kinds.values(), strict=True), 1):
        title = name if learners.count(name) == 1 else f"{name} ({number})"
        named[title] = list(kind.values())
    return named


def read_texts(path: Path, prompt: str) -> list[str]:
    """The lines of a file that are not empty; ValueError for fewer than two, or another prompt."""
    with reading(path, "holds no texts", "give at least 2, a whole text in each line, as UTF-8"):
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # with or without its mark
        texts = [line.replace("\\n", "\n") for line in lines if line.strip()]
        if len(texts) < 2:
            raise ValueError(f"there are {len(texts)}")
        for text in texts:
            if not text.startswith(prompt):
                raise ValueError(f"{text[:80]!r} does not begin with {prompt!r}")
    return texts


def log_q_row(path: Path, world: World) -> dict:
    """A row with KL(sigma||q) of a file of log q."""
    if world.reference is None:
        raise ValueError(f"--log-q {path}: the first job has no exact samples; name another first")
    tokens = world.reference.exact.tokens
    count = len(tokens)
    with reading(path, "holds no log q", f"give {count} lines, a number in each"):
        numbers = [float(line) for line in path.read_text().split()]
        log_q = torch.tensor(numbers, dtype=torch.float64, device=tokens.device)
        if log_q.shape != (count,) or not bool((log_q <= 0).all()):
            raise ValueError(f"it has {len(log_q)} numbers, or some above 0")
    return world.kl_row(log_q)


def best_of_row(count: int, options: Options, world: World) -> dict:
    """The best by phi of n = count texts of p, G times: a fifth of the texts of a row."""
    groups = options.row_size() // 5
    streams = Streams(options.seed, options.torch_device())
    draw = partial(sample_proposal, world.base, None)
    drawn = streams.draw("best of n", None, groups * count, draw)
    tokens = drawn["tokens"]  # [G n, T]
    log_phi = world.potential(tokens).view(groups, count)  # [G, n]
    best = tokens.view(groups, count, -1)[torch.arange(groups), log_phi.argmax(1)]  # [G, T]
    samples = world.score(best)
    row = world.describe(samples)
    if world.reference is not None:
        exact_log_phi = world.reference.exact.log_phi
        log_ratio = best_of_log_ratio(exact_log_phi, log_phi.flatten(), count)
        row |= world.kl_row(world.reference.log_p + log_ratio)
    return row


def best_of_log_ratio(log_phi: Tensor, drawn: Tensor, count: int) -> Tensor:
    """log q(s) - log p(s) of texts with log phi [N], as log phi [M] of texts of p tells F."""
    ascending = drawn.sort().values
    below = torch.searchsorted(ascending, log_phi).double()  # [N] of the M
    upto = torch.searchsorted(ascending, log_phi, right=True).double()  # [N]
    # One more than there are, because no text of p has F = 0.
    log_below, log_upto = (((one + 1) / (len(drawn) + 1)).log() for one in (below, upto))
    # (a^n - b^n) / (a - b) is a sum of powers, which is n a^(n-1) where a = b.
    i = torch.arange(count, device=below.device)
    terms = log_upto[:, None] * i + log_below[:, None] * (count - 1 - i)  # [N, n]
    return terms.logsumexp(1)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables; bad input ends with one line and exit code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser("python -m eval.compare", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("jobs", nargs="+", type=Path, help="finished jobs of main.py")
    add("--texts", nargs="+", type=Path, default=[], help="UTF-8, a text in each line")
    add("--best-of", type=int, metavar="N", help="a row for the best of N texts of p")
    add("--log-q", type=Path, help="log q of each exact sample, a number in each line")
    with one_line_errors("python -m eval.compare"):
        args = parser.parse_args(arguments)
        if args.best_of is not None and args.best_of < 1:
            parser.error(f"--best-of is {args.best_of}; give a number at least 1")
        kinds = kinds_of(args.jobs)
        options = dataclasses.replace(saved_options(args.jobs[0]), device="auto")
        texts = {path: read_texts(path, options.prompt) for path in args.texts}
        world = load_world(options, args.jobs[0])  # with its exact samples
        for job in args.jobs[1:]:
            check_unchanged(job, world)  # their networks and files may be others
        rows: dict[str, list[dict]] = {}
        for title, jobs in kinds.items():
            for name in jobs[0]:
                if name in ("Base", "Target"):
                    rows.setdefault(name, [jobs[0][name]])
                elif all(name in one for one in jobs):
                    rows[f"{title}, {name.lower()}"] = [one[name] for one in jobs]
        if texts and world.reference is not None:  # its noise level for as many as the smallest
            target = world.score(world.reference.exact.tokens)
            rows["Target"] = [target_row(world, target, min(map(len, texts.values())))]
        for path, own in texts.items():
            rows[str(path)] = [world.describe(world.score_texts(own))]
        if args.best_of is not None:
            rows[f"Best of {args.best_of}"] = [best_of_row(args.best_of, options, world)]
        if args.log_q:
            rows[str(args.log_q)] = [log_q_row(args.log_q, world)]
        first = {name: found[0] for name, found in rows.items()}
        print(aligned(rows, columns(first, read_results(args.jobs[0]))))


if __name__ == "__main__":
    main()
