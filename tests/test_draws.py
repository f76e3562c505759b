"""Enumeration against sums by hand; draws, estimates, rejection, and runs that die."""

import itertools
import math
import os
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tables import TableTwist
from torch.nn.functional import one_hot
from worlds import INF, generator, gpt_neo_world, hard_potential, table_world

from eval.evaluate import DRAW, mixture_row
from eval.sample import Weighted
from tests.exact import Target, kl_divergence
from tinystories import decoder
from tsmc import draws
from tsmc.draws import BLOCK, SCHEMES, draw_categorical
from tsmc.estimate import Estimate, log_mean_estimate, tail_factor
from tsmc.mixture import mixture_log_weights
from tsmc.proposal import proposal_log_probs, sample_proposal, sequence_log_probs
from tsmc.rejection import draw_accepted, exact_samples
from tsmc.sampler import Rule, tsmc
from tsmc.sigma import Sigma
from tsmc.streams import Streams, side_by_side
from twist.potential import TextPotential


def chance(model, sequence) -> float:
    """p of a sequence by walking the decoder; the first end follows an end for certain."""
    walk, p = decoder.Decoder(model, 1), 1.0
    for t, token in enumerate(sequence):
        if set(sequence[:t]) & set(model.end):
            p *= token == model.end[0]
        else:
            p *= model.head(walk.hidden).softmax(-1)[0, token].item()
        if t + 1 < model.length:
            walk.append(torch.tensor([token]))
    return p


WORLDS = [(table_world, 3, 3), (table_world, 2, 1), (table_world, 1, 3), (gpt_neo_world, 3, 3)]
WORLDS += [(partial(table_world, end=(2, 1)), 3, 3), (partial(gpt_neo_world, end=(1,)), 3, 3)]


@pytest.mark.parametrize(("world", "vocab_size", "length"), WORLDS)
@torch.no_grad()
def test_all_levels_and_proposals_are_sums_by_hand(world, vocab_size, length, monkeypatch):
    monkeypatch.setattr(decoder, "MAX_LOGITS", 5 * vocab_size * length)
    model, twist, potential = world(vocab_size, length, seed=1)
    target = Target(model, potential)
    sequences = list(itertools.product(range(vocab_size), repeat=length))
    p = torch.tensor([chance(model, one) for one in sequences], dtype=torch.float64)
    joint = p * potential.log_phi.exp()
    assert target.log_z == pytest.approx(joint.sum().log().item(), abs=1e-12)
    for t in range(length + 1):
        p_t, joint_t = (x.view(vocab_size**t, -1).sum(1) for x in (p, joint))
        psi = torch.where(p_t > 0, joint_t / p_t, target.log_psi[t].exp())
        found = [level[t].exp() for level in (target.log_p, target.log_sigma, target.log_psi)]
        torch.testing.assert_close(found, [p_t, joint_t / joint.sum(), psi], rtol=0, atol=1e-12)
    log_q, sigma = target.tree.prefix_log_q(twist)[-1], target.log_sigma[-1].exp()
    assert log_q.exp().sum().item() == pytest.approx(1, abs=1e-12)
    wanted = (sigma * (sigma.log() - log_q))[sigma > 0].sum().item()
    assert kl_divergence(target.log_sigma[-1], log_q) == pytest.approx(wanted, abs=1e-12)
    tokens, log_p = target.tree.sequences, target.log_p[-1]
    found = [*proposal_log_probs(model, twist, tokens), sequence_log_probs(model, tokens)]
    torch.testing.assert_close(found, [log_p, log_q, log_p], rtol=0, atol=1e-12)


@pytest.mark.learned
@pytest.mark.parametrize("weights", [[0.1, 0.9], [0.0, 0.7, 0.3], [0.6, 0.05, 0.3, 0.05]])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_are_k_w_on_average_and_rows_are_independent(scheme, weights):
    """Every second row has the weights in reverse."""
    rows, particles = 20_000, len(weights)
    weights = torch.tensor([weights, weights[::-1]], dtype=torch.float64)
    ancestors = SCHEMES[scheme](weights.repeat(rows // 2, 1), generator(0))
    copies = one_hot(ancestors, particles).double().unflatten(0, (-1, 2)).sum(2)  # [R / 2, 2, K]
    excess = copies - particles * weights
    for one in (excess, excess[:, 0] * excess[:, 1]):
        assert (one.mean(0).abs() <= 5 * one.std(0) / (rows / 2) ** 0.5 + 1e-12).all()
    if scheme == "systematic":  # K W_k, rounded up or down
        assert (excess.abs() < 1 + 1e-9).all()


def test_weights_of_dead_and_extreme_runs_are_defined_and_zero_weights_are_never_drawn():
    points = torch.tensor([[0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53, 1.0]]).double()
    for row in ([0.0, 0.5, 0.0, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0]):
        chosen = draws.invert(torch.tensor([row]), points)
        assert (torch.tensor([row]).gather(1, chosen) > 0).all()
    log_weights = torch.tensor([[-INF] * 4, [-1e4, -1e4, -1e4, -INF], [1e4, 0.0, 0.0, 0.0]])
    wanted = torch.tensor([[0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0], [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(draws.normalise(log_weights), wanted)
    assert draws.effective_sample_size(log_weights).tolist() == pytest.approx([0.0, 3.0, 1.0])
    wanted = torch.tensor([-INF, -1e4 + math.log(0.75), 1e4 + math.log(0.25)])
    torch.testing.assert_close(draws.log_mean_exp(log_weights), wanted)


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, 50257])
def test_a_grid_of_uniforms_meets_every_token_in_proportion_and_none_that_is_ruled_out(size):
    """Uniforms at the midpoints of 1024 equal cells: leading counts are right to one draw."""
    logits = 2.5 * torch.randn(size, generator=generator(8))
    logits[1:][torch.rand(size - 1, generator=generator(1)) < 0.7] = -INF
    edges = torch.tensor([0.0, 2.0**-53, 1 - 2.0**-53])
    uniform = torch.cat([(torch.arange(1024).double() + 0.5) / 1024, edges])[:, None]
    index = torch.zeros(len(uniform), dtype=torch.long)  # all draw from the same row
    tokens, log_normaliser = draw_categorical(logits[None], uniform, index)
    assert logits[tokens].isfinite().all()
    torch.testing.assert_close(log_normaliser, logits.logsumexp(0).expand(len(uniform)))
    cumulative = logits.double().softmax(0).cumsum(0)
    leading = tokens[:1024].bincount(minlength=size).cumsum(0)
    assert (leading - 1024 * cumulative).abs().max() < 0.51 + 1024 * 1e-5
    assert (draw_categorical(logits[None] - INF, uniform, index)[1] == -INF).all()


@pytest.mark.learned
@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_particles_and_runs_die_and_nan_is_told(ess_threshold):
    model, twist, potential = table_world(2, 3, seed=6)
    rule, source = Rule(ess_threshold=ess_threshold), generator(0)
    rare = Sigma(model, model, hard_potential({5: -1.0}))
    population = tsmc(rare, twist, 3, source, 200, rule)
    is_dead = population.log_z == -INF
    assert 0 < is_dead.sum() < 200 and torch.equal(population.ess < 1, is_dead)
    assert (population.alive().samples == torch.tensor([1, 0, 1])).all()
    weighted = Weighted([], {}, population.log_weights, population.log_z, True)
    shares = weighted.shares
    assert shares.sum().item() == pytest.approx(1) and (shares[is_dead] == 0).all()
    with torch.no_grad():
        twist.log_psi[0] = 0.0
        twist.log_psi[1] = -INF  # no token may follow the prefix (0,)
    sigma = Sigma(model, model, potential)
    alive = tsmc(sigma, twist, 6, source, 100, rule).alive()
    assert len(alive.log_z) > 90 and (alive.samples[..., 0] == 1).all()
    nothing, nan = (TableTwist(torch.full_like(twist.log_psi, x)) for x in (-INF, torch.nan))
    assert len(tsmc(sigma, nothing, 3, source, 100, rule).alive().log_z) == 0
    nan_phi = Sigma(model, model, lambda tokens: torch.nan * tokens.sum(1))
    for one, psi in ((sigma, nan), (nan_phi, twist)):
        with pytest.raises(ValueError, match="NaN"):
            tsmc(one, psi, 3, source, 100, rule)


@pytest.mark.learned
@pytest.mark.parametrize("end", [(), (1,)])
def test_rejection_draws_sigma_and_knows_its_evidence(end):
    model, _, potential = table_world(3, 3, end=end)
    target = Target(model, potential)
    found = exact_samples(model, potential, Streams(0), "x", 20_000)
    numbers = found.tokens @ torch.tensor([9, 3, 1])
    assert torch.equal(found.log_phi, potential.log_phi[numbers])
    sigma = target.log_sigma[-1].exp()
    frequency = numbers.bincount(minlength=27) / len(numbers)
    assert ((frequency - sigma).abs() <= 5 * (sigma / len(numbers)).sqrt()).all()
    assert abs(found.log_z - target.log_z) < 5 * found.log_z_std_error < 0.1
    with pytest.raises(ValueError, match=r"log phi is 0\.001 on some text"):
        draw_accepted(model, lambda tokens: 1e-3 + 0.0 * tokens.sum(1), 5, generator(0))


@pytest.mark.learned
@pytest.mark.parametrize("particles", [2, 5])
def test_a_draw_by_weight_has_its_law(particles):
    """Texts of one run picked by weight, of n draws of p and K - n of q, against `mixture_row`."""
    model, twist, potential = table_world(3, 3)
    target, n, runs = Target(model, potential), round(0.3 * particles), 40_000
    texts, log_phi = target.tree.sequences, potential.log_phi
    log_p, log_q = proposal_log_probs(model, twist, texts)
    over_q, sigma, drawn = log_phi + log_p - log_q, target.log_sigma[-1].exp(), []
    kl = lambda log_w: Estimate((sigma @ log_w).item() - target.log_z, 0.0, INF)  # noqa: E731
    world = SimpleNamespace(exact=SimpleNamespace(log_phi=log_phi), kl=kl)
    for seed, psi in enumerate((twist, None)):
        tokens = sample_proposal(model, psi, runs * particles, generator(seed)).tokens
        drawn.append(tokens @ torch.tensor([9, 3, 1]))  # their numbers
    columns = [(over_q[one], log_phi[one]) for one in drawn]
    found = mixture_row(world, columns, particles, over_q)[DRAW]
    of_q, of_p = (one.view(runs, particles) for one in drawn)
    picked = torch.cat([of_q[:, n:], of_p[:, :n]], 1)  # [R, K]
    weights = mixture_log_weights(over_q, log_phi, n / particles)[picked].softmax(1)
    law = torch.zeros_like(sigma).index_add_(0, picked.flatten(), weights.flatten().to(sigma))
    exact = kl_divergence(target.log_sigma[-1], (law / runs).log()).item()
    assert found == pytest.approx(exact, abs=5e-3)


@pytest.mark.parametrize("dof", [1, 2, 7, 30, 31, 60, 10**6])
def test_half_widths_are_quantiles_of_students_t(dof):
    """They hold 95 % of its density, integrated with t = sqrt(dof) tan x."""
    limit = math.atan(Estimate(0.0, 1.0, dof).half_width() / math.sqrt(dof))
    x = torch.linspace(0, limit, 100_001, dtype=torch.float64)
    half = torch.linspace(0, math.pi / 2, 1_000_001, dtype=torch.float64)
    inside, whole = (torch.trapezoid(y.cos() ** (dof - 1), y) for y in (x, half))
    assert (inside / whole).item() == pytest.approx(0.95, abs=2e-5)


def test_an_interval_of_a_log_mean_reaches_upwards_by_the_tail():
    """The error of a log by hand; k of Pareto weights, none of equal ones; dead values count."""
    found = log_mean_estimate(torch.tensor([2.0, 3.0, 4.0]).log())
    wanted = {"value": math.log(3), "std_error": 1 / 3 / 3**0.5, "dof": 2.0}
    assert vars(found) == pytest.approx(wanted | {"stretch": 1.0})
    uniform = torch.rand(4000, generator=generator(0), dtype=torch.float64)
    for k in (0.2, 0.7, 1.5):
        assert tail_factor(-k * uniform.log()) == pytest.approx(1 + 4 * max(0, k - 0.4), rel=0.25)
    passed = torch.zeros(4000).log()
    passed[:3] = 0.0
    found = log_mean_estimate(passed)
    assert found.above() == found.half_width() == pytest.approx(1.96 / 3**0.5, rel=2e-3)


def test_two_threads_draw_what_one_does_and_a_potential_meets_one_at_a_time():
    model, twist, _ = gpt_neo_world(3, 4)
    threads, inside = set(), []

    def factor(texts):
        threads.add(threading.get_ident())
        inside.append(None)
        time.sleep(0.01)
        assert len(inside) == 1
        inside.clear()
        return [float(-len(text)) for text in texts]

    decode = lambda rows: ["".join(map(str, row)) for row in rows]  # noqa: E731
    sigma = Sigma(model, model, TextPotential([factor], decode, model.prompt))
    draw = lambda size, source: tsmc(sigma, twist, 100, source, size)  # noqa: E731
    usual, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        population = Streams(0).draw("x", None, 40, draw, 100)
        drawn = sample_proposal(model, twist, 999, generator(0))
        log_p, log_q = proposal_log_probs(model, twist, drawn.tokens)
        torch.testing.assert_close(log_q, drawn.log_q.sum(1))
        found.append([*vars(population).values(), *vars(drawn).values(), log_p])
    torch.set_num_threads(usual)
    assert all(map(torch.equal, *found)) and len(threads) == 3
    assert threading.main_thread().ident in threads
    child = os.fork()  # its threads are its own
    if child == 0:
        torch.set_num_threads(2)
        os._exit(list(side_by_side(len, ["a", "bc"], torch.device("cpu"))) != [1, 2])
    assert os.waitpid(child, 0)[1] == 0
