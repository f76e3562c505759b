"""The explainer: what its page computes against the project, and what it shows in a browser.

The method of the page runs in V8 without a browser; the sampler of `tsmc` is given the page's world
as tables, and the page's uniform numbers in place of its own. Tests with the marker `browser` open
the page in Chromium: `python -m pytest -m browser`. N prefixes can grow, V letters, T steps.
"""

import itertools
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from py_mini_racer import MiniRacer
from torch import Tensor
from worlds import ListedPotential

import tsmc.resampling
import tsmc.sampler
from distill import PooledOptions
from docs import tiny as TINY
from tsmc import Trace
from tsmc.exact import TableModel, TableTwist, Target, all_sequences
from tsmc.resampling import multinomial, systematic
from twist.pool import Round, joined, tempered, truncated

PAGE = Path(TINY.__file__).with_name("explainer.html")
HTML = PAGE.read_text(encoding="utf-8")
LETTERS = all_sequences(TINY.V, TINY.T)  # [V^T, T]
BROKEN = (LETTERS.flip(1) != LETTERS).sum(1).double() / 2  # each pair is counted twice
RULES = {"paper": (multinomial, 1.0), "weighted": (systematic, 0.0), "pooled": (systematic, 0.0)}
TWISTS = ("one", "learned", "levels", "optimal")
SETTINGS = [(learner, 2, twist, 16) for learner in RULES for twist in TWISTS]
SETTINGS += [(learner, 0, "learned", 16) for learner in RULES]
SETTINGS += [("paper", 1, "longer", 64), ("weighted", 3, "longer", 4)]
PAGE_RUN = """(learner, m, twist, K, seed) => {
  const pair = pairOf(world, learner, m, twist), run = tsmc(pair, K, learner, uniformNumbers(seed));
  const all = (key) => run.steps.flatMap((step) => step[key]);
  const numbers = [...all("ess"), ...all("logW"), run.logZ, world.logZ, pair.kl, ctlLoss(pair)];
  const words = run.samples.map((word) => spell(world, word));
  return [numbers, run.shares, all("ancestors"), words];
}"""


def part_of(text: str, name: str) -> str:
    """The content of one script element of the page."""
    return re.search(rf'<script [^>]*id="{name}">(.*?)</script>', text, re.DOTALL).group(1)


DATA = json.loads(part_of(HTML, "data"))
POOLED = PooledOptions()


@pytest.fixture(scope="module")
def found():
    """A function of an expression: its value in V8, with the method of the page and its world."""
    engine = MiniRacer()
    engine.eval(f"{part_of(HTML, 'method')}\nconst world = readWorld({json.dumps(DATA)}); true")
    return lambda expression: json.loads(engine.eval(f"JSON.stringify({expression})"))


def log_p_of(learner: str, m: int) -> Tensor:
    """log p^(m) of the next letter [N, V], which changes some rows of p^(m-1)."""
    table = torch.empty(TINY.N, TINY.V, dtype=torch.float64)
    changes = [{"rows": range(TINY.N), "log_p": DATA["base"]}, *DATA[learner][: m + 1]]
    for change in changes:
        codes = torch.tensor(
            [DATA["alphabet"].index(code) for code in change["log_p"]], dtype=torch.long
        )
        rows = torch.tensor(change["rows"], dtype=torch.long)
        table[rows] = (-codes.view(-1, TINY.V).double() / DATA["scale"]).log_softmax(-1)
    return table


def log_q_of(fitted: dict) -> Tensor:
    """log q of the next letter [N, V] from the adapter of one round of the pooled learner."""
    shift, strength, scores = (torch.tensor(fitted[key], dtype=torch.float64) for key in "Uag")
    scores = scores.view(-1, TINY.V, TINY.V)
    steps = []
    for t in range(TINY.T):
        letters = all_sequences(TINY.V, t)  # [V^t, t]
        before = letters[:, -1] if t > 0 else torch.tensor([TINY.V - 1])
        tables = scores[t * (t - 1) // 2 :][:t]  # [t, V, V]
        sums = sum(tables[i][letters[:, i]] for i in range(t))
        steps.append(shift[TINY.V * t + before] + strength[t] * sums)
    return (log_p_of("paper", 0) + torch.cat(steps)).log_softmax(-1)


def project_world(learner: str, m: int, name: str):
    """p^(m), a twist, the potential and sigma, read from the page's data anew."""
    base = log_p = log_p_of("paper", 0)
    if learner == "pooled":
        log_q = log_q_of(DATA["pooled"][DATA["ladder"] - 1 + m])
        log_p = log_q if m > 0 else base
        learned = log_q - log_p
    else:
        log_p = log_p_of(learner, m)
        blocks = DATA[learner][m]["longer" if name == "longer" else "log_psi"]  # T of [V, V]
        steps = [torch.tensor(step, dtype=torch.float64) for step in blocks]  # [1, V] at first
        rows = [step.repeat(max(1, TINY.V ** (t - 1)), 1) for t, step in enumerate(steps)]
        learned = torch.cat(rows)  # [N, V]
    factors = [TINY.language_model(table) for table in (base, log_p)]
    log_phi = TINY.effective_potential(factors[0], -TINY.BETA * BROKEN, factors[1])
    potential = ListedPotential(log_phi, TINY.V)
    model = TableModel(log_p, TINY.T).requires_grad_(False)
    target = Target(model, potential)
    levels = torch.cat(target.log_psi[:-1])  # [N] log psi*
    log_psi = {"learned": learned, "longer": learned, "optimal": target.optimal_log_psi()}
    log_psi["levels"] = (log_p + learned).log_softmax(-1) - log_p + levels[:, None]
    twist = None if name == "one" else TableTwist(log_psi[name])
    return model, twist, potential, target


def project_run(world, learner: str, particles: int, draws: list[float]):
    """Numbers with those that are exact, shares, ancestors and samples of the project's sampler."""
    model, twist, potential, target = world
    trace = Trace()
    left = iter(draws)

    def uniforms(rows: int, columns: int, generator) -> Tensor:
        values = list(itertools.islice(left, rows * columns))
        # The page resamples in order, so that the lines of its figure do not cross.
        return torch.tensor(values, dtype=torch.float64).view(rows, columns).sort(-1).values

    given = (particles, torch.Generator(), 1, *RULES[learner], trace)
    with (
        mock.patch.object(tsmc.sampler, "uniforms", uniforms),
        mock.patch.object(tsmc.resampling, "uniforms", uniforms),
    ):
        population = tsmc.sampler.tsmc(model, twist, potential, *given)
    tokens, ancestors = population.samples[0], trace.ancestors[:, 0]  # [K, T], [T, K]
    shares = torch.full((particles,), 1 / particles)
    if learner == "pooled":  # the last resampling is left out
        tokens, shares = population.tokens[0], population.log_weights[0].softmax(0)
        ancestors = torch.arange(particles).expand(TINY.T, -1)
    words = ["".join("abcd"[token] for token in word) for word in tokens.tolist()]
    kl = target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())
    exact = [target.log_z, kl, target.ctl_loss(twist).item()]
    numbers = [*trace.ess.flatten().tolist(), *trace.log_w.flatten().tolist()]
    numbers += [population.log_z.item(), *exact]
    return numbers, shares.tolist(), ancestors.flatten().tolist(), words


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_page_computes_what_the_sampler_computes(found, setting):
    learner, m, twist, particles = setting
    world = project_world(learner, m, twist)
    for seed in (1, 4000000000):
        *numbers, ancestors, words = found(f"({PAGE_RUN})(...{json.dumps([*setting, seed])})")
        draws = found(f"Array.from({{ length: 1100 }}, uniformNumbers({seed}))")
        assert len(set(draws)) == 1100 and 0 <= min(draws) < 0.1 and 0.9 < max(draws) < 1
        *wanted, parents, samples = project_run(world, learner, particles, draws)
        assert ancestors == parents and words == samples
        for ours, theirs in zip(numbers, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=0, abs=1e-9)


def test_the_pool_of_the_page_is_that_of_the_project(found):
    draws, target = [], project_world("paper", 0, "one")[3]
    log_p = log_q = target.log_p[-1]
    rounds = found("poolOf(world).rounds.map(({ kl, ess, drawn }) => [kl, ess, drawn])")
    pairs = zip(DATA["pooled"], rounds, strict=True)
    for number, (fitted, (kl, ess, drawn)) in enumerate(pairs, 1):
        log_phi = -TINY.BETA * BROKEN[drawn]
        draws.append(Round(LETTERS[drawn], (log_p - log_q)[drawn] + log_phi, log_phi))
        pool = joined(draws)
        log_weights, power = pool.log_weights, 1.0
        if number < DATA["ladder"]:
            log_weights, power = tempered(pool, POOLED.pool_first_ess)
        weights = truncated(log_weights, POOLED.pool_least_ess)
        assert fitted["power"] == pytest.approx(power)
        assert 1 / weights.square().sum() == pytest.approx(ess)
        twist = TableTwist(log_q_of(fitted) - log_p_of("paper", 0))
        log_q = target.tree.prefix_log_q(twist)[-1].detach()
        assert target.kl_to(log_q) == pytest.approx(kl, rel=0, abs=1e-9)


def test_the_page_holds_what_tiny_learns():
    """In its world, whose log p^(0) is rounded."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(TINY.N, TINY.V, dtype=torch.float64, generator=source)
    base = log_p_of("paper", 0)
    assert (logits.log_softmax(-1) - base).abs().max() < 1 / DATA["scale"]
    learned = TINY.self_distilled_tsmc(base, -TINY.BETA * BROKEN, source)
    for own, (_, log_psi, *_) in zip(DATA["paper"], learned, strict=True):
        steps = TINY.children(log_psi).split(TINY.COUNTS[:-1])  # T of [V^t, V]
        for step, shown in zip(steps, own["log_psi"], strict=True):
            assert (step[: TINY.V] - torch.tensor(shown)).abs().max() < 2e-3


FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
GENERATION = "[data-choose=m] [aria-pressed=true]"


@pytest.fixture
def opened():
    """A function that opens the page in Chromium; the page must not report an error."""
    from playwright.sync_api import sync_playwright

    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        context = browser.new_context(has_touch=True)

        def open_page(width: int, address: str = ""):
            window = context.new_page()
            window.set_viewport_size({"width": width, "height": 800})
            window.on("pageerror", lambda error: errors.append(str(error)))
            window.on("console", lambda message: errors.append(message.text))
            window.goto(PAGE.resolve().as_uri() + address)
            return window

        yield open_page
        browser.close()
    assert not errors


@pytest.mark.browser
def test_it_opens_with_the_result_of_a_finished_run_on_the_first_screen(opened):
    window = opened(390)
    assert window.inner_text("#result").startswith("15 of the 16 samples of this run are palin")
    assert window.locator("#tree .shape").count() == 16 * TINY.T
    assert window.locator("#result").bounding_box()["y"] < 800
    window = opened(1280, address="#learner=pooled&m=0")
    assert window.inner_text("#result").startswith("Palindromes have")
    assert window.locator("button:disabled").all_inner_texts() == ["4 × the updates"]


@pytest.mark.browser
def test_arrow_keys_step_and_change_the_generation(opened):
    window = opened(1280)
    opening = window.inner_html("#figure")
    window.keyboard.press("ArrowLeft")
    assert window.inner_text("#caption").startswith("t = 8, reweight")
    window.keyboard.press("ArrowRight")
    assert window.inner_html("#figure") == opening
    window.keyboard.press("ArrowDown")
    assert window.inner_text(GENERATION) == "2"
    window.keyboard.press("ArrowUp")
    assert window.inner_html("#figure") == opening and window.evaluate("scrollY") == 0
    narrow = opened(390)  # where up and down scroll until the figure is chosen
    narrow.keyboard.press("ArrowDown")
    assert narrow.inner_text(GENERATION) == "3"
    narrow.click("#view")
    narrow.keyboard.press("ArrowDown")
    assert narrow.inner_text(GENERATION) == "2"


@pytest.mark.browser
def test_another_run_has_other_shares_and_leaves_the_exact_ones(opened):
    window = opened(1280)

    def shares() -> tuple[list[str], list[str]]:
        texts = window.locator("#shares text").all_text_contents()
        return texts[3::3], texts[4::3]

    exact, drawn = shares()
    assert sum(int(re.fullmatch(r"(\d+) of 16", text)[1]) for text in drawn) == 16
    window.click("#seed")
    assert shares()[0] == exact and shares()[1] != drawn


@pytest.mark.browser
def test_a_tap_on_a_panel_moves_nothing(opened):
    window = opened(390)
    panels = window.locator(".panels button").all()
    place = "(button) => [scrollY, button.getBoundingClientRect().top, document.body.scrollHeight]"
    for panel in panels:
        panel.scroll_into_view_if_needed()
        before = panel.evaluate(place)
        panel.tap()
        assert panel.evaluate(place) == before, panel.inner_text()
        told = panel.locator("xpath=ancestor::section").locator(".told").first.inner_text()
        assert told.startswith("In the figure: ") and told.count("log Ẑ is −") == 1
    assert len(panels) == 21


@pytest.mark.browser
@pytest.mark.parametrize("address", ["", "#learner=pooled&m=0&K=64&phase=10"])
def test_nothing_is_wider_than_the_screen(opened, address):
    window = opened(320, address=address)
    beyond = """() => [...document.querySelectorAll("body *:not(.eq *)")]
      .filter((each) => each.getBoundingClientRect().right > innerWidth + 0.5)
      .map((each) => each.outerHTML.slice(0, 80))"""
    for width in (320, 390, 800, 1080, 1280):
        window.set_viewport_size({"width": width, "height": 800})
        assert window.evaluate(beyond) == []
        assert window.evaluate("document.documentElement.scrollWidth <= innerWidth")
