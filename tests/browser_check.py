"""The genealogy page and the explainer in a real browser.

    python -m tsmc runs/pocket --generation 0 1 2 --html page.html
    python tests/browser_check.py page.html pictures/

It is not part of the test suite, since it needs Chromium and chromedriver. It operates both pages
by keyboard, mouse and touch in light and dark, wide and narrow, checks that no step is slow, that
all text has enough contrast and that nothing is cut off, and leaves pictures to look at.
"""

import base64
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

EXPLAINER = Path(__file__).parents[1] / "docs" / "explainer.html"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32}
KEYS |= {"Home": 36, "End": 35, "Tab": 9}
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
    const paper = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(paper)) return paper; } };
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


class Browser:
    """A headless Chromium behind chromedriver, operated over its HTTP interface."""

    def __enter__(self) -> "Browser":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=-3)
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        arguments = [*FLAGS, f"--user-data-dir={self.profile.name}"]
        wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}}}
        self.session = f"http://127.0.0.1:{port}/session"
        for _ in range(100):
            try:
                self.session += "/" + self.post("", capabilities=wanted)["sessionId"]
                return self
            except urllib.error.URLError:  # the driver is not up yet
                time.sleep(0.1)
        raise SystemExit("chromedriver does not answer")

    def __exit__(self, *error) -> None:
        urllib.request.urlopen(urllib.request.Request(self.session, method="DELETE"), timeout=60)
        self.driver.terminate()
        self.driver.wait()
        self.profile.cleanup()

    def post(self, path: str, **body):
        """One command of the driver."""
        request = urllib.request.Request(self.session + path, json.dumps(body).encode())
        return json.load(urllib.request.urlopen(request, timeout=60))["value"]

    def devtools(self, method: str, **params):
        """One command of the browser's own protocol."""
        return self.post("/goog/cdp/execute", cmd=method, params=params)

    def value(self, expression: str):
        """What a JavaScript expression is on the page."""
        settings = {"returnByValue": True, "awaitPromise": True}
        answer = self.devtools("Runtime.evaluate", expression=expression, **settings)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, page: Path, width: int, height: int, scheme: str, touch: bool) -> None:
        """The page at a size, in a colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if touch else 1}
        self.devtools("Emulation.setDeviceMetricsOverride", **size, mobile=touch)
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=touch)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])
        self.post("/url", url=page.resolve().as_uri())

    def press(self, key: str) -> None:
        """A key goes down and up."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        for kind in ("keyDown", "keyUp"):
            self.devtools("Input.dispatchKeyEvent", type=kind, **code)

    def point(self, x: float, y: float, touch: bool) -> None:
        """A click or a tap at a place in the window."""
        if touch:
            points = [{"x": x, "y": y}]
            self.devtools("Input.dispatchTouchEvent", type="touchStart", touchPoints=points)
            self.devtools("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            time.sleep(0.4)
        for kind in () if touch else ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.devtools("Input.dispatchMouseEvent", type=kind, **where)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        data = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


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
    browser.press("ArrowRight")
    forth = browser.value(GENEALOGY)
    assert set(forth["steps"]) == {1} and forth["text"].startswith(start["text"])
    assert forth["look"] != start["look"]
    browser.press("ArrowLeft")
    browser.value("part(panels[0], 'view').focus({preventScroll: true})")
    browser.press("ArrowDown" if start["n"] == 0 else "ArrowUp")
    assert abs(browser.value(GENEALOGY)["n"] - start["n"]) == 1
    browser.press("End")
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
    """Keys work in the figure and its radio buttons; every button in the text changes the figure."""
    browser.value("get('view').focus({preventScroll: true})")
    last = browser.value("LAST")
    for key, phase in {"Home": 0, "ArrowRight": 1, "End": last, "ArrowLeft": last - 1}.items():
        browser.press(key)
        assert browser.value("state.phase") == phase, key
    before = browser.value("state.chosen")
    browser.press("ArrowDown" if before == 0 else "ArrowUp")
    assert abs(browser.value("state.chosen") - before) == 1
    browser.value("get('view').scrollIntoView({block: 'center'})")
    box = browser.value("(({left, top}) => [left, top])(get('tree').getBoundingClientRect())")
    x, y = browser.value("[geometry.x(3), geometry.y(5)]")
    browser.point(box[0] + x, box[1] + y, touch)
    assert browser.value("[state.phase, state.chosen]") == [9, 5]
    browser.value("document.querySelector('input[name=m]:checked').focus()")
    browser.press("ArrowRight")
    assert browser.value("state.m") == 1
    browser.press("ArrowLeft")
    for button in range(browser.value("document.querySelectorAll('[data-show]').length")):
        assert browser.value(SHOW % button)


def main(genealogy: Path, folder: Path) -> None:
    """Every check and every picture of both pages."""
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for page, check in ((genealogy, check_genealogy), (EXPLAINER, check_explainer)):
            for scheme in ("light", "dark"):
                for name, width, height in (("wide", 1280, 900), ("phone", 390, 844)):
                    file = folder / f"{page.stem}-{scheme}-{name}.png"
                    browser.open(page, width, height, scheme, touch=name == "phone")
                    browser.picture(file)
                    check_looks(browser)
                    check(browser, touch=name == "phone")
                    check_looks(browser)
                    browser.picture(file.with_stem(file.stem + "-whole"), whole=True)
            print(f"{page}: everything works")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
