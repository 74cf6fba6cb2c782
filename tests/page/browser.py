"""A real Chromium without a window, asked over a pipe: the protocol of its developer tools."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0
_KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
_KEYS |= {"ArrowDown": 40, "Tab": 9}


def program() -> str | None:
    """The browser of this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """Ends with the block; `said` is all that the page said on its console."""

    def __init__(self, folder: Path) -> None:
        found = program()
        assert found is not None
        # A browser reads from its descriptor 3, and writes to 4.
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [
            found,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",  # which root may not have
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        # Moved up first: either may be 3 or 4 itself.
        moved = 'exec 10<&"$0" 11>&"$1"; shift; exec 3<&10 4>&11 10<&- 11>&-; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.said: list[str] = []
        self._asked: dict[str, str] = {}
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 900)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # at which it ends by itself
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What it answers to one command."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                answered: dict[str, Any] = found["result"]
                return answered

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            assert ready, "the browser says nothing"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found.get("method", ""), found.get("params", {}))
        return found

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(parameters)[:2000])
        if method == "Network.requestWillBeSent":
            self._asked[parameters["requestId"]] = parameters["request"]["url"]
        if method == "Network.loadingFailed" and parameters.get("blockedReason") == "csp":
            self._asked.pop(parameters["requestId"], None)  # which nobody was asked

    def open(self, path: Path) -> None:
        """Load a page, and wait until it is drawn."""
        self.said.clear()
        self._asked.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    @property
    def asked(self) -> set[str]:
        """The addresses of all that was asked for."""
        return {url.partition("#")[0] for url in self._asked.values()}

    def hear(self, count: int) -> None:
        """Until pages have said so many things."""
        while len(self.said) < count:
            self._next()

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}; it said {self.said}"
            time.sleep(0.01)

    def key(self, key: str) -> None:
        """Press and release one key."""
        code = _KEYS.get(key)
        what: dict[str, Any] = {"key": key}
        if code is None:
            what["text"] = key
        else:
            what |= {"code": key, "windowsVirtualKeyCode": code}
            what |= {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **what)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, selector: str, dx: float = 0.5, dy: float = 0.5) -> None:
        """Press and release the mouse on an element, at a share of its size."""
        x, y = self.point_at(selector, dx, dy)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point_at(self, selector: str, dx: float = 0.5, dy: float = 0.5) -> tuple[float, float]:
        """Move the mouse there."""
        self.settle()
        box = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'});"
            " const box = node.getBoundingClientRect();"
            " return [box.x, box.y, box.width, box.height]; })()"
        )
        x, y = box[0] + dx * box[2], box[1] + dy * box[3]
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, theme: str) -> None:
        """Be light or dark."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def settle(self) -> None:
        """Until pictures have got their width, and then their height."""
        turns = "requestAnimationFrame(() => " * 4
        self.run(f"new Promise((done) => {turns}done(){')' * 4})")

    def screenshot(self, *, whole: bool = False) -> bytes:
        """What is to be seen, as a PNG."""
        self.settle()
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def printed(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self.call("Page.printToPDF")["data"])
