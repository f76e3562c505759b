"""A run on disk, read again: its options and the pairs (p^(m), psi^(m)) that it saved.

config_of(run)                           the options that fix sigma
generations(run)                         directories of the saved pairs by m
load_pair(config, given, directory, m)   model, twist, potential of generation m: phi at m = 0, phi^(m) after it
"""

import copy
import dataclasses
from pathlib import Path

import torch

import tinystories
from config import PRESETS, RunConfig
from eval.ingredients import Ingredients
from tinystories import Conditional, InputError
from tinystories.checkpoint import read_json
from tsmc.proposal import Twist
from tsmc.sampler import LogPotential
from twist import base_potential, effective_potential, load_twist
from twist.checkpoint import FILE


@dataclasses.dataclass
class Pair:
    """A generation's proposal and the weight that corrects it."""

    m: int
    model: Conditional
    twist: Twist
    log_potential: LogPotential


def config_of(run: Path) -> RunConfig:
    """The options of a run that fix sigma, as its config.json remembers them."""
    raw = read_json(run / "config.json")
    names = {field.name for field in dataclasses.fields(RunConfig)} - {"ctl", "distill", "eval"}
    config = RunConfig(**{name: raw[name] for name in names if name in raw})
    if config.preset not in PRESETS:
        raise InputError(f"{run / 'config.json'}: the preset {config.preset!r} is unknown; use a run of this version")
    return config


def generations(run: Path) -> dict[int, Path]:
    """Directory of every generation that is saved whole, the twist being its last file; InputError where there is none."""
    numbered = (path for path in run.glob("generation-*") if path.name[11:].isdecimal() and (path / FILE).is_file())
    found = {int(path.name[11:]): path for path in numbered}
    if not found:
        raise InputError(f"{run}: holds no saved generation; name a run of main.py that has finished one")
    return dict(sorted(found.items()))


def load_pair(config: RunConfig, given: Ingredients, directory: Path, m: int) -> Pair:
    """Generation m after the prompt of `given`; InputError names the file that does not fit."""
    prompt = given.base.prompt
    gpt_neo, _ = tinystories.load(directory, prompt.device)
    model, twist = Conditional(gpt_neo, prompt, config.length), load_twist(directory, prompt.device)
    return Pair(m, model, twist, potential_of(given, m))


def potential_of(given: Ingredients, m: int) -> LogPotential:
    """What multiplies p^(m) to give sigma: phi at generation 0, the effective potential from generation 1 on."""
    return base_potential(given.potential) if m == 0 else effective_potential(given.potential, given.base)


def after_prompt(given: Ingredients, pair: Pair, text: str) -> tuple[Ingredients, Pair]:
    """The same networks after another prompt, nothing loaded anew; InputError where the prompt is empty or too long."""
    potential = copy.copy(given.potential)
    ids = torch.tensor(potential.tokenizer.encode(text).ids, dtype=torch.long, device=given.base.prompt.device)
    potential.prompt = ids.tolist()
    base = Conditional(given.base.model, ids, given.base.length)
    moved = dataclasses.replace(given, base=base, potential=potential, target=None)
    model = Conditional(pair.model.model, ids, pair.model.length)
    return moved, Pair(pair.m, model, pair.twist, potential_of(moved, pair.m))
