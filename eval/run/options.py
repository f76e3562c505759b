"""Every option of `main.py`: dataclasses whose fields carry their own help, and the command line made of them.

A field `updates` of the group `ctl` becomes `--ctl-updates`; fields of `RunConfig` itself have no
prefix. `metadata` holds the help text, the range of values and, where there are few, the choices.
"""

import argparse
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from eval.run.command import stop
from tinystories.checkpoint import read_json, reading
from tinystories.errors import InputError, shortened
from tinystories.hub import checkpoint_directory
from tsmc.resampling import SCHEMES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SOURCE = "a directory or a Hub repository, owner/name[@revision] (default: the preset's)"
MOST = 10**9  # larger counts are mistakes
POCKET = Path(__file__).resolve().parents[2] / "checkpoints" / "pocket"
PUBLISHED = {"resampling": "multinomial", "ess_threshold": 1.0, "moves": 0}


@dataclass(frozen=True)
class Preset:
    """Where the three networks and any exact samples of the target come from, and K in training."""

    lm: str
    toxicity_model: str
    similarity_model: str
    target: Path | None
    particles: int


PRESETS = {
    "pocket": Preset(
        lm=str(POCKET / "lm"),
        toxicity_model=str(POCKET / "toxicity"),
        similarity_model=str(POCKET / "similarity"),
        target=POCKET / "target",
        particles=50,
    ),
    "paper": Preset(
        lm="roneneldan/TinyStories-33M@854a281ebcd3a0c8cd4be3f7e676bc20dca27cd3",
        toxicity_model="nicholasKluge/ToxicityModel@d40cd71847981a0868aa3554c96c0aaf8c189753",
        similarity_model="sentence-transformers/all-MiniLM-L6-v2"
        "@1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
        target=None,
        particles=100,
    ),
}


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with its help."""
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class CTLConfig:
    """Twist learning."""

    updates: int = option(150, "gradient steps in each generation", at_least=1)
    batch_size: int = option(100, "K sequences drawn i.i.d. from q for one step", at_least=2)
    learning_rate: float = option(
        2e-4, "Adam's step size, which falls linearly to a tenth of it", at_least=0, at_most=1
    )
    hidden_units: int = option(192, "width of the twist's two hidden layers", at_least=1)


@dataclass(frozen=True)
class DistillConfig:
    """Self-distillation."""

    runs: int = option(
        300, "independent TSMC runs to distil, of which a tenth is held out", at_least=2
    )
    updates: int = option(80, "gradient steps", at_least=1)
    batch_size: int = option(128, "sequences of one step", at_least=1)
    learning_rate: float = option(
        3e-5, "AdamW's step size for full fine-tuning", at_least=0, at_most=1
    )
    lora_learning_rate: float = option(3e-4, "AdamW's step size with --lora", at_least=0, at_most=1)
    weight_decay: float = option(0.01, "AdamW's weight decay of matrices", at_least=0)

    def step_size(self, lora: bool) -> float:
        """AdamW's step size for what is trained."""
        return self.lora_learning_rate if lora else self.learning_rate


@dataclass(frozen=True)
class PoolConfig:
    """Twist learning from everything drawn so far."""

    base_draws: int = option(10_000, "sequences drawn from p^(0) in the first round", at_least=1)
    rounds: int = option(2, "rounds of drawing and learning in each generation", at_least=1)
    draws: int = option(10_000, "sequences drawn from q in each of these rounds", at_least=1)
    power: float = option(
        0.6, "power of psi in drawing: below 1 broader than q", at_least=0, at_most=1
    )
    least_ess: float = option(
        0.02, "truncate weights to an ESS of this share of all draws", at_least=0, at_most=1
    )
    updates: int = option(120, "gradient steps after each round, from psi = 1", at_least=1)
    batch_size: int = option(128, "sequences of one step", at_least=1)
    learning_rate: float = option(1e-4, "Adam's step size", at_least=0, at_most=1)
    hidden_units: int = option(192, "width of the twist's two hidden layers", at_least=1)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation."""

    particles: int = option(50, "K in testing", at_least=1)
    runs: int = option(40, "independent TSMC runs whose particles are pooled", at_least=2)
    base_samples: int = option(2000, "samples of the bare p^(m)", at_least=2)
    target_proposals: int = option(
        100_000,
        "base samples for rejection where no exact samples are shipped for the options; "
        "0 leaves out KL(sigma||q)",
        at_least=0,
    )


@dataclass(frozen=True)
class RunConfig:
    """What to run."""

    preset: str = option("pocket", "which checkpoints", choices=tuple(PRESETS))
    method: str = option(
        "distilled",
        "distilled: Algorithm 1 of the paper; "
        "pooled: a twist learned from everything drawn so far, while p^(0) stays",
        choices=("distilled", "pooled"),
    )
    generations: int = option(2, "M, generations after generation 0", at_least=0)
    potential: tuple[str, ...] = option(
        ("toxicity",),
        "phi: toxicity, nontoxicity, keyword:WORD, regex:PATTERN, first-sentence:WORDS "
        "(keyword~C:WORD and so on are soft: a miss costs C nats) or FILE.py:NAME, a function from "
        "texts to log phi; repeat the option for a product",
    )
    beta: float = option(
        10.0, "strength of the classifier: log phi = beta log p(toxic | s)", at_least=0
    )
    prompt: str = option("Once upon a time, there was a", "s_0, which every story continues")
    length: int = option(20, "T, tokens of a continuation", at_least=1)
    seed: int = option(0, "seed of everything random", at_least=0, at_most=math.inf)
    out: str = option("", "directory to write to, not existing yet (default: a new one in runs/)")
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps; auto takes a GPU if there is one")
    dtype: str = option(
        "float32", "type of p while sampling and of the scorers", choices=tuple(DTYPES)
    )
    rows: int = option(1000, "sequences in memory at a time, at least one TSMC run", at_least=1)
    quiet: bool = option(False, "no progress, only what needs attention and the table")
    lora: bool = option(False, "distil by LoRA (rank 8, query and value), not full fine-tuning")
    effective_potential: bool = option(
        True, "phi^(m) for generations m >= 1; without it phi itself, and sigma drifts"
    )
    particles: int = option(50, "K in training; 100 with --preset paper", at_least=1)
    resampling: str = option("systematic", "resampling scheme", choices=tuple(SCHEMES))
    ess_threshold: float = option(
        0.0, "resample where ESS < this share of K: 1 always, 0 at the end", at_least=0, at_most=1
    )
    moves: int = option(1, "Metropolis-Hastings moves of each sample at the end", at_least=0)
    as_published: bool = option(
        False, "as in the paper: --resampling multinomial --ess-threshold 1 --moves 0"
    )
    lm: str = option("", f"language model: {SOURCE}")
    toxicity_model: str = option("", f"toxicity classifier: {SOURCE}")
    similarity_model: str = option("", f"sentence encoder: {SOURCE}")
    pool: PoolConfig = field(default_factory=PoolConfig)
    ctl: CTLConfig = field(default_factory=CTLConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)

    def checkpoint(self, role: str) -> Path:
        """Directory of `lm`, `toxicity_model` or `similarity_model`, fetched where needed."""
        name = getattr(self, role) or getattr(PRESETS[self.preset], role)
        return checkpoint_directory(name, f"--{role.replace('_', '-')}")

    def torch_device(self) -> torch.device:
        """The device to run on, with torchrun the GPU of this process; InputError if unavailable."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and "LOCAL_RANK" in os.environ:
            name = f"cuda:{int(os.environ['LOCAL_RANK']) % max(1, torch.cuda.device_count())}"
        try:
            torch.Generator(name)
            return torch.zeros(1, device=name).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            fault = f"--device {self.device} is not available ({reason})"
            raise InputError(f"{fault}; use --device cpu") from error

    def generator(self, *purpose: str | int) -> torch.Generator:
        """The random stream of one purpose, such as ("ctl", 1); streams are independent."""
        digest = hashlib.sha256(repr((self.seed, *purpose)).encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
        return torch.Generator(self.torch_device()).manual_seed(seed)

    def streams(self, *purpose: str | int) -> Callable[[int], torch.Generator]:
        """A random stream for each chunk of one purpose, whichever process works on it."""
        return lambda chunk: self.generator(*purpose, chunk)


def flags(config_class: type, group: str = "") -> list[tuple[str, str, dataclasses.Field]]:
    """(group, flag, field) of every option of a config class and of its groups."""
    options = []
    for item in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(item.type):
            options += flags(item.type, item.name)
        else:
            name = f"{group}_{item.name}" if group else item.name
            options.append((group, "--" + name.replace("_", "-"), item))
    return options


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line that says how to see the options."""
        stop(self.prog, f"error: {message}; see {self.prog} --help", 2)


def make_parser(description: str) -> argparse.ArgumentParser:
    """An argument for every option; those not given are absent from what it parses."""
    parser = OneLineParser(
        description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    titles = {
        "": "run",
        "ctl": "distilled: twist learning (CTL)",
        "distill": "distilled: self-distillation",
        "pool": "pooled",
        "eval": "evaluation",
    }
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    for group, flag, item in flags(RunConfig):
        kind: dict[str, Any] = {"type": item.type}
        if item.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(item.default, tuple):
            kind = {"action": "append"}
        if "choices" in item.metadata:
            kind["choices"] = item.metadata["choices"]
        default = " ".join(item.default) if isinstance(item.default, tuple) else item.default
        text = item.metadata["help"] + (f" (default: {default})" if default != "" else "")
        groups[group].add_argument(flag, help=text.replace("%", "%%"), **kind)
    text = "continue the run of this directory, with its own options"
    groups[""].add_argument("--resume", metavar="RUN", help=text)
    return parser


def check(flag: str, value: Any, metadata: Any) -> None:
    """InputError where an option's value is out of its range."""
    low = metadata.get("at_least")
    high = metadata.get("at_most", MOST if type(value) is int else None)
    choices = metadata.get("choices")
    if choices and value not in choices:
        raise InputError(f"{flag} is {value!r}; give one of {', '.join(choices)}")
    if isinstance(value, str) and not value.isprintable():
        raise InputError(f"{flag} holds characters that cannot be printed; give plain text")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{flag} is {value}; give a finite number")
    if low is not None and value < low:
        raise InputError(f"{flag} is {shortened(str(value))}; give at least {low}")
    if high is not None and value > high:
        raise InputError(f"{flag} is {shortened(str(value))}; give at most {high}")


def build(values: dict[str, dict[str, Any]]) -> RunConfig:
    """A config from values by group and name, those of RunConfig itself in the group ""."""
    built: dict[str, dict[str, Any]] = {"": {}}
    for group, flag, item in flags(RunConfig):
        value = values.get(group, {}).get(item.name, item.default)
        if isinstance(item.default, tuple):
            value = tuple(value)
            for part in value:
                check(flag, part, item.metadata)
        else:
            value = item.type(value)
            check(flag, value, item.metadata)
        built.setdefault(group, {})[item.name] = value
    groups = {
        item.name: item.type(**built[item.name])
        for item in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(item.type)
    }
    return RunConfig(**built[""], **groups)


def read_config(arguments: list[str] | None, description: str) -> tuple[RunConfig, Path | None]:
    """The command line as a RunConfig, or the options and the directory that --resume names.

    InputError names the option whose value is out of range.
    """
    chosen = vars(make_parser(description).parse_args(arguments))
    if "resume" in chosen:
        path = Path(chosen.pop("resume"))
        quiet = chosen.pop("quiet", False)
        if chosen:
            others = ", ".join("--" + name.replace("_", "-") for name in chosen)
            raise InputError(f"--resume takes the options of the run; leave out {others}")
        return dataclasses.replace(saved_config(path), quiet=quiet), path
    values: dict[str, dict[str, Any]] = {"": {}}
    for group, flag, item in flags(RunConfig):
        key = flag[2:].replace("-", "_")
        if key in chosen:
            values.setdefault(group, {})[item.name] = chosen[key]
    own = values[""]
    if own.get("as_published"):
        for name in PUBLISHED.keys() & own.keys():
            flag = "--" + name.replace("_", "-")
            raise InputError(f"--as-published sets {flag} itself; leave one of them out")
        own |= PUBLISHED
    own.setdefault("particles", PRESETS[own.get("preset", "pocket")].particles)
    return build(values), None


def saved_config(run: Path) -> RunConfig:
    """The options in the config.json of a run's directory; InputError where they do not fit."""
    path = Path(run) / "config.json"
    raw = read_json(path)
    with reading(path, "holds no options of a run", "name a directory that main.py wrote"):
        names = {item.name for item in dataclasses.fields(RunConfig)}
        if not names <= raw.keys():
            raise ValueError(f"it has no {min(names - raw.keys())}")
        groups = {name: value for name, value in raw.items() if isinstance(value, dict)}
        return build({"": raw, **groups})
