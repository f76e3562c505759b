"""The page of particles in a real browser; not part of the test suite, since it needs Chromium and chromedriver.

    python -m tsmc runs/pocket --generation 0 1 2 --html page.html && python tests/browser_check.py page.html pictures/

drives the page by keyboard, mouse and touch, checks that every step is drawn without freezing, that identical particles are
counted together, that all text contrasts with what is behind it and that nothing is cut, prints the times, and leaves pictures
in light and dark, wide and narrow, to be looked at.
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

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32, "Escape": 27, "Home": 36, "End": 35}
MILLISECONDS = 500  # a step slower than this feels frozen

DRAWN = """Math.max(performance.getEntriesByType('paint').at(-1).startTime,
  performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd)"""
STATE = """({now, steps: panels.map((panel) => panel.chosen.t), n: panels[0].chosen.n, playing: playing !== null,
  text: part(panels[0], 'text').textContent, look: get('look').textContent,
  gloss: get('gloss').hidden ? '' : get('gloss').textContent})"""
TIMED_KEY = """(() => { const began = performance.now();
  document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true, cancelable: true})); show();
  part(panels.at(-1), 'tree').getContext('2d').getImageData(0, 0, 1, 1); return performance.now() - began; })()"""
MIDDLE = "panels[0].levels[%d].findIndex(({first, count}) => first + count > K >> 1)"
PLACE = """((t) => { const g = geometry, box = part(panels[0], 'tree').getBoundingClientRect();
  return [box.left + g.x(t) + g.cell / 2, box.top + ((K >> 1) + 0.5) * g.row]; })(%d)"""
CENTRE = (
    "(() => { const box = %s.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; })()"
)
COUNTS = """panels.flatMap(({levels}) => levels.map((level) => level.reduce((sum, node) => sum + node.count, 0)))
  .every((sum) => sum === K)"""
CONTRAST = """(() => {
  const light = (colour) => luminance(colour.match(/[\\d.]+/g).slice(0, 3).map(Number));
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const behind = (element) => { for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(colour)) return colour; } };
  const own = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()) && e.offsetParent;
  const ratios = [...document.querySelectorAll('body *')].filter(own).map((e) =>
    ratio(light(getComputedStyle(e).color), light(behind(e))));
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  for (const strength of [0.5, 1]) for (let level = -32; level <= 32; level++) {
    const {fill, ink} = colour(limit * level / 32, strength); ratios.push(ratio(light(fill), luminance(rgb(ink)))); }
  for (const ink of ['text', 'muted', 'chosen']) for (const paper of ['page', 'panel'])
    ratios.push(ratio(luminance(rgb(palette.hex(ink))), luminance(rgb(palette.hex(paper)))));
  return Math.min(...ratios); })()"""
CUT = """[...document.querySelectorAll('body *')].filter((e) => e.offsetParent && !e.closest('.scroll') && e.id !== 'spoken')
  .filter((e) => { const box = e.getBoundingClientRect(), room = document.documentElement.clientWidth + 0.5;
    const clipped = getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1;
    return box.left < 0 || box.right > room || clipped; })
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)"""


class Browser:
    """A headless Chromium behind chromedriver, spoken to over its HTTP interface."""

    def __enter__(self) -> "Browser":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = {"goog:chromeOptions": {"args": [*FLAGS, f"--user-data-dir={self.profile.name}"]}}
        self.session = f"http://127.0.0.1:{port}/session"
        for _ in range(100):
            try:
                self.session += "/" + self.post("", capabilities={"alwaysMatch": options})["sessionId"]
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
        answer = self.devtools("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, page: Path, width: int, height: int, scheme: str, touch: bool = False) -> None:
        """The page at a size, in a colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if touch else 1, "mobile": touch}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.post("/url", url=page.resolve().as_uri())

    def press(self, key: str) -> dict:
        """A key, then the page's state once it has been drawn."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        for kind in ("keyDown", "keyUp"):
            self.devtools("Input.dispatchKeyEvent", type=kind, **code)
        return self.settled()

    def move(self, x: float, y: float) -> None:
        """The mouse moves to a place in the window."""
        self.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        """A finger taps a place in the window."""
        self.devtools("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.devtools("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        time.sleep(0.4)

    def settled(self) -> dict:
        """The page's state after the next two frames."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self.value(STATE)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        data = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


def check_keys(browser: Browser) -> None:
    """The page opens at step 1; arrows step in every panel and move in the one with the focus; every step must be quick."""
    start, last, count = browser.value(STATE), browser.value("T - 1"), browser.value("panels.length")
    assert start["now"] == 0 and start["steps"] == [0] * count and "first token" in start["look"], start
    forth = browser.press("ArrowRight")
    assert forth["now"] == 1 and forth["steps"] == [1] * count and forth["text"].startswith(start["text"]), forth
    assert forth["look"] != start["look"] and browser.press("ArrowLeft")["now"] == 0
    browser.value("part(panels[0], 'view').focus({preventScroll: true})")
    by = 1 if start["n"] == 0 else -1
    assert browser.press("ArrowDown" if by > 0 else "ArrowUp")["n"] == start["n"] + by
    assert browser.press("End")["now"] == last
    assert browser.press(" ")["playing"] and browser.value("now") == 0
    time.sleep(2)
    assert browser.value("now") >= 2
    assert not browser.press(" ")["playing"]
    browser.value("step(0)")
    times = [browser.value(TIMED_KEY % "ArrowRight") for _ in range(last)]
    assert browser.settled()["now"] == last
    print(
        f"drawn after {browser.value(DRAWN):.0f} ms, a step {sum(times) / len(times):.1f} ms, the slowest {max(times):.0f} ms"
    )
    assert max(times) < MILLISECONDS


def check_mouse(browser: Browser) -> None:
    """Hovering over a block chooses it and leaves the step alone; a click on the charts goes to a step."""
    browser.value("step(T - 1)")
    browser.value("part(panels[0], 'tree').scrollIntoView({block: 'center'})")
    n = browser.value(MIDDLE % 3)
    x, y = browser.value(PLACE % 3)
    browser.move(x - 1, y)
    browser.move(x, y)
    state = browser.settled()
    assert (state["steps"][0], state["n"], state["now"]) == (3, n, browser.value("T - 1")), state
    browser.value("scrollTo(0, 0)")
    browser.value(
        "part(panels[0], 'ess').dispatchEvent(new MouseEvent('click', {clientX: geometry.left + 3 * geometry.column}))"
    )
    assert 0 < browser.settled()["now"] < browser.value("T - 1")


def check_glossary(browser: Browser, touch: bool) -> None:
    """A term explains itself under the pointer, with the focus and under a finger; Escape closes, and the box stays inside."""
    browser.value("scrollTo(0, 0)")
    for i in range(browser.value("document.querySelectorAll('.term').length")):
        term = f"document.querySelectorAll('.term')[{i}]"
        browser.value(f"{term}.focus()")
        assert browser.settled()["gloss"], "the focus opens it"
        assert browser.value(
            "(({left, right}) => left >= 0 && right <= innerWidth)(get('gloss').getBoundingClientRect())"
        )
        assert not browser.press("Escape")["gloss"]
        browser.value("document.activeElement.blur()")
    browser.value(f"{term}.scrollIntoView({{block: 'center'}})")
    x, y = browser.value(CENTRE % term)
    browser.tap(x, y) if touch else browser.move(x, y)
    assert browser.settled()["gloss"], "a finger or the pointer opens it"
    browser.press("Escape")


def check_touch(browser: Browser) -> None:
    """A tap chooses a block and goes to its step."""
    browser.value("part(panels[0], 'tree').scrollIntoView({block: 'center'})")
    n = browser.value(MIDDLE % 2)
    browser.tap(*browser.value(PLACE % 2))
    state = browser.settled()
    assert (state["now"], state["n"]) == (2, n), state


def check_looks(browser: Browser) -> None:
    """Counts add up to K, text contrasts by 4.5 at least, and nothing is cut, at the first step and at the last."""
    assert browser.value(COUNTS)
    for to in ("0", "T - 1"):
        browser.value(f"scrollTo(0, 0), step({to})")
        browser.settled()
        assert browser.value(CONTRAST) >= 4.5, browser.value(CONTRAST)
        assert browser.value(CUT) == [] and browser.value(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )


def main(page: Path, folder: Path) -> None:
    """Every check and every picture of one page."""
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for scheme in ("light", "dark"):
            name = f"{page.stem}-{scheme}"
            browser.open(page, 1280, 900, scheme)
            browser.settled()
            browser.picture(folder / f"{name}.png")
            check_keys(browser)
            check_mouse(browser)
            browser.picture(folder / f"{name}-middle.png", whole=True)
            check_glossary(browser, touch=False)
            check_looks(browser)
            browser.picture(folder / f"{name}-last.png", whole=True)
            browser.open(page, 390, 844, scheme, touch=True)
            browser.picture(folder / f"{name}-phone.png")
            check_touch(browser)
            browser.picture(folder / f"{name}-phone-tree.png")
            check_glossary(browser, touch=True)
            check_looks(browser)
        loaded = browser.value("performance.getEntriesByType('resource').length")
        assert loaded == 0, f"the page loaded {loaded} things besides itself"
    print(f"{page}: everything works; pictures are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
