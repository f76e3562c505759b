"""The value of a prefix in enumerated worlds: what CTL learns, and what it is for."""

import pytest
import torch
from test_pool import everything
from worlds import ADAPTIVE, bias, generator, mutant, table_world

import twist.value
from tsmc.exact import TableModel, Target
from tsmc.sampler import tsmc
from twist.pool import Pool, draw_round
from twist.potential import effective_potential

VOCABULARY, LENGTH = 3, 3


class TableValue(torch.nn.Module):
    """V with a free parameter for every prefix."""

    def __init__(self, model: TableModel):
        super().__init__()
        self.vocab_size = model.vocab_size
        self.table = torch.nn.Parameter(torch.zeros_like(model.table[:, 0]))

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden.squeeze(-1).long()]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.value(hidden)[..., None].expand(*hidden.shape[:-1], self.vocab_size)


def world(number: int):
    """The model that proposes in generation `number`, and phi^(m) as it sees it."""
    base, _, potential = table_world(VOCABULARY, LENGTH, seed=5)
    if number == 0:
        return base, potential
    model = TableModel.random(VOCABULARY, LENGTH, generator(6))
    return model, effective_potential(potential, base)


def learned(number: int, module=twist.value) -> tuple[TableValue, Target]:
    """The twist of generation `number`, with V learned from a pool that is sigma."""
    model, log_phi = world(number)
    target = Target(model, log_phi)
    pool = everything(target)
    pool.rounds[0].tokens = pool.rounds[0].tokens.repeat(300, 1)  # so that all are in both parts
    weights = target.log_sigma[-1].exp().repeat(300)
    sizes = (20_000, 2000, 200)
    batches = module.batches_of_values(model, pool, weights, *sizes, generator(3))
    psi = TableValue(model)
    optimizer = torch.optim.Adam(psi.parameters(), lr=0.1)
    module.learn_value(psi, optimizer, *batches, 200)
    return psi, target


def distance(psi: TableValue, target: Target) -> float:
    """Largest difference of V and log psi* over prefixes of one or two tokens, up to constants."""
    worst = 0.0
    for t in range(1, LENGTH):
        gap = psi.value(target.tree.hidden[t]) - target.log_psi[t]
        worst = max(worst, (gap - gap.mean()).abs().max().item())
    return worst


@pytest.mark.parametrize("number", [0, 1])
def test_v_tends_to_the_optimal_twist_of_prefixes(number):
    psi, target = learned(number)
    assert distance(psi, target) < 0.2 < 0.6 < distance(TableValue(world(number)[0]), target)


MUTANTS = {
    "positives of any weight": ("draw_rows(allowed,", "draw_rows(allowed**0,"),
    "negatives of the wrong sign": ("each = negative.sum()", "each = -negative.sum()"),
    "the mean of V, not of exp V": ("log_mean_exp(value.T)", "value.mean(0)"),
    "one mean for all steps": ("log_mean_exp(value.T)", "log_mean_exp(value.T.flatten())"),
    "positives of the wrong sign": ("- twist.value(batch.pos", "+ twist.value(batch.pos"),
    "the worst kept": ("loss < least and", "loss > least and"),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_the_mutant_is_caught(change):
    """In generation 1, where p^(1) is another model than p^(0)."""
    assert distance(*learned(1, mutant(twist.value, change))) > 0.3


def test_the_standard_error_is_that_of_both_sides():
    """Over many held-out batches the loss varies as much as one of them says."""
    psi = TableValue(TableModel.random(VOCABULARY, 5, generator(1)))
    rows = torch.randint(len(psi.table), (400, 2, 60, 5, 1), generator=generator(3)).float()
    weights = torch.full((60,), 1 / 60)
    with torch.no_grad():
        psi.table.normal_(std=0.7, generator=generator(2))
        batches = [twist.value.Batch(positive, weights, negative) for positive, negative in rows]
        loss, std_error = torch.tensor([twist.value.value_loss(psi, one) for one in batches]).T
    assert 0.85 < std_error.mean() / loss.std() < 1.15


def test_held_out_rows_keep_v_from_learning_noise_by_heart():
    """Phi = 1: every V but a constant is wrong, and a long training on a few rows finds one."""
    model = TableModel.random(VOCABULARY, 5, generator(1))
    pool, found = Pool(), []
    pool.rounds.append(draw_round(model, None, None, lambda x: 0.0 * x[:, 0], 60, generator(2)))
    sizes = (60, 30, 200)
    for is_seen in (False, True):
        psi = TableValue(model)
        batches = twist.value.batches_of_values(model, pool, torch.ones(60), *sizes, generator(3))
        draw_batch, held_out = batches
        judge = draw_batch(0) if is_seen else held_out
        optimizer = torch.optim.Adam(psi.parameters(), lr=0.1)
        twist.value.learn_value(psi, optimizer, draw_batch, judge, 200)
        found.append(psi.table.detach().abs().max().item())
    assert found[0] == 0 < found[1], found


def test_a_value_learned_from_a_far_round_does_not_harm():
    """Rows of p^(0) say little about prefixes of p^(1); its own draws do (log Z-hat of V and 0)."""
    base, _, potential = table_world(4, 6, seed=3, scale=4.0)
    target = Target(base, potential)
    model = TableModel((base.table + 0.8 * target.optimal_log_psi()).detach(), 6)
    log_phi = effective_potential(potential, base)
    pool = Pool()
    for number, proposal in enumerate((base, model)):
        pool.rounds.append(draw_round(proposal, None, base, potential, 500, generator(number)))
    psi = TableValue(model)
    sizes = (500, 100, 200)
    batches = twist.value.batches_of_values(model, pool, pool.weights(0.02), *sizes, generator(3))
    optimizer = torch.optim.Adam(psi.parameters(), lr=0.05)
    twist.value.learn_value(psi, optimizer, *batches, 200)
    learned_z = tsmc(model, psi, log_phi, 20, generator(0), 400, ess_threshold=0.5).log_z
    plain_z = tsmc(model, None, log_phi, 20, generator(0), 400, ess_threshold=0.5).log_z
    assert learned_z.mean() > plain_z.mean() - 3 * plain_z.std() / 20


def test_with_the_proposal_sigma_all_weights_are_equal():
    """Then V* is constant for each t, and resampling at every step costs nothing."""
    base, _, potential = table_world(VOCABULARY, LENGTH, seed=5)
    target = Target(base, potential)
    model = TableModel((base.table + target.optimal_log_psi()).detach(), LENGTH)
    log_phi = effective_potential(potential, base)
    psi = TableValue(model)
    for shift in (0.0, 3.0):
        psi.table.data[1:4] = shift  # of all prefixes of one token
        population = tsmc(model, psi, log_phi, 50, generator(0), 20)
        wanted = torch.full_like(population.log_z, target.log_z)
        torch.testing.assert_close(population.log_z, wanted)
        assert torch.allclose(population.ess, torch.tensor(50.0).double())
    psi.table.data[1] = 0.0
    assert tsmc(model, psi, log_phi, 50, generator(0), 20).log_z.std() > 0.01


@pytest.mark.parametrize("threshold", [ADAPTIVE, 1.0])
def test_no_value_changes_an_expectation(threshold):
    """Whatever V is, Z-hat is unbiased: all paths of the sampler, enumerated."""
    model, _, potential = table_world(2, 3, seed=2)
    psi = TableValue(model)
    psi.table.data = 2 * torch.randn(len(model.table), generator=generator(0)).double()
    assert bias(model, psi, potential, 2, "multinomial", threshold) < 1e-12
