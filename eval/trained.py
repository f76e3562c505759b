"""Weighted samples of a run, from its pairs (p^(m), psi^(m)) (`twist/pair.py`).

    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.samples(10)    drawn.texts [R K]    drawn.log_weights [R K]    drawn.log_z_hat

`twist/drawn.py` describes what is drawn. Equal options give equal texts. R runs, K particles.
"""

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import Any

from eval.config import LEARNERS, RunOptions, saved_config
from eval.run import ROW
from eval.world import World, identity, load_world, read_network
from tinystories.checkpoint import read_json
from tinystories.errors import InputError, listed
from tsmc.runs import Streams
from twist.drawn import Drawn, sample
from twist.pair import Pair, load_pair


def draw(
    world: World, pair: Pair | None, options: RunOptions, particles: int, runs: int, **rule: Any
) -> Drawn:
    """R = runs populations of K = particles of a pair; without one p^(0) proposes."""
    scores = {}
    if world.log_toxicity is not None:
        scores["toxicity"] = lambda texts: world.log_toxicity(texts).exp()
    given = (world.base, world.potential, pair, particles, runs, options.seed, scores)
    return sample(*given, **rule)


class TrainedRun:
    """The pair (p^(m), psi^(m)) of a run of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; InputError names what is missing."""
        run = Path(directory)
        if not run.is_dir():
            raise InputError(f"{run}: no such directory; name one that main.py wrote")
        names = [path.parent.name[11:] for path in run.glob(f"generation-*/{ROW}")]
        saved = sorted(int(name) for name in names if name.isdecimal())
        if not saved:
            raise InputError(f"{run}: holds no saved generation; name a run that has finished one")
        self.generation = saved[-1] if generation is None else generation
        if self.generation not in saved:
            there = listed(map(str, saved))
            raise InputError(f"generation {self.generation} is not in {run}; it holds {there}")
        self.run = run
        self.path = run / f"generation-{self.generation}"
        self.config = saved_config(run).change(device=device)
        self.world = lru_cache(maxsize=1)(self.load_world)

    def options(self, **changes: Any) -> RunOptions:
        """The options of the run, with those changed that are not None or empty."""
        given = {name: value for name, value in changes.items() if value not in (None, "")}
        # Sampling needs no exact samples; those of the run may be of another sigma, or gone.
        return dataclasses.replace(self.config.run, **{"target": ""} | given)

    def load_world(self, options: RunOptions) -> World:
        """What is fixed, loaded; InputError where the run was made with other networks."""
        hashes = identity(options, self.run / "potential")
        made_with = hashes | read_json(self.run / "config.json").get("networks", {})
        changed = [name for name in hashes if hashes[name] != made_with[name]]
        if changed:
            fault = f"{self.run}: {listed(changed)} changed since the run was made"
            raise InputError(f"{fault}; restore what it had, or make a new run")
        return load_world(options, self.run / "potential")

    def rule(self, world: World) -> dict[str, Any]:
        """How the runs of its learner resample."""
        kind = LEARNERS[self.config.run.learner][0]
        return kind(world.base, world.potential, self.config.learner, Streams()).rule()

    def pair(self, world: World) -> Pair:
        """(p^(m), psi^(m))"""
        return load_pair(self.path, world.base, read_network)

    def sample(
        self, prompt: str = "", particles: int = 50, runs: int = 8, length: int = 0, seed: int = 0
    ) -> Drawn:
        """R = runs populations of K = particles texts; prompt and length are the run's by default.

        InputError for options out of range, changed networks, and where all weights are zero.
        """
        options = self.options(prompt=prompt, length=length or None, seed=seed)
        world = self.world(options)
        return draw(world, self.pair(world), options, particles, runs, **self.rule(world))
