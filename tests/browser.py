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
SCREENS = Path(__file__).parents[1] / ".work" / "screens"


def screens() -> Path:
    """Where screenshots are kept, to be looked at: .work/screens, or TOKENMILL_SCREENSHOTS."""
    folder = Path(os.environ.get("TOKENMILL_SCREENSHOTS") or SCREENS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    with tab(address) as opened:
        opened.resize(width=width, dark=dark)
        opened.open(page.absolute().as_uri())
        opened.seen.value = opened.evaluate(expression)
        opened.seen.screenshot = opened.screenshot()
        return opened.seen


@contextlib.contextmanager
def tab(address: str) -> Iterator[Tab]:
    """A new tab of the browser."""
    with asyncio.Runner() as runner:
        session = runner.run(_session())
        try:
            yield runner.run(Tab.opened(session, address, runner))
        finally:
            runner.run(session.close())


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


class Tab:
    """One tab: does what it is told, and notes what the browser tells on the way."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, runner: asyncio.Runner) -> None:
        self.seen = Seen()
        self._socket = socket
        self._runner = runner
        self._numbers = itertools.count(1)

    @classmethod
    async def opened(
        cls, session: aiohttp.ClientSession, address: str, runner: asyncio.Runner
    ) -> Tab:
        async with session.put(f"{address}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        socket = await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        made = cls(socket, runner)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await made._send(f"{domain}.enable")
        return made

    def send(self, method: str, **params: object) -> dict[str, Any]:
        """A command of the protocol, and its answer."""
        return self._runner.run(self._send(method, **params))

    def resize(
        self, *, width: int, dark: bool = False, height: int = 900, paper: bool = False
    ) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        media = "print" if paper else ""
        self.send("Emulation.setEmulatedMedia", media=media, features=[theme])

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        self._runner.run(self._until("Page.loadEventFired"))

    def evaluate(self, expression: str) -> Any:
        """The value of an expression; of a promise, what it becomes."""
        how = {"returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", expression=expression, **how)
        if "exceptionDetails" in result:
            self.seen.problems.append(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, expression: str, *, seconds: float = 15.0) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, (expression, self.seen.problems)
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        """Press a key, such as 'j' or 'ArrowDown'."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def screenshot(self, *, whole: bool = True) -> bytes:
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(picture["data"])

    async def _send(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                answer: dict[str, Any] = message["result"]
                return answer

    async def _until(self, event: str) -> None:
        while (await self._receive()).get("method") != event:
            pass

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=60)
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.seen.requests.append(params["request"]["url"])
            case "Network.loadingFailed":
                self.seen.problems.append(params["errorText"])
            case "Runtime.exceptionThrown":
                self.seen.problems.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.seen.problems.append(str(params["args"]))
            case "Log.entryAdded":
                self.seen.problems.append(params["entry"]["text"])
        return message
