"""Trained pairs (p^(m), psi^(m)): how a run stores them, and weighted samples from them.

    from eval import load_run
    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.texts [R K]    drawn.log_weights [R K], exp of which sums to one    drawn.log_z_hat

A run has a directory for each generation m with p^(m), its tokenizer and `twist.safetensors`. The
twist is written last, so a directory that has one is complete. `python -m tsmc` draws with the same
function, so equal requests give equal texts. Particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

of the weight of all runs. R runs, K particles, T tokens.
"""

import dataclasses
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import tinystories
from eval.run.options import RunConfig, build, check, saved_config
from eval.run.setup import Setup, load_setup
from tinystories.checkpoint import fill, read_tensors, reading, write_tensors
from tinystories.errors import InputError
from tinystories.fast import pack
from tinystories.gpt_neo import GPTNeo
from tsmc import Population, Trace, tsmc
from tsmc.interfaces import Twist
from tsmc.runs import in_chunks, require_alive
from tsmc.sampler import Sigma
from twist.embedding import EmbeddingTwist
from twist.mlp import TwistMLP
from twist.potential import each_once

FILE = "twist.safetensors"


def save_generation(directory: Path, model: GPTNeo, tokenizer: Tokenizer, twist: nn.Module) -> None:
    """Write p^(m), its tokenizer and psi^(m)."""
    tinystories.save(directory, model, tokenizer)
    save_twist(directory, twist)


def save_twist(directory: Path, twist: nn.Module) -> None:
    """Write the tensors of the twist."""
    write_tensors(Path(directory) / FILE, twist.state_dict())


def load_twist(directory: Path, device: str | torch.device = "cpu") -> TwistMLP | EmbeddingTwist:
    """The twist of a generation; InputError names the file and the tensor that does not fit."""
    path = Path(directory) / FILE
    tensors = read_tensors(path)
    with reading(path, "not a twist", "name a directory that main.py wrote"):
        embeddings = tensors.get("products.weight")
        prefix = "" if embeddings is None else "shift."
        hidden_units, width = tensors[prefix + "first.weight"].shape
        shape = list(tensors[prefix + "second.weight"].shape)
        if shape != [hidden_units, hidden_units]:  # checked before memory is allocated for it
            raise ValueError(f"second.weight has shape {shape} beside {hidden_units} hidden units")
        if embeddings is None:
            twist = TwistMLP(width, hidden_units, len(tensors["last.bias"]), torch.Generator())
        else:
            twist = EmbeddingTwist(hidden_units, embeddings, torch.Generator())
    fill(twist, tensors, path)
    return twist.to(device)


def generations(run: Path) -> dict[int, Path]:
    """The directory of every completely saved generation; InputError where there is none."""
    found = (path.parent for path in Path(run).glob(f"generation-*/{FILE}"))
    directories = {int(path.name[11:]): path for path in found if path.name[11:].isdecimal()}
    if not directories:
        raise InputError(
            f"{run}: holds no saved generation; name a run of main.py that has finished one"
        )
    return dict(sorted(directories.items()))


def chosen_generation(run: Path, number: int | None, name: str) -> tuple[int, Path]:
    """Number and directory of a generation, the last by default; InputError names the option."""
    saved = generations(run)
    m = max(saved) if number is None else number
    if m not in saved:
        raise InputError(f"{name} {m} is not in {run}; it holds {', '.join(map(str, saved))}")
    return m, saved[m]


def load_generation(
    setup: Setup, directory: Path, m: int, device: torch.device
) -> tuple[Sigma, Twist]:
    """Sigma as p^(m) sees it, and psi^(m) packed; InputError names the file that does not fit.

    The potential is phi^(m) (eq. 8), which is phi itself at m = 0.
    """
    twist, model = load_twist(directory, device), None
    if m > 0:
        model = tinystories.load(directory, device)[0].to(setup.model.wte.weight.dtype)
    sizes = (model or setup.model).config
    if (twist.width, twist.vocab_size) != (sizes.hidden_size, sizes.vocab_size):
        path = directory / FILE
        raise InputError(f"{path}: belongs to another language model; restore the run's own")
    return setup.sigma(model), pack(twist)


@dataclass(frozen=True)
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
        numbers = self.log_weights.exp().tolist(), self.log_phi.tolist(), self.score.tolist()
        for text, weight, log_phi, score in zip(self.texts, *numbers, strict=True):
            new = {"text": text, "weight": 0.0, "particles": 0, "log_phi": log_phi, "score": score}
            row = rows.setdefault(text, new)
            row["weight"] += weight
            row["particles"] += 1
        return sorted(rows.values(), key=itemgetter("weight"), reverse=True)


def with_options(config: RunConfig, **changes) -> RunConfig:
    """The options of a run with some of them changed; InputError names one that is out of range."""
    return build(dataclasses.asdict(config) | changes)


def draw(config: RunConfig, setup: Setup, m: int, directory: Path, runs: int) -> Drawn:
    """R = runs populations of K = config.particles from the pair of generation m in `directory`.

    Equal options give equal texts. InputError for a number of runs that is not positive.
    """
    check("--runs", runs, low=1)
    sigma, twist = load_generation(setup, directory, m, config.torch_device())
    trace = Trace()

    def draw_chunk(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        observed = config.rule() | {"observer": None if trace.steps else trace}
        population = tsmc(
            sigma.model, twist, sigma.log_potential, config.particles, generator, size, **observed
        )
        return vars(population)

    streams = config.streams("sample", m, config.prompt)
    population = Population(**in_chunks(draw_chunk, runs, config.rows // config.particles, streams))
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    texts = setup.potential.texts(tokens)
    log_phi, score = setup.potential(tokens), each_once(setup.log_toxicity, texts).exp()
    shares, log_z_hat = population.shares().flatten(), population.log_mean_z()
    return Drawn(texts, log_phi, score, shares.log(), log_z_hat, population, trace)


class TrainedRun:
    """The pair (p^(m), psi^(m)) of a run of main.py, and the potential that it was trained for."""

    def __init__(self, directory: str | Path, generation: int | None = None, device: str = "auto"):
        """The last generation unless another is named; InputError names what is missing."""
        run = Path(directory)
        self.config = with_options(saved_config(run), device=device)
        self.generation, self.directory = chosen_generation(run, generation, "generation")

    def sample(
        self, prompt: str = "", particles: int = 50, runs: int = 8, length: int = 0, seed: int = 0
    ) -> Drawn:
        """R = runs populations of K = particles texts, resampled as the run was.

        An empty prompt and length 0 stand for the run's own. InputError for options out of range
        and where all weights of all runs are zero.
        """
        own = {"prompt": prompt or self.config.prompt, "length": length or self.config.length}
        config = with_options(self.config, particles=particles, seed=seed, **own)
        drawn = draw(config, load_setup(config), self.generation, self.directory, runs)
        require_alive(drawn.population)
        return drawn


load_run = TrainedRun
