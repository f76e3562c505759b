"""docs/tiny.py against the enumeration of tsmc/exact.py; then broken on purpose, to test the tests.

A mutant is its source with one expression replaced. Most checks shrink its world by the same means,
to 3 letters and 4 steps. S prefixes, N of which can grow, V letters, T steps.
"""

import itertools
import math
import re
import time
from types import ModuleType

import pytest
import torch
from torch import Tensor
from worlds import ListedPotential, generator, mutant, sequence_numbers

from eval.viewer.explainer import load_tiny
from tsmc.exact import TableModel, TableTwist, Target
from twist.potential import effective_potential

SMALL = ("V, T, BETA = 4, 8, 5.0", "V, T, BETA = 3, 4, 5.0")


def load(*changes: tuple[str, str]) -> ModuleType:
    """docs/tiny.py as a module, with expressions replaced."""
    return mutant(load_tiny(), *changes)


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
        self.target = target_of(tiny, base, logits, self.log_phi)
        self.twist = TableTwist(log_psi)


def target_of(tiny: ModuleType, base: Tensor, logits: Tensor, log_phi: Tensor) -> Target:
    """sigma as p^(m) sees it, from the logits of p^(0) and p^(m)."""
    first, model = (TableModel(rows, tiny.T).requires_grad_(False) for rows in (base, logits))
    return Target(model, effective_potential(ListedPotential(log_phi, tiny.V), first))


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
    tiny = load(SMALL)
    for check, tolerance in TOLERANCE.items():
        assert check(tiny, generation) < tolerance
    assert enumeration_error(load(), generation) < TOLERANCE[enumeration_error]
    errors = [gradient_error(tiny, generation, size) for size in (20, 500, 20000)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


EXTEND = "parents, prefixes = prefixes, extend(prefixes, log_q, generator)"
WEIGHTS = "log_normaliser[parents] - log_psi[parents]"
LAST = "log_phi[prefixes - N] - log_psi[parents]"
EFFECTIVE = "return joint(log_p_base)[N:] + log_phi - joint(log_p)[N:]"
NEGATIVE = "(log_ratio + log_psi[prefixes])"
RATIO = "(log_p - log_q)[prefixes].cumsum(1)"
MUTANTS = {  # name: the check that notices it, the generation, what is replaced, by what
    "psi before": (evidence_error, 0, WEIGHTS, "log_normaliser[parents]"),
    "psi after": (evidence_error, 0, WEIGHTS, "log_normaliser[parents] - log_psi[prefixes]"),
    "psi before, last letter": (evidence_error, 0, LAST, "log_phi[prefixes - N]"),
    "no correction": (evidence_error, 0, "(log_p - log_q)[prefixes] + log_phi", "log_phi"),
    "log K dropped": (evidence_error, 0, " - math.log(particles)", ""),
    "no resampling": (evidence_error, 0, "prefixes = prefixes.gather(1, ancestors)", "pass"),
    "letters drawn from p": (evidence_error, 0, EXTEND, EXTEND.replace("log_q", "log_p")),
    "TSMC with phi, not phi^(m)": (evidence_error, 1, EFFECTIVE, "return log_phi"),
    "CTL with phi, not phi^(m)": (gradient_error, 1, EFFECTIVE, "return log_phi"),
    "positives not weighted": (gradient_error, 0, "positive[:, None] -", "1 / batch_size -"),
    "negatives without psi": (gradient_error, 0, NEGATIVE, "log_ratio"),
    "negatives without p / q": (gradient_error, 0, NEGATIVE, "log_psi[prefixes]"),
    "ratio of one letter": (gradient_error, 0, RATIO, RATIO.removesuffix(".cumsum(1)")),
    "q not normalised": (enumeration_error, 0, "tilted - log_normaliser[:, None]", "tilted"),
    "pi without p": (enumeration_error, 0, "return joint(log_p) + log_psi", "return log_psi"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_expression_is_noticed(name):
    check, generation, old, new = MUTANTS[name]
    assert not check(load(SMALL, (old, new)), generation) < 2 * TOLERANCE[check]


def test_every_generation_has_the_same_sigma_and_learns_from_the_last_words(monkeypatch):
    tiny, source = load(SMALL), generator(7)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=source)
    log_phi = torch.randn(tiny.V**tiny.T, dtype=torch.float64, generator=source)
    wanted = tiny.joint(tiny.language_model(logits))[tiny.N :] + log_phi
    errors, learned, generations, distil = [], [], [], tiny.distil

    def watched(function, place: int):
        def call(*arguments):
            difference = tiny.joint(arguments[0])[tiny.N :] + arguments[place] - wanted
            errors.append(difference.abs().max().item())
            return function(*arguments)

        return call

    def distilled(logits: Tensor, words: Tensor) -> Tensor:
        learned.append(distil(logits, words))
        assert torch.equal(words, generations[-1][3])
        assert torch.equal(tiny.language_model(logits), generations[-1][0])
        return learned[-1]

    monkeypatch.setattr(tiny, "learn_twist", watched(tiny.learn_twist, 1))
    monkeypatch.setattr(tiny, "tsmc", watched(tiny.tsmc, 2))
    monkeypatch.setattr(tiny, "distil", distilled)
    for generation in tiny.self_distilled_tsmc(logits, log_phi, source):
        generations.append(generation)
    assert len(errors) == 2 * len(generations) == 2 * (len(learned) + 1)
    assert max(errors) < 1e-12
    for model, (log_p, *_) in zip([logits, *learned], generations, strict=True):
        assert torch.equal(log_p, tiny.language_model(model))


def test_one_step_of_distillation_follows_the_gradient_of_the_mean_log_likelihood():
    tiny, source = load(SMALL), generator(4)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=source)
    tokens = torch.randint(tiny.V, (6, 7, tiny.T), generator=source)  # [R, K, T]
    words = tiny.N + sequence_numbers(tokens.flatten(0, 1), tiny.V).view(6, 7)  # [R, K]
    model = TableModel(logits.clone(), tiny.T)
    model.log_probs(tokens.flatten(0, 1))[0].sum(-1).mean().backward()
    tiny.MODEL_STEPS = 1
    step = (tiny.distil(logits, words) - logits) / tiny.MODEL_RATE
    assert (step - model.table.grad).abs().max() < 1e-12


def test_the_twist_sees_the_step_and_the_letter_before():
    tiny = load(SMALL)
    world, tiny.TWIST_STEPS = World(tiny, 0), 1
    log_psi, _ = tiny.learn_twist(world.log_p, world.log_phi, generator(5))
    given = (world.log_p, torch.zeros_like(log_psi), world.log_phi, tiny.BATCH)
    gradient, _ = tiny.ctl_gradient(*given, generator(5))
    seen, number = {}, 1
    for t in range(1, tiny.T + 1):
        for prefix in itertools.product(range(tiny.V), repeat=t):
            seen.setdefault((t, prefix[-2:]), []).append(number)
            number += 1
    assert number == len(log_psi) and log_psi[0] == 0
    for numbers in seen.values():
        wanted = tiny.TWIST_RATE * gradient[numbers].sum()
        assert (log_psi[numbers] - wanted).abs().max() < 1e-12


def table(printed: str) -> list[list[float]]:
    """The numbers of the printed table behind the generation, sigma's row last."""
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert all(re.fullmatch("[a-z]+", word) for row in rows for word in row[-3:])
    return [[float(cell.rstrip("%")) for cell in row[1:-3]] for row in rows]


def test_the_printed_numbers_are_those_of_the_oracle(monkeypatch, capsys):
    tiny, generations = load(SMALL), []
    algorithm = tiny.self_distilled_tsmc

    def recorded(logits: Tensor, log_phi: Tensor, generator: torch.Generator):
        for generation in algorithm(logits, log_phi, generator):
            generations.append((logits, log_phi, *generation))
            yield generation

    monkeypatch.setattr(tiny, "self_distilled_tsmc", recorded)
    tiny.main(6)
    *rows, last = table(capsys.readouterr().out)
    assert len(rows) == len(generations) == tiny.GENERATIONS + 1
    for row, generation in zip(rows, generations, strict=True):
        base, log_phi, log_p, log_psi, ess, words, log_z = generation
        target = target_of(tiny, base, tiny.children(log_p), log_phi)
        twist = TableTwist(tiny.children(log_psi))
        kl = target.kl_to(target.tree.prefix_log_q(twist)[-1])
        share = 100 * (log_phi[words - tiny.N] == 0).double().mean().item()
        losses = [target.ctl_loss(twist).item(), kl, log_z.mean().item(), log_z.std().item()]
        assert row[:2] + row[3:5] == pytest.approx(losses, abs=0.006)  # two decimals are printed
        assert row[2] == pytest.approx(kl, abs=0.2)  # from 1000 exact samples
        assert row[5:] == pytest.approx([ess, share], abs=0.51)
        assert last[3] == pytest.approx(target.log_z, abs=0.006)
    spelled = ["".join(word) for word in itertools.product("abc", repeat=4)]
    assert [word == word[::-1] for word in spelled] == (generations[0][1] == 0).tolist()
    tiny.main(6)
    assert table(capsys.readouterr().out) == [*rows, last]  # the seed decides everything


def test_a_run_takes_seconds_and_every_generation_is_closer_to_sigma(capsys):
    start = time.process_time()
    load().main(3)
    assert time.process_time() - start < 15
    *rows, last = table(capsys.readouterr().out)
    _, kl, estimated, log_z, spread, ess, palindromes = zip(*rows, strict=True)
    assert all(later < earlier for earlier, later in itertools.pairwise(kl))
    assert kl[-1] < 0.6 * kl[0] and estimated == pytest.approx(kl, abs=0.4)
    assert log_z[0] < log_z[-1] < last[3] + 0.1 and spread[-1] < 0.5 * spread[0]
    assert ess[0] < 15 and ess[-1] > 3 * ess[0]
    assert palindromes[0] < 80 < palindromes[-1]
