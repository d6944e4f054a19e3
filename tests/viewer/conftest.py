"""One store, one server and one browser for all tests of the viewer."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import pytest
from tests.browser import browser
from tests.once import once

import tokenmill
from tokenmill.store.facts import Building, PlannedSource, read_manifest, write_building
from tokenmill.store.layout import StoreLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

HOSTILE = (
    "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">",
    "abc\u202edcba\u2066x\u2069 \x1b[31mred\x1b[0m \x07\x00 bell",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 and English",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f",
    "javascript:alert(1) <|endoftext|> &lt;b&gt; \U0001f468\u200d\U0001f469",
)
HOSTILE_NAME = "<img src=x onerror=alert(1)> \x1b[31m\u202e.jsonl"
ROLES = ("user", "assistant")
LONG_WORDS = 2_000_000  # a document of 10 MB


@dataclass
class Viewer:
    """A running `tokenmill view`."""

    address: str
    folder: Path
    pid: int

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
        """Status, headers and body of a request, made by nobody's page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def ask(self, what: str, **given: object) -> Any:
        """An answer, with the token."""
        path = f"/api/{what}?{urlencode(given)}"
        status, _, body = self.get(path, Authorization=f"Bearer {self.token}")
        found = json.loads(body)
        assert status == (400 if "error" in found else 200), found
        return found


def make_inputs(folder: Path, texts: list[str]) -> None:
    """What is shown: code and prose, hostile texts and names, and rows that are no documents."""
    rows = [
        json.dumps({"text": text[at : at + 1500], "lang": ("py", "c")[at > 0]})
        for text in texts
        for at in (0, 1500, 3000)
    ]
    (folder / "code.jsonl").write_text("\n".join(rows) + '\n{"text": 12}\n{"broken\n')
    odd = [*HOSTILE, "word " * LONG_WORDS, "last"]
    (folder / HOSTILE_NAME).write_text("".join(json.dumps({"text": t}) + "\n" for t in odd))


@pytest.fixture(scope="session")
def shown(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str], bpe_tokenizer_dir: Path
) -> Path:
    """A folder with stores."""

    def make(folder: Path) -> Path:
        make_inputs(folder, training_texts[:7])
        names = [folder / "code.jsonl", folder / HOSTILE_NAME]
        how = {"tokenizer": bpe_tokenizer_dir, "max_rejects": 0.2, "serial": True}
        tokenmill.build(names, out=folder / "store", val=0.2, **how)  # type: ignore[arg-type]
        tokenmill.annotate(folder / "store", columns="lang")
        monitor = folder / "timeline.jsonl"
        chats = [{"messages": [{"role": role, "content": role * 3} for role in ROLES]}] * 9
        (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        (folder / "chat.jinja").write_text(template)
        tokenmill.build(
            folder / "chats.jsonl",
            out=folder / "chats",
            format="chat",
            chat_template=folder / "chat.jinja",
            monitor=monitor,
            **how,  # type: ignore[arg-type]
        )
        for name, losses in (("first", (3.0, 2.0, 1.5)), ("second", (3.0, 2.5, 2.25))):
            (folder / name).mkdir()
            write_metrics(folder / name, losses)
        # A build that was stopped: what it has made, what it would have made, and no manifest.
        shutil.copytree(folder / "store", folder / "stopped")
        (folder / "stopped" / "tokenmill.json").unlink()
        plan_of(folder / "store", folder / "stopped")
        return folder

    return once(tmp_path_factory, "viewer", make)


def plan_of(store: Path, stopped: Path, **said: str) -> None:
    """What a build said that it would make: one unit more of each file than there is."""
    manifest = read_manifest(store)
    sources = [
        PlannedSource.of(each.path, size=each.size, version=each.version, units=each.units + 1)
        for each in manifest.sources
    ]
    plan = Building(identity=manifest.identity, sources=tuple(sources), **said)
    write_building(StoreLayout(stopped), plan)


def write_metrics(run: Path, losses: Sequence[float]) -> None:
    """What a training writes, a step after the other."""
    lines = [
        {"step": step, "loss": loss, "tokens": 1000 * step, "tokens_per_second": 9e4 + step}
        for step, loss in enumerate(losses, 1)
    ]
    text = "".join(json.dumps({**line, "wait_share": 0.001}) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)


@pytest.fixture(scope="session")
def viewer(shown: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("viewed") / "all"
    shutil.copytree(shown, folder)  # since tests write into runs and builds
    names = ("store", "chats", "first", "second", "stopped", "timeline.jsonl")
    with started(*(folder / name for name in names)) as found:
        yield found


@contextlib.contextmanager
def started(*paths: Path) -> Iterator[Viewer]:
    """`tokenmill view` as a program; Ctrl-C ends it."""
    command = [sys.executable, "-m", "tokenmill", "view", *map(str, paths), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        assert address.startswith("http://127.0.0.1:"), process.communicate()
        yield Viewer(address, paths[0].parent, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    with browser() as address:
        yield address


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with its size and time."""
    found = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}
