"""A headless Chromium driven through its DevTools pipe, without any extra package."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The path of an installed Chromium or Chrome."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Tab:
    """One page; `events` keeps what the browser reported on its own, e.g. console messages."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._pending, self._last_id, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one DevTools command."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._last_id:
                assert "error" not in reply, reply["error"]
                return dict(reply["result"])
            self.events.append(reply)

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """Light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, code: int, text: str = "") -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[dict[str, Any]]:
        """Console output, log entries and exceptions since the page was opened."""
        self.evaluate("0")  # whatever was reported before this answer has arrived by now
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in methods]

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            chunk = os.read(self._replies, 1 << 16)
            assert chunk, "the browser went away"
            self._pending += chunk
        message, self._pending = self._pending.split(b"\0", 1)
        return dict(json.loads(message))


@contextmanager
def chromium(binary: str, profile: Path) -> Iterator[Tab]:
    """A browser with one empty tab, ended at the end."""
    ours_in, theirs_out = _pipe()
    theirs_in, ours_out = _pipe()

    def wire() -> None:
        os.dup2(theirs_in, 3)  # the numbers --remote-debugging-pipe reads and writes
        os.dup2(theirs_out, 4)

    process = subprocess.Popen(
        [binary, *FLAGS, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=wire,
        pass_fds=(3, 4),
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        with suppress(OSError):
            os.close(ours_out)
        os.close(ours_in)
        process.terminate()
        process.wait(timeout=20)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are out of the way of the numbers 3 and 4."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
