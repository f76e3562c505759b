"""Texts of any method as a row of the table: `python -m eval.score texts.txt more.txt`

A file holds a text in each line, the prompt included. Columns as in `eval/metrics.py`; `distance`
is that from Target on the plane of similarity and toxicity (paper, Fig. 1), and log phi is
beta log p(toxic | s). Target's row has the values of the exact samples of the pocket preset.
"""

import math
from pathlib import Path

from eval.metrics import Samples, describe
from eval.run.command import one_line_errors, say
from eval.run.evaluate import evaluate_target
from eval.run.options import OneLineParser, RunConfig
from eval.run.setup import load_setup
from eval.run.table import align
from tinystories.checkpoint import reading
from twist.potential import each_once

COLUMNS = {"num_sequences": "d", "toxicity": ".3f", "log_phi": ".2f", "similarity": ".3f"}
COLUMNS |= {"energy": ".3f", "distance": ".3f"}


def read_texts(path: Path) -> list[str]:
    """The lines of a file that are not empty; InputError where it has fewer than two."""
    with reading(path, "cannot be read as texts", "name a UTF-8 file with a text in each line"):
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [line for line in lines if line.strip()]
        if len(texts) < 2:
            raise ValueError(f"it holds {len(texts)} texts, at least 2 are needed")
        return texts


def main(arguments: list[str] | None = None) -> None:
    """Print Target and a row for each file; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.score"):
        parser = OneLineParser(prog="eval.score", description=__doc__.splitlines()[0])
        parser.add_argument("files", nargs="+", type=Path, help="UTF-8, a text in each line")
        files = {path: read_texts(path) for path in parser.parse_args(arguments).files}
        say("loading the networks of the preset pocket, and scoring its exact samples")
        config = RunConfig()
        setup = load_setup(config)
        target, _ = evaluate_target(setup, config.eval.runs * config.eval.particles)
        rows = {"Target": target}
        for path, texts in files.items():
            log_toxicity = each_once(setup.log_toxicity, texts).double()  # [N]
            group = list(range(len(texts)))  # the texts are independent of each other
            samples = Samples(texts, log_toxicity.exp(), config.beta * log_toxicity, group)
            rows[str(path)] = describe(samples, setup.encode(texts), setup.exact_vectors)
        lines = [["", "texts", *list(COLUMNS)[1:]]]
        for name, row in rows.items():
            differences = [row[key] - target[key] for key in ("similarity", "toxicity")]
            row["distance"] = math.hypot(*differences)
            lines.append([name, *(format(row[key], form) for key, form in COLUMNS.items())])
        print(align(lines))


if __name__ == "__main__":
    main()
