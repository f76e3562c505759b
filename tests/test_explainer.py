"""The explainer: its page computes what the project's own sampler computes, from the same uniform numbers; its text is true.

The method runs in V8 without a browser (`tests/explainer_check.py` works the page in one). The sampler of `tsmc` is given
the page's world as tables, and the page's uniform numbers in the place of its own. N prefixes can grow, V letters, T steps.
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
from eval.viewer.explainer import ALPHABET, PAGE, SCALE, TEMPLATE, generation_data, load_tiny, page, rounded
from tsmc import SCHEMES, Trace
from tsmc.exact import Target
from tsmc.table import TableModel, TableTwist

PAGE_TEXT = PAGE.read_text(encoding="utf-8")
NAMES = ("one", "learned", "optimal")
SETTINGS = [(name, m, 16, threshold) for name in NAMES for m in (0, 2) for threshold in (0.0, 0.5, 1.0)]
SETTINGS += [("learned", 1, 64, 0.7), ("learned", 3, 4, 1.0)]


def uniform_numbers(seed: int):
    """mulberry32, as the page has it: uniform numbers in [0, 1)."""
    state, mask = seed, 2**32 - 1
    while True:
        state = (state + 0x6D2B79F5) & mask
        bits = (state ^ state >> 15) * (state | 1) & mask
        bits ^= (bits + ((bits ^ bits >> 7) * (bits | 61) & mask)) & mask
        yield (bits ^ bits >> 14) / 2**32


def part_of(text: str, name: str) -> str:
    """What stands in one script element of the page."""
    return re.search(rf'<script [^>]*id="{name}">(.*?)</script>', text, re.DOTALL).group(1)


DATA = json.loads(part_of(PAGE_TEXT, "data"))


def browser(*changes: tuple[str, str]) -> MiniRacer:
    """The method of the page and its world in V8, with expressions replaced."""
    source = part_of(PAGE_TEXT, "method")
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


class World:
    """The page's world, read anew from its data: language models, learned twists, potential, all as tables of `tsmc`."""

    def __init__(self, tiny):
        self.tiny, self.models = tiny, []
        letters = torch.cartesian_prod(*[torch.arange(tiny.V)] * tiny.T)  # [V^T, T]
        half = tiny.T // 2
        self.log_phi = -tiny.BETA * (letters[:, :half] != letters.flip(1)[:, :half]).sum(1).double()  # [V^T]
        for generation in DATA["generations"]:
            places = torch.tensor([ALPHABET.index(character) for character in generation["log_p"]]).view(-1, tiny.V)
            table = self.models[-1].clone() if self.models else torch.zeros(tiny.N, tiny.V, dtype=torch.float64)
            rows = range(tiny.N) if generation["rows"] is None else generation["rows"]
            table[list(rows)] = (-places.double() / SCALE).log_softmax(-1)
            self.models.append(table)

    def sigma(self, m: int) -> tuple[TableModel, Target]:
        """p^(m), and sigma as seen from it."""
        base = self.tiny.language_model(self.models[0])
        log_phi = self.tiny.effective_potential(base, self.log_phi, self.tiny.language_model(self.models[m]))
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
        steps = [torch.tensor(step, dtype=torch.float64) for step in DATA["generations"][m]["log_psi"]]  # T of [V, V]
        blocks = [step.repeat(max(1, self.tiny.V ** (t - 1)), 1) for t, step in enumerate(steps)]  # T of [V^t, V]
        return TableTwist(torch.cat(blocks))


@pytest.fixture(scope="module")
def world(tiny) -> World:
    return World(tiny)


def project_run(world: World, name: str, m: int, particles: int, threshold: float, seed: int) -> list:
    """log Z-hat; ESS, log w and ancestors of every step; and samples of the project's sampler; and the exact answers."""
    model, target = world.sigma(m)
    twist, trace, numbers = world.twist(name, m, target), Trace(), uniform_numbers(seed)

    def uniforms(rows: int, columns: int, generator) -> Tensor:
        return torch.tensor(list(itertools.islice(numbers, rows * columns)), dtype=torch.float64).view(rows, columns)

    with (
        mock.patch.object(tsmc.sampler, "uniforms", uniforms),
        mock.patch.object(tsmc.resampling, "uniforms", uniforms),
    ):
        given = (
            model,
            twist,
            world.potential,
            particles,
            torch.Generator(),
            1,
            SCHEMES["systematic"],
            threshold,
            trace,
        )
        population = tsmc.sampler.tsmc(*given)
    words = ["".join("abcd"[token] for token in tokens) for tokens in population.samples[0].tolist()]
    kl = target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())
    return [
        population.log_z.item(),
        trace.ess[:, 0],
        trace.log_w[:, 0],
        trace.ancestors[:, 0].tolist(),
        words,
        target.log_z,
        kl,
    ]


def page_run(engine: MiniRacer, name: str, m: int, particles: int, threshold: float, seed: int) -> list:
    """The same of the page."""
    run = found(engine, f"tsmc(pairOf(world, '{name}', {m}), {particles}, {threshold}, uniformNumbers({seed}))")
    ess, log_w = (torch.tensor([step[key] for step in run["steps"]], dtype=torch.float64) for key in ("ess", "logW"))
    words = found(engine, f"{json.dumps(run['samples'])}.map((word) => spell(world, word))")
    exact = found(engine, f"[world.logZ, pairOf(world, '{name}', {m}).kl]")
    return [run["logZ"], ess, log_w, [step["ancestors"] for step in run["steps"]], words, *exact]


def agree(one: list, other: list) -> bool:
    """Whether two runs are the same to ten digits."""
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-9)
        if isinstance(a, Tensor)
        else a == b
        if isinstance(a, list)
        else abs(a - b) < 1e-9
        for a, b in zip(one, other, strict=True)
    )


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
    ("weights carried", "carried = due ? new Float64Array(K) : logWeights", "carried = new Float64Array(K)"),
    ("points", "(i + uniform) / K", "i / K"),
    ("letters", "<= uniform * total", "<= uniform * total / 2"),
    ("optimal twist", "table.set(logPhi, N)", "table.set(world.logPhi, N)"),
    ("learned twist", "world.twists[m][t][t ?", "world.twists[0][t][t ?"),
    ("letter before", "(n - 1) % V : 0][v]", "n % V : 0][v]"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_a_broken_expression_is_noticed(world, mutant):
    broken, settings = browser(mutant[1:]), [("learned", 2, 16, 0.0), ("learned", 2, 16, 0.9), ("optimal", 2, 16, 1.0)]
    assert not all(agree(page_run(broken, *each, 0), project_run(world, *each, 0)) for each in settings)


def test_uniform_numbers_are_the_same(engine):
    for seed in (0, 1, 123456, 2**32 - 1):
        expression = f"(() => {{ const next = uniformNumbers({seed}); return Array.from({{length: 1000}}, next); }})()"
        numbers = torch.tensor(found(engine, expression), dtype=torch.float64)
        assert numbers.tolist() == list(itertools.islice(uniform_numbers(seed), 1000))
        assert abs(numbers.mean() - 0.5) < 0.05 and numbers.std() == pytest.approx(12**-0.5, abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_evidence_of_every_step_is_exact(engine, world, tiny, name):
    _, target = world.sigma(1)
    twist = world.twist(name, 1, target)
    log_psi = torch.zeros(tiny.N, tiny.V) if twist is None else twist.log_psi.detach()
    log_pi = tiny.intermediate_targets(tiny.language_model(world.models[1]), tiny.by_prefix(log_psi)).split(tiny.COUNTS)
    wanted = [level.logsumexp(0).item() for level in log_pi[1:-1]] + [target.log_z]
    assert found(engine, f"pairOf(world, '{name}', 1).exact") == pytest.approx(wanted, abs=1e-9)
    assert found(engine, "Array.from(world.sigma)") == pytest.approx(target.log_sigma[-1].exp().tolist(), abs=1e-12)


def test_many_runs_begin_with_the_run_of_the_figure(engine, world):
    setting = ("learned", 1, 16, 0.5)
    runs = found(
        engine,
        "(({counts, ...rest}) => ({...rest, counts: [...counts]}))(manyRuns(pairOf(world, 'learned', 1), 16, 0.5, 7, 3))",
    )
    each = [project_run(world, *setting, 7000 + r) for r in range(3)]
    log_z, words = torch.tensor([run[0] for run in each]), [word for run in each for word in run[4]]
    assert runs["logZ"] == pytest.approx(log_z.tolist())
    assert runs["mean"] == pytest.approx(log_z.mean().item()) and runs["spread"] == pytest.approx(
        log_z.std().item(), rel=1e-4
    )
    assert runs["palindromes"] == sum(word == word[::-1] for word in words) / len(words)
    assert sum(count for _, count in runs["counts"]) == len(words)


def test_what_the_text_says_about_the_panels_holds(engine):
    def runs(name: str, m: int, particles: int, threshold: float) -> dict:
        arguments = f"pairOf(world, '{name}', {m}), {particles}, {threshold}, seed, 200"
        results = f"[1, 2, 3].map((seed) => manyRuns({arguments}))"
        return found(engine, f"{results}.map(({{palindromes, mean, spread}}) => [palindromes, mean, spread])")

    for light, at_times, always in zip(*(runs("learned", 0, 16, threshold) for threshold in (0, 0.5, 1)), strict=True):
        assert light[0] > at_times[0] > always[0], "the more often they resample, the fewer palindromes"
    for few, some, many in zip(*(runs("learned", 0, particles, 0) for particles in (4, 16, 64)), strict=True):
        assert few[2] > some[2] > many[2] and few[1] < some[1] < many[1], "with more particles the runs grow alike"
    assert all(palindromes > 0.85 for palindromes, *_ in runs("one", 2, 16, 0)), "the look-ahead lives in p"
    assert all(palindromes < 0.15 for palindromes, *_ in runs("one", 0, 16, 1)), "nobody looks ahead"
    divergences = [found(engine, f"pairOf(world, 'learned', {m}).kl") for m in range(4)]
    assert divergences == sorted(divergences, reverse=True) and divergences[-1] > 1
    assert found(engine, "pairOf(world, 'optimal', 0).kl") == pytest.approx(0, abs=1e-9)


def test_the_page_is_the_template_with_a_rounded_tiny_world(tiny):
    assert page(DATA) == PAGE_TEXT, "make it again with python -m eval.viewer.explainer"
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    characters = "".join(ALPHABET[place] for place in rounded(logits.log_softmax(-1)).flatten().tolist())
    assert DATA["generations"][0]["log_p"] == characters and len(DATA["generations"]) == tiny.GENERATIONS + 1
    assert (DATA["letters"], DATA["length"], DATA["beta"]) == (tiny.V, tiny.T, tiny.BETA)


def test_a_generation_lists_the_rows_that_changed(tiny):
    before = torch.zeros(tiny.N, tiny.V, dtype=torch.long)
    places = before.clone()
    places[5, 2] = 3
    theta = torch.arange(float(tiny.V * tiny.V)).view(tiny.V, tiny.V)
    last = (torch.arange(tiny.N) - 1) % tiny.V  # the letter before
    data = generation_data(tiny, places, before, tiny.by_prefix(theta[last]))
    assert (data["rows"], data["log_p"]) == ([5], "AADA")
    assert data["log_psi"][1:] == [theta.tolist()] * (tiny.T - 1) and data["log_psi"][0] == theta[-1:].tolist()


def test_the_page_needs_nothing_but_itself():
    for banned in ("http:", "https:", "src=", "url(", "@import", "fetch(", "XMLHttpRequest", "WebSocket", "import("):
        assert banned not in PAGE_TEXT, banned
    links = set(re.findall(r'href="([^"]*)"', PAGE_TEXT)) - {"data:,"}
    assert links and all((PAGE.parent / link).exists() for link in links)
    assert "default-src 'none'" in PAGE_TEXT and "{{" not in PAGE_TEXT


def test_every_element_and_fact_that_the_script_asks_for_is_there():
    template = TEMPLATE.read_text(encoding="utf-8")
    asked = set(re.findall(r'\bget\("([\w-]+)"\)', template))
    defined = re.findall(r'\bid="([\w-]+)"', template)
    assert asked and asked <= set(defined) and len(defined) == len(set(defined))
    facts = re.search(r"const facts = \{(.*?)\};", template, re.DOTALL).group(1)
    for fact in re.findall(r'data-fact="(\w+)"', template):
        assert f"{fact}:" in facts
    numbered = set(re.findall(r"\beq\.(?:&nbsp;| )(\d)", template))
    assert numbered == set("12345678")
