"""The options of `main.py`: those of a job, and those of its learner, which stand beside its code.

A field `ctl_updates` becomes `--ctl-updates`, and `--no-...` switches a switch off.
"""

import argparse
import dataclasses
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill import LEARNERS
from distill.options import check, flag_of, kind_of, option
from eval.command import OneLineParser, say
from tinystories.files import reading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POCKET = Path(__file__).resolve().parents[1] / "checkpoints" / "pocket"
PRESETS: dict[str, dict[str, str]] = {  # of the networks
    "pocket": {},
    "paper": {
        "lm": "roneneldan/TinyStories-33M@854a281ebcd3a0c8cd4be3f7e676bc20dca27cd3",
        "toxicity_model": "nicholasKluge/ToxicityModel@d40cd71847981a0868aa3554c96c0aaf8c189753",
        "similarity_model": "sentence-transformers/all-MiniLM-L6-v2"
        "@1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
    },
}


@dataclass(frozen=True)
class Options:
    """Everything that a command may say of a job."""

    generations: int = option(2, "M, generations after generation 0 [2; of baselines 0]", low=0)
    learner: str = option("paper", "how to learn", choices=tuple(LEARNERS))
    potential: tuple[str, ...] = option(
        ("toxicity",),
        "phi: toxicity, nontoxicity, keyword:WORD, regex:PATTERN, without:WORD (~C before the "
        "colon: a miss costs C nats), ended (the text ends before T) or FILE.py:NAME, a function "
        "of texts; repeated: a product",
    )
    beta: float = option(10.0, "strength of the classifier: phi = p(toxic | s)^beta")
    prompt: str = option("Once upon a time, there was a", "s_0, with which stories begin")
    length: int = option(20, "T, tokens of a continuation")
    end: tuple[str, ...] = option(
        (), "token after which a text is finished, as <|endoftext|>; repeated: any of them [none]"
    )
    preset: str = option("pocket", "which networks", choices=tuple(PRESETS))
    lm: str = option(str(POCKET / "lm"), "language model [the preset's]")
    toxicity_model: str = option(str(POCKET / "toxicity"), "classifier [the preset's]")
    similarity_model: str = option(str(POCKET / "similarity"), "sentence encoder [the preset's]")
    target: str = option("", "exact samples of this sigma that another job has drawn (JOB/target)")
    out: str = option("", "directory to write to, not existing yet [a new one in runs/]")
    seed: int = option(0, "seed of everything random", low=0, high=2**63 - 1)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    dtype: str = option("float32", "type of the networks, but for training", choices=tuple(DTYPES))
    eval_particles: tuple[int, ...] = option((50,), "K in testing; of further K the score alone")
    eval_runs: int = option(40, "TSMC runs of K particles for a row of the table", low=2)
    eval_target_proposals: int = option(
        100_000, "most draws for 200 exact samples, if there are none yet; 0: none", low=0
    )

    learning: Any = None  # the `Options` of the learner, by default with its own defaults

    def __post_init__(self):
        check(self)
        for text in (self.prompt, *self.potential, *self.end):
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError(f"{text!r}: has bytes that are no UTF-8; give text")
        if self.learning is None:
            object.__setattr__(self, "learning", LEARNERS[self.learner].Options())
        check(self.learning)

    def as_json(self) -> dict[str, Any]:
        """All values by name, those of the learner among them, as `build` reads them."""
        own = dataclasses.asdict(self)
        learning = own.pop("learning")
        return own | learning

    def row_size(self) -> int:
        """How many texts a row of the table has."""
        return self.eval_runs * self.eval_particles[0]

    def torch_device(self) -> torch.device:
        """The device to run on, with torchrun this process's GPU; ValueError if unavailable."""
        name = self.device
        if name in ("auto", "cuda") and torch.cuda.is_available():
            name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        try:
            return torch.Generator("cpu" if name == "auto" else name).device
        except (RuntimeError, AssertionError) as error:
            fault = f"--device {name}: there is no such device here"
            raise ValueError(f"{fault}; give auto, cpu, cuda or cuda:N") from error


def build(values: dict[str, Any]) -> Options:
    """Options by name; the others have the defaults of the learner and the preset.

    ValueError names an option that does not fit, or that the learner does not have.
    """
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    name = given.get("learner", Options.learner)
    learner = LEARNERS.get(name, LEARNERS[Options.learner])  # Options refuses another name
    preset = PRESETS.get(given.get("preset", Options.preset), {})
    full = {"generations": learner.generations} | preset | given
    names = {field.name for field in dataclasses.fields(Options) if field.name != "learning"}
    own = {key: value for key, value in full.items() if key in names}
    rest = {key: value for key, value in full.items() if key not in names}
    for key in rest.keys() - {field.name for field in dataclasses.fields(learner.Options)}:
        raise no_option(key, name)
    return Options(**own, learning=learner.Options(**rest))


def no_option(key: str, learner: str) -> ValueError:
    """That a learner does not have an option, and whose it is or which one it resembles."""
    kinds = (Options, *(kind.Options for kind in LEARNERS.values()))
    every = [field.name for kind in kinds for field in dataclasses.fields(kind) if field.metadata]
    near = difflib.get_close_matches(key, every, 1)
    remedy = f"did you mean {flag_of(near[0])}?" if near else "see main.py --help"
    if owners := [name for name, kind in LEARNERS.items() if hasattr(kind.Options, key)]:
        remedy = f"it belongs to {' and '.join(owners)}"
    return ValueError(f"{flag_of(key)}: no option of --learner {learner}; {remedy}")


def add_arguments(group: Any, options: type, names: Sequence[str] = ()) -> None:
    """Add options, all or those named, to a parser or a group of it."""
    for field in dataclasses.fields(options):
        if field.name == "learning" or (names and field.name not in names):
            continue
        default, kind, choices = field.default, kind_of(field), field.metadata["choices"]
        text = field.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
        extra: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
        if choices:
            extra["choices"] = choices
        if kind is bool:
            extra = {"action": argparse.BooleanOptionalAction}
            default = "on" if default else "off"
        elif isinstance(default, tuple):  # texts hold spaces, so each has the flag of its own
            extra |= {"action": "append"} if kind is str else {"nargs": "+"}
            default = " ".join(map(str, default))
        if "[" not in text and default != "":
            text += f" [{default}]"
        group.add_argument(flag_of(field.name), help=text.replace("%", "%%"), **extra)


def read_options(arguments: list[str] | None, description: str) -> tuple[Options, Path | None]:
    """The options of the command line, or those of the job that --resume names and its folder.

    With --resume only --generations may be given anew, to extend a job.
    """
    parser = OneLineParser(
        usage="python main.py [options]",
        description=f"{description} Defaults are in brackets.",
        epilog="Each learner has options of its own: --learner NAME --help shows them.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--resume", metavar="JOB", help="continue this job, with its own options")
    add_arguments(parser.add_argument_group("the job, its networks and its table"), Options)
    chosen = parser.parse_known_args(arguments)[0]
    path = Path(chosen.resume) if "resume" in chosen else None
    options = saved_options(path) if path else None
    learner = options.learner if options else getattr(chosen, "learner", Options.learner)
    add_arguments(parser.add_argument_group(f"the learner ({learner})"), LEARNERS[learner].Options)
    parser.add_argument("-h", "--help", action="help", help="show this")
    known, unknown = parser.parse_known_args(arguments)
    for word in unknown[:1]:
        if word.startswith("-"):
            raise no_option(word.partition("=")[0].lstrip("-").replace("-", "_"), learner)
        remedy = f"a job is continued by --resume {word}, and other values belong to an option"
        raise ValueError(f"{word}: is not an option; {remedy}")
    given = vars(known)
    if options is None:
        return build(given), None
    del given["resume"]
    if "generations" in given:
        options = dataclasses.replace(options, generations=given.pop("generations"))
    if given:
        others = ", ".join(map(flag_of, given))
        raise ValueError(f"--resume takes the options of the job; leave out {others}")
    return options, path


def saved_options(folder: Path) -> Options:
    """The options in the config.json of a job's folder; ValueError where they do not fit.

    Options that are absent, because the job is older than they are, have their defaults.
    """
    path = folder / "config.json"
    with reading(path, "holds no options of a job", "name a job of this version of main.py"):
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw.pop("versions", None)
        options = build(raw)
    absent = options.as_json().keys() - raw.keys()
    if absent:
        names = ", ".join(sorted(map(flag_of, absent)))
        say(f"{path}: is of an older version; it is gone on with the defaults of {names}")
    return options
