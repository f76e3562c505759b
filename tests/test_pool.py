"""The pool: its weights against enumeration, and models that learn sigma from what was drawn."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from worlds import ListedPotential, generator, table_world, tiny_gpt_neo

from distill.self_distill import adapter_loss, batches_of, model_loss, self_distill
from tinystories import Conditional
from tinystories.errors import InputError
from tinystories.fast import pack
from tsmc.exact import TableModel, Target
from tsmc.proposal import sequence_log_probs
from twist.adapter import AdaptedGPTNeo, Adapter
from twist.pool import Pool, Round, draw_round
from twist.surrogate import fit_surrogate

INF = math.inf


def world(seed: int = 1):
    """Model, potential and the enumeration of sigma."""
    model, _, potential = table_world(3, 3, seed=seed, scale=2.0)
    return model, potential, Target(model, potential)


def pool_of(log_weights) -> Pool:
    """A pool of one round of equal sequences."""
    log_weights = torch.as_tensor(log_weights, dtype=torch.float64)
    pool = Pool()
    pool.rounds.append(Round(torch.zeros(len(log_weights), 3, dtype=torch.long), log_weights))
    return pool


def everything(target: Target) -> Pool:
    """A pool in which every sequence occurs once, with the weight of sigma."""
    pool = Pool()
    pool.rounds.append(Round(target.tree.sequences(), target.log_sigma[-1], target.log_psi[-1]))
    return pool


def test_a_round_weighs_every_sequence_by_the_proposal_that_drew_it():
    base, potential, target = world()
    proposal = TableModel.random(3, 3, generator(4), scale=0.5)
    drawn = draw_round(proposal, None, base, potential, 6000, generator(0))
    log_q = sequence_log_probs(proposal, drawn.tokens)
    wanted = sequence_log_probs(base, drawn.tokens) + potential(drawn.tokens) - log_q
    torch.testing.assert_close(drawn.log_weights, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(drawn.log_phi, potential(drawn.tokens))
    weights = wanted.exp()
    error = weights.std() / len(weights) ** 0.5
    assert abs(weights.mean() - math.exp(target.log_z)) < 4 * error < 0.25 * math.exp(target.log_z)


def test_weights_are_truncated_as_little_as_the_ess_allows():
    log_weights = 3 * torch.randn(1000, generator=generator(0), dtype=torch.float64)
    pool = Pool()
    for part in log_weights.split(300):
        pool.rounds += pool_of(part).rounds
    untouched = log_weights.softmax(0)
    ess = 1 / untouched.square().sum().item()
    torch.testing.assert_close(pool.weights(0.9 * ess / 1000), untouched)
    truncated = pool.weights(4 * ess / 1000)
    assert 1 / truncated.square().sum().item() == pytest.approx(4 * ess, rel=1e-6)
    below = truncated < truncated.max() * (1 - 1e-9)
    assert 0 < (~below).sum() < 500
    ratios = truncated[below] / untouched[below]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
    torch.testing.assert_close(pool.weights(1.0), torch.full((1000,), 1e-3).double())
    some = pool_of([0.0, -5.0, -INF, -INF])
    torch.testing.assert_close(some.weights(1.0), torch.tensor([0.5, 0.5, 0, 0]).double())
    wanted = torch.tensor([0.0, -5, -INF, -INF]).double().softmax(0)
    torch.testing.assert_close(some.weights(0.0), wanted)


def test_tempered_pools_have_the_largest_power_that_the_ess_allows():
    """Of all sequences once, W' is p phi^b; the next larger power would have too small an ESS."""
    _, potential, target = world()
    pool = everything(target)
    pool.rounds[0].log_phi = potential(target.tree.sequences())
    log_p, log_phi = target.log_p[-1], pool.log_phi()
    for share in (0.5, 0.6):
        weights = pool.tempered(share).weights(0.0)
        power = ((weights.log() - log_p).diff() / log_phi.diff()).median()
        torch.testing.assert_close(weights, (log_p + power * log_phi).softmax(0))
        larger = (log_p + power * 2**0.125 * log_phi).softmax(0)
        assert 1 / larger.square().sum() < share * 27 <= 1 / weights.square().sum()
        assert 0.01 < power < 1
    torch.testing.assert_close(pool.tempered(0.0).weights(0.0), pool.weights(0.0))
    dead = Round(torch.zeros(100, 3, dtype=torch.long), *torch.full((2, 100), -INF).double())
    pool.rounds.append(dead)
    torch.testing.assert_close(pool.tempered(0.6).weights(0.0)[:27], weights)
    assert not pool.tempered(0.6).weights(0.0)[27:].any()


def test_what_cannot_be_learned_from_is_refused():
    base, _, _ = world()
    for wrong in (math.nan, INF):
        potential = ListedPotential(torch.full((27,), wrong), 3)
        with pytest.raises(InputError, match="check the potential"):
            draw_round(base, None, base, potential, 5, generator(0))
    with pytest.raises(InputError, match="none of the 5 sequences drawn has phi > 0"):
        pool_of([-INF] * 5).weights(0.1)


def test_the_loss_is_the_cross_entropy_of_sigma_and_p():
    """Over all batches the mean loss of eq. 7 is -E_sigma[log p] / T, and so is its gradient."""
    _, _, target = world(seed=4)
    student = TableModel.random(3, 3, generator(5))
    samples, share = target.tree.sequences(), target.log_sigma[-1].exp()
    draw_batch = batches_of(samples, share, 5000, 40, generator(3))
    losses = torch.stack([model_loss(student, draw_batch(update)) for update in range(40)])
    exact = -(share[:, None] * student.log_probs(samples)[0]).sum() / 3
    assert abs(losses.mean() - exact) < 4 * losses.std() / 40**0.5 < 0.01
    found, wanted = (torch.autograd.grad(x, student.table)[0] for x in (losses.mean(), exact))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.003)
    assert wanted.abs().max() > 0.03, "there is something to be found"


def test_rounds_that_start_from_the_model_alone_find_sigma():
    """Draw, distil, draw from the student, distil again, in a world where phi is rare."""
    base, _, potential = table_world(4, 4, seed=7, scale=5.0)
    target = Target(base, potential)
    pool, student = Pool(), base
    found = [target.kl_to(target.log_p[-1])]
    for number in range(4):
        source = generator(100 * number)
        pool.rounds.append(draw_round(student, None, base, potential, 2000, source))
        student = TableModel(base.table.detach().clone(), 4)
        draw_batch = batches_of(pool.tokens(), pool.weights(0.02), 500, 60, generator(number))
        optimizer = torch.optim.Adam([student.table], lr=0.1)
        self_distill(lambda batch, p=student: model_loss(p, batch), optimizer, draw_batch, 60)
        found.append(target.kl_to(Target(student, potential).log_p[-1].detach()))
    assert found[-1] < 0.7 * found[1] < 0.2 * found[0], found


def adapted(has_memory: bool, scores: torch.Tensor | None):
    """p^(0), an adapter of random weights, and p^(0) and p^(1) after a prompt; all plain."""
    network, source = tiny_gpt_neo(11), generator(0)
    adapter = Adapter(network, scores, has_memory, 6, source)
    memory = scores if has_memory else None
    prompt = torch.tensor([4, 2, 7])
    base = Conditional(AdaptedGPTNeo(network, memory), prompt, 5)
    model = Conditional(AdaptedGPTNeo(network, memory, adapter), prompt, 5)
    return network, adapter, base, model


VARIANTS = {
    "memory": (True, torch.linspace(-1, 2, 11)),
    "surrogate": (False, torch.linspace(-1, 2, 11)),
    "neither": (False, None),
}


@pytest.mark.parametrize(("has_memory", "scores"), VARIANTS.values(), ids=VARIANTS)
def test_an_adapter_is_p0_at_first_and_its_formula_then(has_memory, scores):
    network, adapter, base, model = adapted(has_memory, scores)
    tokens = torch.randint(11, (7, 5), generator=generator(1))
    torch.testing.assert_close(model.log_probs(tokens)[0], base.log_probs(tokens)[0])
    torch.nn.init.normal_(adapter.shift.last.weight, generator=generator(2))
    torch.nn.init.normal_(adapter.shift.last.bias, generator=generator(2))
    plain = Conditional(network, base.prompt, 5)
    hidden = plain.states(tokens)  # [7, 5, 8]
    states = hidden
    if has_memory:
        texts = torch.cat([base.prompt.expand(7, -1), tokens[:, :-1]], 1)
        z = scores[texts].cumsum(1)[:, 2:]  # [7, 5]
        states = torch.cat([hidden, z[..., None]], -1)
    torch.testing.assert_close(model.states(tokens), states)
    shift = adapter.shift(states)
    logits = (hidden + shift[..., :8]) @ network.output_weight.T
    if scores is not None:
        logits = logits + shift[..., 8:] * scores
    torch.testing.assert_close(model.log_probs(tokens)[1], logits)
    tilted = plain.log_probs(tokens)[1] + adapter.tilt(states)
    torch.testing.assert_close(tilted, logits)
    torch.testing.assert_close(pack(adapter)(states), logits.detach())
    assert (adapter.tilt(states).abs() > 0.1).any()


def test_decoding_remembers_what_teacher_forcing_does():
    """States of merged and reordered rows, plain and packed."""
    network, adapter, _, plain = adapted(*VARIANTS["memory"])
    fast = AdaptedGPTNeo(pack(network), adapter.scores, pack(adapter))
    packed = Conditional(fast, plain.prompt, 5)
    for model in (plain, packed):
        decoder, texts = model.decoder(80), torch.zeros(80, 0, dtype=torch.long)
        for step in range(4):
            states = model.states(torch.cat([texts, torch.zeros(80, 1, dtype=torch.long)], 1))
            torch.testing.assert_close(decoder.hidden, states[:, -1])
            ancestors = torch.randint(80, (80,), generator=generator(step))
            tokens = torch.randint(3, (80,), generator=generator(step + 9))
            decoder.extend(tokens, ancestors)
            texts = torch.cat([texts[ancestors], tokens[:, None]], 1)


def test_rounds_that_climb_by_tempered_weights_find_sigma_sooner():
    """400 draws in eight rounds, or all from p^(0); KL(sigma||p^(1)) by enumeration."""
    network, prompt, vocab_size = tiny_gpt_neo(11), torch.tensor([4, 2, 7]), 11
    every = torch.cartesian_prod(*[torch.arange(vocab_size)] * 4)  # [11^4, 4]
    base = Conditional(AdaptedGPTNeo(network, None), prompt, 4)

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        return 8 * torch.nn.functional.logsigmoid(torch.linspace(-3, 1, 11)[tokens].sum(1))

    def student(pool: Pool, seed: int, updates: int):
        adapter = Adapter(network, pool.scores, True, 16, generator(seed))
        states = Conditional(AdaptedGPTNeo(network, adapter.memory), prompt, 4)
        weights = pool.weights(0.05)
        rows = batches_of(pool.tokens(), weights, 64, updates, generator(seed), states)
        optimizer = torch.optim.Adam(adapter.shift.parameters(), lr=0.01)
        self_distill(lambda batch: adapter_loss(adapter, batch), optimizer, rows, updates)
        return Conditional(AdaptedGPTNeo(network, adapter.memory, adapter), prompt, 4)

    def log_prob(model: Conditional) -> torch.Tensor:
        with torch.no_grad():
            return sequence_log_probs(model, every)

    def kl(rounds: int, seed: int) -> float:
        pool, model = Pool(), base
        for number in range(rounds):
            source = generator(100 * seed + number)
            pool.rounds.append(draw_round(model, None, base, log_phi, 400 // rounds, source))
            pool.scores, _ = fit_surrogate(pool.tokens(), pool.log_phi(), 8.0, vocab_size)
            model = student(pool.tempered(0.1), seed + number, 20)
        model = student(pool, seed, 60)
        log_sigma = (log_prob(base) + log_phi(every)).log_softmax(0)
        return (log_sigma.exp() * (log_sigma - log_prob(model))).sum().item()

    for seed in range(2):
        assert kl(8, seed) < 0.6 * kl(1, seed), seed


def test_the_adapter_loss_is_that_of_the_model_and_parts_sum_to_it():
    _, adapter, base, model = adapted(*VARIANTS["memory"])
    torch.nn.init.normal_(adapter.shift.last.weight, generator=generator(2))
    samples = torch.randint(11, (6, 5), generator=generator(1))
    cuts = (slice(None), slice(0, 4), slice(4, 9))
    drawn = (samples, torch.ones(6), 9, 1)
    batch, *parts = [batches_of(*drawn, generator(0), base, cut)(0) for cut in cuts]
    loss = adapter_loss(adapter, batch)
    torch.testing.assert_close(loss, model_loss(model, batch))
    torch.testing.assert_close(sum(adapter_loss(adapter, part) for part in parts), loss)
    logits = model.log_probs(batch.tokens)[1]
    torch.testing.assert_close(loss, cross_entropy(logits.flatten(0, 1), batch.tokens.flatten()))
    loss.backward()
    trained = {name for name, value in adapter.named_parameters() if value.grad is not None}
    assert trained and all(name.startswith("shift.") for name in trained)


def test_the_surrogate_finds_the_tokens_that_phi_depends_on():
    """log phi = c log sigmoid(b + sum of g over different tokens), recovered from random texts."""
    scores = torch.tensor([0.0, 0.0, 3.0, -2.0, 1.0, 0.0])
    tokens = torch.randint(6, (4000, 5), generator=generator(0))
    is_there = torch.nn.functional.one_hot(tokens, 6).amax(1).float()  # [N, V]
    log_phi = 10 * torch.nn.functional.logsigmoid(is_there @ scores - 2)
    found, loss = fit_surrogate(tokens, log_phi, 10.0, 8)
    torch.testing.assert_close(found[:6], scores, rtol=0, atol=0.02)
    assert (found[6:] == 0).all(), "tokens that never occur"
    assert 0 < loss < 0.6
    again, _ = fit_surrogate(tokens.flip(1), log_phi, 10.0, 8)
    torch.testing.assert_close(again, found)
    constant, _ = fit_surrogate(tokens, torch.zeros(4000), 10.0, 8)
    assert constant.abs().max() < 1e-3, "phi = 1 says nothing of any token"
