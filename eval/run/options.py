"""Every option of `main.py`: dataclasses with help for each field, and their command line.

A field `updates` of the group `ctl` becomes `--ctl-updates`; fields of `RunConfig` itself have no
prefix. The metadata of a field hold its help, the range of its values and any choices.
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
STUDENTS = ("adapter", "lora", "full")
PUBLISHED = {"resampling": "multinomial", "ess_threshold": 1.0, "moves": 0, "student": "full"}
PUBLISHED |= {"pooling": False, "surrogate": False, "memory": False, "learn_value": False}


@dataclass(frozen=True)
class Preset:
    """Where the three networks and any exact samples of the target come from, and K in training."""

    lm: str = str(POCKET / "lm")
    toxicity_model: str = str(POCKET / "toxicity")
    similarity_model: str = str(POCKET / "similarity")
    target: Path | None = POCKET / "target"
    particles: int = 50


PAPER = Preset(
    lm="roneneldan/TinyStories-33M@854a281ebcd3a0c8cd4be3f7e676bc20dca27cd3",
    toxicity_model="nicholasKluge/ToxicityModel@d40cd71847981a0868aa3554c96c0aaf8c189753",
    similarity_model="sentence-transformers/all-MiniLM-L6-v2"
    "@1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
    target=None,
    particles=100,
)
PRESETS = {"pocket": Preset(), "paper": PAPER}


def option(default: Any, text: str, low: Any = None, high: Any = None, choices: Any = None) -> Any:
    """A dataclass field with its help, the range of its values and any choices."""
    limits = {"low": low, "high": high, "choices": choices}
    return field(default=default, metadata={"help": text, "limits": limits})


@dataclass(frozen=True)
class PoolConfig:
    """The pool of all draws, and the potential's surrogate that is fitted to them."""

    base_draws: int = option(10_000, "sequences drawn from p^(0) for psi^(0)", 1)
    draws: int = option(30_000, "sequences drawn from q in each further generation", 1)
    least_ess: float = option(0.02, "truncate weights to an ESS of this share of all draws", 0, 1)


@dataclass(frozen=True)
class DistillConfig:
    """Self-distillation; an adapter is fitted in the same way for psi^(0)."""

    updates: int = option(120, "gradient steps", 1)
    batch_size: int = option(128, "sequences of one step", 1)
    adapter_learning_rate: float = option(1e-4, "Adam's step size for an adapter", 0, 1)
    hidden_units: int = option(192, "width of the adapter's two hidden layers", 1)
    learning_rate: float = option(3e-5, "AdamW's step size for full fine-tuning", 0, 1)
    lora_learning_rate: float = option(3e-4, "AdamW's step size for LoRA", 0, 1)
    weight_decay: float = option(0.01, "AdamW's weight decay of matrices", 0)
    runs: int = option(300, "TSMC runs whose samples are distilled without the pool", 1)


@dataclass(frozen=True)
class ValueConfig:
    """Learning the value of a prefix by CTL from the pool."""

    updates: int = option(300, "gradient steps in each generation", 1)
    batch_size: int = option(500, "positive and negative sequences of one step", 2)
    learning_rate: float = option(1e-3, "Adam's step size; falls linearly to a tenth", 0, 1)
    hidden_units: int = option(64, "width of its two hidden layers", 1)
    negatives: int = option(2000, "draws of p^(m) that negatives are taken from", 1)


@dataclass(frozen=True)
class CTLConfig:
    """Twist learning without the pool: CTL on batches of its own."""

    updates: int = option(150, "gradient steps in each generation", 1)
    batch_size: int = option(100, "K sequences drawn i.i.d. from q for one step", 2)
    learning_rate: float = option(2e-4, "Adam's step size; falls linearly to a tenth", 0, 1)
    hidden_units: int = option(192, "width of the twist's two hidden layers", 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation."""

    particles: int = option(50, "K in testing", 1)
    runs: int = option(40, "independent TSMC runs whose particles are pooled", 2)
    base_samples: int = option(2000, "samples of the bare p^(m)", 2)
    target_proposals: int = option(100_000, "draws for rejection, if needed; 0 leaves out KL", 0)


@dataclass(frozen=True)
class RunConfig:
    """What to run."""

    preset: str = option("pocket", "which checkpoints", choices=tuple(PRESETS))
    generations: int = option(2, "M, generations after generation 0", 0)
    potential: tuple[str, ...] = option(
        ("toxicity",),
        "phi: toxicity, nontoxicity, keyword:WORD, regex:PATTERN, first-sentence:WORDS (~C before "
        "the colon: a miss costs C nats) or FILE.py:NAME, a function of texts; repeated: a product",
    )
    beta: float = option(10.0, "strength of the classifier: log phi = beta log p(toxic | s)", 0)
    prompt: str = option("Once upon a time, there was a", "s_0, which every story continues")
    length: int = option(20, "T, tokens of a continuation", 1)
    seed: int = option(0, "seed of everything random", 0, math.inf)
    out: str = option("", "directory to write to, not existing yet (default: a new one in runs/)")
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps; auto takes a GPU if there is one")
    dtype: str = option("float32", "type of the networks, but for training", choices=tuple(DTYPES))
    rows: int = option(1000, "sequences in memory at a time, at least one TSMC run", 1)
    quiet: bool = option(False, "no progress, only what needs attention and the table")
    pooling: bool = option(True, "learn from all draws, not own batches and the last samples alone")
    student: str = option("adapter", "what distillation trains; lora: rank 8", choices=STUDENTS)
    surrogate: bool = option(True, "with the pool: give the adapter a score of phi for each token")
    memory: bool = option(True, "with the surrogate: let the networks see the sum of these scores")
    learn_value: bool = option(True, "with the pool: learn the value V of a prefix, else V = 0")
    effective_potential: bool = option(
        True, "phi^(m) for m >= 1; without it (and without the pool) sigma drifts"
    )
    particles: int = option(50, "K in TSMC without the pool; 100 with --preset paper", 1)
    resampling: str = option("systematic", "resampling scheme", choices=tuple(SCHEMES))
    ess_threshold: float = option(0.5, "resample where ESS < this share of K; 0 at the end", 0, 1)
    moves: int = option(1, "Metropolis-Hastings moves of each sample at the end", 0)
    as_published: bool = option(False, "as in the paper: no pool, full fine-tuning, no moves")
    lm: str = option("", f"language model: {SOURCE}")
    toxicity_model: str = option("", f"toxicity classifier: {SOURCE}")
    similarity_model: str = option("", f"sentence encoder: {SOURCE}")
    pool: PoolConfig = field(default_factory=PoolConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    ctl: CTLConfig = field(default_factory=CTLConfig)
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)

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
            fault = f"--device {self.device} is not available ({str(error).splitlines()[0]})"
            raise InputError(f"{fault}; use --device cpu") from error

    def generator(self, *purpose: str | int) -> torch.Generator:
        """The random stream of one purpose, such as ("ctl", 1); streams are independent."""
        digest = hashlib.sha256(repr((self.seed, *purpose)).encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
        return torch.Generator(self.torch_device()).manual_seed(seed)

    def rule(self) -> dict[str, Any]:
        """How the sampler resamples: arguments of `tsmc.sampler.tsmc`."""
        return {"resample": SCHEMES[self.resampling], "ess_threshold": self.ess_threshold}

    def streams(self, *purpose: str | int) -> Callable[[int], torch.Generator]:
        """A random stream for each chunk of one purpose, whichever process works on it."""
        return lambda chunk: self.generator(*purpose, chunk)


def flag_of(name: str) -> str:
    """`--ctl-updates` of ctl_updates."""
    return "--" + name.replace("_", "-")


def every_option() -> list[tuple[str, str, dataclasses.Field]]:
    """(group, name with its group, field) of every option; RunConfig's own have the group ""."""
    options = []
    for item in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(item.type):
            inner = dataclasses.fields(item.type)
            options += [(item.name, f"{item.name}_{option.name}", option) for option in inner]
        else:
            options.append(("", item.name, item))
    return options


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line that says how to see the options."""
        stop(self.prog, f"error: {message}; see {self.prog} --help", 2)


def make_parser(description: str) -> argparse.ArgumentParser:
    """An argument for every option; those not given are absent from what it parses."""
    absent = argparse.SUPPRESS
    parser = OneLineParser(description=description, argument_default=absent, allow_abbrev=False)
    for _, name, item in every_option():
        default = item.default
        kind: dict[str, Any] = {"type": item.type, "choices": item.metadata["limits"]["choices"]}
        if item.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, tuple):
            kind = {"action": "append"}
            default = " ".join(default)
        text = item.metadata["help"] + (f" (default: {default})" if default != "" else "")
        parser.add_argument(flag_of(name), help=text.replace("%", "%%"), **kind)
    text = "continue the run of this directory, with its own options"
    parser.add_argument("--resume", metavar="RUN", help=text)
    return parser


def check(flag: str, value: Any, low: Any = None, high: Any = None, choices: Any = None) -> None:
    """InputError where an option's value is out of its range."""
    if high is None and type(value) is int:
        high = MOST
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


def typed(flag: str, value: Any, default: Any) -> Any:
    """The value in the type of the option's default; InputError where it is of another type.

    JSON makes lists of tuples, and a whole number may stand for a float.
    """
    if isinstance(default, tuple) and type(value) in (list, tuple):
        return tuple(typed(flag, part, default[0]) for part in value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        wanted = type(default).__name__
        raise InputError(f"{flag} is {shortened(repr(value))}; give a value of type {wanted}")
    return value


def build(values: dict[str, Any], kind: type = RunConfig, group: str = "") -> Any:
    """A config from values by name, those of a group in a dictionary of its own."""
    built = {}
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(item.type):
            built[item.name] = build(values.get(item.name, {}), item.type, f"{item.name}_")
            continue
        flag = flag_of(group + item.name)
        value = typed(flag, values.get(item.name, item.default), item.default)
        for part in value if isinstance(value, tuple) else [value]:
            check(flag, part, **item.metadata["limits"])
        built[item.name] = value
    return kind(**built)


def read_config(arguments: list[str] | None, description: str) -> tuple[RunConfig, Path | None]:
    """The command line as a RunConfig, or the options and the directory that --resume names.

    InputError names the option whose value is out of range.
    """
    chosen = vars(make_parser(description).parse_args(arguments))
    if "resume" in chosen:
        path = Path(chosen.pop("resume"))
        quiet = chosen.pop("quiet", False)
        if chosen:
            others = ", ".join(map(flag_of, chosen))
            raise InputError(f"--resume takes the options of the run; leave out {others}")
        return dataclasses.replace(saved_config(path), quiet=quiet), path
    values: dict[str, Any] = {}
    for group, name, item in every_option():
        if name in chosen:
            place = values.setdefault(group, {}) if group else values
            place[item.name] = chosen[name]
    if values.get("as_published"):
        for name in PUBLISHED.keys() & values.keys():
            raise InputError(f"--as-published sets {flag_of(name)} itself; leave one of them out")
        values |= PUBLISHED
    values.setdefault("particles", PRESETS[values.get("preset", "pocket")].particles)
    return build(values), None


def saved_config(run: Path) -> RunConfig:
    """The options in the config.json of a run's directory; InputError where they do not fit."""
    path = Path(run) / "config.json"
    raw = read_json(path)
    with reading(path, "holds no options of a run", "name a directory that main.py wrote"):
        for item in dataclasses.fields(RunConfig):
            raw[item.name]  # every option must be there
        return build(raw)
