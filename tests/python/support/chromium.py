"""A headless Chromium for the tests of pages, driven through its DevTools."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Tab:
    """One tab, and what its console had to say."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._sent = 0
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            self._note(message)
            if message.get("id") == self._sent:
                assert "error" not in message, message
                return dict(message["result"])

    def _note(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(message["params"])[:500])
        self._loaded |= method == "Page.loadEventFired"
        if method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])

    def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._note(json.loads(self._socket.recv()))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser_tab(program: str, width: int = 1440, height: int = 1100) -> Iterator[Tab]:
    import websocket

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [
                    *(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
                    *(f"--user-data-dir={profile}", f"--window-size={width},{height}"),
                    *("--disable-dev-shm-usage", "about:blank"),
                ],
                stderr=stderr,
                stdout=subprocess.DEVNULL,
            )
        try:
            port = _debugging_port(process, log)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            socket = websocket.create_connection(tabs[0]["webSocketDebuggerUrl"], timeout=60)
            try:
                yield Tab(socket)
            finally:
                socket.close()
        finally:
            process.terminate()
            process.wait(30)


def _debugging_port(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(300):
        found = re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", log.read_text())
        if found:
            return found.group(1)
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise RuntimeError(f"chromium did not start: {log.read_text()[-2000:]}")
