"""The explainer: its page computes what the sampler computes from the same random numbers.

The method runs in V8 without a browser. The sampler of `tsmc` is given the page's world as tables,
and the page's uniform numbers in place of its own. The claims of the text are checked too. N
prefixes can grow, V letters, T steps.
"""

import itertools
import json
import re
from unittest import mock

import pytest
import torch
from py_mini_racer import MiniRacer
from torch import Tensor

import tsmc.resampling
import tsmc.sampler
from eval.viewer import explainer
from eval.viewer.explainer import ALPHABET, PAGE, SCALE, load_tiny
from tsmc import SCHEMES, Trace
from tsmc.exact import Target
from tsmc.table import TableModel, TableTwist

HTML = PAGE.read_text(encoding="utf-8")
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


def browser(*changes: tuple[str, str]) -> MiniRacer:
    """The method of the page and its world in V8, with expressions replaced."""
    source = part_of(HTML, "method")
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is not there exactly once"
        source = source.replace(old, new)
    engine = MiniRacer()
    engine.eval(f"{source}\nconst world = readWorld({json.dumps(DATA)}); true")
    return engine


@pytest.fixture(scope="module")
def engine() -> MiniRacer:
    return browser()


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


def found(engine: MiniRacer, expression: str):
    """What an expression is on the page."""
    return json.loads(engine.eval(f"JSON.stringify({expression})"))


def codes_of(generation: dict, tiny) -> Tensor:
    """The indices in ALPHABET [rows, V] that the page holds of one generation."""
    codes = [ALPHABET.index(code) for code in generation["log_p"]]
    return torch.tensor(codes).view(-1, tiny.V)


class World:
    """The world of the page, read from its data anew, as tables of `tsmc`."""

    def __init__(self, tiny):
        self.tiny, self.models = tiny, []
        letters = torch.cartesian_prod(*[torch.arange(tiny.V)] * tiny.T)  # [V^T, T]
        broken = (letters != letters.flip(1))[:, : tiny.T // 2].sum(1).double()
        self.log_phi = -tiny.BETA * broken  # [V^T]
        for generation in DATA["generations"]:
            table = (-codes_of(generation, tiny).double() / SCALE).log_softmax(-1)
            if self.models:
                changed = table
                table = self.models[-1].clone()
                table[generation["rows"]] = changed
            self.models.append(table)

    def sigma(self, m: int) -> tuple[TableModel, Target]:
        """p^(m), and sigma as p^(m) sees it."""
        base, model = (self.tiny.language_model(self.models[i]) for i in (0, m))
        log_phi = self.tiny.effective_potential(base, self.log_phi, model)
        powers = self.tiny.V ** torch.arange(self.tiny.T - 1, -1, -1)
        self.potential = lambda tokens, log_p: log_phi[(tokens * powers).sum(-1)]
        model = TableModel(self.models[m], self.tiny.T).requires_grad_(False)
        return model, Target(model, self.potential)

    def twist(self, name: str, m: int, target: Target) -> TableTwist | None:
        """psi of every prefix and next letter."""
        if name == "one":
            return None
        if name == "optimal":
            return TableTwist(target.optimal_log_psi())
        steps = DATA["generations"][m]["log_psi"]  # T of [V, V]
        tables = [torch.tensor(step, dtype=torch.float64) for step in steps]
        copies = [max(1, self.tiny.V ** (t - 1)) for t in range(self.tiny.T)]
        blocks = [table.repeat(n, 1) for table, n in zip(tables, copies, strict=True)]
        return TableTwist(torch.cat(blocks))


@pytest.fixture(scope="module")
def world(tiny) -> World:
    return World(tiny)


def project_run(world: World, name: str, m: int, particles: int, threshold: float, seed: int):
    """Numbers, ancestors and samples of the project's sampler, and exact log Z and KL."""
    model, target = world.sigma(m)
    twist = world.twist(name, m, target)
    trace = Trace()
    numbers = uniform_numbers(seed)

    def uniforms(rows: int, columns: int, generator) -> Tensor:
        values = list(itertools.islice(numbers, rows * columns))
        return torch.tensor(values, dtype=torch.float64).view(rows, columns)

    sigma = (model, twist, world.potential)
    rule = (SCHEMES["systematic"], threshold, trace)
    with (
        mock.patch.object(tsmc.sampler, "uniforms", uniforms),
        mock.patch.object(tsmc.resampling, "uniforms", uniforms),
    ):
        population = tsmc.sampler.tsmc(*sigma, particles, torch.Generator(), 1, *rule)
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


def agree(one: tuple, other: tuple) -> bool:
    """Whether two runs are the same up to rounding."""
    try:
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-9)
    except AssertionError:
        return False
    return one[1:] == other[1:]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_page_computes_what_the_sampler_computes(engine, world, setting):
    for seed in (0, 1, 4000000000):
        assert agree(page_run(engine, *setting, seed), project_run(world, *setting, seed))


MUTANTS = [
    ("psi before", "logQ[c]) - pair.logPsi[parents[k]]", "logQ[c])"),
    ("phi", " + pair.logPhi[c - N]", ""),
    ("effective potential", "ofBase[N + i] + value - ofModel[N + i]", "value"),
    ("log K", "total - Math.log(K);", "total;"),
    ("last step", "t === T || threshold === 1", "threshold === 1"),
    ("carried", "due ? new Float64Array(K) : logWeights", "new Float64Array(K)"),
    ("points", "(i + uniform) / K", "i / K"),
    ("letters", "<= uniform * total", "<= uniform * total / 2"),
    ("optimal twist", "table.set(logPhi, N)", "table.set(world.logPhi, N)"),
    ("learned twist", "world.twists[m][t][t ?", "world.twists[0][t][t ?"),
    ("letter before", "(n - 1) % V : 0][v]", "n % V : 0][v]"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_a_broken_expression_is_noticed(world, mutant):
    broken = browser(mutant[1:])
    settings = [("learned", 2, 16, 0.0), ("learned", 2, 16, 0.9), ("optimal", 2, 16, 1.0)]
    pairs = ((page_run(broken, *each, 0), project_run(world, *each, 0)) for each in settings)
    assert not all(agree(*pair) for pair in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_evidence_of_every_step_is_exact(engine, world, tiny, name):
    _, target = world.sigma(1)
    twist = world.twist(name, 1, target)
    log_psi = torch.zeros(tiny.N, tiny.V) if twist is None else twist.log_psi.detach()
    log_p = tiny.language_model(world.models[1])
    log_pi = tiny.intermediate_targets(log_p, tiny.by_prefix(log_psi)).split(tiny.COUNTS)
    wanted = [level.logsumexp(0).item() for level in log_pi[1:-1]] + [target.log_z]
    assert found(engine, f"pairOf(world, '{name}', 1).exact") == pytest.approx(wanted, abs=1e-9)
    sigma = target.log_sigma[-1].exp().tolist()
    assert found(engine, "Array.from(world.sigma)") == pytest.approx(sigma, abs=1e-12)


def test_many_runs_begin_with_the_run_of_the_figure(engine, world):
    many = "manyRuns(pairOf(world, 'learned', 1), 16, 0.5, 7, 3)"
    runs = found(engine, f"(({{counts, ...rest}}) => ({{...rest, counts: [...counts]}}))({many})")
    each = [project_run(world, "learned", 1, 16, 0.5, 7000 + r) for r in range(3)]
    log_z = torch.tensor([figures["log_z"] for figures, *_ in each])
    words = [word for *_, words in each for word in words]
    assert runs["logZ"] == pytest.approx(log_z.tolist())
    assert runs["mean"] == pytest.approx(log_z.mean().item())
    assert runs["spread"] == pytest.approx(log_z.std().item(), rel=1e-4)
    assert runs["palindromes"] == sum(word == word[::-1] for word in words) / len(words)
    assert sum(count for _, count in runs["counts"]) == len(words)


def test_the_claims_of_the_text_hold(engine):
    def runs(name: str, m: int, particles: int, threshold: float) -> list:
        """Palindromes, mean and spread for three seeds."""
        setting = f"pairOf(world, '{name}', {m}), {particles}, {threshold}, seed, 200"
        numbers = "({palindromes, mean, spread}) => [palindromes, mean, spread]"
        return found(engine, f"[1, 2, 3].map((seed) => manyRuns({setting})).map({numbers})")

    rules = [runs("learned", 0, 16, threshold) for threshold in (0, 0.5, 1)]
    for rarely, at_times, always in zip(*rules, strict=True):
        assert rarely[0] > at_times[0] > always[0]
    sizes = [runs("learned", 0, particles, 0) for particles in (4, 16, 64)]
    for few, some, many in zip(*sizes, strict=True):
        assert few[2] > some[2] > many[2] and few[1] < some[1] < many[1]
    assert all(palindromes > 0.85 for palindromes, *_ in runs("one", 2, 16, 0))
    assert all(palindromes < 0.15 for palindromes, *_ in runs("one", 0, 16, 1))
    divergences = [found(engine, f"pairOf(world, 'learned', {m}).kl") for m in range(4)]
    assert divergences == sorted(divergences, reverse=True) and divergences[-1] > 1
    assert found(engine, "pairOf(world, 'optimal', 0).kl") == pytest.approx(0, abs=1e-9)


def test_the_page_holds_the_rounded_world_of_tiny(tiny):
    assert explainer.page(DATA) == HTML, "run python -m eval.viewer.explainer"
    quick = load_tiny()
    quick.TWIST_STEPS = quick.MODEL_STEPS = quick.RUNS = 1
    with mock.patch.object(explainer, "load_tiny", lambda: quick):
        made = explainer.world_data()
    assert made.keys() == DATA.keys() and len(DATA["generations"]) == tiny.GENERATIONS + 1
    assert made["generations"][0]["log_p"] == DATA["generations"][0]["log_p"]
    for world in (made, DATA):
        shapes = {torch.tensor(each["log_psi"][1:]).shape for each in world["generations"]}
        assert shapes == {(tiny.T - 1, tiny.V, tiny.V)}
    first = codes_of(made["generations"][0], tiny)
    second = codes_of(made["generations"][1], tiny)
    assert (second != first[made["generations"][1]["rows"]]).any(1).all(), "only what has changed"
    assert explainer.rounded(torch.tensor([[-0.5, -100.0]])).tolist() == [[4, len(ALPHABET) - 1]]
