"""The explainer in a real browser; not part of the test suite, since it needs Chromium and chromedriver.

    PYTHONPATH=. python tests/explainer_check.py pictures/

works the page by keyboard and buttons, compares its numbers with the sampler's, measures the contrast of its text, and leaves
pictures in light and dark, wide and narrow, to be looked at.
"""

import sys
import time
from pathlib import Path

from browser_check import Browser
from test_explainer import PAGE, SETTINGS, World, agree, page_run, project_run

from eval.viewer.explainer import load_tiny

STATE = "({...state, text: get('caption').textContent, focus: document.activeElement.id})"
CONTRAST = """(() => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => { for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(colour)) return colour; } };
  const ratios = [...document.querySelectorAll('p, span, h1, h2, button, label, output, legend, text, b, em')]
    .filter((e) => e.textContent.trim() && !e.classList.contains('gone')).map((e) => {
      const style = getComputedStyle(e), ink = light(e.matches('text') ? style.fill : style.color), paper = light(behind(e));
      return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); });
  return Math.min(...ratios); })()"""


def check_keys(browser: Browser) -> None:
    """Arrows, space, home and end in the figure, the arrow keys of its radio buttons."""
    browser.value("get('view').focus({preventScroll: true})")
    last = browser.value("LAST")
    keys = {"Home": 0, "ArrowRight": 1, "End": last, "ArrowLeft": last - 1}
    for key, phase in keys.items():
        press(browser, key)
        assert browser.value(STATE)["phase"] == phase, key
    before = browser.value(STATE)["chosen"]
    press(browser, "ArrowDown" if before == 0 else "ArrowUp")
    assert abs(browser.value(STATE)["chosen"] - before) == 1
    press(browser, " ")
    time.sleep(1)
    assert browser.value("playing !== null || state.phase === LAST")
    browser.value("play(false)")
    browser.value("document.querySelector('input[name=m]:checked').focus({preventScroll: true})")
    press(browser, "ArrowRight")
    assert browser.value(STATE)["m"] == 1
    press(browser, "ArrowLeft")
    assert browser.value(STATE)["m"] == 0


def press(browser: Browser, key: str) -> None:
    """A key goes down and up."""
    codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32, "Home": 36, "End": 35}
    for kind in ("keyDown", "keyUp"):
        browser.devtools("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key])


def check_page(browser: Browser) -> None:
    """Nothing is wider than the window, text is legible, every button of the text changes the figure, nothing was loaded."""
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.value(CONTRAST) >= 4.5
    for i in range(browser.value("document.querySelectorAll('[data-show]').length")):
        assert browser.value(f"""(() => {{ const button = document.querySelectorAll('[data-show]')[{i}]; button.click();
          const wanted = JSON.parse(button.dataset.show);
          return Object.entries(wanted).every(([name, value]) => state[name] === value)
            && button.getAttribute('aria-pressed') === 'true'; }})()""")
    assert browser.value("performance.getEntriesByType('resource').length") == 0


def check_numbers(browser: Browser) -> None:
    """log Z-hat, ESS, weights, ancestors and samples are those of the project's sampler."""
    browser.open(PAGE, 1280, 800, "light")
    browser.eval, world = browser.value, World(load_tiny())
    for setting in SETTINGS:
        assert agree(page_run(browser, *setting, 0), project_run(world, *setting, 0)), setting


def check_reduced_motion(browser: Browser) -> None:
    """Nothing glides where the reader has asked for that."""
    browser.open(PAGE, 1280, 800, "light")
    duration = "getComputedStyle(document.querySelector('.disc')).transitionDuration"
    for wish, moves in (("no-preference", True), ("reduce", False)):
        browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": wish}])
        assert (browser.value(duration) != "0s") == moves


def main(folder: Path) -> None:
    """Every check and every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        check_numbers(browser)
        check_reduced_motion(browser)
        for scheme in ("light", "dark"):
            for name, width, height, touch in (("wide", 1280, 800, False), ("phone", 390, 844, True)):
                browser.open(PAGE, width, height, scheme, touch)
                browser.picture(folder / f"{scheme}-{name}.png")
                browser.picture(folder / f"{scheme}-{name}-whole.png", whole=True)
                check_keys(browser)
                check_page(browser)
                browser.value("set({m: 0, twist: 'learned', threshold: 0.5, K: 16, seed: 2, phase: 18})")
                browser.value("get('figure').scrollIntoView({behavior: 'instant'})")
                time.sleep(0.5)
                browser.picture(folder / f"{scheme}-{name}-step.png")
    print(f"{PAGE}: everything works; pictures are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
