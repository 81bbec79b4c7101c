"""A real browser for tests, over the DevTools protocol on two pipes (no port, no driver): open, press keys, evaluate, take a picture."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 120.0


class Chromium:
    """One page. `said`: what the page wrote to its console, and exceptions that nobody caught."""

    def __init__(self, folder: Path) -> None:
        browser = (
            shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        )
        if browser is None:
            pytest.skip("there is no chromium on this machine")
        near_in, self._out = os.pipe()
        self._in, near_out = os.pipe()
        # Far from 3 and 4, which the shell gives them.
        its_in, its_out = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (near_in, near_out))
        os.close(near_in)
        os.close(near_out)
        words = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-pipe",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
            f"--user-data-dir={folder / 'profile'}", "about:blank",
        ]  # fmt: skip
        # DevTools reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{its_in} 4>&{its_out} {its_in}<&- {its_out}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words],
            pass_fds=(its_in, its_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(its_in)
        os.close(its_out)
        self._held, self._number, self._session = b"", 0, ""
        self.said: list[str] = []
        (target,) = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """End it."""
        self._session = ""
        with suppress(OSError):
            self.ask("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, method: str, **parameters: Any) -> Any:
        """One command, and its result. Raises RuntimeError where the browser refuses it, ConnectionError where it is gone."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = os.read(self._in, 1 << 16)
            if not data:
                raise ConnectionError("the browser has ended")
            self._held += data
        text, _, self._held = self._held.partition(b"\0")
        made: dict[str, Any] = json.loads(text)
        return made

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(parameters["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.said.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.said.append(f"a dialog: {parameters['message']}")

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """The page's size in CSS pixels, and its colours."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.ask("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme, still])

    def open(self, url: str) -> None:
        """Go there."""
        self.ask("Page.navigate", url=url)

    def reload(self) -> None:
        """Load it again; on return the page before is gone."""
        self.run("window.before = true; location.reload()")
        self.wait("!window.before && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited. Raises RuntimeError where it throws."""
        made = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in made:
            raise RuntimeError(made["exceptionDetails"])
        return made["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true in the page, also in one that is just being loaded."""
        until = time.monotonic() + WAIT_S
        while not self._holds(condition):
            assert time.monotonic() < until, f"not within {WAIT_S} s: {condition}"
            time.sleep(0.02)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.run(f"Boolean({condition})"))
        except RuntimeError:
            return False  # the page before it went away, or what is asked for is not there yet

    def press(self, key: str) -> None:
        """A key of the keyboard: a character, or Tab, Enter, Escape."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        text = {} if key in ("Tab", "Escape") else {"text": "\r" if key == "Enter" else key}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **named)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        made = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))
