"""Opens a page in headless Chromium and says what the browser saw.

The browser is driven over its own protocol by aiohttp, which the tests have anyway: no driver, no
second browser. Where there is none the tests are skipped and say what to install; with
TOKENMILL_REQUIRE_BROWSER set, as in CI, that is a failure.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_SECONDS = 60.0
REQUIRED = "TOKENMILL_REQUIRE_BROWSER"


@dataclass
class Seen:
    """What came of opening a page."""

    value: Any = None
    """Of the expression that was asked for."""
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Errors on the console, exceptions, what the browser refused or could not load."""
    screenshot: bytes = b""


def find_browser() -> str:
    """The browser's program; skips the test, or fails it where a browser is required."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        missing = "no Chromium is installed; install it with: apt-get install chromium"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{missing} ({REQUIRED} is set)")
        pytest.skip(missing)
    return found


@contextlib.contextmanager
def browser() -> Iterator[str]:
    """A running browser, as the address of its protocol."""
    program = find_browser()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"http://127.0.0.1:{_port(Path(profile), process)}"
        finally:
            process.terminate()
            process.wait(30)


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that the browser chose: it writes it into its profile."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((profile / "DevToolsActivePort").read_text().splitlines()[0])
        time.sleep(0.05)
    raise AssertionError(f"the browser did not start (exit code {process.poll()})")


def look(
    address: str, page: Path, *, width: int, dark: bool = False, expression: str = "null"
) -> Seen:
    """Open the page at a width and a theme, and evaluate an expression in it."""
    return asyncio.run(
        _look(address, page.absolute().as_uri(), width=width, dark=dark, expression=expression)
    )


async def _look(address: str, url: str, *, width: int, dark: bool, expression: str) -> Seen:
    seen = Seen()
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{address}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = _Tab(socket, seen)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.send(f"{domain}.enable")
            await tab.send(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=width < 600,
            )
            theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await tab.send("Emulation.setEmulatedMedia", features=[theme])
            await tab.send("Page.navigate", url=url)
            await tab.until("Page.loadEventFired")
            result = await tab.send("Runtime.evaluate", expression=expression, returnByValue=True)
            if "exceptionDetails" in result:
                seen.problems.append(str(result["exceptionDetails"]))
            seen.value = result["result"].get("value")
            picture = await tab.send("Page.captureScreenshot", captureBeyondViewport=True)
            seen.screenshot = base64.b64decode(picture["data"])
    return seen


class _Tab:
    """One tab: sends commands, and notes what the browser tells on the way."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, seen: Seen) -> None:
        self._socket = socket
        self._seen = seen
        self._numbers = itertools.count(1)

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                answer: dict[str, Any] = message["result"]
                return answer

    async def until(self, event: str) -> None:
        while (await self._receive()).get("method") != event:
            pass

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=60)
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self._seen.requests.append(params["request"]["url"])
            case "Network.loadingFailed":
                self._seen.problems.append(params["errorText"])
            case "Runtime.exceptionThrown":
                self._seen.problems.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self._seen.problems.append(str(params["args"]))
            case "Log.entryAdded":
                self._seen.problems.append(params["entry"]["text"])
        return message
