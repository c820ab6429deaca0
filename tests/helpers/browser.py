"""A real browser for tests of pages: chromium without a screen, spoken to through two pipes.

The DevTools protocol: JSON messages that end with a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--force-color-profile=srgb", "--remote-debugging-pipe"),
)
KEYS = {"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Tab": 9}


class Browser:
    """One tab. `requests` are the addresses that it asked for; `errors` what its scripts threw."""

    def __init__(self, sent: int, received: int) -> None:
        self._sent, self._received, self._buffer = sent, received, b""
        self._count, self._session = 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._sent, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._event(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._received], [], [], 60)[0]:
                raise TimeoutError("the browser says nothing")
            read = os.read(self._received, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _event(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def show(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """The size of the window in pixels, and the colours that its user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, file: Path, hash: str = "") -> None:
        """Goes to a file and waits until its scripts have said that they are ready, or failed."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{file.resolve().as_uri()}{hash}")
        self.wait(
            "document.documentElement.dataset.ready || !document.querySelector('#failure').hidden"
        )

    def wait(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(f"document.readyState === 'complete' && Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}; {self.errors}")
            time.sleep(0.05)

    def evaluate(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            if "Cannot find context" in str(found) or "navigat" in str(found):
                return None
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found)))
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, without a profile, that ends with the context."""
    assert CHROMIUM is not None
    to_it, sent = os.pipe()
    received, from_it = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        script = f'exec "$@" 3<&{to_it} 4>&{from_it}'
        process = subprocess.Popen(
            ["bash", "-c", script, "browser", *words],
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        try:
            yield Browser(sent, received)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(sent)
            os.close(received)
