"""The explainer has the numbers of docs/tiny.py, and opens in Chromium (`pytest -m browser`).

`python -m tests.test_explainer` writes into the page what tiny.py learns in its world: log psi^(m)
by step, letter before and letter, and the words that p^(m + 1) is distilled from.
"""

import itertools
import json
import re
import string
from pathlib import Path

import pytest
import torch

from docs import tiny

PAGE = Path(__file__).parents[1] / "docs" / "explainer.html"
SCRIPT = r'(<script[^>]* id="{}">\n)(.*?)(</script>)'
CODES = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+-"  # base 64


def learned() -> tuple[dict, list[float]]:
    """The page's data, and KL(sigma||q) of every generation, as tiny.main() finds them."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=source)
    letters = torch.arange(tiny.V**tiny.T)[:, None] // tiny.V ** torch.arange(tiny.T) % tiny.V
    log_phi = -tiny.BETA * (letters != letters.flip(1)).double().sum(1) / 2
    sigma = tiny.enumerate_target(tiny.language_model(logits), log_phi)[0][tiny.N :]  # its log
    torch.multinomial(sigma.exp(), 1000, replacement=True, generator=source)
    generations, kl = [], []
    for log_p, log_psi, _, samples, _ in tiny.self_distilled_tsmc(logits, log_phi, source):
        steps = tiny.children(log_psi).split(tiny.COUNTS[:-1])  # T of [V^t, V]
        words, copies = (samples - tiny.N).unique(return_counts=True)
        pairs = zip(words.tolist(), copies.tolist(), strict=True)
        digits = [(i // 4096, i // 64 % 64, i % 64, n // 64, n % 64) for i, n in pairs]
        table = [step[: tiny.V].round(decimals=4).tolist() for step in steps]
        code = "".join(CODES[digit] for five in digits for digit in five)
        generations.append({"log_psi": table, "words": code if len(kl) < tiny.GENERATIONS else ""})
        log_q = tiny.joint(tiny.proposal(log_p, log_psi)[0])[tiny.N :]
        kl.append((sigma.exp() * (sigma - log_q)).sum().item())
    data = {"letters": tiny.V, "length": tiny.T, "beta": tiny.BETA, "seed": 0, "alphabet": CODES}
    return data | {"paper": generations}, kl


def test_its_numbers_are_those_of_tiny():
    from py_mini_racer import MiniRacer

    page = PAGE.read_text(encoding="utf-8")
    data, method = (re.search(SCRIPT.format(name), page, re.S)[2] for name in ("data", "method"))
    wanted, kl = learned()
    assert json.loads(data) == wanted
    with MiniRacer() as engine:
        engine.eval(f"{method}\nconst world = readWorld({data}); true")
        found = [engine.eval(f"pairOf(world, 'paper', {m}, 'learned').kl") for m in range(len(kl))]
        engine.eval("const own = withTest(world, (word) => (/dada/.test(word) ? 0 : 4)); true")
        log_z, first, last = engine.eval("[own.logZ, poolOf(own)[0].kl, poolOf(own).at(-1).kl]")
    assert found == pytest.approx(kl, abs=1e-4)
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=source)
    log_p = tiny.joint(tiny.language_model(logits))[tiny.N :]
    words = map("".join, itertools.product("abcd", repeat=tiny.T))
    log_phi = torch.tensor([0.0 if "dada" in word else -20.0 for word in words])
    assert log_z == pytest.approx((log_p + log_phi).logsumexp(0).item())
    assert last < 1 < first


@pytest.mark.browser
def test_both_learners_step_to_their_end():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launch = playwright.chromium.launch
        browser = launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page, errors = browser.new_page(viewport={"width": 1280, "height": 800}), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(PAGE.as_uri() + "#twist=learned")
        page.wait_for_selector("#pool td", state="attached")  # its slowest table
        for learner, steps in (("paper", 24), ("pooled", 16)):
            page.click(f"[data-choose] button:text-is('{learner}')")
            page.click("#first")
            for _ in range(steps):
                assert page.locator("#question button").count() == 0
                page.click("#next")
            assert page.inner_text("#question").endswith("Try it")
        page.fill("#test", "dada")
        page.click("#apply button")
        assert page.inner_text("#verdict").startswith("1,232 words pass")
        page.fill("#test", "(")
        page.click("#apply button")
        assert page.inner_text("#own") == "" and not errors
        browser.close()


if __name__ == "__main__":
    html, text = PAGE.read_text(encoding="utf-8"), json.dumps(learned()[0], separators=(",", ":"))
    html = re.sub(SCRIPT.format("data"), rf"\g<1>{text}\n\g<3>", html, flags=re.S)
    PAGE.write_text(html, encoding="utf-8")
