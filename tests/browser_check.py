"""The genealogy page and the explainer in a real browser.

    python -m tsmc runs/pocket --generation 0 1 2 --html page.html
    python tests/browser_check.py page.html pictures/

It is not part of the test suite, since it needs Chromium, chromedriver and selenium. It operates
both pages by keyboard, mouse and touch in light and dark, wide and narrow, checks that no step is
slow, that all text has enough contrast and that nothing is cut off, and leaves pictures to look at.
"""

import base64
import shutil
import sys
import time
from itertools import product
from pathlib import Path

from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.actions import interaction
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput

EXPLAINER = Path(__file__).parents[1] / "docs" / "explainer.html"
MILLISECONDS = 500  # a slower step feels frozen

GENEALOGY = """({now, steps: panels.map((panel) => panel.chosen.t), n: panels[0].chosen.n,
  playing: playing !== null, text: part(panels[0], 'text').textContent,
  look: get('look').textContent})"""
TIMED_STEP = """(() => { const began = performance.now(); step(now + 1);
  part(panels.at(-1), 'tree').getContext('2d').getImageData(0, 0, 1, 1);
  return performance.now() - began; })()"""
BLOCK = """((t) => { const g = geometry, box = part(panels[0], 'tree').getBoundingClientRect();
  return [box.left + g.x(t) + g.cell / 2, box.top + ((K >> 1) + 0.5) * g.row]; })(2)"""
MIDDLE = "panels[0].levels[2].findIndex(({first, count}) => first + count > K >> 1)"
COUNTS = """panels.flatMap(({levels}) => levels.map((level) => level.reduce((sum, node) =>
  sum + node.count, 0))).every((sum) => sum === K)"""
CONTRAST = """(() => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => { for (let e = element; e; e = e.parentElement) {
    const paper = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(paper)) return paper; } };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const isShown = (e) => e.getClientRects().length && !e.closest('.gone, #spoken');
  const ratios = [...document.querySelectorAll('body *')].filter((e) => own(e) && isShown(e));
  return Math.min(...ratios.map((e) => {
    const style = getComputedStyle(e), ink = light(e.closest('svg') ? style.fill : style.color);
    const paper = light(behind(e));
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); })); })()"""
CELL_CONTRAST = """(() => { const rgb = (text) => text.match(/\\d+/g).map(Number);
  const ratios = [0.5, 1].flatMap((strength) => [...Array(65).keys()].map((level) => {
    const {fill, ink} = colour(limit * (level - 32) / 32, strength), paper = luminance(rgb(fill));
    return ink === '#000000' ? (paper + 0.05) / 0.05 : 1.05 / (paper + 0.05); }));
  return Math.min(...ratios); })()"""
CUT = """[...document.querySelectorAll('body *')]
  .filter((e) => e.offsetParent && !e.closest('.scroll, .eq, #spoken')).filter((e) => {
    const box = e.getBoundingClientRect(), room = document.documentElement.clientWidth + 0.5;
    const hides = getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1;
    return box.left < 0 || box.right > room || hides; })
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)"""
SHOW = """(() => { const button = document.querySelectorAll('[data-show]')[%d]; button.click();
  return Object.entries(JSON.parse(button.dataset.show)).every(([name, value]) =>
    state[name] === value) && button.getAttribute('aria-pressed') === 'true'; })()"""


class Browser(webdriver.Chrome):
    """A headless Chromium."""

    def value(self, expression: str):
        """What a JavaScript expression is on the page."""
        return self.execute_script(f"return ({expression})")

    def open(self, page: Path, width: int, scheme: str, touch: bool) -> None:
        """The page in a window of this width, in a colour scheme."""
        size = {"width": width, "height": 850, "deviceScaleFactor": 2 if touch else 1}
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"mobile": touch})
        self.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.get(page.resolve().as_uri())

    def press(self, key: str) -> None:
        """A key goes down and up."""
        ActionChains(self).send_keys(key).perform()

    def point(self, x: float, y: float, touch: bool) -> None:
        """A tap or a click at a place in the window."""
        finger = interaction.POINTER_TOUCH if touch else interaction.POINTER_MOUSE
        actions = ActionBuilder(self, mouse=PointerInput(finger, finger))
        actions.pointer_action.move_to_location(int(x), int(y)).pointer_down().pointer_up()
        actions.perform()
        time.sleep(0.4)

    def picture(self, path: Path) -> None:
        """A picture of the whole page."""
        shot = self.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))


def check_looks(browser: Browser) -> None:
    """Text has a contrast of at least 4.5, nothing is cut off, and nothing else was loaded."""
    assert browser.value(CONTRAST) >= 4.5, browser.value(CONTRAST)
    assert browser.value(CUT) == [], browser.value(CUT)
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.value("performance.getEntriesByType('resource').length") == 0


def check_genealogy(browser: Browser, touch: bool) -> None:
    """Arrows step in every panel and choose a block in the panel with the focus; so does a tap."""
    start, last = browser.value(GENEALOGY), browser.value("T - 1")
    assert start["now"] == 0 and set(start["steps"]) == {0} and "first token" in start["look"]
    browser.press(Keys.ARROW_RIGHT)
    forth = browser.value(GENEALOGY)
    assert set(forth["steps"]) == {1} and forth["text"].startswith(start["text"])
    assert forth["look"] != start["look"]
    browser.press(Keys.ARROW_LEFT)
    browser.value("part(panels[0], 'view').focus({preventScroll: true})")
    browser.press(Keys.ARROW_DOWN if start["n"] == 0 else Keys.ARROW_UP)
    assert abs(browser.value(GENEALOGY)["n"] - start["n"]) == 1
    browser.press(Keys.END)
    assert browser.value(GENEALOGY)["now"] == last
    check_looks(browser)
    browser.press(" ")
    time.sleep(2)
    assert browser.value(GENEALOGY)["playing"] and browser.value("now") >= 1
    browser.press(" ")
    assert not browser.value(GENEALOGY)["playing"]
    browser.value("step(0)")
    assert max(browser.value(TIMED_STEP) for _ in range(last)) < MILLISECONDS
    browser.value("part(panels[0], 'view').scrollIntoView({block: 'center'})")
    browser.point(*browser.value(BLOCK), touch)
    state = browser.value(GENEALOGY)
    assert (state["now"], state["n"]) == (2, browser.value(MIDDLE)), state
    assert browser.value(COUNTS) and browser.value(CELL_CONTRAST) >= 4.5


def check_explainer(browser: Browser, touch: bool) -> None:
    """Keys work in the figure and its radio buttons; every button in the text shows its run."""
    browser.value("get('view').focus({preventScroll: true})")
    last = browser.value("LAST")
    for key, phase in {
        Keys.HOME: 0,
        Keys.ARROW_RIGHT: 1,
        Keys.END: last,
        Keys.ARROW_LEFT: last - 1,
    }.items():
        browser.press(key)
        assert browser.value("state.phase") == phase, key
    before = browser.value("state.chosen")
    browser.press(Keys.ARROW_DOWN if before == 0 else Keys.ARROW_UP)
    assert abs(browser.value("state.chosen") - before) == 1
    browser.value("get('view').scrollIntoView({block: 'center'})")
    box = browser.value("(({left, top}) => [left, top])(get('tree').getBoundingClientRect())")
    x, y = browser.value("[geometry.x(3), geometry.y(5)]")
    browser.point(box[0] + x, box[1] + y, touch)
    assert browser.value("[state.phase, state.chosen]") == [9, 5]
    browser.value("document.querySelector('input[name=m]:checked').focus()")
    browser.press(Keys.ARROW_RIGHT)
    assert browser.value("state.m") == 1
    browser.press(Keys.ARROW_LEFT)
    for button in range(browser.value("document.querySelectorAll('[data-show]').length")):
        assert browser.value(SHOW % button)


def main(genealogy: Path, folder: Path) -> None:
    """Every check and every picture of both pages."""
    folder.mkdir(parents=True, exist_ok=True)
    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    checks = ((genealogy, check_genealogy), (EXPLAINER, check_explainer))
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with Browser(options, service) as browser:
        for (page, check), scheme, width in product(checks, ("light", "dark"), (1280, 390)):
            browser.open(page, width, scheme, touch=width < 400)
            check_looks(browser)
            check(browser, touch=width < 400)
            check_looks(browser)
            browser.picture(folder / f"{page.stem}-{scheme}-{width}.png")
    print("everything works")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
