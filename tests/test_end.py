"""Texts that end: a world with an absorbing token, enumerated; no loss sees behind the end."""

import pytest
import torch
from worlds import bias, generator, mutant, sequence_numbers, table_world, tiny_conditional

import tsmc.proposal
from distill.grpo import grpo_loss
from tinystories.decoder import counted
from tsmc import sampler
from tsmc.exact import TableModel, Target, Tree
from tsmc.proposal import proposal_log_probs, sample_proposal
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


def test_a_finished_text_waits_with_the_twist_of_its_end():
    model, twist, _ = world(3, 5)
    drawn = sample_proposal(model, twist, 200, generator(0))
    is_behind = ~counted(drawn.tokens, END)
    assert 50 < is_behind.any(1).sum() < 200 and (drawn.tokens[is_behind] == END).all()
    assert not drawn.log_p[is_behind].any() and not drawn.log_q[is_behind].any()
    last = counted(drawn.tokens, END).sum(1, keepdim=True) - 1
    at_end = drawn.log_psi.gather(1, last).expand_as(drawn.log_psi)
    assert torch.equal(drawn.log_psi[is_behind], at_end[is_behind])
    for t, listed in enumerate(Tree(model).prefix_log_psi(twist)):
        numbers = sequence_numbers(drawn.tokens[:, : t + 1], 3)
        torch.testing.assert_close(drawn.log_psi[:, t], listed[numbers])


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


def test_no_loss_sees_what_is_behind_the_end():
    model = tiny_conditional(0, END)
    tokens = sample_proposal(model, None, 64, generator(1)).tokens
    is_behind = ~counted(tokens, END)
    assert is_behind.any()
    log_p = [model.log_probs(tokens.masked_fill(is_behind, token))[0] for token in (END, 3)]
    torch.testing.assert_close(log_p[0], log_p[1])
    advantage = torch.randn(64, generator=generator(2))
    ref = torch.zeros_like(log_p[0])
    losses = [grpo_loss(x, ref, advantage, 0.1, ~is_behind) for x in log_p]
    torch.testing.assert_close(losses[0], losses[1])


def test_the_potential_reads_the_text_without_its_end():
    words = ["Once", "<end>", " a", " b"]
    decode = lambda rows: ["".join(words[t] for t in row) for row in rows]  # noqa: E731
    phi = TextPotential([], decode, torch.tensor([0]), END)
    found = phi.texts(torch.tensor([[2, 1, 1], [1, 1, 1], [2, 3, 2]]))
    assert found == ["Once a", "Once", "Once a b a"]
