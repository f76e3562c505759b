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
from worlds import ListedPotential

import tsmc.resampling
import tsmc.sampler
from eval.viewer import explainer
from eval.viewer.explainer import ALPHABET, PAGE, SCALE, load_tiny
from tsmc import SCHEMES, Trace
from tsmc.exact import Target
from tsmc.table import TableModel, TableTwist

HTML = PAGE.read_text(encoding="utf-8")
TINY = load_tiny()
NAMES = ("one", "learned", "optimal")
SETTINGS = [(name, m, 16, each) for name in NAMES for m in (0, 2) for each in (0.0, 0.5, 1.0)]
SETTINGS += [("learned", 1, 64, 0.7), ("learned", 3, 4, 1.0)]


def uniform_numbers(seed: int):
    """mulberry32, as the page has it: uniform numbers in [0, 1)."""
    state = seed
    mask = 2**32 - 1
    while True:
        state = (state + 0x6D2B79F5) & mask
        bits = (state ^ state >> 15) * (state | 1) & mask
        bits ^= (bits + ((bits ^ bits >> 7) * (bits | 61) & mask)) & mask
        yield (bits ^ bits >> 14) / 2**32


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
    letters = torch.cartesian_prod(*[torch.arange(TINY.V)] * TINY.T)  # [V^T, T]
    broken = (letters != letters.flip(1)).sum(1).double() / 2  # each pair is counted twice
    base, own = (TINY.language_model(log_p_of(i)) for i in (0, m))
    log_phi = TINY.effective_potential(base, -TINY.BETA * broken, own)
    potential = ListedPotential(log_phi, TINY.V)
    model = TableModel(log_p_of(m), TINY.T).requires_grad_(False)
    target = Target(model, potential)
    blocks = []
    for t, step in enumerate(DATA["generations"][m]["log_psi"]):  # [V, V], [1, V] at first
        block = torch.tensor(step, dtype=torch.float64)
        blocks.append(block.repeat(max(1, TINY.V ** (t - 1)), 1))
    twists = {"one": None, "learned": TableTwist(torch.cat(blocks))}
    twists["optimal"] = TableTwist(target.optimal_log_psi())
    return model, twists[name], potential, target


def project_run(name: str, m: int, particles: int, threshold: float, seed: int):
    """Numbers, ancestors and samples of the project's sampler, and exact log Z and KL."""
    model, twist, potential, target = project_world(name, m)
    trace = Trace()
    numbers = uniform_numbers(seed)

    def uniforms(rows: int, columns: int, generator) -> Tensor:
        values = list(itertools.islice(numbers, rows * columns))
        return torch.tensor(values, dtype=torch.float64).view(rows, columns)

    world = (model, twist, potential, particles, torch.Generator(), 1)
    with (
        mock.patch.object(tsmc.sampler, "uniforms", uniforms),
        mock.patch.object(tsmc.resampling, "uniforms", uniforms),
    ):
        population = tsmc.sampler.tsmc(*world, SCHEMES["systematic"], threshold, trace)
    samples = population.samples[0].tolist()
    words = ["".join("abcd"[token] for token in tokens) for tokens in samples]
    figures = {"ess": trace.ess[:, 0], "log_w": trace.log_w[:, 0], "exact": target.log_z}
    figures["log_z"] = population.log_z.item()
    figures["kl"] = target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())
    return figures, trace.ancestors[:, 0].tolist(), words


def page_run(engine: MiniRacer, name: str, m: int, particles: int, threshold: float, seed: int):
    """The same of the page."""
    pair = f"pairOf(world, '{name}', {m})"
    run = found(engine, f"tsmc({pair}, {particles}, {threshold}, uniformNumbers({seed}))")
    steps = run["steps"]
    figures = {"log_z": run["logZ"], "exact": found(engine, "world.logZ")}
    figures["kl"] = found(engine, f"{pair}.kl")
    figures["ess"] = torch.tensor([step["ess"] for step in steps], dtype=torch.float64)
    figures["log_w"] = torch.tensor([step["logW"] for step in steps], dtype=torch.float64)
    words = found(engine, f"{json.dumps(run['samples'])}.map((word) => spell(world, word))")
    return figures, [step["ancestors"] for step in steps], words


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_page_computes_what_the_sampler_computes(engine, setting):
    for seed in (0, 1, 4000000000):
        figures, *choices = page_run(engine, *setting, seed)
        wanted, *rest = project_run(*setting, seed)
        assert choices == rest
        torch.testing.assert_close(figures, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_evidence_of_every_step_is_exact(engine, name):
    _, twist, _, target = project_world(name, 1)
    log_psi = torch.zeros(TINY.N, TINY.V) if twist is None else twist.log_psi.detach()
    log_p = TINY.language_model(log_p_of(1))
    log_pi = TINY.intermediate_targets(log_p, TINY.by_prefix(log_psi)).split(TINY.COUNTS)
    wanted = [level.logsumexp(0).item() for level in log_pi[1:-1]] + [target.log_z]
    assert found(engine, f"pairOf(world, '{name}', 1).exact") == pytest.approx(wanted, abs=1e-9)


def test_the_page_holds_the_rounded_world_of_tiny():
    assert explainer.page(DATA) == HTML, "run python -m eval.viewer.explainer"
    quick = load_tiny()
    quick.TWIST_STEPS = quick.MODEL_STEPS = quick.RUNS = 1
    with mock.patch.object(explainer, "load_tiny", lambda: quick):
        made = explainer.world_data()
    assert made.keys() == DATA.keys() and len(DATA["generations"]) == TINY.GENERATIONS + 1
    assert made["generations"][0]["log_p"] == DATA["generations"][0]["log_p"]
