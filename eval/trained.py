"""Weighted samples of a finished run, from its pairs (p^(m), psi^(m)) (`twist/pair.py`).

    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.samples(10)    drawn.texts [R K]    drawn.log_weights [R K]    drawn.log_z_hat

`twist/drawn.py` describes what is drawn. Equal options give equal texts. R runs, K particles.
"""

import dataclasses
from functools import lru_cache
from pathlib import Path

import torch

import tinystories
from eval.run.options import RunConfig, build, saved_config
from eval.run.setup import Setup, identity, load_setup
from tinystories.checkpoint import read_json, reading
from tinystories.errors import InputError, listed
from tsmc import Phases
from tsmc.interfaces import BaseModel
from twist.drawn import Drawn, sample
from twist.pair import ADAPTER, TWIST, Pair, load_pair


def read_network(directory: Path, base: BaseModel) -> torch.nn.Module:
    """A fine-tuned p^(m) as main.py writes it, on the device and in the type of p^(0)."""
    return tinystories.load(directory)[0].to(base.output_embeddings)


def draw(setup: Setup, pair: Pair | None, config: RunConfig, particles: int, runs: int) -> Drawn:
    """R = runs populations of K = particles of a pair; without one p^(0) proposes."""
    scores = {}
    if setup.log_toxicity is not None:
        scores["toxicity"] = lambda texts: setup.log_toxicity(texts).exp()
    phases = Phases(config.seed, config.torch_device(), config.rows)
    sizes = (particles, runs, config.seed)
    return sample(setup.base, setup.potential, pair, *sizes, scores, phases, **config.rule())


class TrainedRun:
    """The pair (p^(m), psi^(m)) of a run of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; InputError names what is missing."""
        run = Path(directory)
        if not run.is_dir():
            raise InputError(f"{run}: no such directory; name one that main.py wrote")
        found = [
            path.parent for name in (TWIST, ADAPTER) for path in run.glob(f"generation-*/{name}")
        ]
        saved = {int(path.name[11:]): path for path in found if path.name[11:].isdecimal()}
        if not saved:
            raise InputError(f"{run}: holds no saved generation; name a run that has finished one")
        self.generation = max(saved) if generation is None else generation
        if self.generation not in saved:
            there = listed(map(str, saved))
            raise InputError(f"generation {self.generation} is not in {run}; it holds {there}")
        self.path = saved[self.generation]
        self.config = dataclasses.replace(saved_config(run), device=device)
        self.setup = lru_cache(maxsize=1)(self.load_setup)

    def options(self, **changes) -> RunConfig:
        """The options of the run, with those changed that are not None or empty."""
        given = {name: value for name, value in changes.items() if value not in (None, "")}
        return build(dataclasses.asdict(self.config) | given)

    def load_setup(self, config: RunConfig) -> Setup:
        """What is fixed, loaded; InputError where the run was made with other networks."""
        run, hashes = self.path.parent, identity(config)
        with reading(run / "config.json", "holds no hashes of networks"):
            made_with = hashes | read_json(run / "config.json")["networks"]
        changed = [name for name in hashes if hashes[name] != made_with[name]]
        if changed:
            fault = f"{run}: {listed(changed)} changed since the run was made"
            raise InputError(f"{fault}; restore what it had, or make a new run")
        return load_setup(config)

    def sample(
        self, prompt: str = "", particles: int = 50, runs: int = 8, length: int = 0, seed: int = 0
    ) -> Drawn:
        """R = runs populations of K = particles texts; prompt and length are the run's by default.

        InputError for options out of range, changed networks, and where all weights are zero.
        """
        config = self.options(prompt=prompt, length=length or None, seed=seed)
        setup = self.setup(config)
        pair = load_pair(self.path, setup.base, read_network)
        return draw(setup, pair, config, particles, runs)
