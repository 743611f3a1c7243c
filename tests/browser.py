"""A headless Chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
    None,
)
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class BrowserError(Exception):
    """The browser, or a script in it, has failed."""


class Browser:
    """One tab. Its `log` is what the page has complained of: errors, violations of its
    policy."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.log: list[str] = []
        self._to = to_browser
        self._from = from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._number:
                self._note(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def _read(self, timeout_s: float = 60) -> dict[str, Any]:
        end_s = time.monotonic() + timeout_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select(
                [self._from], [], [], max(0, end_s - time.monotonic())
            )
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise BrowserError(
                    "the browser has ended" if ready else "the browser is silent"
                )
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.log.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.log.append(
                details.get("exception", {}).get("description", details["text"])
            )
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.log.append(f"a dialog: {params['message']}")

    def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window in pixels, and `light` or `dark`."""
        size = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression, and return its value."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = 30) -> None:
        """Wait until an expression is true."""
        end_s = time.monotonic() + timeout_s
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > end_s:
                raise BrowserError(
                    f"still not so after {timeout_s:.0f} s: {script}\n{self.log}"
                )
            time.sleep(0.03)

    def type(self, selector: str, text: str) -> None:
        """Put text into a field, in place of what it has, as a keyboard would."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press a key by its name and Windows' code; modifiers are 2 for Ctrl, 8 for Shift."""
        own = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": modifiers,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **own, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **own)

    def click(self, selector: str, *, only_point: bool = False) -> None:
        """Click an element's first box with the mouse, or only point at it."""
        place = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const b = e.getClientRects()[0];"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        where = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        for kind in [
            "mouseMoved",
            *([] if only_point else ["mousePressed", "mouseReleased"]),
        ]:
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def picture(self, path: Path) -> None:
        """Write what the window shows as a .png file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def pixel(self, x: float, y: float) -> tuple[int, ...]:
        """Return the red, green and blue of a place in the page, from 0 to 255."""
        clip = {"x": x, "y": y, "width": 1, "height": 1, "scale": 1}
        png = base64.b64decode(self.call("Page.captureScreenshot", clip=clip)["data"])
        data = b""
        place = 8  # chunks follow the signature: size, name, bytes, checksum
        while place < len(png):
            size = int.from_bytes(png[place : place + 4])
            if png[place + 4 : place + 8] == b"IDAT":
                data += png[place + 8 : place + 8 + size]
            place += size + 12
        # A filter's number, and the pixel itself: there is none before it to differ from.
        return tuple(zlib.decompress(data)[1:4])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it."""
    assert CHROMIUM is not None, "no chromium"
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()
    theirs = [
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (read_end, write_end)
    ]
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    # The protocol's pipes are 3 and 4 there.
    pipes = [
        (os.POSIX_SPAWN_DUP2, fd, place) for place, fd in enumerate(theirs, start=3)
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"]
        pid = os.posix_spawn(
            CHROMIUM, command, os.environ, file_actions=[*quiet, *pipes], setsid=True
        )
        for fd in (read_end, write_end, *theirs):
            os.close(fd)
        try:
            yield Browser(to_browser, from_browser)
        finally:
            os.close(to_browser)
            os.close(from_browser)
            # its own group: the browser's processes and no other
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
