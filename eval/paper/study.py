"""What the study of `eval.paper` consists of: its settings at three scales, and its parts with what each waits for.

    rejection                 base samples, exact samples of sigma for every beta
    tsmc-S                    Algorithm 1 with seed S: `main.py --seed S`
    no-effective-S, lora-S    the same with phi in place of phi^(m), and distilled by LoRA
    late-S                    the same, resampled at the last token alone and by the systematic scheme
    pooled-S                  resampled like late-S, the twist learned from everything drawn: the default but for its moves
    particles-S, resampling-S the trained pairs of tsmc-S under other K, and other resampling schemes
    particles-pooled-S        the pairs of pooled-S under other K
    dpo-full-1, ...           the sweep of a baseline on the first seed, numbered by the settings of its grid
    dpo-full-best-S, ...      the best of the sweep on another seed

The baselines, no-effective-S, lora-S and resampling-S have the first `seeds_beside` seeds only.

A baseline spends as many model evaluations as Algorithm 1 does: token positions through the language model, forward and
backward together counting three.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from distill import DPO_GRID, GRPO_GRID, BaselineConfig, Cost, Grid, dpo_cost, grpo_cost
from eval.run.options import CTLConfig, DistillConfig, EvaluationConfig, PoolConfig, RunConfig, option

VARIANTS: dict[str, dict[str, Any]] = {
    "tsmc": {},
    "no-effective": {"effective_potential": False},
    "lora": {"lora": True},
    "late": {"resampling": "systematic", "ess_threshold": 0.0},
    "pooled": {"method": "pooled", "resampling": "systematic", "ess_threshold": 0.0},
}
METHODS = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")  # baselines
NAMES = {"tsmc": "TSMC", "no-effective": "TSMC without φ⁽ᵐ⁾", "lora": "TSMC, LoRA"}
NAMES |= {"late": "TSMC, resampled last", "pooled": "Pooled twist"}
NAMES |= {"dpo-full": "DPO, full", "dpo-lora": "DPO, LoRA", "grpo-full": "GRPO, full", "grpo-lora": "GRPO, LoRA"}
TSMC = NAMES["tsmc"]
NEVER = "never before the last token"
AS_PUBLISHED = RunConfig(method="distilled", resampling="multinomial", ess_threshold=1.0, moves=0)
Place = tuple[str, str, int | str, int | str]
"""Where a number belongs: section, name in it, seed (or "mean", or ""), generation (or "")."""


@dataclass(frozen=True)
class StudyConfig:
    """Everything that the numbers of a study depend on, but for versions and checkpoints."""

    seeds: tuple[int, ...] = option((21, 22, 23, 24, 25), "seeds of the runs; the first one's serves the sweep")
    seeds_beside: int = option(
        3, "so many of them, the first ones, also run the baselines, no-effective, lora and resampling"
    )
    rejection_betas: tuple[float, ...] = option((0.0, 1.0, 10.0), "beta of the rejection table")
    rejection_samples: int = option(50_000, "base samples of the rejection table")
    particle_counts: tuple[int, ...] = option((20, 50, 100, 1000), "K of the particle study")
    particles_per_point: int = option(2000, "R K of each point of the particle study")
    least_runs: int = option(4, "R of each point of the particle study is at least this")
    resampling_runs: int = option(20, "R of each row of the resampling table")
    similarity_samples: int = option(2000, "texts at most that a similarity is taken of")
    texts: int = option(5, "representative texts of each set")
    replicates: int = option(1000, "bootstrap replicates")
    methods: tuple[str, ...] = option(METHODS, "baselines")
    learning_rates: tuple[float, ...] = option((1e-3, 1e-4), "step sizes of the baselines' sweep")
    weight_decays: tuple[float, ...] = option((1e-2,), "weight decays of the sweep")
    dpo_strengths: tuple[float, ...] = option((0.1, 0.8), "b of DPO in the sweep")
    grpo_strengths: tuple[float, ...] = option((0.04, 0.32), "b of GRPO in the sweep")
    baseline_batch: int = option(128, "sequences of a baseline's update")
    baseline_updates: int = option(0, "updates of a baseline; 0 spends what Algorithm 1 spends in model evaluations")
    run: RunConfig = AS_PUBLISHED

    def run_config(self, seed: int, variant: str = "tsmc", out: str = "") -> RunConfig:
        """The options of one run of Algorithm 1, which draws no exact samples: all runs share those of the study."""
        evaluation = dataclasses.replace(self.run.eval, target_proposals=0)
        changes = {"seed": seed, "out": out, "eval": evaluation, "keep_states": variant == "tsmc"}
        return dataclasses.replace(self.run, **changes, **VARIANTS.get(variant, {}))

    def target_place(self) -> Place:
        """Target in the table of numbers."""
        return "rejection", f"beta {self.run.beta:g}", "", ""

    def runs_of(self, particles: int) -> int:
        """R of the particle study at K = particles."""
        return max(self.least_runs, -(-self.particles_per_point // particles))

    def grid(self, method: str) -> list[BaselineConfig]:
        """The sweep of one baseline, its updates those of the budget."""
        strengths = self.dpo_strengths if method.startswith("dpo") else self.grpo_strengths
        grid = Grid(strengths, self.learning_rates, self.weight_decays)
        one = baseline_cost(method, BaselineConfig(0.0, 0.0, 0.0, 1, self.baseline_batch)).units(self.run.length)
        updates = self.baseline_updates or max(1, tsmc_cost(self.run).units(self.run.length) // one)
        return grid.configs(updates=updates, batch_size=self.baseline_batch)


def baseline_cost(method: str, config: BaselineConfig) -> Cost:
    """What a baseline spends."""
    return dpo_cost(config) if method.startswith("dpo") else grpo_cost(config)


def tsmc_cost(config: RunConfig) -> Cost:
    """What Algorithm 1 spends, evaluation left out; p^(0) reads every sequence of a generation m >= 1 for phi^(m)."""
    last, learning = config.generations, config.ctl.updates * config.ctl.batch_size
    drawn = config.distill.runs * config.particles  # in each generation but the last
    sampled = (last + 1) * learning + last * drawn
    read = sampled - learning - drawn if last and config.effective_potential else 0
    return Cost(sampled, scored=read, trained=last * config.distill.updates * config.distill.batch_size)


def scheme_name(scheme: str, threshold: float) -> str:
    """A row of the resampling table."""
    if threshold == 0:
        return NEVER
    return f"{scheme}, " + {1.0: "every step", 0.5: "ESS < K/2"}.get(threshold, f"ESS < {threshold:g} K")


def setting_name(method: str, config: BaselineConfig) -> str:
    """One run of a baseline's sweep."""
    return f"{NAMES[method]}, lr {config.learning_rate:g}, decay {config.weight_decay:g}, b {config.strength:g}"


@dataclass(frozen=True)
class Part:
    """One part of a study: `kind` says what is computed, `seconds` roughly how long it takes on one core (pocket preset)."""

    name: str
    kind: str
    seed: int
    seconds: float
    needs: tuple[str, ...] = ()
    method: str = ""  # a baseline, or the variant whose trained pairs are looked at
    place: int = 0  # in the grid

    @property
    def variant(self) -> str:
        """The way to run Algorithm 1 that the part runs or looks at."""
        return next((name for name in (self.method, self.kind) if name in VARIANTS), "tsmc")


def study_parts(study: StudyConfig, shipped: bool) -> list[Part]:
    """Every part, those that others wait for before them; exact samples of sigma may be shipped."""
    first, *others = beside = study.seeds[: study.seeds_beside]
    exact = () if shipped else ("rejection",)
    parts = [Part("rejection", "rejection", first, 80)]
    for seed in study.seeds:
        parts += [Part(f"{kind}-{seed}", kind, seed, 240, exact) for kind in ("tsmc", "late", "pooled")]
    for seed in study.seeds:
        parts.append(Part(f"particles-pooled-{seed}", "particles", seed, 80, (f"pooled-{seed}",), "pooled"))
        parts.append(Part(f"particles-{seed}", "particles", seed, 80, (f"tsmc-{seed}",)))
    for seed in beside:
        for kind, seconds in (("no-effective", 120), ("lora", 180), ("resampling", 70)):
            parts.append(Part(f"{kind}-{seed}", kind, seed, seconds, (f"tsmc-{seed}",)))
    for method in study.methods:
        sweep = tuple(f"{method}-{place + 1}" for place in range(len(study.grid(method))))
        parts += [Part(name, "baseline", first, 160, exact, method, place) for place, name in enumerate(sweep)]
        parts += [Part(f"{method}-best-{seed}", "best", seed, 160, ("rejection", *sweep), method) for seed in others]
    return parts


STUDIES = {
    "pocket": StudyConfig(),
    "paper": StudyConfig(
        rejection_samples=1_000_000,
        learning_rates=DPO_GRID.learning_rate,
        weight_decays=DPO_GRID.weight_decay,
        dpo_strengths=DPO_GRID.strength,
        grpo_strengths=GRPO_GRID.strength,
        baseline_batch=1024,
        baseline_updates=1000,
        run=dataclasses.replace(AS_PUBLISHED, preset="paper", particles=100),
    ),
    "quick": StudyConfig(
        seeds=(1, 2),
        rejection_samples=1500,
        particle_counts=(5, 10, 40),
        particles_per_point=80,
        resampling_runs=6,
        similarity_samples=200,
        texts=3,
        replicates=200,
        learning_rates=(1e-3,),
        dpo_strengths=(0.1,),
        grpo_strengths=(0.04,),
        baseline_batch=16,
        run=dataclasses.replace(
            AS_PUBLISHED,
            save_every=5.0,
            particles=10,
            pool=PoolConfig(base_draws=200, rounds=1, draws=100, updates=5, batch_size=16),
            ctl=CTLConfig(updates=10, batch_size=32),
            distill=DistillConfig(runs=10, updates=5, batch_size=16),
            eval=EvaluationConfig(particles=10, runs=8, base_samples=100),
        ),
    ),
}
