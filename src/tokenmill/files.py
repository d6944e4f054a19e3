"""Files at a URL, read and written, and the only home of fsspec.

Network libraries raise whatever they like. Here it becomes a RemoteError, which says what happened
in our words: their texts repeat addresses, and an address may carry a password or a signature.

A range that was answered with too few bytes, or with an error that may pass, is asked for again
after a random pause. Ranges are asked for at once: the time of a batch is that of its slowest.

A file is written as a whole and seen as a whole: an object store shows it when its last byte is
there, or never. There is no rename, and none is needed.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import glob
import io
import itertools
import os
import re
import stat as filestat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar, cast

from tokenmill.errors import MissingExtraError, SourceError, TokenmillError, UsageError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future


_Answer = TypeVar("_Answer")
PathInput: TypeAlias = str | os.PathLike[str]
Stop: TypeAlias = "threading.Event | None"  # when set, a call ends with StoppedError
ByteRange: TypeAlias = tuple[str, int, int]  # a URL, the first byte, and the byte after the last
# Bytes of a file, and the version of it that the server says they are of; "" if it says none.
Versioned: TypeAlias = tuple[bytes, str]

ATTEMPTS = 8
# Of each request to S3, so that one part of a large file that fails does not end the whole.
REQUEST_ATTEMPTS = 3
OPENING_ATTEMPTS = 4  # of what is asked for first: a person waits, and the address may be wrong
# Pauses are drawn between 0 and this, doubled each time: 8 attempts take 16 seconds on average.
FIRST_PAUSE_SECONDS = 0.25
# A web server that sends nothing for so long is asked again; left alone, aiohttp waits for 300.
STALL_SECONDS = 30
# From a loopback server 20 ms away, on 2 shared cores (medians of 3): 8, 32 and 128 ranges of 1 MiB
# at once gave 215, 267 and 259 MB/s, and 256 ranges of 4 KB took 757, 275 and 170 ms. In a later
# run 32 and 64 gave 224 and 246 MB/s, and took 259 and 192 ms.
CONCURRENT_RANGES = 64
# Of a file that is sent in parts; S3 takes no smaller ones than 5 MiB, and 10,000 of them.
PART_BYTES = 8 << 20
CONCURRENT_PARTS = 2  # parts in memory at once while a file is sent
SYNC_THREADS = 8  # for filesystems that cannot ask for several ranges at once by themselves (hf://)
_POLL_SECONDS = 0.2
_FAMILIES = {"s3a": "s3", "gcs": "gs", "https": "http"}
# Package and extra that read the addresses of a family.
_BACKENDS = {
    "s3": ("s3fs", "s3"),
    "hf": ("huggingface_hub", "hf"),
    "http": ("aiohttp", "http"),
    "gs": ("gcsfs", ""),
}
_UPLOAD_OPTIONS: dict[str, tuple[str, ...]] = {
    "s3": ("chunksize", "max_concurrency"),
    "gs": ("chunksize",),
    "abfs": ("max_concurrency",),
}
_ADDRESS = re.compile(r"\s*(?:[\w-]+::)*([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
# One slash too: pathlib makes one of the two.
_SIGNATURE = re.compile(r"[?&](x-(amz|goog)-|(sig|signature|token|awsaccesskeyid)=)", re.IGNORECASE)
# Where the tools of each kind of server look for keys.
_KEY_PLACES = {
    "http": "put them into ~/.netrc, or the file that NETRC names; an '@' in a path is written as"
    " %40",
    "s3": "leave them out: they are taken from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from"
    " ~/.aws/credentials (AWS_PROFILE) or from the machine's role",
    "gs": "leave them out: they are taken from GOOGLE_APPLICATION_CREDENTIALS, or from:"
    " gcloud auth application-default login",
    "hf": "leave it out: it is taken from HF_TOKEN, or from: hf auth login",
}
_PASSING = {408, 421, 425, 429}
_WEB = ("http://", "https://")


class Failure(enum.Enum):
    """Why a file could not be read."""

    MISSING = "missing"
    DENIED = "denied"
    PASSING = "passing"  # the server or the network failed: later it may work
    WRONG = "wrong"  # the answer is not one that asking again would change


class RemoteError(OSError):
    """A file at a URL was not given to us."""

    def __init__(self, url: str, reason: str, *, failure: Failure, hint: str | None = None) -> None:
        super().__init__(reason)
        self.url = shown(url)
        self.reason = reason
        self.failure = failure
        is_hub = url.lower().startswith("hf://")
        self.hint = hint or (is_hub and _HUB_HINTS.get(failure)) or _HINTS[failure]

    def __reduce__(self) -> tuple[object, ...]:
        again = functools.partial(RemoteError, failure=self.failure, hint=self.hint)
        return again, (self.url, self.reason)


_HUB_HINTS = {
    Failure.MISSING: "check the name; a private repository is shown only to those who may read it:"
    " log in with `hf auth login`, or set HF_TOKEN",
    Failure.DENIED: "check the name; log in with `hf auth login` or set HF_TOKEN; where the"
    " repository is gated, accept its terms on its page first",
}


class StoppedError(Exception):
    """Whoever wanted the bytes does not want them any more."""


_WRITING_HINTS = {
    Failure.MISSING: "make the bucket first, or check the address",
    Failure.DENIED: "check that the credentials found here may write there",
}
_HINTS = {
    Failure.MISSING: "check the address",
    Failure.DENIED: "check that it is there and that the credentials found here may read it",
    Failure.PASSING: "check the network and the server, then run the same again",
    Failure.WRONG: "check the address and what serves it",
}


def shown(url: str) -> str:
    """The address without user name, password, query and fragment: fit for messages."""
    text = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/?#]*@", r"\1", url)
    return re.split(r"[?#]", text, maxsplit=1)[0] if _is_web(text) else text


def join(url: str, name: str) -> str:
    """The address of a file below a folder's; a query (a signature) stays at its end."""
    head, mark, query = url.partition("?") if _is_web(url) else (url, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def _is_web(url: str) -> bool:
    return url.lower().startswith(_WEB)


def filesystem(url: str) -> tuple[Any, str]:
    """The filesystem of a URL, and its own name for the file."""
    import fsspec

    refuse_secrets(url)
    scheme = url.split("://", 1)[0].lower()
    try:
        fs, name = fsspec.core.url_to_fs(url, **_options(scheme))
    except ImportError as error:
        package, extra = _BACKENDS.get(_FAMILIES.get(scheme, scheme), (scheme, ""))
        missing = MissingExtraError(package, extra=extra, purpose=f"reading {scheme}:// paths")
        if not extra:
            missing.hint = f"install it with: pip install {package}"
        raise missing from error
    except ValueError as error:
        raise RemoteError(
            url,
            _without_addresses(str(error)),
            failure=Failure.WRONG,
            hint="use a local path, s3://, gs://, hf:// or https://",
        ) from None
    if "s3" in _protocols(fs):
        fs.retries = 1  # s3fs would do 5 times what botocore has done, and we do it again
    return fs, name


def refuse_secrets(address: str) -> None:
    """UsageError for an address with a name or password in it, which repeats nothing of them.

    They would be told to the wrong server, or kept in logs and in what is built.
    """
    found = _ADDRESS.match(address)
    scheme = found[1].lower() if found else ""
    family = _FAMILIES.get(scheme, scheme)
    if found and _has_secret(family, found[2]):
        raise UsageError(
            f"keys and passwords do not belong in an address, and this one, {scheme}://..., has"
            " one",
            hint=_KEY_PLACES.get(family, "put them where the tools of that store look"),
        )


def _has_secret(family: str, rest: str) -> bool:
    # A password may hold any character, also those that end the name of a server.
    if family in ("s3", "gs", "hf"):  # a name alone is before the first slash, and no user
        bucket = rest.split("/", 1)[0]
        has_user = re.search("[@%]|^(?!arn:).*:", bucket, re.DOTALL)
        return bool(has_user or _SIGNATURE.search(rest))
    server = re.sub(r"^\[[0-9A-Fa-f:.]*\]", "", re.split(r"[/?#\\]", rest, maxsplit=1)[0])
    _, colon, port = server.partition(":")
    if family == "http":
        is_port = port.isascii() and port.isdigit()
        return bool(re.search("[@%]", server)) or bool(colon and ("@" in rest or not is_port))
    # Elsewhere a name alone is a login or a container, and this is how GitHub's files are named.
    return bool(colon) and "@" in rest and family not in ("file", "github")


# A filesystem has connections of its own, so a process keeps one for each server, whatever thread
# asks. A forked process must not use its parent's: that is why its number is part of the key.
@functools.lru_cache(16)
def _shared_filesystem(scheme: str, server: str, _process: int) -> Any:
    return filesystem(f"{scheme}://{server}")[0]


def _options(scheme: str) -> dict[str, Any]:
    """What our way of reading needs, under what the user's configuration of fsspec says."""
    from fsspec.config import conf

    if scheme in ("http", "https"):
        # Names and passwords of a .netrc, as curl and requests take them, and proxies.
        given = conf.get(scheme, {}).get("client_kwargs", {})
        return {"client_kwargs": {"trust_env": True, **given}}
    if _FAMILIES.get(scheme, scheme) != "s3":
        return {}
    given = conf.get("s3", {}).get("config_kwargs", {})
    # botocore opens 10 connections, however many ranges are asked for, and asks 5 times.
    retries = {"total_max_attempts": REQUEST_ATTEMPTS}
    ours = {"max_pool_connections": CONCURRENT_RANGES, "retries": retries}
    # Otherwise s3fs asks for the size of a file first, to have 10 parts of 50 MB in memory at once.
    return {"max_concurrency": 1, **conf.get("s3", {}), "config_kwargs": {**ours, **given}}


def _resolve(urls: Sequence[str]) -> tuple[Any, list[str]]:
    """The filesystem of several URLs of one server, and its own names for them."""
    scheme, _, rest = urls[0].partition("://")
    refuse_secrets(urls[0])
    fs = _shared_filesystem(scheme, re.split(r"[/?#]", rest, maxsplit=1)[0], os.getpid())
    return fs, [fs._strip_protocol(url) for url in urls]


def read_bytes(url: str) -> bytes:
    """A small file whole."""
    return bytes(_ask_each([url], _ask_whole, attempts=OPENING_ATTEMPTS)[0])


def read_many(urls: Sequence[str]) -> list[bytes | None]:
    """Small files whole, all of one server, at once; None for those that are not there."""
    found = _ask_each(urls, _ask_whole, missing_ok=True)
    return [None if data is None else bytes(data) for data in found]


def _ask_whole(fs: Any, name: str, _: int) -> Any:
    return _method(fs, "cat_file")(name, **_web_options(fs))


def download(url: str, path: Path) -> None:
    """Copy a file of any size to a local path, without holding it in memory."""
    _ask_each([url], lambda fs, name, _: _method(fs, "get_file")(name, str(path)))


def upload(path: Path, url: str) -> None:
    """Send a local file, in parts where it is large; what was there before is replaced."""
    known = {
        # Room for a file to grow beyond what 10,000 parts of the usual size hold.
        "chunksize": max(PART_BYTES, -(-path.stat().st_size // 9000)),
        "max_concurrency": CONCURRENT_PARTS,
    }

    def ask(fs: Any, name: str, _: int) -> Any:
        taken = (option for each in _protocols(fs) for option in _UPLOAD_OPTIONS.get(each, ()))
        options = {option: known[option] for option in taken}
        return _method(fs, "put_file")(str(path), name, **options)

    with _writing():
        _ask_each([url], ask)


def copy(url: str, to: str) -> None:
    """Have a file of a server under a second address of the same server too."""
    with _writing():
        _ask_each([url], lambda fs, name, _: _method(fs, "cp_file")(name, _resolve([to])[1][0]))


def remove(urls: Sequence[str]) -> None:
    """Take files away, all of one server; those that are not there are gone already."""
    with _writing():
        _ask_each(urls, lambda fs, name, _: _method(fs, "rm_file")(name), missing_ok=True)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Errors say what to do when something was to be written."""
    try:
        yield
    except RemoteError as error:
        hint = _WRITING_HINTS.get(error.failure, error.hint)
        reason = "its bucket is not there" if error.failure is Failure.MISSING else error.reason
        raise RemoteError(error.url, reason, failure=error.failure, hint=hint) from None


def read_ranges(wanted: Sequence[ByteRange], *, stop: Stop = None) -> list[bytes]:
    """Bytes `start` to `stop` of each (url, start, stop), all of one server, in their order.

    Setting the event makes another thread's call end with StoppedError within a moment.
    """
    return [data for data, _ in read_versions(wanted, stop=stop)]


def read_versions(wanted: Sequence[ByteRange], *, stop: Stop = None) -> list[Versioned]:
    """What `read_ranges` gives, and the version of the file that each answer is of."""
    real = [each for each in wanted if each[1] < each[2]]

    def ask(fs: Any, name: str, place: int) -> Any:
        _, first, last = real[place]
        if fs.async_impl:
            family = _FAMILIES.get(_protocols(fs)[0], _protocols(fs)[0])
            return {"http": _cat_web, "s3": _cat_s3}.get(family, _cat)(fs, name, first, last)
        # hf:// would look up the file's size before each range, and read ahead 5 MB after it.
        options = {"size": last, "cache_type": "none"} if "hf" in fs.protocol else {}
        return fs.cat_file(name, first, last, **options), ""

    def check(answer: Versioned, place: int) -> RemoteError | None:
        (data, _), (url, first, last) = answer, real[place]
        reason = f"{len(data):,} bytes came instead of the {last - first:,} from byte {first:,}"
        if len(data) < last - first:
            return RemoteError(url, reason, failure=Failure.PASSING)
        if len(data) == last - first:
            return None
        hint = "use a server that answers range requests, or copy the files to a local disk"
        return RemoteError(url, reason, failure=Failure.WRONG, hint=hint)

    found = iter(_ask_each([url for url, _, _ in real], ask, check=check, stop=stop))
    return [next(found) if first < last else (b"", "") for _, first, last in wanted]


# fsspec's own `_cat_file` drops what an answer says beside its bytes: which version they are of.


async def _cat_web(fs: Any, name: str, first: int, last: int) -> Versioned:
    options = {**fs.kwargs, **_web_options(fs)}
    options["headers"] = {**options.get("headers", {}), "Range": f"bytes={first}-{last - 1}"}
    session = await fs.set_session()
    async with session.get(fs.encode_url(name), **options) as answer:
        data = await answer.read()
        answer.raise_for_status()
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
        return data, version.removeprefix("W/")


async def _cat_s3(fs: Any, name: str, first: int, last: int) -> Versioned:
    bucket, key, version = fs.split_path(name)
    options = {"VersionId": version} if version else {}
    wanted = f"bytes={first}-{last - 1}"
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted, **options)
    try:
        return await answer["Body"].read(), answer.get("ETag", "")
    finally:
        answer["Body"].close()


async def _cat(fs: Any, name: str, first: int, last: int) -> Versioned:
    return await fs._cat_file(name, start=first, end=last), ""


def _web_options(fs: Any) -> dict[str, Any]:
    if "http" not in fs.protocol:
        return {}
    import aiohttp

    return {"timeout": aiohttp.ClientTimeout(sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)}


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def list_sizes(url: str, *, versions: dict[str, str] | None = None) -> dict[str, int] | None:
    """Name -> bytes of the files in a folder; None where the server does not tell.

    `versions` gets the version of each file, where the listing has it.
    """
    try:
        found = list_folder(url, versions=versions)
    except RemoteError as error:
        # A key that may read files need not be allowed to list them.
        if error.failure is Failure.DENIED:
            return None
        raise
    if found is None:
        return None
    return {name: size for name, size in found.items() if size is not None}


def list_folder(
    url: str, *, versions: dict[str, str] | None = None
) -> dict[str, int | None] | None:
    """Name -> bytes of what is in a folder, None for folders in it; None for a web server."""
    if _is_web(url):
        return None
    found: dict[str, int | None] = {}

    def take(entry: dict[str, Any]) -> None:
        name = entry["name"].rpartition("/")[2]
        version = entry.get("ETag") or entry.get("etag") or entry.get("blob_id")  # s3; gs, abfs; hf
        if versions is not None and isinstance(version, str):
            versions[name] = version
        found[name] = int(entry["size"]) if entry["type"] == "file" else None

    async def take_pages(fs: Any, name: str) -> None:
        bucket, _, key = name.partition("/")
        async for entry in fs._iterdir(bucket, prefix=f"{key.rstrip('/')}/" if key else ""):
            take(entry)
        found.pop("", None)  # some tools leave an empty object in the place of a folder

    def ask() -> None:
        fs, (name,) = _resolve([url])
        if hasattr(fs, "_iterdir"):  # s3: page by page, since 30,000 names take 30 MB otherwise
            _run(take_pages(fs, name))
            return
        fs.invalidate_cache(name)
        for entry in fs.ls(name, detail=True):
            take(entry)
        fs.invalidate_cache(name)

    try:
        persistently(url, ask)
    except RemoteError as error:
        if error.failure is not Failure.MISSING:
            raise
    return found


def _ask_each(
    urls: Sequence[str],
    ask: Callable[[Any, str, int], Any],
    *,
    check: Callable[[Any, int], RemoteError | None] = lambda *_: None,
    missing_ok: bool = False,
    attempts: int = ATTEMPTS,
    stop: Stop = None,
) -> list[Any]:
    """What `ask(filesystem, name, place)` gives for each URL of one server, all at once.

    Those that fail are asked for again. With `missing_ok` what is not there is None.
    """
    answers: list[Any] = [None] * len(urls)
    left = list(range(len(urls)))

    def attempt() -> None:
        asked, left[:] = left[:], []
        fs, names = _resolve([urls[place] for place in asked])
        found = _run(_gather(fs, ask, names, asked), stop=stop)
        failures: list[RemoteError] = []
        for place, answer in zip(asked, found, strict=True):
            if isinstance(answer, BaseException):
                failure: RemoteError | None = as_remote_error(answer, urls[place])
            else:
                failure, answers[place] = check(answer, place), answer
            if failure and not (missing_ok and failure.failure is Failure.MISSING):
                failures.append(failure)
                left.append(place)
        for failure in sorted(failures, key=lambda each: each.failure is Failure.PASSING):
            raise failure

    if left:
        persistently(urls[0], attempt, attempts=attempts, stop=stop)
    return answers


async def _gather(
    fs: Any, ask: Callable[[Any, str, int], Any], names: list[str], places: list[int]
) -> list[Any]:
    # fsspec's own `_cat_ranges` does the same, but cancelling it leaves its requests running.
    import asyncio

    gate = asyncio.Semaphore(CONCURRENT_RANGES if fs.async_impl else SYNC_THREADS)

    async def one(name: str, place: int) -> object:
        async with gate:
            if fs.async_impl:
                return await ask(fs, name, place)
            return await asyncio.to_thread(ask, fs, name, place)

    return await asyncio.gather(*map(one, names, places), return_exceptions=True)


def _method(fs: Any, name: str) -> Any:
    """A method of a filesystem, which gives what it says or, of some filesystems, awaits it."""
    return getattr(fs, f"_{name}" if fs.async_impl else name)


def _run(coroutine: Any, *, stop: Stop = None) -> Any:
    """Wait for a coroutine on fsspec's own thread; giving up ends its requests too."""
    import asyncio

    from fsspec.asyn import get_loop

    job: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, get_loop())
    try:
        while True:
            try:
                return job.result(_POLL_SECONDS)
            except TimeoutError:
                if job.done():
                    return job.result()
                if stop is not None and stop.is_set():
                    raise StoppedError from None
    except BaseException:
        job.cancel()
        raise


def persistently(
    url: str,
    call: Callable[[], _Answer],
    *,
    attempts: int = OPENING_ATTEMPTS,
    stop: Stop = None,
) -> _Answer:
    """What a call of a network library gives, tried again while its failure may pass."""
    for number in itertools.count(1):
        try:
            return call()
        except (TokenmillError, StoppedError):
            raise
        except Exception as found:  # boundary to network libraries
            error = as_remote_error(found, url)
            if error.failure is not Failure.PASSING or number == attempts:
                tried = f" ({attempts} attempts)" if error.failure is Failure.PASSING else ""
                failure, hint = error.failure, error.hint
                # Without its cause: a traceback would print the address with all that is in it.
                raise RemoteError(
                    error.url, error.reason + tried, failure=failure, hint=hint
                ) from None
        import random

        # After a pause that grows, random, so that the ranks of a run do not come back all at once.
        # Not by the module's own functions: those would take from numbers that a user has seeded.
        pause = random.SystemRandom().uniform(0, FIRST_PAUSE_SECONDS * 2 ** (number - 1))
        if stop is None:
            time.sleep(pause)
        elif stop.wait(pause):
            raise StoppedError
    raise AssertionError


def as_remote_error(error: BaseException, url: str) -> RemoteError:
    """What an exception of a network library means."""
    if isinstance(error, RemoteError):
        return error
    status = _status(error)
    # fsspec calls a web file missing whatever the server said; the status knows better.
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError)):
        return RemoteError(url, "it is not there", failure=Failure.MISSING)
    if status is not None:
        from http import HTTPStatus

        denied, passing = status in (401, 403), status >= 500 or status in _PASSING
        failure = Failure.DENIED if denied else Failure.PASSING if passing else Failure.WRONG
        phrase = next((f" {known.phrase}" for known in HTTPStatus if known == status), "")
        return RemoteError(url, f"the server answers {status}{phrase}", failure=failure)
    reason = f"{type(error).__name__}: {_without_addresses(str(error))}".rstrip(": ")
    query = url.partition("?")[2]
    if query and any(part in reason for part in (query, *re.findall("[^&=]{4,}", query))):
        reason = type(error).__name__
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return RemoteError(url, reason, failure=Failure.DENIED)
    # Where the interpreter ends, no later attempt succeeds; the process would wait for all of them.
    has_ended = isinstance(error, RuntimeError) and "cannot schedule new futures" in str(error)
    wrong = (ValueError, TypeError, NotImplementedError, IsADirectoryError)
    if has_ended or isinstance(error, wrong):
        return RemoteError(url, reason, failure=Failure.WRONG)
    return RemoteError(url, reason, failure=Failure.PASSING)


def _status(error: BaseException) -> int | None:
    """The status of the HTTP answer that an exception is about; each library keeps it elsewhere."""
    found: list[object] = []
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        found.append(getattr(response, "status_code", None))  # requests, httpx
        found.append(getattr(cause, "status", None))  # aiohttp
        cause = cause.__cause__
    if not any(found):
        found.append(getattr(error, "code", None))  # gcsfs
    return next((each for each in found if isinstance(each, int) and 300 <= each < 600), None)


def _without_addresses(text: str) -> str:
    return re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://\S+", lambda found: shown(found[0]), text)


class RemoteFile(io.RawIOBase):
    """An fsspec file whose errors, whatever library they come from, are OSErrors."""

    def __init__(self, file: BinaryIO, *, url: str) -> None:
        self._file = file
        self._url = url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self._file.tell()

        def read() -> bytes:
            self._file.seek(start)
            return self._file.read(len(view))

        data = persistently(self._url, read, attempts=ATTEMPTS)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


# -------------------------------------------------------------------------------------------------
# Files wherever they are: names, sizes, versions and bytes of local and remote inputs.
#
# Local paths go through `os` and `open` alone; anything with a scheme (`s3://`, `gs://`, `hf://`,
# `https://`) goes through fsspec, which is imported only then. `file://` names a local file and is
# treated as one.
#
# A path is kept as the user named it, because it is the identity of what is built from it: it is
# cleaned ("./a//b" becomes "a/b") but never made absolute, and ".." stays, since it may cross a
# link.

# Paths are identities here, so they stay strings; pathlib would rewrite them.
# ruff: noqa: PTH112, PTH116, PTH118, PTH207


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# A folder with one of these is a store: it may be in an input folder, and is never input.
STORE_MARKS = frozenset({"tokenmill.json", ".lock-workers"})
_REMOTE_BLOCK_BYTES = 4 << 20
# What fsspec's filesystems call the value that changes with the content, best first.
_VERSION_KEYS = [
    "ETag",
    "etag",
    "blob_id",
    "Content-MD5",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
]


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that an input stands for."""

    path: str
    named: bool  # the input names this file or its suffix, so it must be usable; folders do not


@dataclass(frozen=True, slots=True)
class FileStat:
    size: int
    # Changes when the file changes: modification time in ns, or what the remote system gives.
    version: str
    key: tuple[object, ...]  # equal for two names of one file
    # When anything about the file was last changed, in ns, which no program can set back; 0 where
    # nothing tells.
    changed: int = 0


def is_remote(path: PathInput) -> bool:
    """Whether the path is read through fsspec; UsageError for an address with a password in it."""
    text = os.fspath(path)
    refuse_secrets(text)
    return bool(_SCHEME.match(text)) and not text.lower().startswith("file://")


def local_path(path: PathInput) -> Path | None:
    """Where a local file or folder is; None for what is read through fsspec."""
    text = os.fspath(path)
    if ":/" in text:
        if is_remote(text):
            return None
        text = normalise(text)
    return Path(text)


def normalise(path: PathInput) -> str:
    """The path as an identity: POSIX separators, no "." and no empty parts."""
    text = os.fspath(path)
    if is_remote(text):
        return text
    if text.lower().startswith("file://"):
        # Imported here: it imports ssl and the mail package, a third of opening a small store.
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        text = url2pathname(urlsplit(text).path)
    root = "/" if text.startswith("/") else ""
    return root + "/".join(part for part in text.split("/") if part not in ("", ".")) or "."


def matches(name: PathInput) -> list[FoundFile]:
    """The files that one input stands for: itself, a folder's content, or what a glob matches."""
    path = normalise(name)
    found = list(_remote_matches(path) if is_remote(path) else _local_matches(path))
    if not found:
        said = shown(os.fspath(name))
        hint = "check the path; a glob looks like 'data/**/*.jsonl', quotes included"
        if len(said) > 1000 or len(said.split()) > 1:
            hint += "; a list of strings names files, and texts are given as iter(texts)"
        if len(said) > 1000:
            said = f"{said[:80]} ..."
        raise SourceError(f"input {said!r} matches no file", hint=hint)
    return sorted(found, key=lambda match: match.path)


def stat(path: str, *, fresh: bool = False) -> FileStat:
    """Size and version of a file; `fresh` asks a remote system again instead of a listing."""
    try:
        if is_remote(path):
            return _remote_stat(path, fresh=fresh)
        facts = os.stat(path)
        _refuse_special(facts)
    except OSError as error:
        raise unreadable(path, error) from error
    key = (facts.st_dev, facts.st_ino)
    return FileStat(facts.st_size, str(facts.st_mtime_ns), key, facts.st_ctime_ns)


def open_binary(path: str) -> BinaryIO:
    """Open for unbuffered, seekable reading; every later read error is an OSError."""
    try:
        if not is_remote(path):
            return cast("BinaryIO", open(path, "rb", buffering=0, opener=_open_file))
        fs, name = filesystem(path)
        file = persistently(path, lambda: fs.open(name, "rb", block_size=_REMOTE_BLOCK_BYTES))
        return cast("BinaryIO", RemoteFile(file, url=path))
    except OSError as error:
        raise unreadable(path, error) from error


def _open_file(path: str, flags: int) -> int:
    # A pipe may have taken the place of the file that was found; opening one waits for a writer.
    found = os.open(path, flags | os.O_NONBLOCK)
    try:
        _refuse_special(os.fstat(found))
    except OSError:
        os.close(found)
        raise
    return found


def _refuse_special(facts: os.stat_result) -> None:
    """Raise for what has no end or would be waited for: pipes, sockets, devices."""
    if not filestat.S_ISREG(facts.st_mode):
        kinds = {
            filestat.S_IFIFO: "a pipe",
            filestat.S_IFSOCK: "a socket",
            filestat.S_IFDIR: "a folder",
        }
        kind = kinds.get(filestat.S_IFMT(facts.st_mode), "a device")
        raise OSError(f"it is {kind}, and only files are read")


def unreadable(path: str, error: Exception) -> SourceError:
    """The error for a file that the system does not give us."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return SourceError(
        f"cannot read {shown(path)!r}: {reason}",
        hint=error.hint
        if isinstance(error, RemoteError)
        else "check that the file is there, complete and readable, then run the same command again",
    )


def _local_matches(path: str) -> Iterator[FoundFile]:
    if os.path.isdir(path):
        yield from (FoundFile(found, False) for found in _walk(path))
    elif os.path.lexists(path):
        yield FoundFile(path, True)
    elif glob.has_magic(path):
        suffix = _literal_suffix(path)
        for found in _glob(path):
            if os.path.isdir(found):
                yield from (FoundFile(normalise(inner), False) for inner in _walk(found))
            else:
                yield FoundFile(normalise(found), bool(suffix) and found.endswith(suffix))


def _literal_suffix(pattern: str) -> str:
    """ ".txt" of "a/*.txt"; empty where the pattern ends in a wildcard or has no suffix."""
    tail = re.split(r"[*?\]]", pattern)[-1]
    return tail if "." in tail and "/" not in tail else ""


def _walk(folder: str) -> Iterator[str]:
    """Files below a folder, no hidden ones, no stores; what links lead to twice counts once."""
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        raise unreadable(error.filename or folder, error)

    for parent, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        facts = os.stat(parent)
        if (facts.st_dev, facts.st_ino) in seen:
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        if not STORE_MARKS.isdisjoint(files):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            normalise(os.path.join(parent, name))
            for name in sorted(files)
            if not name.startswith(".")
        )


def _glob(pattern: str) -> Iterator[str]:
    # glob.glob follows links round and round below "**", so these are matched on our own walk.
    if "**" not in pattern:
        yield from sorted(glob.glob(pattern))
        return
    base = fixed_part(pattern)
    root = base or ("/" if pattern.startswith("/") else ".")
    rule = glob_rule(pattern)
    if os.path.isdir(root):
        yield from (found for found in _walk(root) if rule.fullmatch(found))


def fixed_part(pattern: str) -> str:
    """The folder in which all matches of a glob are."""
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def glob_rule(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression: `*` stays within a folder, `**` does not."""
    *folders, last = pattern.split("/")
    rules = ["(?:[^/]+/)*" if part == "**" else _part_rule(part) + "/" for part in folders]
    return re.compile("".join([*rules, ".*" if last == "**" else _part_rule(last)]), re.DOTALL)


def _part_rule(part: str) -> str:
    """One component of a glob as a regular expression; in fnmatch's own "*" crosses folders."""
    wild = {"*": "[^/]*", "?": "[^/]"}
    pieces = re.findall(r"\[!?\]?[^\]]*\]|.", part, re.DOTALL)
    return "".join(
        "[" + re.sub(r"^!", "^", piece[1:-1]).replace("\\", "\\\\") + "]"
        if len(piece) > 1
        else wild.get(piece, re.escape(piece))
        for piece in pieces
    )


def _remote_matches(path: str) -> list[FoundFile]:
    if _is_web(path):
        # A web address is one file: "?" starts a query there, and servers do not list folders.
        return [FoundFile(path, True)]
    try:
        fs, name = filesystem(path)
        return persistently(path, lambda: _remote_listing(fs, name, path))
    except OSError as error:
        raise unreadable(path, error) from error


def _remote_listing(fs: Any, name: str, path: str) -> list[FoundFile]:
    fs.invalidate_cache(name)
    suffix, folder, found = "", name, []
    if glob.has_magic(name):
        suffix = _literal_suffix(path)
        folder = fixed_part(name)
        found = [each for each in fs.glob(name) if fs.isfile(each)]
    elif fs.isdir(name):
        found = fs.find(name)
    elif fs.exists(name):
        return [FoundFile(path, True)]
    known = len(name.split("*", 1)[0].rstrip("/").split("/"))
    shown_files = [
        FoundFile(fs.unstrip_protocol(each), bool(suffix) and each.endswith(suffix))
        for each in found
        if not any(part.startswith(".") for part in each.split("/")[known - 1 :])
    ]
    if not shown_files:
        # For want of files, or because the server refused? fsspec hides the difference.
        with contextlib.suppress(FileNotFoundError):
            fs.info(folder)
    return shown_files


def _remote_stat(path: str, *, fresh: bool) -> FileStat:
    fs, name = filesystem(path)

    def ask() -> dict[str, Any]:
        if fresh:
            fs.invalidate_cache()
        facts: dict[str, Any] = fs.info(name)
        return facts

    facts = persistently(path, ask)
    size = facts.get("size")
    if size is None:
        raise OSError("the server does not tell the size of the file")
    version = next((str(facts[key]) for key in _VERSION_KEYS if facts.get(key)), f"size-{size}")
    return FileStat(int(size), version, (path,))


def cache_folder() -> Path:
    """Where what can be found out again is kept: `$TOKENMILL_CACHE`, or in the user's cache."""
    given = os.environ.get("TOKENMILL_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tokenmill"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill"
