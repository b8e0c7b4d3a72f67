"""A headless Chromium that opens one page, clicks and looks, driven over its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--use-angle=swiftshader", "--enable-unsafe-swiftshader"),  # without these two there is no WebGL
)


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true result of `condition`; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s"
        time.sleep(0.1)
    return result


class Browser:
    """One page.

    Args:
        folder: An empty folder for the browser's profile.
        url: The page.
        size: Width and height in pixels.
    """

    def __init__(self, folder: Path, url: str, size: tuple[int, int] = (1280, 800)) -> None:
        assert CHROMIUM is not None
        flags = [*FLAGS, f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}", "--remote-debugging-port=0"]
        self.process = subprocess.Popen(
            [CHROMIUM, *flags, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            port_file = folder / "DevToolsActivePort"
            port = wait_for(lambda: port_file.exists() and port_file.read_text().split("\n")[0], 30, "browser")
            self.socket = connect(self._page_socket(port), max_size=None, open_timeout=30)
        except BaseException:
            self.close()
            raise
        self.count = 0

    @staticmethod
    def _page_socket(port: str) -> str:
        def page() -> str | None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as reply:
                pages = [item for item in json.load(reply) if item["type"] == "page"]
            return pages[0]["webSocketDebuggerUrl"] if pages else None

        return wait_for(page, 20, "page")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; returns its result, with `error` where it could not be done."""
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:
            reply = json.loads(self.socket.recv(timeout=60))
            if reply.get("id") == self.count:
                return reply.get("result", {"error": reply.get("error")})

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; None while the page is not there yet."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "error" in result:
            return None
        assert "exceptionDetails" not in result or "null" in json.dumps(result), result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Go to another page."""
        self.call("Page.navigate", url=url)

    def text(self) -> str:
        """What the page says."""
        return self.evaluate("document.body.innerText") or ""

    def click(self, x: float, y: float) -> None:
        """A mouse click at a point of the page, pixels."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click_on(self, finder: str) -> None:
        """A mouse click at the centre of the element that the JavaScript expression `finder` gives."""
        box = f"(() => {{ const e = {finder}; if (!e) return null; e.scrollIntoView({{block: 'nearest'}}); \
const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        self.click(*wait_for(lambda: self.evaluate(box), 20, finder))

    def screenshot(self, path: Path | None = None) -> bytes:
        """The page as PNG."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        if path is not None:
            path.write_bytes(data)
        return data

    def close(self) -> None:
        """End the browser with all its processes."""
        if hasattr(self, "socket"):
            self.socket.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=20)


def labelled(label: str) -> str:
    """JavaScript: the input beside a label of viser's panel."""
    pattern = json.dumps(f"^{re.escape(label)}$")
    return (
        f"(() => {{ const l = [...document.querySelectorAll('label')].find(e => new RegExp({pattern}).test("
        "e.textContent.trim())); let box = l; while (box && !box.querySelector('input')) box = box.parentElement; "
        "return box && box.querySelector('input'); })()"
    )
