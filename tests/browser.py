"""A real Chromium for tests of pages, without a network, over its DevTools."""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
needs_chromium = pytest.mark.skipif(
    PROGRAM is None, reason="there is no Chromium here: install the package chromium"
)
PATIENCE = 60.0


class Page:
    """A page that is open: what it shows, asks for and complains about."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.numbers = socket, itertools.count(1)
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, method: str | None, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] != "verbose":
            self.complaints.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] != "log":
            self.complaints.append(json.dumps(told["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        given = {"returnByValue": True, "awaitPromise": True}
        found = self.ask("Runtime.evaluate", expression=expression, **given)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, address: str, *, width: int = 1200, dark: bool = False) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.ask("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        scheme = "dark" if dark else "light"
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=media)
        self.ask("Page.navigate", url=address)
        self.wait_for(f"location.href === {json.dumps(address)}")
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE
        # Between two pages there is no document to look into.
        tried = (
            f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"
        )
        while not self.evaluate(tried):
            assert time.monotonic() < end, (expression, self.complaints)
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        one = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **one)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **one)

    def picture(self, path: Path) -> None:
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def opened(*, offline: bool = True) -> Iterator[Page]:
    """Start Chromium; yield its only page; end it."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"),
            *("--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"),
        ]
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
        try:
            with connect(_address(Path(folder)), max_size=None) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    page.ask(f"{domain}.enable")
                if offline:
                    limits = {"latency": 0, "downloadThroughput": 0}
                    limits["uploadThroughput"] = 0
                    page.ask("Network.emulateNetworkConditions", offline=True, **limits)
                yield page
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _address(folder: Path) -> str:
    """Wait until Chromium says where it listens; return the address of its page."""
    told, end = folder / "DevToolsActivePort", time.monotonic() + PATIENCE
    while not (told.exists() and told.read_text().count("\n")):
        assert time.monotonic() < end, "Chromium did not start"
        time.sleep(0.05)
    port = told.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        pages = [one for one in json.load(answer) if one["type"] == "page"]
    return pages[0]["webSocketDebuggerUrl"]
