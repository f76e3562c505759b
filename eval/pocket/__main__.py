"""What makes the pocket checkpoints and their model cards: `python -m eval.pocket WHAT --help`.

    lm            the language model                toxicity   the classifier
    similarity    the sentence encoder              target     exact samples of sigma

Each trains or draws, writes its checkpoint into --out, measures that and writes its card. Options are those of the shipped
checkpoints; the same options and files give the same checkpoint on the same machine.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from eval.pocket import lm, similarity, target, toxicity
from eval.run.command import one_line_errors
from tinystories.errors import InputError
from tinystories.fast import keep_freed_memory

WHAT = {"lm": lm, "toxicity": toxicity, "similarity": similarity, "target": target}
FILES = {
    "stories": "training stories, each followed by a line <|endoftext|>",
    "labelled": "training rows text,label,source (1 = toxic)",
    "teacher": "directory of all-MiniLM-L6-v2: config.json, model.safetensors (checked by sha256), tokenizer.json",
    "heldout": "what the card's figures are of, in the form of --labelled, or of --stories where there are no rows",
}
OPTIONS = {  # the lowest value, and what it is
    "lm": (None, "directory of the language model to sample from"),
    "toxicity_model": (None, "directory of the classifier"),
    "vocab_size": (300, "entries of the tokenizer"),
    "width": (1, "hidden size"),
    "layers": (1, "layers; the language model's are global and local in turn"),
    "heads": (1, "attention heads"),
    "window": (1, "window of the local layers in tokens"),
    "context": (2, "positions of a training row and of the model"),
    "positions": (3, "longest text in tokens"),
    "tokens": (3, "tokens of a training text that are read"),
    "word_dropout": (0, "share of tokens hidden in training"),
    "rows": (2, "rows or texts of a batch"),
    "batch_size": (1, "texts of a batch"),
    "steps": (1, "updates"),
    "peak": (0, "highest learning rate"),
    "weight_decay": (0, "AdamW weight decay"),
    "samples": (1, "samples of the language model: to train on, or for the card to show"),
    "hard_samples": (0, "of these, how many are kept as hard after two thirds of the updates"),
    "calibration_samples": (2, "further samples to calibrate on"),
    "fresh_samples": (2, "other samples, which the card judges the regime by"),
    "validation": (0, "last of --stories, compared on and not trained on"),
    "openings": (1, "training texts, read once by the teacher"),
    "prompt": (None, "s_0"),
    "length": (1, "T, tokens of a continuation"),
    "beta": (0, "strength of the potential"),
    "proposals": (2, "base samples to draw"),
    "seed": (0, "seed of everything random"),
}


class Parser(argparse.ArgumentParser):
    """Reports a bad command line as bad input."""

    def error(self, message: str) -> None:
        """InputError that says how to see the options."""
        raise InputError(f"{message}; see {self.prog} --help")


def value_of(kind: type, least: float | None) -> Callable[[str], object]:
    """What reads an option: a value of this kind, finite and at least so large."""

    def read(text: str) -> object:
        value = kind(text)
        if least is not None and not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is out of range, give at least {least}")
        return value

    return read


def make_parser() -> Parser:
    """A command for each checkpoint, with the options that its module has defaults for."""
    parser = Parser(prog="python -m eval.pocket", description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for what, module in WHAT.items():
        title = module.__doc__.splitlines()[0]
        add = commands.add_parser(what, help=title, description=title, allow_abbrev=False).add_argument
        for name in module.FILES:
            add(f"--{name}", type=Path, required=True, help=FILES[name])
        shipped = Path("checkpoints/pocket/target") if module is target else None
        add("--out", type=Path, default=shipped, required=shipped is None, help=f"directory to write to (default: {shipped})")
        add("--card-only", action="store_true", help="train nothing: measure what these options have made, rewrite its card")
        for name, default in {**module.DEFAULTS, "seed": 0}.items():
            least, text = OPTIONS[name]
            kind, flag = value_of(type(default), least), "--" + name.replace("_", "-")
            add(flag, type=kind, default=default, metavar=type(default).__name__.upper(), help=f"{text} (default: {default})")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Command line to checkpoint and card; bad input ends with one line and exit code 2."""
    with one_line_errors("python -m eval.pocket"):
        args = make_parser().parse_args(arguments)
        module = WHAT[args.what]
        defaults = {**module.DEFAULTS, "seed": 0}
        changed = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in defaults if getattr(args, name) != defaults[name]]
        args.changed = " ".join(changed)
        keep_freed_memory()
        if not args.card_only:
            module.make(args)
        module.write_card(args)
        print(f"{args.out / 'README.md'} written")


if __name__ == "__main__":
    main()
