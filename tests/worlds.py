"""Worlds small enough to enumerate, and every random path of the sampler in them.

A uniform number that the sampler draws matters only through the cell it falls into: the token or
the ancestors that it selects. `bias` replaces the uniforms of R runs by the midpoints of all
combinations of cells, each with a known probability. Sums over runs are then exact expectations.
"""

import contextlib
import inspect
import types
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from tables import TableModel, TableTwist
from torch import Tensor

from distill.pair import Pair
from tests.exact import Target, Tree, kl_divergence
from tinystories.gpt_neo import GPTNeo, GPTNeoModel
from tsmc import draws, proposal
from tsmc.draws import multinomial, systematic
from tsmc.sampler import Rule, tsmc
from tsmc.sigma import Sigma

INF = torch.inf


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mutant(module: types.ModuleType, *changes: tuple[str, str]) -> types.ModuleType:
    """A module with expressions replaced, each of which must be there exactly once."""
    other, source = types.ModuleType("mutant"), inspect.getsource(module)
    for right, wrong in changes:
        assert source.count(right) == 1, f"{right!r} is not there exactly once"
        source = source.replace(right, wrong)
    exec(compile(source, "mutant", "exec"), vars(other))
    return other


@contextlib.contextmanager
def broken(module: types.ModuleType, right: str, wrong: str) -> Iterator[None]:
    """A module whose functions and methods are those of its mutant, for everybody who uses it."""
    other, kept = mutant(module, (right, wrong)), []
    kinds = [name for name, _ in inspect.getmembers(module, inspect.isclass)]
    pairs = [(module, other), *((getattr(module, name), getattr(other, name)) for name in kinds)]
    for mine, theirs in pairs:
        for name, value in vars(mine).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                function = inspect.unwrap(value)
                kept.append((function, function.__code__))
                function.__code__ = inspect.unwrap(vars(theirs)[name]).__code__
    try:
        yield
    finally:
        for function, code in kept:
            function.__code__ = code


def sequence_numbers(tokens: Tensor, vocab_size: int) -> Tensor:
    """Where tokens [N, T] stand in lexicographic order [N]."""
    return tokens @ vocab_size ** torch.arange(tokens.shape[1]).flip(0)


class ListedPotential:
    """log phi [V^T] of all sequences and, with a prefix part, log f_t [V^t] for t = 0..T."""

    log_f: list[Tensor]
    has_prefix = False

    def __init__(self, log_phi: Tensor, vocab_size: int):
        self.log_phi, self.vocab_size = log_phi, vocab_size

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.log_phi[sequence_numbers(tokens, self.vocab_size)]

    def log_prefix(self, tokens: Tensor) -> Tensor:
        return self.log_f[tokens.shape[1]][sequence_numbers(tokens, self.vocab_size)]


def hard_potential(log_phi: dict[int, float]) -> ListedPotential:
    """A potential of binary sequences [N, 3] that is zero except on the listed ones."""
    return ListedPotential(torch.tensor([log_phi.get(n, -INF) for n in range(8)]).double(), 2)


def table_world(vocab_size: int, length: int, seed: int = 0, scale: float = 1.5, end=()):
    """A random table model, a random table twist and a random potential in [0, 1], all float64."""
    source = generator(seed)
    table = TableModel.random(vocab_size, length, source).table
    log_psi = scale * torch.randn(table.shape, dtype=torch.float64, generator=source)
    log_phi = scale * torch.randn(vocab_size**length, dtype=torch.float64, generator=source)
    potential = ListedPotential(-log_phi.abs(), vocab_size)
    return TableModel(table, length, end), TableTwist(log_psi), potential


def random_model(length: int, end: tuple[int, ...] = ()) -> TableModel:
    return table_world(3, length, end=end)[0]


def tiny_gpt_neo(vocab_size: int, seed: int = 0, **changes) -> GPTNeo:
    """A random GPT-Neo in eval mode, with weights large enough that every token matters."""
    shape = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16}
    shape |= {"attention_types": [[["global", "local"], 1]], "window_size": 2}
    shape |= {"max_position_embeddings": 32, "layer_norm_epsilon": 1e-5} | changes
    model, source = GPTNeo(types.SimpleNamespace(vocab_size=vocab_size, **shape)), generator(seed)
    for name, parameter in model.named_parameters():
        scale = 0.5 if parameter.ndim > 1 else 0.1
        is_norm = "ln" in name and "weight" in name
        parameter.data = scale * torch.randn(parameter.shape, generator=source) + is_norm
    return model.eval()


def letters(rows: list[list[int]]) -> list[str]:
    """Texts of rows of tokens: token i is the i-th letter."""
    return ["".join("abcdefg"[token] for token in row) for row in rows]


def tiny_conditional(seed: int, end: tuple[int, ...] = ()) -> GPTNeoModel:
    """A random GPT-Neo of 7 tokens after a prompt, four tokens to come, float32."""
    return GPTNeoModel(tiny_gpt_neo(7, seed), torch.tensor([1, 2]), 4, end)


def rare_potential(tokens: Tensor) -> Tensor:
    """log phi [N] = 8 log sigmoid(sum of a number for each token), small under random texts."""
    return 8 * F.logsigmoid(torch.linspace(-3, 2, 7)[tokens].sum(1))


def gpt_neo_world(vocab_size: int, length: int, seed: int = 0, end=()):
    """A tiny GPT-Neo after a prompt, a linear twist and a random potential, all float64."""
    network = tiny_gpt_neo(vocab_size, seed).double()
    model = GPTNeoModel(network, torch.tensor([1, 0, 1]), length, end)
    weight = torch.randn(8, vocab_size, dtype=torch.float64, generator=generator(seed))
    return model, lambda hidden: hidden[..., :8] @ weight, table_world(vocab_size, length, seed)[2]


class Paths:
    """Uniforms that visit every combination of cells: run r takes number r in mixed radix."""

    def __init__(self, combinations: int):
        self.number = torch.arange(combinations)
        self.stride = 1
        self.chances = torch.ones(combinations, dtype=torch.float64)

    def choose(self, breakpoints: Tensor) -> Tensor:
        """The next uniforms [R, n]: midpoints of the cells between sorted breakpoints [R, n, m]."""
        edges = F.pad(F.pad(breakpoints.double().clamp(0, 1), (1, 0)), (0, 1), value=1.0)
        columns = []
        for edge in edges.unbind(1):  # [R, m + 2]
            cell = (self.number // self.stride % (edge.shape[1] - 1))[:, None]  # [R, 1]
            self.stride *= edge.shape[1] - 1
            low, high = edge.gather(1, cell), edge.gather(1, cell + 1)
            self.chances *= (high - low)[:, 0]
            columns.append((low + high) / 2)
        return torch.cat(columns, 1)


def bias(model, twist, log_phi, base=None, scheme=multinomial, ess_threshold=1.0) -> float:
    """The larger of two errors, both relative to Z_sigma, of the sampler with K = 2 particles: that
    of E[Z-hat] = Z_sigma, and the largest of E[Z-hat * share of samples that equal s] = Z_sigma
    sigma(s) over all s. The target is p^(0) phi with p^(0) = base, by default the model itself."""
    base = base or model
    target = Target(base, log_phi)
    cells = {multinomial: 4, systematic: 3}[scheme]  # of the ancestors of two particles
    runs = (model.vocab_size**2 * cells) ** model.length
    paths, draw = Paths(runs), draws.draw_categorical

    def draw_everywhere(logits: Tensor, _: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        inner = logits[index].double().softmax(-1).cumsum(-1)[:, :-1]  # where the token changes
        uniform = paths.choose(inner.view(runs, -1, inner.shape[-1]))  # from [R, K, V - 1]
        return draw(logits, uniform.view(-1, 1), index)

    def resample_everywhere(weights: Tensor, source: torch.Generator) -> Tensor:
        inner = (weights[:, :1] / weights.sum(1, keepdim=True))[:, None]  # [R, 1, 1]
        breakpoints = inner.expand(-1, 2, -1)  # of two numbers
        if scheme is systematic:
            breakpoints = torch.cat([2 * inner - 1, 2 * inner], -1)  # of one number
        points = paths.choose(breakpoints)
        with mock.patch.object(draws, "uniforms", lambda *_: points):
            return scheme(weights, source)

    with mock.patch.object(proposal, "draw_categorical", draw_everywhere):
        rule = Rule(resample_everywhere, ess_threshold)
        population = tsmc(Sigma(model, base, log_phi), twist, 2, generator(0), runs, rule)
    assert runs % paths.stride == 0
    chances = paths.chances * paths.stride / runs  # [R], unused combinations are counted once
    assert abs(chances.sum().item() - 1) < 1e-12
    evidence = chances * (population.log_z - target.log_z).exp()  # [R]
    numbers = sequence_numbers(population.samples.flatten(0, 1), model.vocab_size)  # [R K]
    shares = (evidence / 2).repeat_interleave(2)
    measure = torch.zeros_like(target.log_sigma[-1]).index_add(0, numbers, shares)
    error = (measure - target.log_sigma[-1].exp()).abs().max().item()
    return max(error, abs(evidence.sum().item() - 1))


@torch.no_grad()
def log_q(pair: Pair) -> Tensor:
    """log q [V^T] of all sequences, by the proposal of a pair."""
    return Tree(pair.model).prefix_log_q(pair.twist)[-1]


def exact_ctl_loss(target: Target, twist) -> Tensor:
    """sum_t KL(sigma(s_{1:t}) || pi_t(s_{1:t})) (eq. 5), whose gradient is eq. 6."""
    loss = torch.zeros_like(target.log_p[0][0])
    for t, hidden in enumerate(target.tree.hidden, start=1):
        log_pi = (target.log_p[t] + twist(hidden).flatten()).log_softmax(0)  # [V^t]
        loss = loss + kl_divergence(target.log_sigma[t], log_pi)
    return loss
