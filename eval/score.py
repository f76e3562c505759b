"""Texts of any method as rows of the table: `python -m eval.score texts.txt more.txt --run RUN`

A file holds a text in each line, prompt included, with \\n for a line break. Prompt, potential and
exact samples are those of RUN, whose rows come first; without it those of the preset pocket.
Columns as in `eval/metrics.py`, where all texts count as independent; Target's energy is the noise
level of as many texts as the smallest file has. Texts should be about as long as RUN's. N texts.
"""

from pathlib import Path

from eval.metrics import describe
from eval.run.command import OneLineParser, one_line_errors, say
from eval.run.evaluate import evaluate_target
from eval.run.options import RunConfig
from eval.run.setup import load_setup, load_target, sigma_key
from eval.table import aligned, columns, named_rows, read_results
from eval.trained import TrainedRun
from tinystories.checkpoint import reading
from tinystories.errors import shortened


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


def main(arguments: list[str] | None = None) -> None:
    """Print the rows of RUN, or Target, and one for each file; bad input: one line, code 2."""
    with one_line_errors("eval.score"):
        parser = OneLineParser(prog="eval.score", description=__doc__.splitlines()[0])
        parser.add_argument("files", nargs="+", type=Path, help="UTF-8, a text in each line")
        parser.add_argument("--run", type=Path, help="a finished run of main.py to compare with")
        args = parser.parse_args(arguments)
        trained = TrainedRun(args.run) if args.run else None
        config = trained.config if trained else RunConfig()
        results = read_results(args.run) if args.run else {"generations": []}
        files = {path: read_texts(path, config.prompt if args.run else "") for path in args.files}
        say("loading the networks, and scoring exact samples")
        setup = trained.setup(config) if trained else load_setup(config)
        if args.run and (args.run / "target").exists():
            setup.exact = load_target(args.run / "target", sigma_key(config), setup.base.vocab_size)
        if setup.exact is not None:
            results["target"], _ = evaluate_target(setup, min(map(len, files.values())))
        rows = named_rows(results)
        for path, texts in files.items():
            name = f"./{path}" if str(path) in rows else str(path)  # a file may be called Base
            samples = setup.score_texts(texts)
            rows[name] = describe(samples, setup.encode(texts), setup.exact_vectors)
        print(aligned(rows, columns(rows, results)))


if __name__ == "__main__":
    main()
