"""A server on the loopback address that answers as the Hugging Face hub does, as far as we ask."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from tests.web import listening

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "1" * 40
_API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/[^/]+/?(.*))?")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)")


@dataclass
class Hub:
    """A running hub: repositories are the folders ORG/NAME of a folder."""

    folder: Path
    address: str = ""
    token: str | None = None
    """Asked for where a repository is private or gated."""
    private: set[str] = field(default_factory=set)
    """Shown to those who have the token; to others they do not exist."""
    gated: set[str] = field(default_factory=set)
    """Listed for all; files only for those who have the token."""
    faults: list[str] = field(default_factory=list)
    """What becomes of the next downloads: a status, or cut (the connection, half way)."""
    log: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: object, hub: Hub) -> None:
        self._hub = hub
        super().__init__(*args)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._hub.log.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        path = unquote(urlsplit(self.path).path)
        if found := _API.fullmatch(path):
            self._answer_api(found[1], found[2], found[3] or "", body)
        elif found := _FILE.fullmatch(path):
            self._answer_file(found[1], found[2])
        else:
            self._refuse(404, "EntryNotFound")

    @property
    def _knows_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self._hub.token}"

    def _answer_api(self, repo: str, kind: str | None, place: str, body: bytes) -> None:
        root = self._hub.folder / repo
        if not root.is_dir() or (repo in self._hub.private and not self._knows_token):
            # As the hub does: whoever may not see a repository is not told that it is there.
            self._refuse(404 if self._knows_token else 401, "RepoNotFound")
        elif kind in (None, "revision"):
            self._send_json({"id": repo, "sha": COMMIT, "private": repo in self._hub.private})
        elif kind == "tree":
            folder = root / place
            if not folder.is_dir():
                self._refuse(404, "EntryNotFound")
                return
            recursive = parse_qs(urlsplit(self.path).query).get("recursive") == ["true"]
            found = sorted(folder.rglob("*") if recursive else folder.iterdir())
            self._send_json([_entry(path, root) for path in found])
        else:
            wanted = json.loads(body) if body[:1] == b"{" else parse_qs(body.decode())
            paths = wanted.get("paths", [])
            names = [paths] if isinstance(paths, str) else paths
            self._send_json([_entry(root / n, root) for n in names if (root / n).exists()])

    def _answer_file(self, repo: str, name: str) -> None:
        path = self._hub.folder / repo / name
        if repo in self._hub.gated and not self._knows_token:
            self._refuse(403, "GatedRepo")
            return
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        fault = self._hub.faults.pop(0) if self._hub.faults and self.command == "GET" else None
        if fault is not None and fault.isdigit():
            self._refuse(int(fault), "")
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        last = int(wanted[2]) if wanted and wanted[2] else len(data) - 1
        part = data[first : last + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("ETag", f'"{_digest(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part[: len(part) // 2] if fault == "cut" else part)
            self.close_connection = fault == "cut"

    def _send_json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep quiet."""


def _entry(path: Path, root: Path) -> dict[str, object]:
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    return {"type": "file", "path": name, "oid": _digest(path), "size": path.stat().st_size}


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """A hub with the repositories of a folder."""
    hub = Hub(folder)
    with listening(partial(_Handler, hub=hub)) as hub.address:
        yield hub
