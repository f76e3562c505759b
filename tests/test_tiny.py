"""docs/tiny.py against the enumeration of tsmc/exact.py, in a world of 3 letters and 4 steps."""

import math
import subprocess
import sys

import pytest
import torch
from worlds import ListedPotential, generator, mutant

import docs.tiny
from tsmc.exact import TableModel, TableTwist, Target
from twist.potential import effective_potential


@pytest.mark.parametrize("generation", [0, 1])
def test_the_page_agrees_with_enumeration(generation):
    """For a random p^(0), p^(1), twist psi and potential: log Z_sigma, log sigma, KL(sigma || q)
    and the CTL loss exactly; E[Z-hat], E[Z-hat f(words)], f = 1 on a third of the words, and the
    CTL gradient by their means."""
    tiny = mutant(docs.tiny, ("V, T, BETA = 4, 8, 5.0", "V, T, BETA = 3, 4, 5.0"))
    source = generator(0)
    base, change, log_psi = torch.randn(3, tiny.N, tiny.V, dtype=torch.float64, generator=source)
    logits = base + generation * change / 2
    log_phi = -torch.randn(tiny.V**tiny.T, dtype=torch.float64, generator=source).abs()
    log_p_base, log_p = tiny.language_model(base), tiny.language_model(logits)
    given = (log_p, tiny.by_prefix(log_psi), tiny.effective_potential(log_p_base, log_phi, log_p))
    first, model = (TableModel(rows, tiny.T) for rows in (base, logits))
    potential = effective_potential(ListedPotential(log_phi, tiny.V), first)
    target = Target(model, potential)  # sigma as p^(m) sees it
    twist = TableTwist(log_psi)
    log_sigma, log_z_sigma = tiny.enumerate_target(log_p_base, log_phi)
    log_q = tiny.joint(tiny.proposal(*given[:2])[0])
    kl = (log_sigma[tiny.N :].exp() * (log_sigma - log_q)[tiny.N :]).sum()
    loss = tiny.ctl_loss(log_sigma, *given[:2])
    exact_log_q = target.tree.prefix_log_q(twist)
    close = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(log_sigma, torch.cat(target.log_sigma), **close)
    torch.testing.assert_close(log_q, torch.cat(exact_log_q), **close)
    exact = [target.log_z, target.kl_to(exact_log_q[-1]), target.ctl_loss(twist).item()]
    assert [log_z_sigma, kl.item(), loss.item()] == pytest.approx(exact, rel=0, abs=1e-9)
    words, log_z = tiny.tsmc(*given, 20000, 5, generator(1))
    sigma = target.log_sigma[-1].exp()
    third = (torch.arange(len(sigma)) % 3 == 0).double()
    for function in (torch.ones_like(sigma), third):
        found = log_z.exp() * function[words - tiny.N].mean(1)  # [R]
        wanted = math.exp(target.log_z) * (sigma * function).sum()
        assert (found.mean() - wanted).abs() < 4 * found.std() / math.sqrt(len(found))
    target.ctl_loss(twist).backward()
    wanted = tiny.by_prefix(-twist.log_psi.grad)
    source = generator(2)
    gradients = [tiny.ctl_gradient(*given, 20000, source)[0] for _ in range(20)]
    assert (sum(gradients) / 20 - wanted).abs().max() < 0.006


def test_a_solution_passes_its_check():
    command = [sys.executable, "docs/assignments.py", "2", "--solved"]
    assert "the variances add up to 1.28" in subprocess.check_output(command, text=True)
