"""Make the pocket checkpoints anew: `python -m eval.pocket WHAT --help`.

Every command trains or draws, writes the result into --out, and measures it; `figures.json` there
has the command and the figures. --stories, and --heldout of lm and similarity, have a line
<|endoftext|> after each story; --labelled, and --heldout of toxicity, are CSV files with the
columns text and label (1 is toxic); --teacher is the directory of all-MiniLM-L6-v2.
"""

import json
import math
import shlex
import sys
from argparse import Namespace, RawDescriptionHelpFormatter

from eval.pocket import lm, similarity, target, toxicity
from eval.run.command import one_line_errors
from eval.run.options import OneLineParser
from eval.run.run import finite_or_null
from tinystories.checkpoint import write_json
from tinystories.errors import InputError
from tinystories.fast import keep_freed_memory

COMMANDS = {"lm": lm, "toxicity": toxicity, "similarity": similarity, "target": target}


def parse(arguments: list[str]) -> Namespace:
    """Read the command line; InputError for a number that is negative or not finite."""
    style = {"formatter_class": RawDescriptionHelpFormatter}
    parser = OneLineParser(prog="python -m eval.pocket", description=__doc__, **style)
    commands = parser.add_subparsers(dest="command", metavar="WHAT", required=True)
    for name, module in COMMANDS.items():
        module.add_options(commands.add_parser(name, description=module.__doc__, **style))
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise InputError(f"--{name} is {value}; give a number that is not negative")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Command line to checkpoint and figures; bad input ends with one line and exit code 2."""
    with one_line_errors("python -m eval.pocket"):
        arguments = sys.argv[1:] if arguments is None else arguments
        args = parse(arguments)
        args.out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
        keep_freed_memory()
        figures = finite_or_null(COMMANDS[args.command].make(args))
        line = shlex.join(["python", "-m", "eval.pocket", *arguments])
        write_json(args.out / "figures.json", {"command": line, **figures})
        print(f"{args.out}: done, {json.dumps(figures, indent=2)}")


if __name__ == "__main__":
    main()
