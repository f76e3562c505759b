"""Texts that end: a world with an absorbing token, enumerated."""

import pytest
import torch
from worlds import bias, generator, mutant, table_world

import tsmc.proposal
from tinystories.decoder import counted
from tsmc import sampler
from tsmc.exact import TableModel, Target, Tree
from tsmc.proposal import proposal_log_probs
from tsmc.sampler import Sigma
from twist.ctl import ctl_loss, draw_batch
from twist.potential import TextPotential

END = 1


def world(vocab_size: int = 2, length: int = 3, seed: int = 1):
    """A table model whose token END finishes a text, a twist, and a potential blind behind it."""
    model, twist, potential = table_world(vocab_size, length, seed)
    model = TableModel(model.table.detach(), length, END)

    def log_phi(tokens: torch.Tensor, log_p: torch.Tensor | None = None) -> torch.Tensor:
        return potential(tokens.where(counted(tokens, END), END))

    return model, twist, log_phi


def test_p_and_q_sum_to_one_over_finished_and_unfinished_texts():
    model, twist, _ = world(3, 4)
    tree = Tree(model)
    sequences = tree.sequences()
    is_possible = (counted(sequences, END) | (sequences == END)).all(1)
    for psi in (None, twist):
        exact = tree.prefix_log_q(psi)[-1].exp()
        assert exact.sum().item() == pytest.approx(1)
        assert not exact[~is_possible].any() and is_possible.sum() == 31
        found = proposal_log_probs(model, psi, sequences[is_possible])[1].exp()
        torch.testing.assert_close(found, exact[is_possible])


@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("scheme", ["multinomial", "systematic"])
def test_the_evidence_is_unbiased_where_texts_end_and_beginnings_are_judged(scheme, threshold):
    for log_prefix in (None, lambda tokens: -0.7 * (tokens == 0).sum(-1).double()):
        assert bias(*world(), 2, scheme, threshold, log_prefix=log_prefix) < 1e-10


BROKEN = [
    ("log_q=step.log_q.masked_fill(is_finished, 0.0)", "log_q=step.log_q"),
    ("log_p=step.log_p.masked_fill(is_finished, 0.0)", "log_p=step.log_p"),
    ("tokens=step.tokens.masked_fill(is_finished, end)", "tokens=step.tokens"),
    ("torch.where(is_finished, log_psi, step.log_psi)", "step.log_psi"),
    ("torch.where(is_finished, log_psi, step.log_normaliser)", "step.log_normaliser"),
]


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_wait_is_found(change, monkeypatch):
    monkeypatch.setattr(sampler, "wait", mutant(tsmc.proposal, change).wait)
    model, twist, log_phi = world()
    assert max(bias(model, twist, log_phi, 2, "multinomial", x) for x in (0.0, 1.0)) > 1e-3


def test_the_gradient_of_ctl_is_the_enumerated_one_where_texts_end():
    """Behind the end psi waits, so what the twist would say there has no gradient."""
    model, twist, log_phi = world()
    sigma, source, found = Sigma(model, log_phi), generator(4), []
    for _ in range(60):
        loss = ctl_loss(twist, draw_batch(sigma, twist, 4000, source))
        found += torch.autograd.grad(loss, twist.log_psi)
    gradients = torch.stack(found)  # [60, prefixes, V]
    (exact,) = torch.autograd.grad(Target(model, log_phi).ctl_loss(twist), twist.log_psi)
    is_behind = exact == 0
    assert is_behind.sum() == 8 and not gradients[:, is_behind].any()
    mean, error = gradients.mean(0)[~is_behind], gradients.std(0)[~is_behind] / 60**0.5
    assert ((mean - exact[~is_behind]) / error).abs().max() < 4
    assert (mean / error).abs().median() > 20  # it can tell the gradient from none


def test_the_potential_reads_the_text_without_its_end():
    words = ["Once", "<end>", " a", " b"]
    decode = lambda rows: ["".join(words[t] for t in row) for row in rows]  # noqa: E731
    phi = TextPotential([], decode, torch.tensor([0]), END)
    found = phi.texts(torch.tensor([[2, 1, 1], [1, 1, 1], [2, 3, 2]]))
    assert found == ["Once a", "Once", "Once a b a"]
