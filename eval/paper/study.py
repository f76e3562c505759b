"""What the study consists of: its sizes, its parts, and the equal budget of all methods.

    rejection             samples of the base model, exact samples of sigma for several betas
    published-S, ...      a run of main.py with seed S, as METHODS and ABLATIONS list them
    dpo-full-1, ...       one setting of a baseline's grid, on the first seed
    best-of-dpo-full-S    the best setting of that grid, on seed S

The pairs of METHODS are also sampled with other K, and those of published-S with other resampling
schemes. A baseline spends as many token positions through the language model as Algorithm 1 does.
"""

import shlex
from dataclasses import dataclass

from distill.dpo import dpo_cost
from distill.finetune import BaselineConfig, Cost, Grid
from distill.grpo import grpo_cost
from eval.run.options import RunConfig, read_config

METHODS = {  # arguments of main.py; on all seeds
    "published": "--as-published",
    "default": "",
}
ABLATIONS = {  # arguments of main.py; on the first few seeds, as the baselines
    "no-effective": "--as-published --no-effective-potential",
    "lora": "--as-published --lora",
}
VARIANTS = METHODS | ABLATIONS
BASELINES = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")


@dataclass(frozen=True)
class Study:
    """Everything that the numbers depend on, besides the networks and the versions of libraries."""

    options: str = ""  # of every run of main.py
    seeds: tuple[int, ...] = (21, 22, 23, 24, 25)
    few: int = 3  # so many of the seeds serve the baselines and the ablations
    rejection_samples: int = 50_000  # from the base model
    rejection_betas: tuple[float, ...] = (1.0,)  # besides 0 (Base) and the beta of Target
    particle_counts: tuple[int, ...] = (20, 50, 100, 1000)
    particles_per_point: int = 2000  # R K for each K, but at least 8 runs
    resampling_runs: int = 20
    learning_rates: tuple[float, ...] = (1e-3, 1e-4)
    weight_decays: tuple[float, ...] = (1e-2,)
    dpo_strengths: tuple[float, ...] = (0.1, 0.8)
    grpo_strengths: tuple[float, ...] = (0.04, 0.32)
    baseline_batch: int = 128  # sequences of one update

    def few_seeds(self) -> tuple[int, ...]:
        """The seeds of the baselines and of the ablations."""
        return self.seeds[: self.few]

    def arguments(self, method: str, seed: int) -> list[str]:
        """The command line of a run of main.py, which leaves the exact samples to the study.

        A baseline has the networks and sizes of the published algorithm.
        """
        own = VARIANTS.get(method, VARIANTS["published"])
        return shlex.split(f"{self.options} {own} --seed {seed} --eval-target-proposals 0")

    def config(self, method: str = "published", seed: int = 0) -> RunConfig:
        """The options of a run; InputError where they are not options of main.py."""
        return read_config(self.arguments(method, seed), "")[0]

    def grid(self, method: str) -> list[BaselineConfig]:
        """The settings of a baseline's sweep."""
        config = self.config()
        one = BaselineConfig(0.0, 0.0, 0.0, updates=1, batch_size=self.baseline_batch)
        budget = tsmc_cost(config).units(config.length)
        updates = max(1, budget // baseline_cost(method, one).units(config.length))
        strengths = self.dpo_strengths if method.startswith("dpo") else self.grpo_strengths
        grid = Grid(strengths, self.learning_rates, self.weight_decays)
        return grid.configs(updates=updates, batch_size=self.baseline_batch)


QUICK = Study(  # only shows that everything runs
    options="--length 3 --beta 0.3 --generations 1 --eval-particles 3 --eval-runs 3 "
    "--eval-base-samples 10 --particles 3 --ctl-updates 2 --ctl-batch-size 8 --distill-runs 3 "
    "--distill-updates 2 --distill-batch-size 4",
    seeds=(1, 2),
    few=1,
    rejection_samples=100,
    rejection_betas=(0.1,),
    particle_counts=(2, 3),
    particles_per_point=8,
    resampling_runs=2,
    learning_rates=(1e-3,),
    dpo_strengths=(0.1,),
    grpo_strengths=(0.04,),
    baseline_batch=4,
)


def baseline_cost(method: str, config: BaselineConfig) -> Cost:
    """What a baseline spends."""
    return dpo_cost(config) if method.startswith("dpo") else grpo_cost(config)


def tsmc_cost(config: RunConfig) -> Cost:
    """What Algorithm 1 as published spends, without the evaluation.

    p^(0) reads every sequence of a generation m >= 1 for the effective potential phi^(m).
    """
    last, learning = config.generations, config.ctl.updates * config.ctl.batch_size
    drawn = config.distill.runs * config.particles  # in every generation but the last
    sampled = (last + 1) * learning + last * drawn
    read = sampled - learning - drawn if last and config.effective_potential else 0
    trained = last * config.distill.updates * config.distill.batch_size
    return Cost(sampled, scored=read, trained=trained)


@dataclass(frozen=True)
class Part:
    """One part of a study. `kind` is "rejection", "run", "sweep" or "best"."""

    name: str
    kind: str
    seed: int
    method: str = "published"  # of VARIANTS or BASELINES
    setting: int = 0  # number of a sweep's setting in the grid


def stages(study: Study) -> list[list[Part]]:
    """The parts in three stages, each of which needs only results of the stages before it."""
    first, few = study.seeds[0], study.few_seeds()
    runs = [(method, seed) for method in METHODS for seed in study.seeds]
    runs += [(method, seed) for method in ABLATIONS for seed in few]
    trained = [Part(f"{method}-{seed}", "run", seed, method) for method, seed in runs]
    best = []
    for method in BASELINES:
        for setting in range(len(study.grid(method))):
            trained.append(Part(f"{method}-{setting + 1}", "sweep", first, method, setting))
        best += [Part(f"best-of-{method}-{seed}", "best", seed, method) for seed in few]
    return [[Part("rejection", "rejection", first)], trained, best]
