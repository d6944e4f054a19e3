"""The verb `view`: a server of one page and its answers for this machine alone, or one file.

    browser -> Guard (host, origin, token) -> page.html, page.js, ... or an answer as JSON

It listens on the loopback address, and whoever asks must know the token in the address of the page:
other users and other pages of the same browser do not. Requests name stores, documents and runs by
their numbers; there is no path in any of them. Nothing is written.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tokenmill.errors import TokenmillError, UsageError, importing
from tokenmill.markup import LOOK, digest
from tokenmill.options import ViewOptions, with_options
from tokenmill.viewer.batches import ShownBatches
from tokenmill.viewer.desk import Desk
from tokenmill.viewer.runs import ShownBuild, ShownRun
from tokenmill.viewer.stores import ShownStore, spread
from tokenmill.visible import visible_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

HERE = Path(__file__).parent
FILES = {
    "/page.js": ("page.js", "text/javascript"),
    "/look.css": ("../look.css", "text/css"),
    "/page.css": ("page.css", "text/css"),
    "/uPlot.js": ("uplot/uPlot.js", "text/javascript"),
    "/uPlot.css": ("uplot/uPlot.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
LOOPBACK = "127.0.0.1"
NO_TOKEN = "This page needs the whole address that `tokenmill view` printed, with its token.\n"


@with_options(ViewOptions)
def view(asked: ViewOptions) -> None:
    """Show stores, runs and builds in the browser until Ctrl-C, or write what a store is."""
    desk = Desk(asked.paths)
    if asked.export is not None:
        write_page(desk, Path(asked.export))
        return
    with importing("starlette", extra="view", purpose="showing a store in the browser"):
        import uvicorn
    listening = _listen(asked.port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    address = f"http://{LOOPBACK}:{port}/?token={token}"
    if asked.on_ready is not None:
        asked.on_ready(address)
    if not asked.no_open:
        # In a thread: a browser in the terminal would wait for the page, and the page for it.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    config = uvicorn.Config(
        make_app(desk, port=port, token=token),
        log_level="critical",
        lifespan="off",
        ws="none",
        http="h11",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen()  # before the address is told: who asks at once only waits
    except (OSError, OverflowError) as error:
        listening.close()
        hint = "leave --port out: one that is free is taken"
        raise UsageError(f"port {port} cannot be listened on: {error}", hint=hint) from error
    return listening


def make_app(desk: Desk, *, port: int, token: str) -> Starlette:
    """The pages and answers, for who knows the token."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    lock = threading.Lock()  # what is shown is read by one request at a time

    def page(request: Request) -> Response:
        given = request.query_params.get("token", "")
        if not _same(given, token):
            return PlainTextResponse(NO_TOKEN, 403)
        return Response((HERE / "page.html").read_bytes(), media_type="text/html")

    def file(request: Request) -> Response:
        name, kind = FILES[request.url.path]
        return Response((HERE / name).read_bytes(), media_type=kind)

    def answer(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not _same(given, token):
            return PlainTextResponse(NO_TOKEN, 403)
        try:
            with lock:
                content = answer_to(desk, request.path_params["what"], request.url.query)
            status = 200
        except TokenmillError as error:
            content, status = {"error": error.message, "hint": error.hint}, 400
        except Exception as error:
            content, status = {"error": f"{type(error).__name__}: {error}", "hint": None}, 500
        return Response(as_json(content), status, media_type="application/json")

    routes = [Route("/", page), *(Route(path, file) for path in FILES)]
    routes.append(Route("/api/{what}", answer))
    hosts = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
    return Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts)])


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())


class Guard:
    """Lets no request through that another site made, by whatever name it calls this machine."""

    def __init__(self, app: ASGIApp, *, hosts: set[str]) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        site = headers.get("sec-fetch-site", "none")
        is_ours = host in self.hosts and origin in (None, f"http://{host}")
        if not is_ours or (site not in ("none", "same-origin") and scope["path"] != "/"):
            await PlainTextResponse("This is for its own page alone.\n", 403)(
                scope, receive, guarded
            )
            return
        await self.app(scope, receive, guarded)


# -------------------------------------------------------------------------------------------------
# The page as one file: the answers that it would ask for are in it, with a sample of the documents.

EXPORTED_DOCUMENTS, EXPORTED_TOKENS = 24, 600


def write_page(desk: Desk, out: Path) -> None:
    """Write the overview and some documents of every store as one HTML file."""
    if not desk.stores:
        raise UsageError("there is no store to write a page of", hint="name one before --export")
    kept: dict[str, Any] = {"about": desk.about() | {"runs": [], "builds": []}}
    for of, shown in enumerate(desk.stores):
        for what in ("overview", "frequencies", "rejects"):
            kept[f"{what}?of={of}"] = getattr(shown, what)()
        numbers = spread(len(shown.whole), EXPORTED_DOCUMENTS)
        kept[f"documents?of={of}&first=0"] = shown.some(numbers)
        for number in numbers:
            found = shown.document(number=number, count=EXPORTED_TOKENS)
            kept[f"document?of={of}&number={number}"] = found
    try:
        out.write_text(_one_file(as_json(kept).decode()), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(out)!r} cannot be written: {error.strerror or error}") from error


def _one_file(kept: str) -> str:
    """The page with everything in it; its policy allows what is in it and no request."""
    style = _text("uplot/uPlot.css") + LOOK.read_text(encoding="utf-8") + _text("page.css")
    charts, script = _text("uplot/uPlot.js"), _text("page.js")
    policy = (
        f"default-src 'none'; script-src {digest(charts)} {digest(script)};"
        f" style-src {digest(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    data = kept.replace("<", "\\u003c")
    page = _text("page.html")
    page = re.sub(r"<(link rel=.stylesheet|script src)[^\n]*\n", "", page)
    page = page.replace("</head>", f"{head}<style>{style}</style>\n</head>")
    scripts = (
        f'<script type="application/json" id="kept">{data}</script>\n'
        f'<script>{charts}</script>\n<script type="module">{script}</script>\n'
    )
    return page.replace("</body>", f"{scripts}</body>")


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


# -------------------------------------------------------------------------------------------------
# From the words of a request to the method that answers it, and from its answer to JSON.


# What can be asked of what was named; the words of a request are a method's arguments.
QUESTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    name: (kind, getattr(shown, name))
    for kind, shown, names in (
        ("stores", ShownStore, "overview frequencies documents document row rejects"),
        ("batches", ShownBatches, "batch packings"),
        ("runs", ShownRun, "run"),
        ("builds", ShownBuild, "build"),
    )
    for name in names.split()
}
_READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda word: word == "true",
    "str": str,
}


def answer_to(desk: Desk, what: str, query: str) -> Any:
    """What a question is answered with; `of` is the number of the store, run or build."""
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    if what == "about":
        return desk.about()
    if what not in QUESTIONS:
        raise UsageError(f"{what!r} is no question")
    kind, function = QUESTIONS[what]
    known = inspect.signature(function).parameters
    try:
        shown = getattr(desk, kind)[int(given.pop("of", "0"))]
        asked = {
            name: _READ[known[name].annotation.removesuffix(" | None")](word)
            for name, word in given.items()
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(f"{what!r} cannot be asked like this: {error}") from error
    return function(shown, **asked)


def as_json(content: Any) -> bytes:
    """JSON in which no string can act on who shows it."""
    return json.dumps(_harmless(content), ensure_ascii=False, default=str).encode()


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return visible_lines(value)
    if isinstance(value, dict):
        return {visible_lines(str(name)): _harmless(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_harmless(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
