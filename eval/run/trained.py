"""Trained pairs (p^(m), psi^(m)): how a run stores them, and weighted samples from them.

    from eval import load_run
    drawn = load_run("runs/pocket").sample("Once upon a time, there was a", particles=50, runs=8)
    drawn.texts [R K]    drawn.log_weights [R K], exp of which sums to one    drawn.log_z_hat

A run has a directory for each generation m with p^(m) and `twist.safetensors`. p^(0) and a
fine-tuned p^(m) are checkpoints with a tokenizer; where p^(m) is an adapter of p^(0), it is
`adapter.safetensors`, and p^(0) is the model that the run names. The twist is written last, so a
directory that has one is complete. Particle k of run r has the share

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
from tsmc import Population, Sigma, Trace, in_chunks, sample_runs
from tsmc.interfaces import Twist
from tsmc.runs import require_alive
from twist.adapter import Adapter, learned
from twist.mlp import TwistMLP
from twist.potential import each_once
from twist.value import ValueTwist

FILE = "twist.safetensors"
ADAPTER = "adapter.safetensors"


def save_generation(directory: Path, p: nn.Module, tokenizer: Tokenizer, psi: nn.Module) -> None:
    """Write p^(m), a GPT-Neo with its tokenizer or an adapter of p^(0), and then psi^(m)."""
    if isinstance(p, Adapter):
        write_tensors(directory / ADAPTER, learned(p))
    else:
        tinystories.save(directory, p, tokenizer)
    write_tensors(directory / FILE, learned(psi))


def adapter_from(tensors: dict[str, Tensor], base: GPTNeo) -> Adapter:
    """An adapter of p^(0) = base; KeyError or ValueError where the tensors do not fit."""
    hidden_units, width = tensors["shift.first.weight"].shape
    has_memory = width > base.config.hidden_size
    scores = tensors.get("scores")
    adapter = Adapter(base, scores, has_memory, hidden_units, torch.Generator())
    fill(adapter, {"products.weight": adapter.products.weight, **tensors})
    return adapter.requires_grad_(False)


def load_twist(directory: Path, base: GPTNeo) -> TwistMLP | ValueTwist:
    """psi^(m) over p^(0) = base; InputError names the file and the tensor that does not fit."""
    path = directory / FILE
    tensors = read_tensors(path)
    sizes = base.config
    with reading(path, "not a twist of this model", "name a directory that main.py wrote"):
        is_mlp = "first.weight" in tensors
        hidden_units = len(tensors["first.weight" if is_mlp else "network.first.weight"])
        widths = (sizes.hidden_size, hidden_units, sizes.vocab_size, torch.Generator())
        if is_mlp:
            twist = TwistMLP(*widths)
        else:
            parts = {name[8:]: tensors[name] for name in tensors if name.startswith("adapter.")}
            adapter = adapter_from(parts, base) if parts else None
            memory = tensors.get("memory")
            if memory is not None and memory.shape != (sizes.vocab_size,):
                raise ValueError(f"memory has shape {list(memory.shape)}, not [{sizes.vocab_size}]")
            twist = ValueTwist(*widths, memory, adapter)
            if parts:
                tensors["adapter.products.weight"] = adapter.products.weight
        fill(twist, tensors)
        return twist


def load_model(directory: Path, m: int, base: GPTNeo) -> GPTNeo | Adapter:
    """p^(m), which is p^(0) = base itself for m = 0; InputError names the file at fault."""
    if m == 0:
        return base
    path = directory / ADAPTER
    if not path.exists():
        return tinystories.load(directory)[0].to(base.wte.weight)
    tensors = read_tensors(path)
    with reading(path, "not an adapter of this model", "restore the run's own"):
        return adapter_from(tensors, base)


def load_generation(setup: Setup, path: Path, m: int, device: torch.device) -> tuple[Sigma, Twist]:
    """Sigma as p^(m) sees it (eq. 8), and psi^(m) packed; InputError names a file at fault."""
    psi = load_twist(path, setup.model).to(device)
    p = load_model(path, m, setup.model).to(device)
    if isinstance(p, Adapter):
        needed = [p.scores] if p.has_memory else []
        given = [] if getattr(psi, "memory", None) is None else [psi.memory]
        if len(needed) != len(given) or not all(map(torch.equal, needed, given)):
            raise InputError(f"{path / ADAPTER}: does not fit {FILE}; restore the run's own files")
    return setup.sigma(p, psi), pack(psi)


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
            return vars(sample_runs(sigma, twist, particles, size, generator, **rule))

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

        InputError for options out of range and where all weights are zero.
        """
        own = {"prompt": prompt or None, "length": length or None}
        config = self.options(particles=particles, seed=seed, **own)
        drawn = self.draw(config, load_setup(config), runs)
        require_alive(drawn.population)
        return drawn


load_run = TrainedRun
