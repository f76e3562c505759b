"""Every option of `main.py`: dataclasses with help for each field, and their command line.

A field `updates` of the group `ctl` becomes `--ctl-updates`; fields of `RunConfig` itself have no
prefix. The help of a switch that is on by default describes `--no-...`.
"""

import argparse
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eval.run.command import OneLineParser
from tinystories.checkpoint import read_json, reading
from tinystories.errors import InputError, shortened
from tinystories.hub import checkpoint_directory
from tsmc.resampling import SCHEMES
from tsmc.runs import chunk_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST = 10**9  # larger numbers are mistakes
CLASSIFIED = {"toxicity", "nontoxicity"}
POCKET = Path(__file__).resolve().parents[2] / "checkpoints" / "pocket"
PUBLISHED = {"resampling": "multinomial", "ess_threshold": 1.0, "moves": 0, "student": "full"}
PUBLISHED |= {"pooling": False, "surrogate": False, "memory": False, "learn_value": False}
TITLES = {  # of the groups in --help, by their first option
    "generations": "what to run",
    "as_published": "ingredients of Algorithm 1",
    "preset": "networks, each a directory or owner/name[@revision] of the Hugging Face Hub",
    "out": "the run",
    "pool_first_draws": "the pool of all draws",
    "distill_updates": "distillation, and the adapter of psi^(0)",
    "value_updates": "learning the value V",
    "ctl_updates": "learning the twist without the pool",
    "eval_particles": "the table",
}


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


def option(default: Any, text: str, low: Any = -MOST, high: Any = MOST, choices: Any = ()) -> Any:
    """A dataclass field with its help, the range of its values and any choices."""
    limits = {"low": low, "high": high, "choices": tuple(choices)}
    return field(default=default, metadata={"help": text, "limits": limits})


@dataclass(frozen=True)
class PoolConfig:
    first_draws: int = option(10_000, "sequences drawn for psi^(0)", 1)
    first_rounds: int = option(8, "most rounds of these draws, the first from p^(0)", 1)
    first_ess: float = option(0.1, "after each, temper phi to this ESS per text with phi > 0", 0, 1)
    first_updates: int = option(30, "gradient steps between two such rounds", 1)
    draws: int = option(15_000, "sequences drawn from q in each further generation", 1)
    least_ess: float = option(0.05, "truncate weights to an ESS of this share of all", 0, 1)

    def first_sizes(self) -> list[int]:
        """Sequences of each of the first rounds."""
        return chunk_sizes(self.first_draws, math.ceil(self.first_draws / self.first_rounds))


@dataclass(frozen=True)
class DistillConfig:
    updates: int = option(120, "gradient steps", 1)
    batch_size: int = option(128, "sequences of one step", 1)
    adapter_learning_rate: float = option(1e-4, "Adam's step size for an adapter", 0, 1)
    hidden_units: int = option(192, "width of the adapter's two hidden layers", 1)
    learning_rate: float = option(3e-5, "AdamW's step size for full fine-tuning", 0, 1)
    lora_learning_rate: float = option(3e-4, "AdamW's step size for LoRA", 0, 1)
    weight_decay: float = option(0.01, "AdamW's weight decay of matrices", 0)
    runs: int = option(300, "TSMC runs that are distilled without the pool", 1)


@dataclass(frozen=True)
class ValueConfig:
    updates: int = option(120, "gradient steps in each generation", 1)
    batch_size: int = option(500, "positive and negative sequences of one step", 2)
    learning_rate: float = option(1e-3, "Adam's step size; falls linearly to a tenth", 0, 1)
    hidden_units: int = option(64, "width of its two hidden layers", 1)
    negatives: int = option(2000, "draws of p^(m) that negatives are taken from", 1)


@dataclass(frozen=True)
class CTLConfig:
    updates: int = option(150, "gradient steps in each generation", 1)
    batch_size: int = option(100, "K sequences drawn i.i.d. from q for one step", 2)
    learning_rate: float = option(2e-4, "Adam's step size; falls linearly to a tenth", 0, 1)
    hidden_units: int = option(192, "width of the twist's two hidden layers", 1)


@dataclass(frozen=True)
class EvaluationConfig:
    particles: int = option(50, "K in testing", 1)
    runs: int = option(40, "independent TSMC runs whose particles are pooled", 2)
    base_samples: int = option(2000, "samples of the bare p^(m)", 2)
    target_proposals: int = option(100_000, "draws for exact samples if not shipped; 0: none", 0)


@dataclass(frozen=True)
class RunConfig:
    generations: int = option(2, "M, generations after generation 0", 0)
    potential: tuple[str, ...] = option(
        ("toxicity",),
        "phi: toxicity, nontoxicity, keyword:WORD, regex:PATTERN, first-sentence:WORDS (~C before "
        "the colon: a miss costs C nats) or FILE.py:NAME, a function of texts; repeated: a product",
    )
    beta: float = option(10.0, "strength of the classifier: phi = p(toxic | s)^beta", 0)
    prompt: str = option("Once upon a time, there was a", "s_0, with which stories begin")
    length: int = option(20, "T, tokens of a continuation", 1)
    as_published: bool = option(False, "all ingredients as in the paper (docs/options.md)")
    pooling: bool = option(True, "learn from own batches and the last samples, not all draws")
    student: str = option("adapter", "what is trained", choices=("adapter", "lora", "full"))
    surrogate: bool = option(True, "give the adapter no score of phi for each token")
    memory: bool = option(True, "hide the sum of these scores from the networks")
    learn_value: bool = option(True, "V = 0 instead of the learned value of a prefix")
    effective_potential: bool = option(True, "phi in place of phi^(m): sigma drifts")
    particles: int = option(50, "K without the pool; 100 with --preset paper", 1)
    resampling: str = option("systematic", "resampling scheme", choices=SCHEMES)
    ess_threshold: float = option(0.5, "resample where ESS / K is lower; 0: only at the end", 0, 1)
    moves: int = option(1, "Metropolis-Hastings moves of each sample at the end", 0)
    preset: str = option("pocket", "which networks", choices=PRESETS)
    lm: str = option("", "language model [the preset's]")
    toxicity_model: str = option("", "toxicity classifier [the preset's]")
    similarity_model: str = option("", "sentence encoder [the preset's]")
    out: str = option("", "directory to write to, not existing yet [a new one in runs/]")
    seed: int = option(0, "seed of everything random", 0, math.inf)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:N or mps")
    dtype: str = option("float32", "type of the networks, but for training", choices=DTYPES)
    rows: int = option(1000, "sequences in memory at a time, at least one TSMC run", 1)
    quiet: bool = option(False, "no progress, only what needs attention and the table")
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

    def deciding(self) -> "RunConfig":
        """The options that decide the results; the others have their defaults."""
        return dataclasses.replace(self, out="", quiet=False)

    def streams(self, *purpose: str | int) -> Callable[[int], torch.Generator]:
        """A random stream for each chunk of one purpose, whichever process works on it."""
        return lambda chunk: self.generator(*purpose, chunk)


def flag_of(name: str, value: Any = True) -> str:
    """`--ctl-updates` of ctl_updates, and `--no-pooling` of a switch that is off."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def every_option() -> Iterator[tuple[str, str, dataclasses.Field]]:
    """(group, name with its group, field) of every option; RunConfig's own have the group ""."""
    for item in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(item.type):
            for inner in dataclasses.fields(item.type):
                yield item.name, f"{item.name}_{inner.name}", inner
        else:
            yield "", item.name, item


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
    for _, name, item in every_option():
        if name in TITLES:
            group = parser.add_argument_group(TITLES[name])
        default = item.default
        text = item.metadata["help"]
        if item.type is bool:
            for value in (True, False):
                action = "store_true" if value else "store_false"
                shown = argparse.SUPPRESS if value is default else text
                group.add_argument(flag_of(name, value), dest=name, action=action, help=shown)
            continue
        if choices := item.metadata["limits"]["choices"]:
            text += f": {', '.join(choices)}"
        kind = {"action": "append"} if isinstance(default, tuple) else {"type": item.type}
        brackets = " ".join(default) if isinstance(default, tuple) else default
        text += "" if default == "" else f" [{brackets}]"
        metavar = {int: "N", float: "X"}.get(item.type, "NAME")
        group.add_argument(flag_of(name), metavar=metavar, help=text.replace("%", "%%"), **kind)
    return parser


def check(flag: str, value: Any, low: Any = -MOST, high: Any = MOST, choices: Any = ()) -> None:
    """InputError where an option's value is out of its range."""
    if choices and value not in choices:
        raise InputError(f"{flag} is {value!r}; give one of {', '.join(choices)}")
    if isinstance(value, str):
        if not value.isprintable():
            raise InputError(f"{flag} holds characters that cannot be printed; give plain text")
    elif not low <= value <= high:
        limits = f"at least {low}" if value < low else f"at most {high}"
        raise InputError(f"{flag} is {shortened(str(value))}; give {limits}")


def checked(flag: str, value: Any, item: dataclasses.Field) -> Any:
    """The value in the type of the option's default; InputError for another type or its range."""
    wanted = type(item.default)
    if (wanted, type(value)) in ((tuple, list), (float, int)):  # as JSON has them
        value = wanted(value)
    if type(value) is not wanted:
        fault = f"{flag} is {shortened(repr(value))}"
        raise InputError(f"{fault}; give a value of type {wanted.__name__}")
    for part in value if wanted is tuple else [value]:
        check(flag, part, **item.metadata["limits"])
    return value


def build(values: dict[str, Any], kind: type = RunConfig, group: str = "") -> Any:
    """A config from values by name, those of a group in a dictionary of its own."""
    built = {}
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(item.type):
            built[item.name] = build(values.get(item.name, {}), item.type, f"{item.name}_")
        else:
            flag = flag_of(group + item.name)
            built[item.name] = checked(flag, values.get(item.name, item.default), item)
    return kind(**built)


NEEDS = (  # an option, whether it is given, and the options or groups that are read only then
    (
        "--no-pooling",
        lambda run: not run.pooling,
        ("effective_potential", "particles", "distill_runs", "ctl"),
    ),
    ("--pooling", lambda run: run.pooling, ("pool", "surrogate", "memory", "learn_value", "value")),
    (
        "--pool-first-rounds 2",
        lambda run: run.pool.first_rounds > 1,
        ("pool_first_ess", "pool_first_updates"),
    ),
    ("--surrogate", lambda run: run.surrogate, ("memory",)),
    ("--learn-value", lambda run: run.learn_value, ("value",)),
    (
        "--student adapter",
        lambda run: run.pooling or run.student == "adapter",
        ("distill_adapter_learning_rate", "distill_hidden_units"),
    ),
    ("--student full", lambda run: run.student == "full", ("distill_learning_rate",)),
    ("--student lora", lambda run: run.student == "lora", ("distill_lora_learning_rate",)),
    ("--student full", lambda run: run.student != "adapter", ("distill_weight_decay",)),
    ("--potential toxicity", lambda run: CLASSIFIED & set(run.potential), ("beta",)),
)


def read_config(arguments: list[str] | None, description: str) -> tuple[RunConfig, Path | None]:
    """The command line as a RunConfig, or the options and the directory that --resume names.

    Of the process's own command line, InputError also names an option that the run does not read.
    """
    chosen = vars(make_parser(description).parse_args(arguments))
    if "resume" in chosen:
        path = Path(chosen.pop("resume"))
        quiet = chosen.pop("quiet", False)
        if chosen:
            others = ", ".join(flag_of(*one) for one in chosen.items())
            raise InputError(f"--resume takes the options of the run; leave out {others}")
        return dataclasses.replace(saved_config(path), quiet=quiet), path
    values: dict[str, Any] = {}
    for group, name, item in every_option():
        if name in chosen:
            place = values.setdefault(group, {}) if group else values
            place[item.name] = chosen[name]
    if values.get("as_published"):
        for name in PUBLISHED.keys() & values.keys():
            flag = flag_of(name, values[name])
            raise InputError(f"--as-published sets {flag} itself; leave one of them out")
        values |= PUBLISHED
    preset = PRESETS.get(values.get("preset", "pocket"), Preset())  # `build` refuses other names
    config = build({"particles": preset.particles} | values)
    for need, is_met, names in NEEDS:
        for group, name, _ in every_option():
            is_named = arguments is None and name in chosen and (name in names or group in names)
            if is_named and not is_met(config):
                flag = flag_of(name, chosen[name])
                raise InputError(f"{flag} has no effect without {need}; leave it out or add that")
    return config, None


def saved_config(run: Path) -> RunConfig:
    """The options in the config.json of a run's directory; InputError where they do not fit."""
    path = Path(run) / "config.json"
    raw = read_json(path)
    with reading(path, "holds no options of a run", "name a directory that main.py wrote"):
        for item in dataclasses.fields(RunConfig):
            raw[item.name]  # every option must be there
        return build(raw)
