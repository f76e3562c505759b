"""The explainer: its page computes what the sampler computes from the same random numbers.

The method runs in V8 without a browser. The sampler of `tsmc` is given the page's world as tables,
and the page's uniform numbers in place of its own. N prefixes can grow, V letters, T steps.
"""

import functools
import itertools
import json
import re
from unittest import mock

import pytest
import torch
from py_mini_racer import MiniRacer
from torch import Tensor
from worlds import ListedPotential, generator

import tsmc.resampling
import tsmc.sampler
from eval.viewer import explainer
from eval.viewer.explainer import ALPHABET, PAGE, SCALE, load_tiny
from tsmc import SCHEMES, Trace
from tsmc.exact import TableModel, TableTwist, Target
from twist.pool import Pool, Round, tempered, truncated

HTML = PAGE.read_text(encoding="utf-8")
TINY = load_tiny()
LETTERS = torch.cartesian_prod(*[torch.arange(TINY.V)] * TINY.T)  # [V^T, T]
BROKEN = (LETTERS.flip(1) != LETTERS).sum(1).double() / 2  # each pair is counted twice
SETTINGS = list(itertools.product(("one", "learned", "optimal"), (0, 2), (16,), (0.0, 0.5, 1.0)))
SETTINGS += [("learned", 1, 64, 0.7), ("learned", 3, 4, 1.0)]
PAGE_RUN = """(name, m, K, threshold, seed) => {
  const pair = pairOf(world, name, m), run = tsmc(pair, K, threshold, uniformNumbers(seed));
  const all = (key) => run.steps.flatMap((step) => step[key]);
  const numbers = [...all("ess"), ...all("logW"), ...pair.exact, run.logZ, pair.kl];
  return [numbers, all("ancestors"), run.samples.map((word) => spell(world, word))];
}"""


def part_of(text: str, name: str) -> str:
    """The content of one script element of the page."""
    return re.search(rf'<script [^>]*id="{name}">(.*?)</script>', text, re.DOTALL).group(1)


DATA = json.loads(part_of(HTML, "data"))


@pytest.fixture(scope="module")
def engine() -> MiniRacer:
    """The method of the page and its world in V8."""
    engine = MiniRacer()
    engine.eval(f"{part_of(HTML, 'method')}\nconst world = readWorld({json.dumps(DATA)}); true")
    return engine


def found(engine: MiniRacer, expression: str):
    """What an expression is on the page."""
    return json.loads(engine.eval(f"JSON.stringify({expression})"))


def log_p_of(m: int) -> Tensor:
    """log p^(m) of the next letter [N, V], which changes some rows of p^(m-1)."""
    table = torch.empty(TINY.N, TINY.V, dtype=torch.float64)
    for generation in DATA["generations"][: m + 1]:
        rows = slice(None) if generation["rows"] is None else generation["rows"]
        codes = torch.tensor([ALPHABET.index(code) for code in generation["log_p"]])
        table[rows] = (-codes.view(-1, TINY.V).double() / SCALE).log_softmax(-1)
    return table


@functools.cache
def project_world(name: str, m: int):
    """p^(m), a twist, the potential and sigma, read from the page's data anew."""
    base, own = (TINY.language_model(log_p_of(i)) for i in (0, m))
    log_phi = TINY.effective_potential(base, -TINY.BETA * BROKEN, own)
    potential = ListedPotential(log_phi, TINY.V)
    model = TableModel(log_p_of(m), TINY.T).requires_grad_(False)
    target = Target(model, potential)
    log_psi = DATA["generations"][m]["log_psi"]  # T of [V, V], [1, V] at first
    blocks = [torch.tensor(step, dtype=torch.float64) for step in log_psi]
    blocks = [step.repeat(max(1, TINY.V ** (t - 1)), 1) for t, step in enumerate(blocks)]
    twists = {"one": None, "learned": TableTwist(torch.cat(blocks))}
    twists["optimal"] = TableTwist(target.optimal_log_psi())
    return model, twists[name], potential, target


def project_run(name: str, m: int, particles: int, threshold: float, draws: list[float]):
    """Numbers with those that are exact, ancestors and samples of the project's sampler."""
    model, twist, potential, target = project_world(name, m)
    trace = Trace()
    left = iter(draws)

    def uniforms(rows: int, columns: int, generator) -> Tensor:
        values = list(itertools.islice(left, rows * columns))
        return torch.tensor(values, dtype=torch.float64).view(rows, columns)

    world = (model, twist, potential, particles, torch.Generator(), 1)
    with (
        mock.patch.object(tsmc.sampler, "uniforms", uniforms),
        mock.patch.object(tsmc.resampling, "uniforms", uniforms),
    ):
        population = tsmc.sampler.tsmc(*world, SCHEMES["systematic"], threshold, trace)
    samples = population.samples[0].tolist()
    words = ["".join("abcd"[token] for token in tokens) for tokens in samples]
    psi = [level.detach().flatten() for level in target.tree.log_psi(twist)]  # T of [V^t]
    evidence = [(target.log_p[t] + psi[t - 1]).logsumexp(0) for t in range(1, TINY.T)]
    kl = target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())
    numbers = [*trace.ess, *trace.log_w.flatten(), *evidence, target.log_z, population.log_z, kl]
    return [float(number) for number in numbers], trace.ancestors.flatten().tolist(), words


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_page_computes_what_the_sampler_computes(engine, setting):
    for seed in (0, 1, 4000000000):
        numbers, *choices = found(engine, f"({PAGE_RUN})(...{json.dumps([*setting, seed])})")
        draws = found(engine, f"Array.from({{ length: 600 }}, uniformNumbers({seed}))")
        assert len(set(draws)) == 600 and 0 <= min(draws) < 0.1 and 0.9 < max(draws) < 1
        wanted, *rest = project_run(*setting, draws)
        assert choices == rest and numbers == pytest.approx(wanted, rel=0, abs=1e-9)


def log_q_of(fitted: dict) -> Tensor:
    """log q of all words [V^T] from the adapter of one round."""
    shift, strength = torch.tensor(fitted["U"]), torch.tensor(fitted["a"])
    scores = torch.tensor(fitted["g"] or [0.0] * 28 * TINY.V**2).view(-1, TINY.V, TINY.V)
    base = log_p_of(0)  # [N, V]
    log_q, prefixes = torch.zeros(len(LETTERS)), torch.zeros(len(LETTERS), dtype=torch.long)
    for t, letters in enumerate(LETTERS.T):
        before = LETTERS[:, t - 1] if t > 0 else torch.tensor(TINY.V - 1)
        logits = base[prefixes] + shift[TINY.V * t + before]
        for i in range(t):
            logits = logits + strength[t] * scores[t * (t - 1) // 2 + i][LETTERS[:, i]]
        log_q = log_q + logits.log_softmax(-1).gather(1, letters[:, None])[:, 0]
        prefixes = prefixes * TINY.V + 1 + letters
    return log_q


@pytest.mark.parametrize("name", ["with", "without"])
def test_the_pool_of_the_page_is_that_of_the_project(engine, name):
    pool, target = Pool(), project_world("one", 0)[3]
    log_p = log_q = target.log_p[-1]
    listed = "({ kl, ess, drawn }) => [kl, ess, drawn]"
    rounds = found(engine, f"poolOf(world, '{name}').rounds.map({listed})")
    pairs = zip(DATA["pools"][name], rounds, strict=True)
    for number, (fitted, (kl, ess, drawn)) in enumerate(pairs, 1):
        log_phi = -TINY.BETA * BROKEN[drawn]
        pool.rounds.append(Round(LETTERS[drawn], (log_p - log_q)[drawn] + log_phi, log_phi))
        log_weights, power = pool.log_weights(), 1.0
        if number < explainer.LADDER:
            log_weights, power = tempered(pool, explainer.LADDER_ESS)
        weights = truncated(log_weights, explainer.LEAST_ESS)
        assert fitted["power"] == pytest.approx(power)
        assert 1 / weights.square().sum() == pytest.approx(ess)
        log_q = log_q_of(fitted)
        assert target.kl_to(log_q) == pytest.approx(kl, rel=0, abs=1e-5)


def test_the_page_holds_the_rounded_world_of_tiny(engine):
    assert explainer.page(DATA) == HTML, "run python -m eval.viewer.explainer"
    logits = torch.randn(TINY.N, TINY.V, dtype=torch.float64, generator=generator(0))
    _, log_z = TINY.enumerate_target(TINY.language_model(logits), -TINY.BETA * BROKEN)
    assert f"{found(engine, 'world.logZ'):.2f}" == f"{log_z:.2f}"  # as tiny.py prints it
