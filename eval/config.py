"""The options of `main.py`: those of a run, and those of its learner, which stand beside its code.

A field `ctl_updates` becomes `--ctl-updates`. The parser is made of the two classes that the
learner needs, so it knows no option of another learner. The help of a switch says what is switched
on; `--no-...` switches it off.
"""

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill import DPO, GRPO, WEIGHTED, BaselineOptions, Paper, PaperOptions, Pooled, PooledOptions
from distill.learner import check_all, flag_of, option
from eval.command import OneLineParser
from tinystories.checkpoint import read_json
from tinystories.errors import InputError, listed, reason_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POCKET = Path(__file__).resolve().parents[1] / "checkpoints" / "pocket"
LEARNERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "paper": (Paper, PaperOptions, {}),
    "weighted": (Paper, PaperOptions, WEIGHTED),
    "pooled": (Pooled, PooledOptions, {}),
    "dpo": (DPO, BaselineOptions, {"generations": 0}),
    "grpo": (GRPO, BaselineOptions, {"generations": 0, "learning_rate": 1e-3, "strength": 0.64}),
}
"""Each learner by name: its class, its options, and defaults other than those of the options."""
PRESETS: dict[str, dict[str, Any]] = {
    "pocket": {},
    "paper": {
        "lm": "roneneldan/TinyStories-33M@854a281ebcd3a0c8cd4be3f7e676bc20dca27cd3",
        "toxicity_model": "nicholasKluge/ToxicityModel@d40cd71847981a0868aa3554c96c0aaf8c189753",
        "similarity_model": "sentence-transformers/all-MiniLM-L6-v2"
        "@1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
        "particles": 100,
    },
}
"""Defaults by preset, of whichever options the run has."""
MADE_BY = ("versions", "networks")  # entries of config.json that are no options


@dataclass(frozen=True)
class RunOptions:
    generations: int = option(2, "M, generations after generation 0", 0)
    learner: str = option("weighted", "how to learn", choices=LEARNERS)
    potential: tuple[str, ...] = option(
        ("toxicity",),
        "phi: toxicity, nontoxicity, keyword:WORD, regex:PATTERN, without:WORD (~C before the "
        "colon: a miss costs C nats) or FILE.py:NAME, a function of texts; repeated: a product",
    )
    beta: float = option(10.0, "strength of the classifier: phi = p(toxic | s)^beta", 0)
    prompt: str = option("Once upon a time, there was a", "s_0, with which stories begin")
    length: int = option(20, "T, tokens of a continuation", 1)
    end: str = option("", "token after which a text is finished, as <|endoftext|> [none]")
    preset: str = option("pocket", "which networks", choices=PRESETS)
    lm: str = option(str(POCKET / "lm"), "language model [the preset's]")
    toxicity_model: str = option(str(POCKET / "toxicity"), "classifier [the preset's]")
    similarity_model: str = option(str(POCKET / "similarity"), "sentence encoder [the preset's]")
    target: str = option("", "exact samples of this sigma that another run has drawn (RUN/target)")
    out: str = option("", "directory to write to, not existing yet [a new one in runs/]")
    seed: int = option(0, "seed of everything random", 0, 2**63 - 1)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    dtype: str = option("float32", "type of the networks, but for training", choices=DTYPES)
    eval_particles: tuple[int, ...] = option(
        (50,), "K in testing; with further numbers, populations of these K are measured too", 1
    )
    eval_runs: int = option(40, "TSMC runs of K particles for a row of the table", 2)
    eval_target_proposals: int = option(
        100_000, "most draws for 200 exact samples, if there are none yet; 0: none", 0
    )

    def __post_init__(self):
        check_all(self)

    def row_size(self) -> int:
        """How many texts a row of the table has."""
        return self.eval_runs * self.eval_particles[0]

    def torch_device(self) -> torch.device:
        """The device to run on, with torchrun this process's GPU; InputError if unavailable."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda":
            rank = int(os.environ.get("LOCAL_RANK", 0))
            name = f"cuda:{rank % max(1, torch.cuda.device_count())}"
        try:
            return torch.Generator(name).device
        except (RuntimeError, AssertionError) as error:
            fault = f"--device {self.device} is not available ({reason_of(error)})"
            raise InputError(f"{fault}; use --device cpu") from error


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    run: RunOptions
    learner: Any  # of the class that LEARNERS names

    def as_json(self) -> dict[str, Any]:
        """Every option by name."""
        return dataclasses.asdict(self.run) | dataclasses.asdict(self.learner)

    def change(self, **changes: Any) -> "Config":
        """The same with other options of the run."""
        return Config(dataclasses.replace(self.run, **changes), self.learner)


def build(values: dict[str, Any]) -> Config:
    """A config from options by name; the others have the defaults of the learner and the preset.

    InputError names an option that is out of range, or that the learner does not have.
    """
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    name = values.get("learner", RunOptions.learner)
    preset = PRESETS.get(values.get("preset", RunOptions.preset), {})
    _, kind, own = LEARNERS.get(name, LEARNERS[RunOptions.learner])
    full = own | preset | values
    parts = []
    for options in (RunOptions, kind):  # the first refuses learners and presets that are not there
        names = [field.name for field in dataclasses.fields(options) if field.name in full]
        parts.append(options(**{name: full[name] for name in names}))
    config = Config(*parts)
    if unknown := values.keys() - config.as_json():
        flags = listed(flag_of(one) for one in unknown)
        raise InputError(f"{flags}: no option of --learner {name}; see main.py --help")
    return config


def make_parser(description: str, learner: str) -> argparse.ArgumentParser:
    """An argument for every option of a run with this learner; what is not given is absent."""
    parser = OneLineParser(
        usage="python main.py [options]",
        description=f"{description} Defaults are in brackets.",
        epilog="Each learner has options of its own: --learner NAME --help shows them.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--resume", metavar="RUN", help="continue this run, with its own options")
    _, kind, own = LEARNERS.get(learner, LEARNERS[RunOptions.learner])
    groups = {"the run, what it aims at, its networks and its table": RunOptions}
    groups[f"the learner ({learner})"] = kind
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for field in dataclasses.fields(options):
            add_argument(group, field, own.get(field.name, field.default))
    return parser


def add_argument(group: argparse._ArgumentGroup, field: dataclasses.Field, default: Any) -> None:
    """Add the argument of one option, or both of a switch."""
    text, kind = field.metadata["help"], field.metadata["kind"]
    if choices := field.metadata["choices"]:
        text += f": {', '.join(choices)}"
    if kind is bool:
        text += f" [{'on' if default else 'off'}]"
    elif "[" not in text and default != "":
        text += f" [{' '.join(map(str, default)) if isinstance(default, tuple) else default}]"
    extra: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
    if kind is bool:
        extra = {"action": argparse.BooleanOptionalAction}
    elif isinstance(default, tuple):  # texts hold spaces, so each has the flag of its own
        extra |= {"action": "append"} if kind is str else {"nargs": "+"}
    group.add_argument(flag_of(field.name), help=text.replace("%", "%%"), **extra)


def read_config(arguments: list[str] | None, description: str) -> tuple[Config, Path | None]:
    """The options of the command line, or those of the run that --resume names and its directory.

    With --resume only --generations may be given anew, to extend a run.
    """
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--learner", default=RunOptions.learner)
    learner = chooser.parse_known_args(arguments)[0].learner
    given = vars(make_parser(description, learner).parse_args(arguments))
    if "resume" not in given:
        return build(given), None
    path = Path(given.pop("resume"))
    generations = given.pop("generations", None)
    if given:
        others = ", ".join(flag_of(*one) for one in given.items())
        raise InputError(f"--resume takes the options of the run; leave out {others}")
    config = saved_config(path)
    if generations is not None:
        config = config.change(generations=generations)
    return config, path


def saved_config(run: Path) -> Config:
    """The options in the config.json of a run's directory; InputError where they do not fit.

    Options that are absent, because the run is older than they are, have their defaults.
    """
    path = run / "config.json"
    if not path.exists():
        raise InputError(f"{path}: no such file; name a run of main.py")
    raw = read_json(path)
    try:
        return build({name: raw[name] for name in raw if name not in MADE_BY})
    except (InputError, TypeError) as error:
        remedy = "run it with the version that made it, or name another"
        raise InputError(f"{path}: holds no options of a run ({error}); {remedy}") from error
