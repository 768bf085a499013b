"""A headless Chromium, driven over a pipe in its devtools protocol: no port, and no library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

WAIT_S = 120.0
#: Chromium reads commands from descriptor 3 and answers on 4.
_START = """import os, sys
read, write = (os.dup(int(word)) for word in sys.argv[1:3])
high = [os.dup2(fd, 90 + n) for n, fd in enumerate((read, write))]
os.dup2(90, 3); os.dup2(91, 4)
os.execvp(sys.argv[3], sys.argv[3:])"""
_KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "Tab": (9, ""),
    "/": (191, "/"),
}


def found() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page. `complaints` has what the console said of errors, and what was thrown."""

    def __init__(self, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-sync",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        words = [
            sys.executable,
            "-c",
            _START,
            str(to_read),
            str(to_write),
            str(found()),
            *flags,
            "about:blank",
        ]
        self._process = subprocess.Popen(
            words,
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def close(self) -> None:
        """End the browser and all of its processes."""
        try:
            self._session = ""
            self._send("Browser.close")
        except (OSError, AssertionError):
            self._process.terminate()
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(WAIT_S)

    def show(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """The size of the window, in the theme that the reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        self._send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """What an expression of the page's JavaScript gives."""
        done = self._send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, code: str) -> Any:
        """Wait until an expression is true: its value, of an element true."""
        return wait_for(
            lambda: self.run(f"((value) => value instanceof Node || value)({code})"), code
        )

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        self._send("Input.insertText", text=text)

    def press(self, *keys: str) -> None:
        for key in keys:
            code, text = _KEYS[key]
            event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
            self._send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event)
            self._send("Input.dispatchKeyEvent", type="keyUp", **{**event, "text": ""})

    def move(self, x: float, y: float) -> None:
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen as PNG; `whole`: with what is below."""
        data = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._receive(lambda told: told.get("id") == self._number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while True:
            while b"\0" in self._buffer:
                line, self._buffer = self._buffer.split(b"\0", 1)
                told: dict[str, Any] = json.loads(line)
                self._hear(told)
                if wanted(told):
                    return told
            assert select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0], (
                "no answer"
            )
            part = os.read(self._read, 2**20)
            assert part, "the browser has ended"
            self._buffer += part

    def _hear(self, told: dict[str, Any]) -> None:
        method = told.get("method")
        parameters = told.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(
                str(details.get("exception", details).get("description", details))
            )
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(
                f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
            )
