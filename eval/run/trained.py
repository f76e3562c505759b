"""Weighted samples of a finished run, from its pairs (p^(m), psi^(m)) (`twist/saved.py`).

    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.samples(10)    drawn.texts [R K]    drawn.log_weights [R K]    drawn.log_z_hat

Of the weight of all runs, particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

Equal options give equal texts. R runs, K particles, T tokens.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from eval.run.options import RunConfig, build, saved_config
from eval.run.setup import Setup, identity, load_setup
from tinystories.checkpoint import read_json
from tinystories.errors import InputError, listed
from tinystories.fast import pack
from tsmc import Population, Sigma, Trace, in_chunks, sample_runs
from tsmc.interfaces import Twist
from tsmc.proposal import sequence_log_probs
from tsmc.runs import require_alive
from twist.potential import each_once
from twist.saved import FILE, load_pair


def load_generation(setup: Setup, path: Path, m: int, device: torch.device) -> tuple[Sigma, Twist]:
    """Sigma as p^(m) sees it (eq. 8), and psi^(m) packed; InputError names a file at fault."""
    p, psi = (module.to(device) for module in load_pair(path, m, setup.model))
    return setup.sigma(p, psi), pack(psi)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    log_phi: Tensor  # [R K]
    log_p: Tensor  # [R K] log p^(0)(s_{1:T} | s_0)
    toxicity: Tensor  # [R K] p(toxic | text), whatever the potential is
    log_weights: Tensor  # [R K] float64, log of the share W of each particle
    log_z_hat: float  # log of the mean of Z-hat; runs whose weights are all zero count as zero
    population: Population
    trace: Trace  # of the first chunk of runs
    seed: int = 0  # of `samples`

    def row(self, k: int) -> dict[str, str | float]:
        """Particle k: its text, log phi, log p, toxicity, and its weight W."""
        row = {"text": self.texts[k], "weight": self.log_weights[k].exp().item()}
        numbers = ("log_phi", "log_p", "toxicity")
        return row | {name: getattr(self, name)[k].item() for name in numbers}

    def samples(self, count: int, generator: torch.Generator | None = None) -> list[dict]:
        """`count` independent draws by the weights, for large R K from sigma; a `row` for each.

        Equal calls give equal draws, others with a `generator` on the CPU. There are none where
        every weight is zero.
        """
        weights = self.log_weights.exp().float()
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
        found = [path.parent for path in run.glob(f"generation-*/{FILE}")]
        saved = {int(path.name[11:]): path for path in found if path.name[11:].isdecimal()}
        if not saved:
            raise InputError(f"{run}: holds no saved generation; name a run that has finished one")
        self.generation = max(saved) if generation is None else generation
        if self.generation not in saved:
            there = listed(map(str, saved))
            raise InputError(f"generation {self.generation} is not in {run}; it holds {there}")
        self.path = saved[self.generation]
        self.config = dataclasses.replace(saved_config(run), device=device)

    def options(self, **changes) -> RunConfig:
        """The options of the run, with those changed that are not None or empty."""
        given = {name: value for name, value in changes.items() if value not in (None, "")}
        return build(dataclasses.asdict(self.config) | given)

    def setup(self, config: RunConfig) -> Setup:
        """What is fixed, loaded; InputError where the run was made with other networks."""
        run, hashes = self.path.parent, identity(config)
        made_with = hashes | read_json(run / "config.json").get("networks", {})
        changed = [name for name in hashes if hashes[name] != made_with[name]]
        if changed:
            fault = f"{run}: {listed(changed)} changed since the run was made"
            raise InputError(f"{fault}; restore what it had, or make a new run")
        return load_setup(config)

    def draw(self, config: RunConfig, setup: Setup, runs: int) -> Drawn:
        """R = runs populations of K = config.particles; equal options give equal texts."""
        sigma, twist = load_generation(setup, self.path, self.generation, config.torch_device())
        trace = Trace()
        particles = config.particles

        def draw_chunk(size: int, generator: torch.Generator) -> dict[str, Tensor]:
            rule = config.rule() | {"observer": None if trace.steps else trace}
            return vars(sample_runs(sigma, twist, particles, size, generator, **rule))

        streams = config.streams("sample", self.generation, config.prompt)
        population = Population(**in_chunks(draw_chunk, runs, config.rows // particles, streams))
        tokens = population.tokens.flatten(0, 1)  # [R K, T]
        texts = setup.potential.texts(tokens)
        return Drawn(
            texts,
            log_phi=setup.potential(tokens),
            log_p=sequence_log_probs(setup.base, tokens),
            toxicity=each_once(setup.log_toxicity, texts).exp(),
            log_weights=population.shares().flatten().log(),
            log_z_hat=population.log_mean_z(),
            population=population,
            trace=trace,
            seed=config.generator("samples", self.generation, config.prompt).initial_seed(),
        )

    def sample(
        self, prompt: str = "", particles: int = 50, runs: int = 8, length: int = 0, seed: int = 0
    ) -> Drawn:
        """R = runs populations of K = particles texts; prompt and length are the run's by default.

        InputError for options out of range, changed networks, and where all weights are zero.
        """
        sizes = {"particles": particles, "length": length or None}
        config = self.options(prompt=prompt, seed=seed, **sizes)
        drawn = self.draw(config, self.setup(config), runs)
        require_alive(drawn.population)
        return drawn
