"""A trained pair from a run's directory, for programs: sampling any opening with it.

    from eval import load_run
    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.texts [R K]    drawn.log_weights [R K], normalised over all runs    drawn.log_z_hat

R runs, K particles, T tokens.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from eval.run.options import saved_config
from eval.run.saved import chosen_generation, load_generation
from eval.run.setup import load_setup
from tsmc import SCHEMES, Chunks, Population, sample_runs


@dataclass(frozen=True)
class Drawn:
    """What R runs of K particles have given: weighted texts, and the evidence."""

    texts: list[str]  # [R K], prompt included
    log_weights: torch.Tensor  # [R K] float64, log of each particle's share of all weight: they sum to one
    log_z_hat: float  # log of the mean of Z-hat, dead runs counting zero
    population: Population


class TrainedRun:
    """The pair (p^(m), psi^(m)) of a run of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; InputError names the file or the number that is not there."""
        self.config = dataclasses.replace(saved_config(Path(directory)), device=device)
        self.generation, self.directory = chosen_generation(Path(directory), generation, "generation")

    def sample(self, prompt: str = "", particles: int = 50, runs: int = 8, length: int = 0, seed: int = 0) -> Drawn:
        """R = runs populations of K = particles stories, resampled as the run was; "" and 0 stand for the run's own.

        InputError for sizes out of range and where every run has died.
        """
        changes = {"prompt": (prompt,) if prompt else self.config.prompt[:1], "length": length or self.config.length}
        config = dataclasses.replace(self.config, seed=seed, **changes)
        setup = load_setup(config)
        (sigma,), twist = load_generation(setup, self.directory, self.generation, config.torch_device())
        chunks = Chunks(runs, config.rows // max(1, particles), config.streams("sample", self.generation, prompt))
        rule = SCHEMES[config.resampling], config.ess_threshold
        population = sample_runs(sigma, twist, particles, chunks, *rule)
        texts = setup.problems[0].potential.texts(population.tokens.flatten(0, 1))
        return Drawn(texts, population.shares().flatten().log(), population.log_mean_z(), population)


load_run = TrainedRun
