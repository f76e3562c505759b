"""Worlds small enough to enumerate, and every random path of the sampler in them.

Each uniform number that the sampler draws matters only through the cell it falls into: the token or
the ancestor that it selects. `bias` replaces the uniforms of R runs by the midpoints of all
combinations of cells, one combination for each run with a known probability. Sums over runs are
then exact expectations, and the sampler's own code has produced every term.
"""

import inspect
import types
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import tsmc.draws
import tsmc.proposal
import tsmc.sampler
from distill import Learner
from distill.pair import Pair
from tinystories import Conditional, GPTNeo, GPTNeoConfig, GPTNeoModel
from tinystories.decoder import NO_END, End, counted
from tsmc.exact import TableModel, TableTwist, Target, Tree
from tsmc.sampler import Rule
from tsmc.sigma import Sigma


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mutant(module: types.ModuleType, *changes: tuple[str, str]) -> types.ModuleType:
    """A module with expressions replaced, each of which must be there exactly once."""
    broken, source = types.ModuleType("mutant"), inspect.getsource(module)
    for right, wrong in changes:
        assert source.count(right) == 1, f"{right!r} is not there exactly once"
        source = source.replace(right, wrong)
    exec(compile(source, "mutant", "exec"), vars(broken))
    return broken


def sequence_numbers(tokens: Tensor, vocab_size: int) -> Tensor:
    """Place [N] of tokens [N, T] in lexicographic order."""
    return tokens @ vocab_size ** torch.arange(tokens.shape[1]).flip(0)


class ListedPotential:
    def __init__(self, log_phi: Tensor, vocab_size: int):
        self.log_phi, self.vocab_size = log_phi, vocab_size

    def __call__(self, tokens: Tensor, log_p: Tensor | None = None) -> Tensor:
        return self.log_phi[sequence_numbers(tokens, self.vocab_size)]


def hard_potential(log_phi: dict[int, float]) -> ListedPotential:
    """A potential of binary sequences [N, 3] that is zero except on the listed ones."""
    values = [log_phi.get(number, -torch.inf) for number in range(8)]
    return ListedPotential(torch.tensor(values).double(), 2)


def table_world(vocab_size: int, length: int, seed: int = 0, scale: float = 1.5):
    """A random table model, a random table twist and a random potential in [0, 1], all float64."""
    source = generator(seed)
    model = TableModel.random(vocab_size, length, source)
    log_psi = scale * torch.randn(model.table.shape, dtype=torch.float64, generator=source)
    log_phi = scale * torch.randn(vocab_size**length, dtype=torch.float64, generator=source)
    return model, TableTwist(log_psi), ListedPotential(-log_phi.abs(), vocab_size)


def random_model(length: int, end: End = NO_END) -> TableModel:
    return TableModel(TableModel.random(3, length, generator(0)).table, length, end)


def ended_world(vocab_size: int, length: int, seed: int = 1, end: End = 1):
    """As `table_world`, but an `end` finishes a text, and phi does not see what follows it."""
    model, twist, potential = table_world(vocab_size, length, seed)

    def log_phi(tokens: Tensor, log_p: Tensor | None = None) -> Tensor:
        return potential(tokens.where(counted(tokens, end), 1))

    return TableModel(model.table, length, end), twist, log_phi


def tiny_gpt_neo(vocab_size: int, seed: int = 0, **changes) -> GPTNeo:
    """A random GPT-Neo in eval mode, with weights large enough that every token matters."""
    shape = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16}
    shape |= {"attention_layers": ("global", "local"), "window_size": 2}
    shape |= {"max_position_embeddings": 32}
    model = GPTNeo(GPTNeoConfig(vocab_size=vocab_size, **(shape | changes)))
    source = generator(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if parameter.ndim > 1 else 0.1
            is_norm = "ln" in name and "weight" in name
            parameter.copy_(scale * torch.randn(parameter.shape, generator=source) + is_norm)
    return model.eval()


def letters(rows: list[list[int]]) -> list[str]:
    """Texts of rows of tokens: token i is the i-th letter."""
    return ["".join("abcdefg"[token] for token in row) for row in rows]


def tiny_conditional(seed: int, end: End = NO_END) -> Conditional:
    """A random GPT-Neo of 7 tokens after a prompt, four tokens to come, float32."""
    return GPTNeoModel(tiny_gpt_neo(7, seed), torch.tensor([1, 2]), 4, end)


def rare_potential(tokens: Tensor, log_p: Tensor | None = None) -> Tensor:
    """log phi [N] = 8 log sigmoid(sum of a number for each token), small under random texts."""
    scores = torch.linspace(-3, 2, 7)
    return 8 * F.logsigmoid(scores[tokens].sum(1))


def gpt_neo_world(vocab_size: int, length: int, seed: int = 0):
    """A tiny GPT-Neo after a prompt, a linear twist and a random potential, all float64."""
    model = GPTNeoModel(tiny_gpt_neo(vocab_size, seed).double(), torch.tensor([1, 0, 1]), length)
    weight = torch.randn(8, vocab_size, dtype=torch.float64, generator=generator(seed))
    return model, lambda hidden: hidden @ weight, table_world(vocab_size, length, seed)[2]


class Paths:
    """Uniforms that visit every combination of cells: run r takes number r in mixed radix."""

    def __init__(self, combinations: int):
        self.number = torch.arange(combinations)
        self.stride = 1
        self.chances = torch.ones(combinations, dtype=torch.float64)

    def choose(self, breakpoints: Tensor) -> Tensor:
        """The next uniforms [R, n]: midpoints of the cells between sorted breakpoints [R, n, m]."""
        border = torch.zeros(*breakpoints.shape[:2], 1, dtype=torch.float64)
        inner = breakpoints.double().clamp(0, 1)
        edges = torch.cat([border, inner, border + 1], -1)  # [R, n, m + 2]
        columns = []
        for edge in edges.unbind(1):  # [R, m + 2]
            cell = (self.number // self.stride % (edge.shape[1] - 1))[:, None]  # [R, 1]
            self.stride *= edge.shape[1] - 1
            low, high = edge.gather(1, cell), edge.gather(1, cell + 1)
            self.chances *= (high - low)[:, 0]
            columns.append((low + high) / 2)
        return torch.cat(columns, 1)


def bias(
    model, twist, potential, target=None, module=tsmc.sampler, log_prefix=None, ess_threshold=1.0
) -> float:
    """The larger of two errors, both relative to Z_sigma, of the sampler in a module, K = 2.

    That of E[Z-hat] = Z_sigma, and the largest of E[Z-hat * share of samples that equal s] =
    Z_sigma sigma(s) over all sequences s.
    """
    target = target or Target(model, potential)
    runs = (model.vocab_size**2 * 4) ** model.length
    paths, draw = Paths(runs), tsmc.draws.draw_categorical

    def draw_everywhere(logits: Tensor, given: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        if not given.isnan().any():  # not of the sampler, but where a text is only read
            return draw(logits, given, place)
        inner = logits[place].double().softmax(-1).cumsum(-1)[:, :-1]  # where the token changes
        uniform = paths.choose(inner.view(runs, -1, inner.shape[-1]))  # from [R, K, V - 1]
        return draw(logits, uniform.view(-1, 1), place)

    def resample(weights: Tensor, _: torch.Generator) -> Tensor:  # multinomially, written anew
        cumulative = weights.cumsum(-1)[:, None]  # [R, 1, K]
        inner = cumulative[..., :-1] / cumulative[..., -1:]
        return (paths.choose(inner.expand(-1, 2, -1))[..., None] > inner).sum(-1)

    with (
        mock.patch.object(module, "uniforms", lambda rows, *_: torch.full((rows, 1), torch.nan)),
        mock.patch.object(tsmc.proposal, "draw_categorical", draw_everywhere),
    ):
        sigma, rule = Sigma(model, potential, log_prefix), Rule(resample, ess_threshold)
        population = module.tsmc(sigma, twist, 2, generator(0), runs, rule)
    assert runs % paths.stride == 0
    chances = paths.chances * paths.stride / runs  # [R], unused combinations are counted once
    assert abs(chances.sum().item() - 1) < 1e-12
    evidence = chances * (population.log_z - target.log_z).exp()  # [R]
    numbers = sequence_numbers(population.samples.flatten(0, 1), model.vocab_size)  # [R K]
    shares = (evidence / 2).repeat_interleave(2)
    measure = torch.zeros_like(target.log_sigma[-1]).index_add(0, numbers, shares)
    error = (measure - target.log_sigma[-1].exp()).abs().max().item()
    return max(error, abs(evidence.sum().item() - 1))


def recorded(learner: Learner, phase: str, name: str) -> list[float]:
    return [record[name] for record in learner.records if record["phase"] == phase]


@torch.no_grad()
def log_q(pair: Pair) -> Tensor:
    """log q of all sequences, by the proposal of a pair."""
    return Tree(pair.model).prefix_log_q(pair.twist)[-1]
