"""What makes the pocket checkpoints and their model cards: `python -m eval.pocket WHAT --help`.

    lm            the language model                toxicity   the classifier
    similarity    the sentence encoder              target     exact samples of sigma

Each trains or draws, writes what it has made into --out, measures that and fills in its card, `card_*.md`. The options
and their defaults, those of the shipped checkpoints, are in `options.toml`.
"""

import argparse
import shlex
import sys
import tomllib
from pathlib import Path

from eval.pocket import lm, similarity, target, toxicity
from eval.run.command import one_line_errors
from eval.run.options import OneLineParser, check
from tinystories.errors import InputError
from tinystories.fast import keep_freed_memory

COMMANDS = {"lm": lm, "toxicity": toxicity, "similarity": similarity, "target": target}
OPTIONS = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))


def make_parser() -> OneLineParser:
    """A command for each module, with its options."""
    parser = OneLineParser(prog="python -m eval.pocket", description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="WHAT", required=True)
    for name, module in COMMANDS.items():
        title = module.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=title, description=title, allow_abbrev=False)
        only = "make nothing: measure what was made with these options, and rewrite its card"
        command.add_argument("--card-only", action="store_true", help=only)
        for option, about in OPTIONS[name].items():
            flag, default = "--" + option.replace("_", "-"), about.get("default")
            text = about["help"] if default is None else f"{about['help']} (default: {default})"
            kind = Path if default is None or option == "out" else type(default)
            command.add_argument(flag, type=kind, default=default, required=default is None, help=text)
    return parser


def check_options(args: argparse.Namespace) -> None:
    """InputError where an option is out of range or a file is not there."""
    for option, about in OPTIONS[args.command].items():
        flag, value = "--" + option.replace("_", "-"), getattr(args, option)
        check(flag, value, about)
        if "default" not in about and option != "out" and not value.exists():
            raise InputError(f"{flag} {value}: no such file or directory; check the name")
    if "heads" in args and args.width % args.heads:
        raise InputError(f"--width {args.width} is no multiple of --heads {args.heads}; change one of them")


def main(arguments: list[str] | None = None) -> None:
    """Command line to checkpoint and card; bad input ends with one line and exit code 2."""
    with one_line_errors("python -m eval.pocket"):
        arguments = sys.argv[1:] if arguments is None else arguments
        args = make_parser().parse_args(arguments)
        check_options(args)
        args.line = shlex.join(["python", "-m", "eval.pocket", *(word for word in arguments if word != "--card-only")])
        keep_freed_memory()
        if not args.card_only:
            args.out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
            COMMANDS[args.command].make(args)
        COMMANDS[args.command].write_card(args)
        print(f"{args.out}: done, the figures are in README.md")


if __name__ == "__main__":
    main()
