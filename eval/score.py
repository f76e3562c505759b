"""Texts of any method as a row of the table: `python -m eval.score texts.txt more.txt`

A file holds a text in each line, the prompt included. Columns as in `eval/metrics.py`; `distance` is how far a set lies from
Target on the plane of similarity and toxicity (paper, Fig. 1), and log phi is beta log p(toxic | s). Target's row has the
values of the exact samples that come with the pocket preset, its `energy` what two halves of them stay under in 95 % of cases.
"""

import math
from pathlib import Path

import torch

from eval.metrics import Samples, describe
from eval.run.command import one_line_errors, say
from eval.run.evaluate import evaluate_target
from eval.run.options import OneLineParser, RunConfig
from eval.run.setup import Problem, load_setup
from eval.run.table import align
from eval.scorers.similarity import SimilarityScorer
from tinystories.errors import InputError
from twist.factors import each_once

COLUMNS = {
    "num_sequences": "d",
    "toxicity": ".3f",
    "log_phi": ".2f",
    "similarity": ".3f",
    "energy": ".3f",
    "distance": ".3f",
}


def read_texts(path: Path) -> list[str]:
    """The lines of a file that hold something; InputError where it cannot be read or has fewer than two."""
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as UTF-8 text ({error}); name a file with a text in each line"
        ) from error
    if len(texts) < 2:
        raise InputError(f"{path}: holds {len(texts)} texts; give at least 2, one in each line")
    return texts


def text_row(texts: list[str], beta: float, problem: Problem, encode: SimilarityScorer) -> dict:
    """The columns of N texts that a method has written independently of each other."""
    log_toxicity = each_once(problem.log_toxicity, texts).double()  # [N]
    samples = Samples(texts, log_toxicity.exp(), beta * log_toxicity, list(range(len(texts))))
    return describe(samples, encode(texts), problem.exact_vectors)


def main(arguments: list[str] | None = None) -> None:
    """Print Target and a row for each file; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.score"):
        parser = OneLineParser(prog="eval.score", description=__doc__.splitlines()[0])
        parser.add_argument("files", nargs="+", type=Path, help="UTF-8, a text in each line, prompt included")
        files = {path: read_texts(path) for path in parser.parse_args(arguments).files}
        config = RunConfig()
        say("loading the networks of the preset pocket, and scoring its exact samples")
        setup = load_setup(config)
        problem = setup.problems[0]
        target, _ = evaluate_target(problem, setup.encode)
        rows = {"Target": target}
        with torch.inference_mode():
            rows |= {str(path): text_row(texts, config.beta, problem, setup.encode) for path, texts in files.items()}
        for row in rows.values():
            row["distance"] = math.hypot(row["similarity"] - target["similarity"], row["toxicity"] - target["toxicity"])
        lines = [["", "texts", *list(COLUMNS)[1:]]]
        lines += [[name, *(format(row[key], form) for key, form in COLUMNS.items())] for name, row in rows.items()]
        print(align(lines))


if __name__ == "__main__":
    main()
