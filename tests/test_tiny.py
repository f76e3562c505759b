"""docs/tiny.py against the enumeration of tsmc/exact.py.

Most checks shrink its world to 3 letters and 4 steps. S prefixes, N of which can grow.
"""

import itertools
import math
import re
import time
from types import ModuleType

import pytest
import torch
from worlds import ListedPotential, generator, mutant

from eval.explainer import load_tiny
from tsmc.exact import TableModel, TableTwist, Target
from twist.potential import effective_potential

SMALL = ("V, T, BETA = 4, 8, 5.0", "V, T, BETA = 3, 4, 5.0")


class World:
    """A random p^(0), p^(1), twist and potential, in the forms of `tiny` and of `tsmc`."""

    def __init__(self, tiny: ModuleType, generation: int, seed: int = 0):
        source = generator(seed)
        tables = torch.randn(3, tiny.N, tiny.V, dtype=torch.float64, generator=source)
        base, change, log_psi = tables
        logits = base + generation * change / 2
        log_phi = torch.randn(tiny.V**tiny.T, dtype=torch.float64, generator=source)
        self.log_phi = -log_phi.abs()
        self.base = tiny.language_model(base)
        self.log_p = tiny.language_model(logits)
        self.log_psi = tiny.by_prefix(log_psi)
        self.log_phi_m = tiny.effective_potential(self.base, self.log_phi, self.log_p)
        first, model = (TableModel(rows, tiny.T).requires_grad_(False) for rows in (base, logits))
        potential = effective_potential(ListedPotential(self.log_phi, tiny.V), first)
        self.target = Target(model, potential)  # sigma as p^(m) sees it
        self.twist = TableTwist(log_psi)


def enumeration_error(tiny: ModuleType, generation: int) -> float:
    """Largest error of log Z_sigma, log sigma, KL(sigma || q) and the CTL loss."""
    world = World(tiny, generation)
    target = world.target
    log_sigma, log_z = tiny.enumerate_target(world.base, world.log_phi)
    log_q = tiny.joint(tiny.proposal(world.log_p, world.log_psi)[0])
    kl = (log_sigma[tiny.N :].exp() * (log_sigma - log_q)[tiny.N :]).sum()
    theirs = target.tree.prefix_log_q(world.twist)
    loss = tiny.ctl_loss(log_sigma, world.log_p, world.log_psi)
    errors = [log_sigma - torch.cat(target.log_sigma), log_q - torch.cat(theirs)]
    errors += [kl - target.kl_to(theirs[-1]), loss - target.ctl_loss(world.twist)]
    return max(abs(log_z - target.log_z), *(error.abs().max().item() for error in errors))


def evidence_error(tiny: ModuleType, generation: int) -> float:
    """The larger distance, in standard errors, of E[Z-hat] and of E[Z-hat f(words)].

    f is 1 on a third of the words.
    """
    world = World(tiny, generation)
    arguments = (world.log_p, world.log_psi, world.log_phi_m, 20000, 5, generator(1))
    words, log_z = tiny.tsmc(*arguments)
    third = torch.arange(len(world.log_phi)) % 3 == 0
    sigma = world.target.log_sigma[-1].exp()
    distances = []
    for function in (torch.ones_like(sigma), third.double()):
        found = log_z.exp() * function[words - tiny.N].mean(1)  # [R]
        wanted = math.exp(world.target.log_z) * (sigma * function).sum()
        error = found.std() / math.sqrt(len(found))
        distances.append(((found.mean() - wanted) / error).abs().item())
    return max(distances)


def gradient_error(tiny: ModuleType, generation: int, batch_size: int = 20000) -> float:
    """Largest error of the mean CTL gradient over 20 batches against that of the exact loss."""
    world = World(tiny, generation)
    world.target.ctl_loss(world.twist).backward()
    wanted = tiny.by_prefix(-world.twist.log_psi.grad)
    given = (world.log_p, world.log_psi, world.log_phi_m, batch_size, generator(2))
    mean = sum(tiny.ctl_gradient(*given)[0] for _ in range(20)) / 20  # [S]
    return (mean - wanted).abs().max().item()


TOLERANCE = {enumeration_error: 1e-9, evidence_error: 4.0, gradient_error: 0.006}


@pytest.mark.parametrize("generation", [0, 1])
def test_every_check_passes_and_the_ctl_gradient_converges(generation):
    tiny = mutant(load_tiny(), SMALL)
    for check, tolerance in TOLERANCE.items():
        assert check(tiny, generation) < tolerance
    assert enumeration_error(load_tiny(), generation) < TOLERANCE[enumeration_error]
    errors = [gradient_error(tiny, generation, size) for size in (20, 500, 20000)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_a_run_takes_seconds_and_every_generation_is_closer_to_sigma(capsys):
    start = time.process_time()
    load_tiny().main(3)
    assert time.process_time() - start < 15
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert all(re.fullmatch("[a-z]+", word) for line in lines for word in line[-3:])
    *rows, last = [[float(cell.rstrip("%")) for cell in line[1:-3]] for line in lines]
    _, kl, estimated, log_z, spread, ess, palindromes = zip(*rows, strict=True)
    assert all(later < earlier for earlier, later in itertools.pairwise(kl))
    assert kl[-1] < 0.6 * kl[0] and estimated == pytest.approx(kl, abs=0.4)
    assert log_z[0] < log_z[-1] < last[3] + 0.1 and spread[-1] < 0.5 * spread[0]
    assert ess[0] < 15 and ess[-1] > 3 * ess[0]
    assert palindromes[0] < 80 < palindromes[-1]
