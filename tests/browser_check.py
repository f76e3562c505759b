"""The page of particles in a real browser; not part of the test suite, since it needs Chromium and chromedriver.

    python -m tsmc runs/pocket --html page.html && python tests/browser_check.py page.html pictures/

drives the page by keyboard, mouse and touch, checks that every step is drawn without freezing, prints the times, and leaves
pictures in light and dark, wide and narrow, to be looked at.
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
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32}
MILLISECONDS = 500  # a step slower than this feels frozen

DRAWN = """Math.max(performance.getEntriesByType('paint').at(-1).startTime,
  performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd)"""
STATE = """({now, t: chosen.t, k: chosen.k, playing: playing !== null, text: get('text').textContent,
  focus: document.activeElement.id})"""
TIMED_KEY = """(() => { const began = performance.now();
  get('view').dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true, cancelable: true})); show();
  get('tree').getContext('2d').getImageData(0, 0, 1, 1); return performance.now() - began; })()"""
PLACE = """(() => { const box = get('tree').getBoundingClientRect(), g = geometry;
  return [box.left + g.x(%d) + g.cell / 2, box.top + g.y(%d) + g.row / 2]; })()"""


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

    def settled(self) -> dict:
        """The page's state after the next two frames."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self.value(STATE)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        data = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


def check_keys(browser: Browser) -> None:
    """Arrows step and move, space plays; every step must be quick."""
    start = browser.value(STATE)
    last = browser.value("T - 1")
    assert start["now"] == start["t"] == last and start["focus"] == "view", start
    back = browser.press("ArrowLeft")
    assert back["t"] == back["now"] == last - 1 and start["text"].startswith(back["text"]), (start, back)
    assert browser.press("ArrowRight")["t"] == last
    rank = "world.rank[chosen.t][chosen.k]"
    place = browser.value(rank)
    by = 1 if place == 0 else -1
    browser.press("ArrowDown" if by > 0 else "ArrowUp")
    assert browser.value(rank) == place + by
    assert browser.press(" ")["playing"] and browser.value("now") == 0
    time.sleep(1.7)
    assert browser.value("now") >= 2
    assert not browser.press(" ")["playing"]
    browser.value("play(false), step(T - 1)")
    times = [browser.value(TIMED_KEY % "ArrowLeft") for _ in range(last)]
    assert browser.settled()["t"] == 0
    print(
        f"drawn after {browser.value(DRAWN):.0f} ms, a step {sum(times) / len(times):.1f} ms, the slowest {max(times):.0f} ms"
    )
    assert max(times) < MILLISECONDS


def check_mouse(browser: Browser) -> None:
    """Hovering over a cell chooses it and leaves the step alone; a click on the charts goes to a step."""
    browser.value("step(T - 1)")
    browser.settled()
    browser.value("scrollTo(0, 0)")
    x, y = browser.value(PLACE % (3, 5))
    browser.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x - 3, y=y)
    browser.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    state = browser.settled()
    assert (state["t"], state["now"]) == (3, browser.value("T - 1")), state
    assert abs(browser.value("world.rank[chosen.t][chosen.k]") - 5) <= 1, "rows of one pixel: a neighbour will do"


def check_touch(browser: Browser) -> None:
    """A tap chooses a cell; nothing is wider than the window."""
    browser.value("get('tree').scrollIntoView({block: 'center'})")
    x, y = browser.value(PLACE % (2, browser.value("K >> 1")))
    browser.devtools("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    browser.devtools("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    time.sleep(0.4)
    assert browser.settled()["t"] == 2
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")


def main(page: Path, folder: Path) -> None:
    """Every check and every picture of one page."""
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for scheme in ("light", "dark"):
            browser.open(page, 1400, 900, scheme)
            browser.settled()
            browser.picture(folder / f"{page.stem}-{scheme}.png", whole=True)
            check_keys(browser)
            check_mouse(browser)
            browser.picture(folder / f"{page.stem}-{scheme}-hover.png")
            browser.open(page, 390, 844, scheme, touch=True)
            browser.picture(folder / f"{page.stem}-{scheme}-phone-top.png")
            check_touch(browser)
            browser.picture(folder / f"{page.stem}-{scheme}-phone.png")
        loaded = browser.value("performance.getEntriesByType('resource').length")
        assert loaded == 0, f"the page loaded {loaded} things besides itself"
    print(f"{page}: everything works; pictures are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
