"""Worlds small enough to enumerate, and the enumeration of every random path of the sampler in them.

Each uniform number the sampler draws matters only through the cell it falls into: the token or ancestor that it selects.
`every_path` replaces the uniforms of R runs by the midpoints of all combinations of cells, one combination per run, and
returns the probability of each. Sums over runs are then exact expectations, and the sampler's own code produced every term.
"""

import contextlib
import types
from unittest import mock

import torch
from torch import Tensor

import tsmc.categorical
import tsmc.conditional
import tsmc.proposal
import tsmc.sampler
from tinystories import Conditional, GPTNeo, GPTNeoConfig
from tsmc.resampling import SCHEMES
from tsmc.sampler import Sigma
from tsmc.steps import Chunks, Steps
from tsmc.table import TableModel, TableTwist
from tsmc.trace import Trace
from twist.ctl import batches_from_proposal, learn_twist


def generator(seed: int) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


def sequence_numbers(tokens: Tensor, vocab_size: int) -> Tensor:
    """Place [N] of tokens [N, T] in lexicographic order."""
    numbers = torch.zeros_like(tokens[:, 0])
    for t in range(tokens.shape[1]):
        numbers = numbers * vocab_size + tokens[:, t]
    return numbers


def letters(rows: list[list[int]]) -> list[str]:
    """Texts of rows of tokens: token i is the i-th letter."""
    return [" ".join("abcdefg"[token] for token in row) for row in rows]


def traced(trace: Trace) -> Tensor:
    """The final particles [R, K, T] as a trace tells them: the last row of each lineage's tokens."""
    return trace.tokens.gather(2, trace.lineages()).permute(1, 2, 0)


class ListedPotential:
    """log phi listed for every sequence; counts its calls."""

    def __init__(self, log_phi: Tensor, vocab_size: int):
        self.log_phi, self.vocab_size = log_phi, vocab_size

    def __call__(self, tokens: Tensor, log_p: Tensor | None = None) -> Tensor:
        return self.log_phi[sequence_numbers(tokens, self.vocab_size)]


def table_world(vocab_size: int, length: int, seed: int = 0, scale: float = 1.5):
    """A random table model, a random table twist and a random potential in [0, 1], all float64."""
    source = generator(seed)
    model = TableModel.random(vocab_size, length, source)
    twist = TableTwist(scale * torch.randn(model.table.shape, dtype=torch.float64, generator=source))
    log_phi = -(scale * torch.randn(vocab_size**length, dtype=torch.float64, generator=source)).abs()
    return model, twist, ListedPotential(log_phi, vocab_size)


def tiny_gpt_neo(vocab_size: int, seed: int = 0, **changes) -> GPTNeo:
    """A random GPT-Neo in eval mode, with weights large enough that every token matters."""
    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32, "window_size": 2}
    config = GPTNeoConfig(
        vocab_size=vocab_size, **({"attention_layers": ("global", "local"), "intermediate_size": 16} | sizes | changes)
    )
    model, source = GPTNeo(config), generator(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(
                scale * torch.randn(parameter.shape, generator=source) + float("ln" in name and "weight" in name)
            )
    return model.eval()


def gpt_neo_world(vocab_size: int, length: int, seed: int = 0):
    """A tiny GPT-Neo after a prompt, a linear twist on its hidden states, and a random potential, all float64."""
    model = Conditional(tiny_gpt_neo(vocab_size, seed).double(), torch.tensor([1, 0, 1]), length)
    source = generator(seed + 1000)
    weight = torch.randn(vocab_size, model.model.config.hidden_size, dtype=torch.float64, generator=source)
    log_phi = -torch.randn(vocab_size**length, dtype=torch.float64, generator=source).abs()
    return model, lambda hidden: hidden @ weight.T, ListedPotential(log_phi, vocab_size)


class Paths:
    """Uniform numbers that visit every combination of cells: run r takes the combination numbered r in mixed radix."""

    def __init__(self, combinations: int, runs: int, skipped: int = 0):
        """The first `skipped` uniforms of each draw stay at one half: nothing depends on them."""
        self.combinations, self.number, self.skipped = combinations, torch.arange(runs) % combinations, skipped
        self.stride = 1
        self.chances = torch.ones(runs, dtype=torch.float64)
        self.uniforms = torch.empty(0)

    def choose(self, breakpoints: Tensor) -> None:
        """Pick the next uniforms [R, n]: midpoints of the cells between sorted breakpoints [R, n, m] of the unit interval."""
        border = torch.zeros(*breakpoints.shape[:2], 1, dtype=torch.float64)
        edges = torch.cat([border, breakpoints.double().clamp(0, 1), border + 1], -1)  # [R, n, m + 2]
        columns = [torch.full((len(edges), self.skipped), 0.5, dtype=torch.float64)]
        for j in range(self.skipped, edges.shape[1]):
            cell = (self.number // self.stride % (edges.shape[2] - 1))[:, None]  # [R, 1]
            self.stride *= edges.shape[2] - 1
            low, high = edges[:, j].gather(1, cell), edges[:, j].gather(1, cell + 1)
            self.chances *= (high - low)[:, 0]
            columns.append((low + high) / 2)
        self.uniforms = torch.cat(columns, 1)

    def rand(self, *shape: int, **_) -> Tensor:
        """Stands in for torch.rand."""
        return self.uniforms.view(shape)

    def probabilities(self) -> Tensor:
        """Probability [R] of each run's path; combinations that the sampler had no use for are counted once."""
        assert self.combinations % self.stride == 0
        return self.chances * self.stride / self.combinations


def token_breakpoints(logits: Tensor, runs: int) -> Tensor:
    """Where the uniform of a token draw changes the token: [R, K, V - 1]."""
    return logits.double().softmax(-1).cumsum(-1)[:, :-1].view(runs, -1, logits.shape[-1] - 1)


def ancestor_breakpoints(scheme: str, weights: Tensor) -> Tensor:
    """Where the uniforms of a resampling scheme change an ancestor: [R, uniforms, K - 1]."""
    runs, particles = weights.shape
    inner = weights.cumsum(-1)[:, None, :-1]  # [R, 1, K - 1]
    if scheme == "systematic":
        return (particles * inner % 1).sort(-1).values
    if scheme == "stratified":
        return (particles * inner - torch.arange(particles)[:, None]).clamp(0, 1)
    if scheme == "residual":
        fractions = particles * weights - (particles * weights * (1 + 1e-14)).floor()
        total = fractions.sum(-1, keepdim=True)
        inner = torch.where(total > 1e-9, fractions.cumsum(-1) / total, 0.5)[:, None, :-1]
    return inner.expand(runs, particles, -1)


@contextlib.contextmanager
def injected(paths: Paths, scheme: str, module: types.ModuleType):
    """Patch the sources of randomness of a module that samples; yields the resampling function to pass to it."""
    draw, runs = tsmc.categorical.draw_categorical, len(paths.number)

    def draw_everywhere(logits: Tensor, uniform, state_of: Tensor):
        paths.choose(token_breakpoints(logits[state_of], runs))
        return draw(logits, paths.uniforms.view(-1, 1), state_of)

    def resample(weights: Tensor, source) -> Tensor:
        paths.choose(ancestor_breakpoints(scheme, weights))
        return SCHEMES[scheme](weights, source)

    multinomial = resample if scheme == "multinomial" else module.multinomial
    with (
        mock.patch.object(torch, "rand", paths.rand),
        # of tokens: `draw_everywhere` has its own
        mock.patch.object(module, "uniforms", lambda rows, *_: torch.empty(rows, 1)),
        mock.patch.object(tsmc.proposal, "draw_categorical", draw_everywhere),
        mock.patch.object(module, "multinomial", multinomial),
    ):
        yield resample


def every_path(
    model,
    twist,
    potential,
    particles,
    scheme="multinomial",
    ess_threshold=1.0,
    references=None,
    observer=None,
    module=None,
):
    """Probabilities [R] and `Population` of all random paths, for each of `references` [N, T] in turn where given.

    `module` stands in for `tsmc.sampler`, or with references for `tsmc.conditional`.
    """
    skipped = int(references is not None)  # draws for the slot of the reference
    cells = particles if scheme == "systematic" else particles ** (particles - skipped)
    vocab_size = model.decoder(1).logits.shape[-1]
    combinations = (vocab_size ** (particles - skipped) * cells) ** model.length
    runs = combinations * (1 if references is None else len(references))
    paths = Paths(combinations, runs, skipped)
    module = module or (tsmc.conditional if skipped else tsmc.sampler)
    with injected(paths, scheme, module) as resample:
        if skipped:
            reference = references.repeat_interleave(combinations, 0)
            run, options = module.conditional_tsmc, (reference, particles, generator(0))
        else:
            run, options = module.tsmc, (particles, generator(0), runs, resample)
        population = run(model, twist, potential, *options, ess_threshold=ess_threshold, observer=observer)
    return paths.probabilities(), population


def every_conditional_path(model, twist, potential, target, particles, ess_threshold=1.0, module=None):
    """Probabilities [R] and `Population` of all random paths of conditional runs whose reference is drawn from sigma."""
    possible = target.log_sigma[-1] > -torch.inf
    options = {"ess_threshold": ess_threshold, "references": target.tree.sequences()[possible], "module": module}
    chances, population = every_path(model, twist, potential, particles, **options)
    sigma = target.log_sigma[-1][possible].exp()
    return sigma.repeat_interleave(len(chances) // len(sigma)) * chances, population


class Recorded(Steps):
    """Steps that keep what is reported."""

    def __init__(self, total: int, name: str = "the loop"):
        super().__init__(total, name)
        self.reports: list[dict] = []

    def report(self, **figures: float | Tensor) -> None:
        super().report(**figures)
        self.reports.append({name: float(value) for name, value in figures.items()})


def in_chunks(total: int, at_once: int, source: torch.Generator) -> Chunks:
    """Chunks that all draw from one stream."""
    return Chunks(total, at_once, lambda chunk: source)


def learn(twist, model, potential, steps: Steps, batch_size: int, learning_rate: float = 2e-4, seed: int = 0) -> float:
    """Twist learning with Adam, batches drawn from the proposal; the step size of the last step."""
    sigma, optimizer = Sigma(model, potential), torch.optim.Adam(twist.parameters(), lr=learning_rate)
    learn_twist(twist, optimizer, batches_from_proposal([sigma], twist, batch_size, generator(seed)), steps)
    return optimizer.param_groups[0]["lr"]
