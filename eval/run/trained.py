"""Trained pairs (p^(m), psi^(m)): how a run stores them, and weighted samples from them.

    from eval import load_run
    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.texts [R K]    drawn.log_weights [R K], exp of which sums to one    drawn.log_z_hat

A run has a directory for each generation m with p^(m), its tokenizer and `twist.safetensors`. The
twist is written last, so a directory that has one is complete. Particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

of the weight of all runs. Equal options give equal texts. R runs, K particles, T tokens.
"""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import tinystories
from eval.run.options import RunConfig, build, saved_config
from eval.run.setup import Setup, load_setup
from tinystories.checkpoint import fill, read_tensors, reading, write_tensors
from tinystories.errors import InputError, listed
from tinystories.fast import pack
from tinystories.gpt_neo import GPTNeo
from tsmc import Population, Sigma, Trace, in_chunks, tsmc
from tsmc.interfaces import Twist
from tsmc.runs import require_alive
from twist.embedding import EmbeddingTwist
from twist.mlp import TwistMLP
from twist.potential import each_once

FILE = "twist.safetensors"


def save_generation(directory: Path, model: GPTNeo, tokenizer: Tokenizer, twist: nn.Module) -> None:
    tinystories.save(directory, model, tokenizer)
    save_twist(directory, twist)


def save_twist(directory: Path, twist: nn.Module) -> None:
    write_tensors(directory / FILE, twist.state_dict())


def load_twist(directory: Path, device: str | torch.device = "cpu") -> TwistMLP | EmbeddingTwist:
    """The twist of a generation; InputError names the file and the tensor that does not fit."""
    path = directory / FILE
    tensors = read_tensors(path)
    with reading(path, "not a twist", "name a directory that main.py wrote"):
        if "products.weight" in tensors:
            hidden_units = len(tensors["shift.first.weight"])
            twist = EmbeddingTwist(hidden_units, tensors["products.weight"], torch.Generator())
        else:
            hidden_units, width = tensors["first.weight"].shape
            twist = TwistMLP(width, hidden_units, len(tensors["last.bias"]), torch.Generator())
        fill(twist, tensors)
    return twist.to(device)


def load_generation(setup: Setup, path: Path, m: int, device: torch.device) -> tuple[Sigma, Twist]:
    """Sigma as p^(m) sees it (eq. 8), and psi^(m) packed; InputError names a file at fault."""
    twist = load_twist(path, device)
    model = setup.model
    if m > 0:
        model = tinystories.load(path, device)[0].to(setup.model.wte.weight.dtype)
    if (twist.width, twist.vocab_size) != (model.config.hidden_size, model.config.vocab_size):
        raise InputError(f"{path / FILE}: fits another language model; restore the run's own")
    return setup.sigma(model if m > 0 else None), pack(twist)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    log_phi: Tensor  # [R K]
    score: Tensor  # [R K] p(toxic | text), whatever the potential is
    log_weights: Tensor  # [R K] float64, log of the share W of each particle
    log_z_hat: float  # log of the mean of Z-hat; runs whose weights are all zero count as zero
    population: Population
    trace: Trace  # of the first chunk of runs

    def samples(self, count: int, generator: torch.Generator) -> list[str]:
        """`count` texts drawn by their weights, independently; none where every weight is zero."""
        weights = self.log_weights.exp().float().to(generator.device)
        if not weights.any():
            return []
        places = torch.multinomial(weights, count, replacement=True, generator=generator)
        return [self.texts[place] for place in places.tolist()]

    def distinct(self) -> list[dict]:
        """A row for each distinct text, heaviest first; `particles` counts those that carry it."""
        rows = {}
        weights = self.log_weights.exp().tolist()
        for k, text in enumerate(self.texts):
            own = {"log_phi": self.log_phi[k].item(), "score": self.score[k].item()}
            row = rows.setdefault(text, {"text": text, "weight": 0.0, "particles": 0} | own)
            row["weight"] += weights[k]
            row["particles"] += 1
        return sorted(rows.values(), key=lambda row: row["weight"], reverse=True)


class TrainedRun:
    """The pair (p^(m), psi^(m)) of a run of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; InputError names what is missing."""
        run = Path(directory)
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
        """The options of the run, with those changed that are not None."""
        given = {name: value for name, value in changes.items() if value is not None}
        return build(dataclasses.asdict(self.config) | given)

    def draw(self, config: RunConfig, setup: Setup, runs: int) -> Drawn:
        """R = runs populations of K = config.particles; equal options give equal texts."""
        sigma, twist = load_generation(setup, self.path, self.generation, config.torch_device())
        trace = Trace()
        particles = config.particles

        def draw_chunk(size: int, generator: torch.Generator) -> dict[str, Tensor]:
            rule = config.rule() | {"observer": None if trace.steps else trace}
            model = sigma.model
            return vars(tsmc(model, twist, sigma.log_potential, particles, generator, size, **rule))

        streams = config.streams("sample", self.generation, config.prompt)
        population = Population(**in_chunks(draw_chunk, runs, config.rows // particles, streams))
        tokens = population.tokens.flatten(0, 1)  # [R K, T]
        texts = setup.potential.texts(tokens)
        log_phi = setup.potential(tokens)
        score = each_once(setup.log_toxicity, texts).exp()
        log_weights = population.shares().flatten().log()
        return Drawn(texts, log_phi, score, log_weights, population.log_mean_z(), population, trace)

    def sample(
        self, prompt: str = "", particles: int = 50, runs: int = 8, length: int = 0, seed: int = 0
    ) -> Drawn:
        """R = runs populations of K = particles texts; prompt and length are the run's by default.

        InputError for options out of range and where all weights of all runs are zero.
        """
        own = {"prompt": prompt or None, "length": length or None}
        config = self.options(particles=particles, seed=seed, **own)
        drawn = self.draw(config, load_setup(config), runs)
        require_alive(drawn.population)
        return drawn


load_run = TrainedRun
