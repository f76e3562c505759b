"""What the study consists of: its sizes and its parts.

    rejection             samples of the base model, and exact samples of sigma
    default-S, ...        a run of main.py with seed S, as `Study.variants` lists them
    dpo-full-1, ...       one setting of a baseline's grid, on the first seed
    best-of-dpo-full-S    the best setting of that grid, on seed S

The last pairs of the default are also sampled at every threshold of WHEN. Moves, V and the time of
resampling do not enter the pool, so no run is made without them; with V = 0 all weights before the
last token are equal, which is resampling at the last token alone.
`eval/paper/cost.py` gives all baselines the budget of Algorithm 1.
"""

import itertools
import shlex
from dataclasses import dataclass

from eval.run.options import RunConfig, read_config

METHODS = {  # arguments of main.py; on all seeds
    "default": "",
    "published": "--as-published",
}
ABLATIONS = {  # on the first few seeds, as the baselines
    "no-ladder": "--pool-first-rounds 1",
    "no-surrogate": "--no-surrogate",
    "no-memory": "--no-memory",
    "no-pooling": "--no-pooling",
    "student-full": "--student full",
    "student-lora": "--student lora",
    "published-no-effective": "--as-published --no-effective-potential",
}
WHEN = {0.0: "never", 0.25: "ESS < K/4", 0.5: "ESS < K/2", 1.0: "every step"}  # by threshold
BASELINES = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")
BEYOND = {  # (step size, b) beyond the edges of the grid at which the best settings once lay
    "dpo-full": ((3e-5, 0.8), (1e-4, 6.4)),
    "dpo-lora": ((3e-5, 0.8), (1e-4, 6.4)),
    "grpo-full": ((3e-3, 0.32), (1e-3, 2.56)),
    "grpo-lora": ((3e-5, 0.04), (1e-4, 0.005)),
}


@dataclass(frozen=True)
class Study:
    """What the numbers depend on, besides main.py's defaults, the networks and the libraries."""

    options: str = ""  # of every run of main.py
    seeds: tuple[int, ...] = (41, 42, 43, 44, 45)
    few: int = 3  # so many of the seeds serve the baselines, the ablations and longer texts
    rejection_samples: int = 50_000  # draws for exact samples where none are shipped
    best_of: int = 50  # draws of p^(0), of which the row "Best of 50" keeps the best by phi
    lengths: tuple[int, ...] = (40, 60)  # T of longer texts, only for the table of resampling
    resampling_runs: int = 100
    learning_rates: tuple[float, ...] = (1e-3, 1e-4)
    dpo_strengths: tuple[float, ...] = (0.1, 0.8)
    grpo_strengths: tuple[float, ...] = (0.04, 0.32)
    beyond: int = 2  # so many settings of BEYOND
    baseline_batch: int = 128  # sequences of one update

    def longer(self) -> dict[str, str]:
        """Arguments of main.py for longer texts, of whose sigma there are no exact samples."""
        return {f"default-T{length}": f"--length {length}" for length in self.lengths}

    def resampled(self) -> tuple[str, ...]:
        """The variants in the table of resampling."""
        return ("default", *self.longer())

    def variants(self) -> dict[str, str]:
        """Arguments of main.py by name, of all runs."""
        return METHODS | self.longer() | ABLATIONS

    def seeds_of(self, method: str) -> tuple[int, ...]:
        """All seeds for METHODS, the first few for everything else."""
        return self.seeds if method in METHODS else self.seeds[: self.few]

    def arguments(self, method: str, seed: int) -> list[str]:
        """The command line of a run of main.py, which leaves the exact samples to the study."""
        own = self.variants().get(method, "")
        return shlex.split(f"{self.options} {own} --seed {seed} --eval-target-proposals 0")

    def config(self, method: str = "default", seed: int = 0) -> RunConfig:
        """The options of a run; InputError where they are not options of main.py."""
        return read_config(self.arguments(method, seed), "")[0]

    def grid(self, method: str) -> list[tuple[float, float]]:
        """The settings (step size, b) of a baseline's sweep."""
        strengths = self.dpo_strengths if method.startswith("dpo") else self.grpo_strengths
        inner = itertools.product(self.learning_rates, strengths)
        return [*inner, *BEYOND[method][: self.beyond]]


QUICK = Study(  # only shows that everything runs
    options="--length 3 --beta 0.3 --generations 1 --eval-particles 3 --eval-runs 3 "
    "--eval-base-samples 10 --particles 3 --ctl-updates 2 --ctl-batch-size 8 --distill-runs 3 "
    "--distill-updates 2 --distill-batch-size 4 --pool-first-draws 30 "
    "--pool-first-rounds 2 --pool-first-updates 2 --pool-draws 20 "
    "--value-updates 2 --value-batch-size 4",
    seeds=(1, 2),
    few=1,
    rejection_samples=100,
    best_of=2,
    lengths=(4,),
    resampling_runs=2,
    learning_rates=(1e-3,),
    dpo_strengths=(0.1,),
    grpo_strengths=(0.04,),
    beyond=0,
    baseline_batch=4,
)


@dataclass(frozen=True)
class Part:
    """One part of a study. `kind` is "rejection", "run", "sweep" or "best"."""

    name: str
    kind: str
    seed: int
    method: str = "default"  # of `Study.variants` or BASELINES
    setting: int = 0  # number of a sweep's setting in the grid


def stages(study: Study) -> list[list[Part]]:
    """The parts in three stages, each of which needs only results of the stages before it."""
    first = study.seeds[0]
    runs = [(method, seed) for method in study.variants() for seed in study.seeds_of(method)]
    trained = [Part(f"{method}-{seed}", "run", seed, method) for method, seed in runs]
    best = []
    for method in BASELINES:
        for setting in range(len(study.grid(method))):
            trained.append(Part(f"{method}-{setting + 1}", "sweep", first, method, setting))
        for seed in study.seeds_of(method):
            best.append(Part(f"best-of-{method}-{seed}", "best", seed, method))
    return [[Part("rejection", "rejection", first)], trained, best]
