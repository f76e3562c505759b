"""The value of a prefix in enumerated worlds: what CTL from the pool learns, what it is for."""

import pytest
import torch
from test_pool import everything
from worlds import ADAPTIVE, bias, generator, mutant, table_world

import twist.value
from tsmc.exact import Target
from tsmc.sampler import tsmc
from tsmc.table import TableModel
from twist.pool import draw_round
from twist.potential import effective_potential

VOCABULARY, LENGTH = 3, 3


class TableValue(torch.nn.Module):
    """V with a free parameter for every prefix, and log q_t - log p of every next token."""

    def __init__(self, model: TableModel, log_ratio: torch.Tensor):
        super().__init__()
        self.network = torch.nn.ParameterList([torch.zeros_like(model.table[:, 0])])
        self.log_ratio = log_ratio

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.network[0][hidden.squeeze(-1).long()]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.value(hidden)[..., None] + self.log_ratio[hidden.squeeze(-1).long()]


def world(number: int):
    """p^(0) and its potential; p^(m) of generation `number` with phi^(m); log q_t - log p^(m)."""
    base, proposing, potential = table_world(VOCABULARY, LENGTH, seed=5)
    if number == 1:
        model = TableModel.random(VOCABULARY, LENGTH, generator(6))
        return base, potential, model, effective_potential(potential, base), 0 * base.table
    tilted = (base.table + proposing.log_psi).log_softmax(-1)
    return base, potential, base, potential, (tilted - base.table.log_softmax(-1)).detach()


def learned(number: int, module=twist.value) -> tuple[TableValue, Target]:
    """The twist of generation `number`, with V learned from a pool of three rounds."""
    base, potential, model, log_phi, log_ratio = world(number)
    target = Target(model, log_phi)
    pool = everything(target)
    for source in (8, 9):
        proposal = TableModel.random(VOCABULARY, LENGTH, generator(source), scale=0.5)
        pool.rounds.append(draw_round(proposal, None, base, potential, 8000, generator(source)))
    weights = torch.zeros(len(pool.tokens()), dtype=torch.float64)
    weights[: VOCABULARY**LENGTH] = target.log_sigma[-1].exp()
    sizes = (8000, 4000, 150)
    draw_batch = module.batches_of_values(model, pool, weights, *sizes, generator(3))
    psi = TableValue(model, log_ratio)
    optimizer = torch.optim.Adam(psi.parameters(), lr=0.1)
    module.learn_value(psi, optimizer, draw_batch, 150)
    return psi, target


def distance(psi: TableValue, target: Target) -> float:
    """Largest difference of V and log psi* over prefixes of one or two tokens, up to constants."""
    worst = 0.0
    for t in range(1, LENGTH):
        gap = psi.value(target.tree.hidden[t]) - target.log_psi[t]
        worst = max(worst, (gap - gap.mean()).abs().max().item())
    return worst


@pytest.mark.parametrize("number", [0, 1])
def test_v_tends_to_the_optimal_twist_of_prefixes_whatever_proposes(number):
    psi, target = learned(number)
    untrained = TableValue(world(number)[2], psi.log_ratio)
    assert distance(psi, target) < 0.1 < 0.8 < distance(untrained, target)


MUTANTS = {
    "negatives without V": ("batch.log_ratio + value.detach()", "batch.log_ratio"),
    "negatives without p / q": ("batch.log_ratio + value.detach()", "value.detach()"),
    "p / q of other prefixes": ("cumsum(1)  #", "cumsum(1).roll(1, 1)  #"),
    "p without q": ("(log_p - one.log_q[rows, :-1])", "log_p"),
    "positives of any weight": ("multinomial(weights", "multinomial(weights**0"),
    "normalised over the tokens": ("normalise(log_weights.T).T", "normalise(log_weights)"),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_the_mutant_is_caught(change):
    """In generation 1, where p^(1) is neither p^(0) nor a proposal of the pool."""
    assert distance(*learned(1, mutant(twist.value, change))) > 0.2


def test_with_the_proposal_sigma_and_these_values_all_weights_are_equal():
    """Then resampling at every step costs nothing; with V = 0 it does."""
    model, _, potential = table_world(VOCABULARY, LENGTH, seed=5)
    target = Target(model, potential)
    log_psi = target.optimal_log_psi()  # [prefixes, V]
    values = torch.cat(target.log_psi[:-1])  # [prefixes]
    psi = TableValue(model, log_psi - values[:, None])  # sigma's next token over that of p
    flat = tsmc(model, psi, potential, 50, generator(0), 20)
    assert flat.log_z.std() > 0.01
    psi.network[0].data = values
    population = tsmc(model, psi, potential, 50, generator(0), 20)
    torch.testing.assert_close(population.log_z, torch.full_like(population.log_z, target.log_z))
    assert torch.allclose(population.ess, torch.tensor(50.0).double())


@pytest.mark.parametrize("threshold", [ADAPTIVE, 1.0])
def test_no_value_changes_an_expectation(threshold):
    """Whatever V is, Z-hat is unbiased: all paths of the sampler, enumerated."""
    model, _, potential = table_world(2, 3, seed=2)
    psi = TableValue(model, torch.zeros_like(model.table))
    psi.network[0].data = 2 * torch.randn(len(model.table), generator=generator(0)).double()
    assert bias(model, psi, potential, 2, "multinomial", threshold) < 1e-12
