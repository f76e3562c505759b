"""Weighted samples of a finished run, from its pairs (p^(m), psi^(m)) (`twist/pair.py`).

    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.samples(10)    drawn.texts [R K]    drawn.log_weights [R K]    drawn.log_z_hat

Of the weight of all runs, particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

Equal options give equal texts. R runs, K particles, T tokens.
"""

import dataclasses
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

import tinystories
from eval.run.options import RunConfig, build, saved_config
from eval.run.setup import Setup, identity, load_setup
from tinystories.checkpoint import read_json
from tinystories.errors import InputError, listed
from tinystories.fast import pack
from tsmc import Phases, Population, Trace
from tsmc.interfaces import BaseModel
from tsmc.proposal import sequence_log_probs
from tsmc.runs import draw_population
from tsmc.sampler import Step
from twist.pair import ADAPTER, TWIST, Pair, load_pair
from twist.potential import each_once, seen_from


def read_network(directory: Path, base: BaseModel) -> torch.nn.Module:
    """A fine-tuned p^(m) as main.py writes it, on the device and in the type of p^(0)."""
    return tinystories.load(directory)[0].to(base.output_embeddings)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    scores: dict[str, Tensor]  # "log_phi" [R K], "log_p" [R K] of p^(0), perhaps "toxicity" [R K]
    log_weights: Tensor  # [R K] float64, log of the share W of each particle
    log_z_hat: float  # log of the mean of Z-hat; runs whose weights are all zero count as zero
    population: Population
    trace: Trace  # of the first chunk of runs
    seed: int = 0  # of `samples`

    @property
    def ess(self) -> float:
        """1 / sum W^2: how many independent samples the weighted texts are worth."""
        return 1 / self.log_weights.exp().square().sum().item()

    def row(self, k: int) -> dict[str, str | float]:
        """Particle k: its text, its scores, and its weight W."""
        row = {"text": self.texts[k], "weight": self.log_weights[k].exp().item()}
        return row | {name: values[k].item() for name, values in self.scores.items()}

    def samples(self, count: int, generator: torch.Generator | None = None) -> list[dict]:
        """`count` independent draws by the weights, for large R K from sigma; a `row` for each.

        Equal calls give equal draws, others with a `generator` on the CPU. There are none where
        every weight is zero. InputError unless count is a positive number.
        """
        if type(count) is not int or count < 1:
            raise InputError(f"{count!r} samples cannot be drawn; give a whole number from 1 on")
        weights = self.log_weights.exp()
        if not weights.any():
            return []
        generator = generator or torch.Generator().manual_seed(self.seed)
        places = torch.multinomial(weights, count, replacement=True, generator=generator)
        return [self.row(k) for k in places.tolist()]


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
        made_with = hashes | read_json(run / "config.json").get("networks", {})
        changed = [name for name in hashes if hashes[name] != made_with[name]]
        if changed:
            fault = f"{run}: {listed(changed)} changed since the run was made"
            raise InputError(f"{fault}; restore what it had, or make a new run")
        return load_setup(config)

    def draw(self, config: RunConfig, particles: int, runs: int) -> Drawn:
        """R = runs populations of K = particles; equal options give equal texts."""
        setup = self.setup(config)
        pair = load_pair(self.path, setup.base, read_network)
        phases = Phases(config.seed, config.torch_device(), config.rows)
        seed = phases.stream("samples", self.generation, config.prompt).initial_seed()
        return draw_weighted(setup, pair, config, phases, particles, runs, seed)

    def sample(
        self, prompt: str = "", particles: int = 50, runs: int = 8, length: int = 0, seed: int = 0
    ) -> Drawn:
        """R = runs populations of K = particles texts; prompt and length are the run's by default.

        InputError for options out of range, changed networks, and where all weights are zero.
        """
        config = self.options(prompt=prompt, length=length or None, seed=seed)
        return self.draw(config, particles, runs)


def draw_weighted(
    setup: Setup,
    pair: Pair,
    config: RunConfig,
    phases: Phases,
    particles: int,
    runs: int,
    seed: int,
) -> Drawn:
    """R = runs populations of K = particles of a pair, with texts, scores and weights."""
    sigma = seen_from(pair.model, setup.base, setup.potential)
    twist = None if pair.twist is None else pack(pair.twist)
    trace = Trace()

    def observe(step: Step) -> None:
        if step.tokens.shape[-1] > len(trace.steps):  # in the first chunk of runs
            trace(step)

    rule = config.rule() | {"observer": observe}
    population = draw_population(phases, "sample", None, sigma, twist, particles, runs, **rule)
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    texts = setup.potential.texts(tokens)
    scores = {"log_phi": setup.potential(tokens)}
    scores["log_p"] = sequence_log_probs(setup.base.packed(), tokens)
    if setup.log_toxicity is not None:
        scores["toxicity"] = each_once(setup.log_toxicity, texts).exp()
    return Drawn(
        texts,
        scores,
        log_weights=population.shares().flatten().log(),
        log_z_hat=population.log_mean_z(),
        population=population,
        trace=trace,
        seed=seed,
    )
