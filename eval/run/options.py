"""Every option of `main.py`: the fields of dataclasses, with help for each, and the command line.

The learners' options stand beside their code in `distill/`. A field `ctl_updates` becomes
`--ctl-updates`. The help of a switch describes what is switched on; `--no-...` switches it off.
"""

import argparse
import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.options import check_all, option
from distill.pooled import PooledOptions
from distill.published import PublishedOptions
from eval.run.command import OneLineParser
from eval.scorers.potentials import CLASSIFIED, rule
from tinystories.checkpoint import read_json, reading
from tinystories.errors import InputError, shortened
from tinystories.hub import checkpoint_directory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POCKET = Path(__file__).resolve().parents[2] / "checkpoints" / "pocket"
AS_PUBLISHED = {"learner": "published", "resampling": "multinomial", "ess_threshold": 1.0}


@dataclass(frozen=True)
class Preset:
    """Where the three networks and any exact samples of the target come from, and K in training."""

    lm: str = str(POCKET / "lm")
    toxicity_model: str = str(POCKET / "toxicity")
    similarity_model: str = str(POCKET / "similarity")
    target: Path | None = POCKET / "target"
    particles: int = 50


PAPER = Preset(
    "roneneldan/TinyStories-33M@854a281ebcd3a0c8cd4be3f7e676bc20dca27cd3",
    "nicholasKluge/ToxicityModel@d40cd71847981a0868aa3554c96c0aaf8c189753",
    "sentence-transformers/all-MiniLM-L6-v2@1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
    target=None,
    particles=100,
)
PRESETS = {"pocket": Preset(), "paper": PAPER}


@dataclass(frozen=True)
class EvaluationOptions:
    eval_particles: int = option(50, "K in testing", 1)
    eval_runs: int = option(40, "independent TSMC runs whose particles are pooled", 2)
    eval_base_samples: int = option(2000, "samples of p^(0)", 2)
    eval_target_proposals: int = option(
        100_000, "most draws for 200 exact samples, if none are shipped; 0: none", 0
    )


@dataclass(frozen=True)
class RunConfig(PublishedOptions, PooledOptions, EvaluationOptions):
    """All options of a run; those of the learners and of the table are inherited."""

    generations: int = option(2, "M, generations after generation 0", 0)
    learner: str = option("published", "how to learn", choices=("published", "pooled"))
    as_published: bool = option(False, "the published learner, multinomial resampling at each step")
    potential: tuple[str, ...] = option(
        ("toxicity",),
        "phi: toxicity, nontoxicity, keyword:WORD, regex:PATTERN, without:WORD, "
        "first-sentence:WORDS (~C before the colon: a miss costs C nats) or FILE.py:NAME, a "
        "function of texts; repeated: a product",
    )
    beta: float = option(10.0, "strength of the classifier: phi = p(toxic | s)^beta", 0)
    toxicity: bool = option(False, "a column of p(toxic | s), whatever the potential is")
    prompt: str = option("Once upon a time, there was a", "s_0, with which stories begin")
    length: int = option(20, "T, tokens of a continuation", 1)
    end: str = option("", "token after which a text is finished, as <|endoftext|> [none]")
    preset: str = option("pocket", "which networks", choices=PRESETS)
    lm: str = option("", "language model [the preset's]")
    toxicity_model: str = option("", "toxicity classifier [the preset's]")
    similarity_model: str = option("", "sentence encoder [the preset's]")
    out: str = option("", "directory to write to, not existing yet [a new one in runs/]")
    seed: int = option(0, "seed of everything random", 0, 2**63 - 1)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:N or mps")
    dtype: str = option("float32", "type of the networks, but for training", choices=DTYPES)
    rows: int = option(1000, "sequences in memory at a time, at least one TSMC run", 1)
    quiet: bool = option(False, "no progress, only what needs attention and the table")

    def __post_init__(self):
        check_all(self, flag_of)

    def checkpoint(self, role: str) -> Path:
        """Directory of `lm`, `toxicity_model` or `similarity_model`, fetched where needed."""
        name = getattr(self, role) or getattr(PRESETS[self.preset], role)
        return checkpoint_directory(name, flag_of(role))

    def torch_device(self) -> torch.device:
        """The device to run on, with torchrun this process's GPU; InputError if unavailable."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and "LOCAL_RANK" in os.environ:
            name = f"cuda:{int(os.environ['LOCAL_RANK']) % max(1, torch.cuda.device_count())}"
        try:
            return torch.Generator(name).device
        except (RuntimeError, AssertionError) as error:
            reason = shortened(str(error).splitlines()[0])
            fault = f"--device {self.device} is not available ({reason})"
            raise InputError(f"{fault}; use --device cpu") from error

    def keeps_sigma(self) -> bool:
        """Whether p^(m) sees the same sigma through phi^(m); the pooled learner always does."""
        return self.effective_potential or self.learner == "pooled"

    def has_classifier(self) -> bool:
        """Whether phi is a power of the toxicity classifier's score, or of its opposite."""
        return not set(CLASSIFIED).isdisjoint(self.potential)

    def reads_classifier(self) -> bool:
        """Whether the toxicity classifier is needed; otherwise it is not loaded."""
        return self.toxicity or self.has_classifier()


GROUPS = {  # titles in --help, and the class that declares the options
    "the run, what it aims at and the networks": RunConfig,
    "the published learner (--resampling and --ess-threshold serve both)": PublishedOptions,
    "the pooled learner (--learner pooled)": PooledOptions,
    "the table": EvaluationOptions,
}
READ_BY_ALL = {"resampling", "ess_threshold"}


def flag_of(name: str, value: Any = True) -> str:
    """`--ctl-updates` of ctl_updates, and `--no-surrogate` of a switch that is off."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def declared(kind: type) -> Iterator[dataclasses.Field]:
    """The options that a class declares itself, in their order."""
    fields = {item.name: item for item in dataclasses.fields(kind)}
    return (fields[name] for name in kind.__annotations__)


def make_parser(description: str) -> argparse.ArgumentParser:
    """An argument for every option; those not given are absent from what it parses."""
    parser = OneLineParser(
        usage="python main.py [options]",
        description=f"{description} Defaults are in brackets.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--resume", metavar="RUN", help="continue this run, with its own options")
    for title, kind in GROUPS.items():
        group = parser.add_argument_group(title)
        for item in declared(kind):
            add_argument(group, item)
    return parser


def add_argument(group: argparse._ArgumentGroup, item: dataclasses.Field) -> None:
    """Add the argument of one option, or both of a switch."""
    default, text = item.default, item.metadata["help"]
    if item.type is bool:
        shown = f"{text} [{'on' if default else 'off'}]"
        group.add_argument(flag_of(item.name), action=argparse.BooleanOptionalAction, help=shown)
        return
    if choices := item.metadata["limits"]["choices"]:
        text += f": {', '.join(choices)}"
    kind = {"action": "append"} if isinstance(default, tuple) else {"type": item.type}
    brackets = " ".join(default) if isinstance(default, tuple) else default
    text += "" if default == "" else f" [{brackets}]"
    metavar = {int: "N", float: "X"}.get(item.type, "NAME")
    group.add_argument(flag_of(item.name), metavar=metavar, help=text.replace("%", "%%"), **kind)


def checked(item: dataclasses.Field, value: Any) -> Any:
    """The value in the type of the option's default; InputError for another type."""
    flag = flag_of(item.name)
    wanted = type(item.default)
    if (wanted, type(value)) in ((tuple, list), (float, int)):  # as JSON has them
        value = wanted(value)
    if type(value) is not wanted:
        fault = f"{flag} is {shortened(repr(value))}"
        raise InputError(f"{fault}; give a value of type {wanted.__name__}")
    if wanted is tuple and (not value or any(type(part) is not str for part in value)):
        raise InputError(f"{flag} is {shortened(repr(value))}; give one text or more")
    return value


def build(values: dict[str, Any]) -> RunConfig:
    """A config from values by name; the others have their defaults."""
    fields = dataclasses.fields(RunConfig)
    full = {item.name: checked(item, values.get(item.name, item.default)) for item in fields}
    return RunConfig(**full)


def default_threshold(potential: Iterable[str]) -> float:
    """The share of K under which runs resample; without a prefix part only at the end."""
    rules = [rule(spec) for spec in potential if spec not in CLASSIFIED]
    return 0.5 if any(factor.log_prefix is not None for factor in rules) else 0.0


def refuse_unread(config: RunConfig, given: dict[str, Any]) -> None:
    """InputError for an option on the command line that this run would not read."""
    for learner, kind in (("published", PublishedOptions), ("pooled", PooledOptions)):
        for item in declared(kind):
            if item.name in given and config.learner != learner and item.name not in READ_BY_ALL:
                flag = flag_of(item.name, given[item.name])
                remedy = f"leave it out or add --learner {learner}"
                raise InputError(f"{flag} has no effect without --learner {learner}; {remedy}")
    if "beta" in given and not config.has_classifier():
        raise InputError("--beta has no effect without --potential toxicity; leave it out")


def read_config(arguments: list[str] | None, description: str) -> tuple[RunConfig, Path | None]:
    """The command line as a RunConfig, or the options and the directory that --resume names.

    Of the process's own command line, InputError also names an option that the run does not read.
    """
    given = vars(make_parser(description).parse_args(arguments))
    if "resume" in given:
        path = Path(given.pop("resume"))
        quiet = given.pop("quiet", None)
        if given:
            others = ", ".join(flag_of(*one) for one in given.items())
            raise InputError(f"--resume takes the options of the run; leave out {others}")
        config = saved_config(path)
        return dataclasses.replace(config, quiet=config.quiet if quiet is None else quiet), path
    values = dict(given)
    if given.get("as_published"):
        for name in AS_PUBLISHED.keys() & given.keys():
            flag = flag_of(name, given[name])
            raise InputError(f"--as-published sets {flag} itself; leave one of them out")
        values |= AS_PUBLISHED
    preset = PRESETS.get(values.get("preset", "pocket"), Preset())  # `build` refuses other names
    defaults = {"particles": preset.particles}
    defaults["ess_threshold"] = default_threshold(values.get("potential", ()))
    config = build(defaults | values)
    if arguments is None:
        refuse_unread(config, given)
    return config, None


def saved_config(run: Path) -> RunConfig:
    """The options in the config.json of a run's directory; InputError where they do not fit."""
    path = Path(run) / "config.json"
    if Path(run).is_dir() and not path.exists():
        is_empty = {one.name for one in Path(run).iterdir()} <= {".lock"}
        remedy = "delete it, or name another directory" if is_empty else "name a run of main.py"
        raise InputError(f"{run}: holds no config.json, so no run; {remedy}")
    raw = read_json(path)
    with reading(path, "holds no options of a run", "name a directory that main.py wrote"):
        return build({item.name: raw[item.name] for item in dataclasses.fields(RunConfig)})
