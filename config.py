"""Every option of `main.py`: dataclasses whose fields carry their own help, and the command line made from them.

A field `updates` of the group `ctl` becomes `--ctl-updates`; fields of `RunConfig` itself have no prefix. `metadata` holds
the help text, the smallest value allowed and, where there are few, the choices.
"""

import argparse
import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from distill import DistillConfig
from tinystories.errors import InputError
from tinystories.hub import checkpoint_directory
from tsmc import SCHEMES
from twist import CTLConfig

SOURCE = "a directory or a Hub repository, owner/name[@revision] (default: the preset's)"
POCKET = Path(__file__).parent / "checkpoints" / "pocket"


@dataclass(frozen=True)
class Preset:
    """Where the three networks and, if there are any, exact samples of the target come from."""

    lm: str
    toxicity_model: str
    similarity_model: str
    target: Path | None


PRESETS = {
    "pocket": Preset(str(POCKET / "lm"), str(POCKET / "toxicity"), str(POCKET / "similarity"), POCKET / "target"),
    "paper": Preset(
        lm="roneneldan/TinyStories-33M@854a281ebcd3a0c8cd4be3f7e676bc20dca27cd3",
        toxicity_model="nicholasKluge/ToxicityModel@d40cd71847981a0868aa3554c96c0aaf8c189753",
        similarity_model="sentence-transformers/all-MiniLM-L6-v2@1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
        target=None,
    ),
}


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with its help."""
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation."""

    particles: int = option(50, "K in testing", at_least=1)
    runs: int = option(40, "independent TSMC runs whose particles are pooled", at_least=2)
    base_samples: int = option(2000, "samples of the bare p^(m)", at_least=2)
    target_proposals: int = option(
        100_000, "base samples for rejection, where no exact samples are shipped for the options", at_least=2
    )


@dataclass(frozen=True)
class RunConfig:
    """What to run."""

    preset: str = option("pocket", "which checkpoints", choices=tuple(PRESETS))
    generations: int = option(2, "M, generations after generation 0", at_least=0)
    beta: float = option(10.0, "strength of the potential, log phi = beta log p(toxic | s)", at_least=0)
    prompt: str = option("Once upon a time, there was a", "s_0, the opening that every story continues")
    length: int = option(20, "T, tokens of a continuation", at_least=1)
    seed: int = option(0, "seed of everything random", at_least=0)
    out: str = option("", "directory to write to, which must not exist yet (default: a new one under runs/)")
    device: str = option("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    lora: bool = option(False, "distil by LoRA (rank 8, query and value) instead of full fine-tuning")
    particles: int = option(50, "K in training: particles of each TSMC run that is distilled", at_least=1)
    resampling: str = option("multinomial", "resampling scheme", choices=tuple(SCHEMES))
    ess_threshold: float = option(1.0, "resample where ESS < this share of K: 1 always, 0 never", at_least=0, at_most=1)
    lm: str = option("", f"language model: {SOURCE}")
    toxicity_model: str = option("", f"toxicity classifier: {SOURCE}")
    similarity_model: str = option("", f"sentence encoder: {SOURCE}")
    ctl: CTLConfig = field(default_factory=CTLConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)

    def checkpoint(self, role: str) -> Path:
        """Directory of `lm`, `toxicity_model` or `similarity_model`, fetched if need be; InputError where it cannot be."""
        name = getattr(self, role) or getattr(PRESETS[self.preset], role)
        return checkpoint_directory(name, f"--{role.replace('_', '-')}")

    def torch_device(self) -> torch.device:
        """The device to run on; InputError where --device names none that is here."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            if torch.device(self.device).type not in ("cpu", "cuda"):
                raise RuntimeError("no float64 or no random numbers there")
            return torch.zeros(1, device=self.device).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"--device {self.device} is not available ({reason}); use --device cpu") from error

    def generator(self, *purpose: str | int) -> torch.Generator:
        """The random stream of one purpose, such as ("ctl", 1): other purposes draw nothing from it."""
        digest = hashlib.sha256(repr((self.seed, *purpose)).encode()).digest()
        return torch.Generator(self.torch_device()).manual_seed(int.from_bytes(digest[:7], "big"))

    def uses_preset_checkpoints(self) -> bool:
        """Whether the networks that define sigma are the preset's own."""
        return not (self.lm or self.toxicity_model)


def flags(config_class: type, prefix: str = "") -> list[tuple[str, str, dataclasses.Field]]:
    """(group, flag, field) of every option, groups first to last."""
    found = []
    for item in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(item.type):
            found += flags(item.type, item.name + "-")
        else:
            found.append((prefix.rstrip("-"), "--" + prefix + item.name.replace("_", "-"), item))
    return found


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line that says how to see the options."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(description: str) -> argparse.ArgumentParser:
    """An argument for every field of RunConfig and of its groups."""
    parser = OneLineParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    titles = {"": "run", "ctl": "twist learning (CTL)", "distill": "self-distillation", "eval": "evaluation"}
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    for group, flag, item in flags(RunConfig):
        kind = {"action": argparse.BooleanOptionalAction} if item.type is bool else {"type": item.type}
        if "choices" in item.metadata:
            kind["choices"] = item.metadata["choices"]
        text = item.metadata["help"].replace("%", "%%")
        default = argparse.SUPPRESS if item.default == "" else item.default
        groups[group].add_argument(flag, default=default, help=text, **kind)
    return parser


def read_config(arguments: list[str] | None, description: str) -> RunConfig:
    """The command line as a RunConfig; InputError names the option whose value is out of range."""
    values = vars(make_parser(description).parse_args(arguments))
    grouped: dict[str, dict[str, Any]] = {"": {}}
    for group, flag, item in flags(RunConfig):
        key = flag[2:].replace("-", "_")
        value = values.get(key, item.default)
        low, high = item.metadata.get("at_least"), item.metadata.get("at_most")
        if isinstance(value, str) and not value.isprintable():
            raise InputError(f"{flag} holds characters that cannot be printed; give plain text")
        if isinstance(value, float) and math.isinf(value):
            raise InputError(f"{flag} is {value}; give a finite number")
        if low is not None and not value >= low:
            raise InputError(f"{flag} is {value}; give at least {low}")
        if high is not None and not value <= high:
            raise InputError(f"{flag} is {value}; give at most {high}")
        grouped.setdefault(group, {})[item.name] = value
    config = RunConfig(**grouped[""], ctl=CTLConfig(**grouped["ctl"]), distill=DistillConfig(**grouped["distill"]))
    return dataclasses.replace(config, eval=EvaluationConfig(**grouped["eval"]))
