"""The explainer: what its page computes against the project, and what it shows in a browser.

The method of the page runs in V8 without a browser; the sampler of `tsmc` is given the page's world
as tables, and the page's uniform numbers in place of its own. Tests with the marker `browser` open
the page in Chromium: `python -m pytest -m browser`. N prefixes can grow, V letters, T steps.
"""

import functools
import itertools
import json
import re
import shutil
from unittest import mock

import pytest
import torch
from py_mini_racer import MiniRacer
from torch import Tensor
from worlds import ListedPotential, generator

import tsmc.resampling
import tsmc.sampler
from eval import explainer
from eval.explainer import ALPHABET, PAGE, SCALE, load_tiny
from tsmc import SCHEMES, Trace
from tsmc.exact import TableModel, TableTwist, Target, all_sequences
from twist.pool import Round, joined, tempered, truncated

HTML = PAGE.read_text(encoding="utf-8")
TINY = load_tiny()
LETTERS = all_sequences(TINY.V, TINY.T)  # [V^T, T]
BROKEN = (LETTERS.flip(1) != LETTERS).sum(1).double() / 2  # each pair is counted twice
LEARNERS = ("paper", "weighted", "pooled")
TWISTS = ("one", "learned", "levels", "optimal")
SETTINGS = [(*choice, 16) for choice in itertools.product(LEARNERS, (0, 2), TWISTS)]
SETTINGS += [("paper", 1, "longer", 64), ("weighted", 3, "longer", 4)]
RULES = {"paper": ("multinomial", 1.0), "weighted": ("systematic", 0.0)}
RULES["pooled"] = RULES["weighted"]  # whose last resampling is left out
PAGE_RUN = """(learner, m, twist, K, seed) => {
  const pair = pairOf(world, learner, m, twist), run = tsmc(pair, K, learner, uniformNumbers(seed));
  const all = (key) => run.steps.flatMap((step) => step[key]);
  const exact = [...pair.logZ.slice(1, world.T), world.logZ, pair.kl, ctlLoss(pair)];
  const words = run.samples.map((word) => spell(world, word));
  return [[...all("ess"), ...all("logW"), run.logZ, ...exact], run.shares, all("ancestors"), words];
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


def log_p_of(learner: str, m: int) -> Tensor:
    """log p^(m) of the next letter [N, V], which changes some rows of p^(m-1)."""
    table = torch.empty(TINY.N, TINY.V, dtype=torch.float64)
    changes = [{"rows": range(TINY.N), "log_p": DATA["base"]}]
    for change in changes + DATA[learner][: m + 1]:
        codes = torch.tensor([ALPHABET.index(code) for code in change["log_p"]], dtype=torch.long)
        rows = torch.tensor(change["rows"], dtype=torch.long)
        table[rows] = (-codes.view(-1, TINY.V).double() / SCALE).log_softmax(-1)
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


@functools.cache
def project_world(learner: str, m: int, name: str):
    """p^(m), a twist, the potential and sigma, read from the page's data anew."""
    base = log_p = log_p_of("paper", 0)
    if learner == "pooled":
        log_q = log_q_of(DATA["pooled"][explainer.LADDER - 1 + m])
        log_p = log_q if m > 0 else base
        learned = log_q - log_p
    else:
        log_p = log_p_of(learner, m)
        blocks = DATA[learner][m]["longer" if name == "longer" else "log_psi"]  # T of [V, V]
        blocks = [torch.tensor(step, dtype=torch.float64) for step in blocks]  # [1, V] at first
        blocks = [step.repeat(max(1, TINY.V ** (t - 1)), 1) for t, step in enumerate(blocks)]
        learned = torch.cat(blocks)  # [N, V]
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


def project_run(learner: str, m: int, name: str, particles: int, draws: list[float]):
    """Numbers with those that are exact, shares, ancestors and samples of the project's sampler."""
    model, twist, potential, target = project_world(learner, m, name)
    trace = Trace()
    left = iter(draws)

    def uniforms(rows: int, columns: int, generator) -> Tensor:
        values = list(itertools.islice(left, rows * columns))
        # The page resamples in order, so that the lines of its figure do not cross.
        return torch.tensor(values, dtype=torch.float64).view(rows, columns).sort(-1).values

    world = (model, twist, potential, particles, torch.Generator(), 1)
    scheme, threshold = RULES[learner]
    with (
        mock.patch.object(tsmc.sampler, "uniforms", uniforms),
        mock.patch.object(tsmc.resampling, "uniforms", uniforms),
    ):
        population = tsmc.sampler.tsmc(*world, SCHEMES[scheme], threshold, trace)
    tokens, ancestors = population.samples[0], trace.ancestors[:, 0]  # [K, T], [T, K]
    shares = torch.full((particles,), 1 / particles)
    if learner == "pooled":
        tokens, shares = population.tokens[0], population.log_weights[0].softmax(0)
        ancestors = torch.arange(particles).expand(TINY.T, -1)
    words = ["".join("abcd"[token] for token in word) for word in tokens.tolist()]
    psi = [level.detach().flatten() for level in target.tree.log_psi(twist)]  # T of [V^t]
    evidence = [(target.log_p[t] + psi[t - 1]).logsumexp(0) for t in range(1, TINY.T)]
    kl = target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())
    numbers = [*trace.ess, *trace.log_w.flatten(), population.log_z, *evidence, target.log_z, kl]
    numbers = [float(number) for number in [*numbers, target.ctl_loss(twist).detach()]]
    return numbers, shares.tolist(), ancestors.flatten().tolist(), words


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_page_computes_what_the_sampler_computes(engine, setting):
    for seed in (0, 1, 4000000000):
        *numbers, ancestors, words = found(
            engine, f"({PAGE_RUN})(...{json.dumps([*setting, seed])})"
        )
        draws = found(engine, f"Array.from({{ length: 1100 }}, uniformNumbers({seed}))")
        assert len(set(draws)) == 1100 and 0 <= min(draws) < 0.1 and 0.9 < max(draws) < 1
        *wanted, parents, samples = project_run(*setting, draws)
        assert ancestors == parents and words == samples
        for ours, theirs in zip(numbers, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=0, abs=1e-9)


def test_the_pool_of_the_page_is_that_of_the_project(engine):
    draws, target = [], project_world("paper", 0, "one")[3]
    log_p = log_q = target.log_p[-1]
    rounds = found(engine, "poolOf(world).rounds.map(({ kl, ess, drawn }) => [kl, ess, drawn])")
    pairs = zip(DATA["pooled"], rounds, strict=True)
    for number, (fitted, (kl, ess, drawn)) in enumerate(pairs, 1):
        log_phi = -TINY.BETA * BROKEN[drawn]
        draws.append(Round(LETTERS[drawn], (log_p - log_q)[drawn] + log_phi, log_phi))
        pool = joined(draws)
        log_weights, power = pool.log_weights, 1.0
        if number < explainer.LADDER:
            log_weights, power = tempered(pool, explainer.LADDER_ESS)
        weights = truncated(log_weights, explainer.LEAST_ESS)
        assert fitted["power"] == pytest.approx(power)
        assert 1 / weights.square().sum() == pytest.approx(ess)
        twist = TableTwist(log_q_of(fitted) - log_p_of("paper", 0))
        log_q = target.tree.prefix_log_q(twist)[-1].detach()
        assert target.kl_to(log_q) == pytest.approx(kl, rel=0, abs=1e-9)


def test_the_page_holds_what_its_command_learns(engine):
    assert explainer.page(DATA) == HTML, "run python -m eval.explainer"
    with mock.patch.object(explainer, "DRAWS", explainer.DRAWS[:1]):
        data = explainer.world_data()
    first, own = data.pop("pooled")[0], DATA["pooled"][0]
    assert data == {name: value for name, value in DATA.items() if name != "pooled"}
    # The surrogate is float32: its last digits, and what follows from them, depend on the machine.
    assert (first["words"], first["power"]) == (own["words"], own["power"])
    assert log_q_of(first).sub(log_q_of(own)).abs().max() < 0.05
    logits = torch.randn(TINY.N, TINY.V, dtype=torch.float64, generator=generator(0))
    _, log_z = TINY.enumerate_target(TINY.language_model(logits), -TINY.BETA * BROKEN)
    assert f"{found(engine, 'world.logZ'):.2f}" == f"{log_z:.2f}"  # as tiny.py prints it


def test_bad_levels_spoil_resampling_and_four_things_help(engine):
    settings = {name: ("paper", name, 16) for name in ("learned", "longer", "levels")}
    settings |= {"more": ("paper", "learned", 64), "end": ("weighted", "learned", 16)}
    shares = {}
    for name, (learner, twist, particles) in settings.items():
        runs = f"pairOf(world, '{learner}', 0, '{twist}'), {particles}, '{learner}', 1818, 200"
        shares[name] = found(engine, f"manyRuns({runs})")["palindromes"]
    assert shares.pop("learned") < 0.25 and min(shares.values()) > 0.35
    kls = [found(engine, f"pairOf(world, 'paper', 0, '{twist}').kl") for twist in TWISTS[1:3]]
    loss = found(engine, "ctlLoss(pairOf(world, 'paper', 0, 'levels'))")
    assert kls[0] == pytest.approx(kls[1]) == pytest.approx(loss)  # q is all that is left to learn


FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
RESULT = r"\d+ of the \d+ samples of this run are palindromes; the language model alone writes "
RESULT += r"one in 326 words. log Ẑ is −\d+.\d\d, log Zσ −5.68."
GENERATION = "[data-choose=m] [aria-pressed=true]"


@pytest.fixture(scope="module")
def chromium():
    """Chromium as it is installed, with a new profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        assert path, "these tests need Chromium: apt-get install chromium"
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """A function that opens the page in a window of some size; it must not report an error."""
    contexts, errors = [], []

    def open_page(width: int, height: int = 800, address: str = "", has_touch: bool = False):
        size = {"width": width, "height": height}
        contexts.append(chromium.new_context(viewport=size, has_touch=has_touch))
        window = contexts[-1].new_page()
        window.on("pageerror", lambda error: errors.append(str(error)))
        window.on("console", lambda message: errors.append(message.text))
        window.goto(PAGE.resolve().as_uri() + address)
        return window

    yield open_page
    for context in contexts:
        context.close()
    assert not errors


def text_of(window, selector: str) -> str:
    """The text of an element as one line."""
    return " ".join(window.inner_text(selector).split())


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_with_the_result_of_a_finished_run(opened, width):
    window = opened(width)
    assert re.fullmatch(RESULT, text_of(window, "#result"))
    assert text_of(window, "#result").startswith("15 of the 16")
    assert text_of(window, "#caption").startswith("t = 8, resample: ")
    assert window.locator("#tree .shape").count() == 16 * TINY.T
    assert window.locator("#result").bounding_box()["y"] < 800  # on the first screen


@pytest.mark.browser
def test_arrow_keys_step_and_change_the_generation(opened):
    window = opened(1280)
    opening = window.inner_html("#figure")
    for key, caption in (("ArrowLeft", "t = 8, reweight"), ("ArrowLeft", "t = 8, extend")):
        window.keyboard.press(key)
        assert text_of(window, "#caption").startswith(caption)
    for _ in range(2):
        window.keyboard.press("ArrowRight")
    assert window.inner_html("#figure") == opening
    window.keyboard.press("ArrowDown")
    assert window.inner_text(GENERATION) == "2"
    assert text_of(window, "#caption").startswith("t = 8, resample: ")
    window.keyboard.press("ArrowUp")
    assert window.inner_html("#figure") == opening and window.evaluate("scrollY") == 0
    window.keyboard.press("Home")
    assert window.locator("#tree .shape").count() == 0


@pytest.mark.browser
def test_in_a_narrow_window_up_and_down_scroll_until_the_figure_is_chosen(opened):
    window = opened(390)
    window.keyboard.press("ArrowLeft")
    assert text_of(window, "#caption").startswith("t = 8, reweight")
    window.keyboard.press("ArrowDown")
    assert window.inner_text(GENERATION) == "3"
    window.click("#view")
    window.keyboard.press("ArrowDown")
    assert window.inner_text(GENERATION) == "2"


@pytest.mark.browser
@pytest.mark.parametrize(("learner", "times"), [("paper", 8), ("weighted", 1), ("pooled", 0)])
def test_each_learner_resamples_as_its_name_says(opened, learner, times):
    window = opened(1280, address=f"#learner={learner}&m=0&phase=0")
    captions = []
    while not captions or captions[-1] != text_of(window, "#caption"):
        captions.append(text_of(window, "#caption"))
        window.keyboard.press("ArrowRight")
    assert len(captions) == 1 + 2 * TINY.T + max(times, 1)  # pooled says that it does not
    assert sum("resample: " in caption for caption in captions) == times
    if learner == "pooled":
        assert re.match(r"Palindromes have \d+ % of the weight", text_of(window, "#result"))
        assert window.locator("button:disabled").all_inner_texts() == ["4 × the updates"]


@pytest.mark.browser
def test_exact_and_drawn_values_differ_in_form_and_do_not_mix(opened):
    window = opened(1280)

    def shares() -> tuple[list[str], list[str]]:
        texts = window.locator("#shares text").all_text_contents()
        return texts[3::3], texts[4::3]

    exact, drawn = shares()
    assert all(re.fullmatch(r"\d+ %", text) for text in exact)
    assert all(re.fullmatch(r"\d+ of 16", text) for text in drawn)
    assert sum(int(text.split()[0]) for text in drawn) == 16
    assert len(exact) == window.locator("#shares .outline").count() == len(drawn) == 11
    style = "(kind) => getComputedStyle(document.querySelector('#shares .' + kind)).fill"
    assert window.evaluate(style, "outline") == "none" != window.evaluate(style, "full")
    borders = "(kind) => getComputedStyle(document.querySelector('#result .' + kind)).borderStyle"
    assert [window.evaluate(borders, kind) for kind in ("exact", "drawn")] == ["dashed", "none"]
    window.click("#seed")
    assert shares()[0] == exact and shares()[1] != drawn


@pytest.mark.browser
def test_a_tap_on_a_panel_moves_nothing(opened):
    window = opened(390, 844, has_touch=True)
    panels = window.locator(".panels button")
    place = "(button) => [scrollY, button.getBoundingClientRect().top, document.body.scrollHeight]"
    for i in range(panels.count()):
        panels.nth(i).scroll_into_view_if_needed()
        before = panels.nth(i).evaluate(place)
        panels.nth(i).tap()
        assert panels.nth(i).evaluate(place) == before, panels.nth(i).inner_text()
        assert panels.nth(i).get_attribute("aria-pressed") == "true"
        told = panels.nth(i).locator("xpath=ancestor::section").locator(".told").first
        assert told.inner_text().startswith("In the figure: ")
        assert told.inner_text().count("log Ẑ is −") == 1
    assert i + 1 == 21
    window.evaluate("scrollTo(0, 400)")
    heights = """(changes) => {
      set(changes);
      return upTo(LAST).map((phase) => { go(phase); return get("figure").offsetHeight; });
    }"""
    settings = [{"m": m, "learner": name} for m in (0, 3) for name in LEARNERS]
    assert len({height for each in settings for height in window.evaluate(heights, each)}) == 1
    assert window.evaluate("scrollY") == 400


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 390, 800, 1080, 1280])
@pytest.mark.parametrize("address", ["", "#learner=pooled&m=0&K=64&phase=10"])
def test_nothing_is_wider_than_the_screen(opened, width, address):
    window = opened(width, address=address)
    beyond = """() => [...document.querySelectorAll("body *:not(.eq *)")]
      .filter((each) => each.getBoundingClientRect().right > innerWidth + 0.5)
      .map((each) => each.outerHTML.slice(0, 80))"""
    assert window.evaluate(beyond) == []
    assert window.evaluate("document.documentElement.scrollWidth <= innerWidth")
