"""The options of a job: a field `ctl_updates` of Options becomes `--ctl-updates`.

A learner may have `defaults` of its own, and a subclass of this class with further options.
"""

import argparse
import dataclasses
import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from tinystories.load import CHECKOUT, read_json
from tsmc.draws import SCHEMES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
POCKET = CHECKOUT / "checkpoints" / "pocket"
PRESETS: dict[str, dict[str, Any]] = {  # of the networks
    "pocket": {},
    "paper": {
        "lm": "roneneldan/TinyStories-33M@854a281ebcd3a0c8cd4be3f7e676bc20dca27cd3",
        "toxicity_model": "nicholasKluge/ToxicityModel@d40cd71847981a0868aa3554c96c0aaf8c189753",
        "similarity_model": "sentence-transformers/all-MiniLM-L6-v2"
        "@1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
    },
}


def option(default: Any, text: str, low: float = 0, high: float = 2**63, choices: Any = ()) -> Any:
    """A field with its default, a line of help, and its limits or choices."""
    metadata = {"help": text, "low": low, "high": high, "choices": tuple(choices)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Everything that a command may say of a job; ValueError for a value out of range."""

    generations: int = option(2, "M, generations after generation 0; of baselines 0")
    learner: str = option("paper", "how to learn")
    potential: tuple[str, ...] = option(
        ("toxicity",),
        "phi: toxicity, nontoxicity, keyword:WORD, without:WORD, regex:PATTERN (~C before the "
        "colon: a miss costs C nats), ended, or FILE.py:NAME; repeated: a product",
    )
    beta: float = option(10.0, "strength of the classifier: phi = p(toxic | s)^beta")
    prompt: str = option("Once upon a time, there was a", "s_0, with which stories begin")
    length: int = option(20, "T, tokens of a continuation", low=1)
    end: tuple[str, ...] = option((), "token that finishes a text; repeated: any of them")
    preset: str = option("pocket", "which networks", choices=PRESETS)
    lm: str = option("checkpoints/pocket/lm", "language model: directory or OWNER/NAME of the Hub")
    toxicity_model: str = option("checkpoints/pocket/toxicity", "classifier")
    similarity_model: str = option("checkpoints/pocket/similarity", "sentence encoder")
    target: str = option("", "exact samples of this sigma that another job has drawn (JOB/target)")
    out: str = option("", "directory to write to, not existing yet; by default a new one in runs/")
    seed: int = option(0, "seed of everything random")
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    dtype: str = option("float32", "type of the networks, but for training", choices=DTYPES)
    eval_particles: int = option(50, "K in testing", low=1)
    eval_runs: int = option(40, "TSMC runs of K particles for a row of the table", low=2)
    eval_target_proposals: int = option(100_000, "most draws for 200 exact samples; 0: none")
    particles: int = option(100, "K, particles of a run", low=1)
    resampling: str = option("multinomial", "resampling scheme", choices=SCHEMES)
    ess_threshold: float = option(0.0, "resample where ESS / K is lower; 1: at every step", high=1)
    effective_potential: bool = option(True, "use phi^(m), so that sigma stays the target")
    student: str = option("full", "what is fine-tuned", choices=("full", "lora"))
    ctl_updates: int = option(100, "gradient steps for each twist", low=1)
    ctl_batch_size: int = option(100, "sequences drawn i.i.d. from q for one step", low=1)
    ctl_learning_rate: float = option(1.5e-4, "Adam's step size; falls linearly to a tenth", high=1)
    distill_runs: int = option(100, "R, TSMC runs that are distilled", low=1)
    distill_updates: int = option(200, "gradient steps for each language model, at most", low=1)
    distill_learning_rate: float = option(1e-5, "AdamW's step size; of LoRA thirty times", high=1)
    learning_rate: float = option(1e-4, "AdamW's step size of a policy; LoRA needs more", high=1)
    updates: int = option(398, "gradient steps of a policy in a generation", low=1)
    batch_size: int = option(128, "N, sequences drawn for one update of a policy", low=2)
    strength: float = option(0.4, "b, how strongly a policy is held to p^(0)")

    def __post_init__(self):
        for one in dataclasses.fields(self):
            value, limits = getattr(self, one.name), one.metadata
            for part in value if isinstance(value, tuple) else (value,):
                fault = f"--{one.name.replace('_', '-')} is {part!r}; give"
                is_number = isinstance(part, int | float)
                if is_number and not limits["low"] <= part <= limits["high"]:  # nor NaN
                    raise ValueError(f"{fault} a number from {limits['low']} to {limits['high']}")
                if limits["choices"] and part not in limits["choices"]:
                    raise ValueError(f"{fault} one of {', '.join(limits['choices'])}")

    def torch_device(self) -> torch.device:
        """The device to run on, with torchrun this process's GPU."""
        name = self.device
        if name in ("auto", "cuda") and torch.cuda.is_available():
            name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        return torch.Generator("cpu" if name == "auto" else name).device


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a ValueError, which the command prints in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help shows all options")


def add_options(parser: argparse.ArgumentParser, kind: type, names: tuple[str, ...] = ()) -> None:
    """An argument for each field of a class of options, or for those named."""
    for one in dataclasses.fields(kind):
        if one.name == "learner" or (names and one.name not in names):
            continue
        text = f"{one.metadata['help']} [{one.default}]".replace("%", "%%")
        how: dict[str, Any] = {"type": type(one.default)}
        if isinstance(one.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        elif isinstance(one.default, tuple):
            how = {"action": "append"}
        parser.add_argument(f"--{one.name.replace('_', '-')}", help=text, **how)


def build(kind: type, values: dict[str, Any]) -> Any:
    """Options of a class from values as JSON or argparse has them; others' names are left out."""
    names = {one.name for one in dataclasses.fields(kind)}
    known = {name: value for name, value in values.items() if name in names}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})


def read_job(folder: Path) -> dict[str, Any]:
    """What a job has saved; ValueError for one of an earlier version."""
    saved = read_json(folder / "config.json")
    files = saved.get("sigma", {}).get("files")
    if not (isinstance(files, dict) and isinstance(saved["eval_particles"], int)):
        raise ValueError(f"{folder}: is a job of an earlier version")
    return saved


def read_options(
    arguments: list[str] | None, learners: dict[str, str], description: str
) -> tuple[Any, type, Path | None]:
    """The options of a command line, the class of the learner of all `learners`, which is imported
    by its "module:Class", and the folder to resume, if any."""
    first = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    first.add_argument("--resume", metavar="JOB", type=Path, help="continue this job")
    first.add_argument("--learner", choices=learners, help="how to learn [paper]")
    chosen = vars(first.parse_known_args(arguments)[0])
    folder = chosen.get("resume")
    saved = read_job(folder) if folder else {}
    module, _, name = learners[saved.get("learner", chosen.get("learner", "paper"))].partition(":")
    learner = getattr(importlib.import_module(module), name)
    kind = getattr(learner, "Options", Options)
    raw = argparse.RawDescriptionHelpFormatter
    settings = {"parents": [first], "description": description, "formatter_class": raw}
    parser = Parser(argument_default=argparse.SUPPRESS, allow_abbrev=False, **settings)
    add_options(parser, kind)
    typed = vars(parser.parse_args(arguments))
    files = {"lm", "toxicity_model", "potential"}  # which may have moved, but not changed
    if typed.pop("resume", None) and typed.keys() - {"generations"} - files:
        raise ValueError("--resume keeps all options; give none but --generations and moved files")
    preset = PRESETS.get(typed.get("preset", "pocket"), {})
    return build(kind, learner.defaults | preset | saved | typed), learner, folder
