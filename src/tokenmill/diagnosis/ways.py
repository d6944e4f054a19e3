"""The ways people get tokens into a training loop, each a program of its own that is timed.

    one-by-one         the tokenizer is called for each sample, in the loop
    with-transformers  the same by transformers, where it is installed
    batched            many samples in a call, which lets the package use every core
    joined             many samples joined by a delimiter token, encoded, and split at its id
    pool               a multiprocessing.Pool whose workers tokenize, fed by `imap`
    dataloader         a torch DataLoader whose workers tokenize
    build              `tokenmill build`: the cost, paid once
    loader             `tokenmill.Loader` on the store that it made

A way is the text of a program (`WayJob.source`): what people write with the package of their
tokenizer, and a clock. It is run as it is, by a Python of its own, and the report shows the same
text. Nothing of tokenmill is in the process, but where tokenmill is what is timed. CPU and memory
are looked at from outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from tokenmill.diagnosis.values import SampleFacts, WayResult
from tokenmill.engines import REFERENCES
from tokenmill.engines.base import TokenizerKind
from tokenmill.engines.references import PieceType
from tokenmill.errors import SourceError, UsageError
from tokenmill.files import shown
from tokenmill.monitor import cpu_seconds, rss_bytes, tree
from tokenmill.runners.local import usable_cores
from tokenmill.sources.base import SourceFile, SourceOptions, open_source, plan_units, text_size
from tokenmill.sources.discovery import discover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.load import TokenizerFiles
    from tokenmill.records import RowBatch
    from tokenmill.supervised.shaper import Shaper


# -------------------------------------------------------------------------------------------------
# A bounded part of the user's own text, read as a build reads it, kept for the ways to share.
#
# Some documents of some files, spread over the input, as JSON Lines: their texts, which the ways
# encode, and their rows, which the build reads, where these are more than a text.

SAMPLED_FILES = 8
BATCH_BYTES = 1 << 20
LINES, ROWS = "sample.jsonl", "rows.jsonl"


def take_sample(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    folder: Path,
    most_bytes: int,
    options: SourceOptions | None = None,
    shaper: Shaper | None = None,
) -> SampleFacts:
    """Read the sample and keep it in the folder; the shaper makes texts of rows of fields."""
    if most_bytes < 1:
        raise UsageError("a sample of no bytes measures nothing", hint="use --sample-mb 32")
    options = dataclasses.replace(options or SourceOptions(), batch_bytes=BATCH_BYTES)
    files = discover(inputs, options).files
    chosen = files[:: max(1, len(files) // SAMPLED_FILES)][:SAMPLED_FILES]
    documents: list[str] = []
    rows: list[bytes] = []
    rejected = 0
    for file in chosen:
        room = max(1, most_bytes // len(chosen))
        for batch in _batches(file, options):
            found, refused = _documents(batch, shaper)
            rejected += len(batch.rejects) + refused
            for row, text in found:
                if room > 0 and text:
                    documents.append(text)
                    rows.append(row + b"\n")
                    room -= len(text.encode())
            if room <= 0:
                break
    if not documents:
        names = ", ".join(repr(shown(str(each))) for each in inputs[:3])
        more = " ..." if len(inputs) > 3 else ""
        why = f"{rejected:,} rows cannot be used, and no other" if rejected else "no row"
        problem = f"there is no text to measure in {names}{more}: {why} has text in it"
        hint = f"check the file; the text is looked for under --text-field {options.text_field}"
        raise SourceError(problem, hint=hint)
    with (folder / LINES).open("w", encoding="utf-8", newline="\n") as lines:
        for document in documents:
            lines.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
    if shaper is not None:
        (folder / ROWS).write_bytes(b"".join(rows))
    sizes = [len(document.encode()) for document in documents]
    return SampleFacts(
        files=sum(len(file.members) or 1 for file in files),
        input_bytes=sum(file.size for file in files),
        documents=len(documents),
        text_bytes=sum(sizes),
        rejected=rejected,
        largest_document_bytes=max(sizes),
        estimated_text_bytes=sum(text_size(file) for file in files),
    )


def _batches(file: SourceFile, options: SourceOptions) -> Iterator[RowBatch]:
    with contextlib.closing(open_source(file, options)) as source:
        for unit in plan_units(file, options):
            if not source.exists(unit):
                return
            yield from source.read(unit)


def _documents(batch: RowBatch, shaper: Shaper | None) -> tuple[list[tuple[bytes, str]], int]:
    """The row and the text of each document, and how many rows are none."""
    if shaper is None:
        return [(b"", text) for text in batch.texts.texts()], 0
    shaped = shaper.shape(batch.texts, batch.rows)
    places = {row: place for place, row in enumerate(batch.rows.tolist())}
    rows = (batch.texts.bytes_at(places[row]) for row in shaped.rows.tolist())
    return [*zip(rows, shaped.texts.texts(), strict=True)], len(shaped.rejects)


# -------------------------------------------------------------------------------------------------
# How a tokenizer is loaded and called, in the words of its package.


class Delimiter(NamedTuple):
    """A token that the package finds in a text."""

    token: str
    id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The lines of a program that are the package's own."""

    load: str  # with the imports
    one: str  # ids of `text`
    many: str  # ids of each of `batch`
    joined: str  # ids of `joined`
    delimiter: Delimiter | None
    no_delimiter: str = ""  # why there is none
    # Ids of `text` by transformers, and the folder that it loads; empty where it could not.
    transformers: str = ""
    folder: str = ""


def calls_of(
    files: TokenizerFiles, info: TokenizerInfo, *, workers: int, avoid: str | None = None
) -> Calls:
    """The code that people write for such a tokenizer; batches are encoded by so many threads.

    `avoid` is a token that texts hold, by which they cannot be joined.
    """
    if files.main is None:
        return BYTES
    if avoid is not None:
        special = {token: index for token, index in info.special_tokens.items() if token != avoid}
        info = dataclasses.replace(info, special_tokens=special, eos_token=None)
    return _CALLS[files.kind](files, info, repr(str(files.path.resolve())), workers)


def _tokenizers_calls(files: TokenizerFiles, info: TokenizerInfo, path: str, workers: int) -> Calls:
    content = files.parsed
    load = f"from tokenizers import Tokenizer\n\ntokenizer = Tokenizer.from_file({path})"
    if workers != len(usable_cores()):
        load = f'import os\n\nos.environ["RAYON_NUM_THREADS"] = "{workers}"\n{load}'
    for name in ("padding", "truncation"):
        load += f"\ntokenizer.no_{name}()" if content.get(name) else ""
    # Tokens around each document are left out: all ways count those of the text itself.
    processor = (content.get("post_processor") or {"type": "ByteLevel"})["type"]
    alone = "" if processor == "ByteLevel" else ", add_special_tokens=False"
    found = {str(token["content"]): int(token["id"]) for token in info.added_tokens}
    special = [token for token in info.special_tokens if token in found]
    delimiter = info.eos_token if info.eos_token in found else next(iter(special), None)
    return Calls(
        load=load,
        one=f"tokenizer.encode(text{alone}).ids",
        many=f"[each.ids for each in tokenizer.encode_batch(batch{alone})]",
        joined=f"tokenizer.encode(joined{alone}).ids",
        delimiter=None if delimiter is None else Delimiter(delimiter, found[delimiter]),
        no_delimiter="this tokenizer has no special token to join documents by",
        transformers=f'tokenizer(text{alone})["input_ids"]',
        folder=repr(str(files.path.resolve().parent)) if _names_a_class(files) else "",
    )


def _names_a_class(files: TokenizerFiles) -> bool:
    """Whether the folder is one that transformers knows how to load."""
    found = [path for path in files.metadata if path.name == "tokenizer_config.json"]
    return any("tokenizer_class" in json.loads(path.read_text()) for path in found)


def _sentencepiece_calls(
    files: TokenizerFiles, info: TokenizerInfo, path: str, workers: int
) -> Calls:
    found = (
        Delimiter(text, index)
        for index, (text, kind) in enumerate(files.parsed.pieces)
        if kind is PieceType.USER_DEFINED and text.startswith(("<", "["))
    )
    return Calls(
        load="from sentencepiece import SentencePieceProcessor\n\n"
        f"sp = SentencePieceProcessor(model_file={path})",
        one="sp.encode(text)",
        many=f"sp.encode(batch, num_threads={workers})",
        joined="sp.encode(joined)",
        delimiter=next(found, None),
        no_delimiter=f"SentencePiece takes {info.eos_token or 'a control symbol'} in a text for"
        " text, and this model has no user-defined symbol, the only kind that it finds there (train"
        " one with --user_defined_symbols)",
    )


def _tiktoken_calls(files: TokenizerFiles, info: TokenizerInfo, path: str, workers: int) -> Calls:
    definition = files.parsed.definition
    special = info.special_tokens
    name = info.eos_token if info.eos_token in special else next(iter(special), None)
    kept = {} if name is None else {name: special[name]}
    load = (
        "import base64\n\nimport tiktoken\n\n"
        f"lines = [line.split() for line in open({path}, 'rb') if line.strip()]\n"
        "encoding = tiktoken.Encoding(\n"
        f"    {files.path.stem!r},\n"
        f"    pat_str={definition.pattern!r},\n"
        "    mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},\n"
        f"    special_tokens={kept!r},\n)"
    )
    form = {"text": "text", "batch": "batch", "joined": "joined"}
    if definition.normalization:
        load = f"import unicodedata\n\n{load}"
        normal = f"unicodedata.normalize({definition.normalization!r}, "
        form = {"text": f"{normal}text)", "joined": f"{normal}joined)"}
        form["batch"] = f"[{form['text']} for text in batch]"
    return Calls(
        load=load,
        one=f"encoding.encode_ordinary({form['text']})",
        many=f"encoding.encode_ordinary_batch({form['batch']}, num_threads={workers})",
        joined=f"encoding.encode({form['joined']}, allowed_special={{DELIMITER}})",
        delimiter=None if name is None else Delimiter(name, special[name]),
        no_delimiter="this encoding has no special token to join documents by",
    )


BYTES = Calls(
    load="",
    one="list(text.encode())",
    many="[list(text.encode()) for text in batch]",
    joined="",
    delimiter=None,
    no_delimiter="bytes have no string that stands for their end of text",
)
_CALLS: dict[TokenizerKind, Callable[[TokenizerFiles, TokenizerInfo, str, int], Calls]] = {
    TokenizerKind.HUGGINGFACE: _tokenizers_calls,
    TokenizerKind.SENTENCEPIECE: _sentencepiece_calls,
    TokenizerKind.TIKTOKEN: _tiktoken_calls,
}


# -------------------------------------------------------------------------------------------------
# The programs. `work` is what is timed; all else is the clock, which is the same for all of them.
#
# Rounds have as many documents as take about a fifth of the time. Between documents no clock is
# looked at: what is timed is a bare loop.

CHUNK = 8  # samples asked for at once, beside single ones
ROUNDS = 5

_HEAD = '''"""$about

    python $name.py $file
"""

import itertools
import json
import statistics
import sys
import time
'''
_CLOCK = """

# The clock. The first documents warm everything up. Then rounds grow until two of them are long
# enough, and $rounds of that size are printed.


def timed(work, documents):
    start, cpu = time.monotonic(), time.process_time()
    tokens = work(documents)
    taken = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu}
    num_bytes = sum(len(text.encode()) for text in documents)
    told = {"documents": len(documents), "text_bytes": num_bytes, "tokens": tokens}
    return {**told, **taken, "start": start}


def clock(work, texts, seconds, samples=(1, 8)):
    print(json.dumps({"ready": time.monotonic()}))
    deal, size = itertools.cycle(texts), 8

    def take(number):
        return timed(work, list(itertools.islice(deal, number)))

    take(64)
    while min(take(size)["seconds"], take(size)["seconds"]) < seconds / $rounds / 2:
        size *= 2
    for _ in range($rounds):
        print(json.dumps(take(size)))
    for number in samples:
        end, found = time.monotonic() + seconds / 8, []
        while len(found) < 3 or time.monotonic() < end:
            found.append(1000 * take(number)["seconds"])
        print(json.dumps({"samples": number, "milliseconds": statistics.median(found)}))
"""
_MAIN = """

if __name__ == "__main__":
    texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
    seconds = float(sys.argv[2]) if sys.argv[2:] else 1.0
"""
_RUN = f"{_MAIN}    clock(work, texts, seconds)\n"

_ONE_BY_ONE = """

def work(documents):
    tokens = 0
    for text in documents:
        ids = $one
        tokens += len(ids)
    return tokens
"""
_TRANSFORMERS = _ONE_BY_ONE.replace("$one", "$transformers")
_BATCHED = """

def work(documents):
    tokens = 0
    for first in range(0, len(documents), $batch):
        batch = documents[first : first + $batch]
        for ids in $many:
            tokens += len(ids)
    return tokens
"""
_JOINED = '''
DELIMITER, DELIMITER_ID = $delimiter


def encode_joined(batch):
    joined = "".join(text + DELIMITER for text in batch)
    ids = $joined
    parts, start = [], 0
    for _ in batch:
        end = ids.index(DELIMITER_ID, start)
        parts.append(ids[start:end])
        start = end + 1
    return parts


def work(documents):
    tokens = 0
    for first in range(0, len(documents), $batch):
        for ids in encode_joined(documents[first : first + $batch]):
            tokens += len(ids)
    return tokens


def compare(texts):
    """How many documents have other ids than by themselves, and how many hold the delimiter."""
    clean = [text for text in texts[:512] if DELIMITER not in text]
    differing = 0
    for first in range(0, len(clean), $batch):
        batch = clean[first : first + $batch]
        for text, ids in zip(batch, encode_joined(batch)):
            differing += ids != $one
    held = sum(DELIMITER in text for text in texts)
    told = {"compared_documents": len(clean), "differing_documents": differing}
    print(json.dumps({**told, "delimited_documents": held}))
'''
_POOL = """

def encode(text):
    return $one


def work(documents):
    chunk = min($batch, -(-len(documents) // $workers))
    return sum(map(len, pool.imap(encode, documents, chunksize=chunk)))
"""
_RUN_POOL = f"""{_MAIN}    with multiprocessing.Pool($workers) as pool:
        clock(work, texts, seconds)
"""
_DATALOADER = """

class Tokenized(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return torch.tensor($one)


def epochs(texts):
    how = {"num_workers": $workers, "persistent_workers": True, "drop_last": True}
    loader = DataLoader(Tokenized(texts), batch_size=8, collate_fn=list, **how)
    while True:
        yield from loader


def work(documents):
    tokens = 0
    for batch in itertools.islice(batches, len(documents) // 8):
        for ids in batch:
            tokens += len(ids)
    return tokens
"""
_RUN_DATALOADER = f"""{_MAIN}    texts *= -(-8 // len(texts))
    batches = epochs(texts)
    clock(work, texts, seconds, samples=())
"""
_BUILD = """

if __name__ == "__main__":
    result = tokenmill.build(
        sys.argv[1],
        $options,
    )
    built, seconds = result.built, result.working_seconds
    told = {"documents": built.documents, "text_bytes": built.text_bytes, "tokens": built.tokens}
    taken = {"seconds": seconds, "whole_seconds": result.seconds}
    known = {"engine": result.engine, "workers": result.workers}
    print(json.dumps({**told, **taken, **known, "start": time.monotonic() - seconds}))
"""
_LOADER = """

def work(rows):
    tokens = 0
    for _ in range(-(-len(rows) // 8)):
        batch = next(singles if len(rows) == 1 else batches)
        inputs, labels = batch.input_ids, batch.labels
        tokens += inputs.size
    return tokens
"""
_RUN_LOADER = """

if __name__ == "__main__":
    seconds = float(sys.argv[2]) if sys.argv[2:] else 1.0
    store = tokenmill.Store(sys.argv[1])
    # Shorter rows for a small sample: padding is read faster than tokens.
    seq_len = min($seq_len, max(store.num_tokens // 8, 1))
    batches = iter(tokenmill.Loader(store, seq_len=seq_len, batch_size=8))
    singles = iter(tokenmill.Loader(store, seq_len=seq_len, batch_size=1))
    clock(work, [""] * 8, seconds)
"""


class Way(NamedTuple):
    """What is known of a way before it runs."""

    title: str
    about: str
    call: str  # the line that people will look for
    program: str
    imports: str = ""
    load: str = "$load"
    run: str = _RUN
    engine: str = ""  # where it is not the reference
    in_loop: bool = False
    feeds: bool = True


WAYS = {
    "one-by-one": Way(
        "one at a time",
        "One sample at a time: the tokenizer is called for each, in the loop.",
        "$one",
        _ONE_BY_ONE,
        in_loop=True,
    ),
    "with-transformers": Way(
        "transformers",
        "One sample at a time by transformers, in the loop.",
        "$transformers",
        _TRANSFORMERS,
        load="from transformers import AutoTokenizer\n\n"
        "tokenizer = AutoTokenizer.from_pretrained($folder)",
        engine="transformers",
        in_loop=True,
    ),
    "batched": Way(
        "in batches",
        "$batch samples in a call, in the loop.",
        "$many",
        _BATCHED,
        in_loop=True,
    ),
    "joined": Way(
        "joined",
        "$batch samples joined by a delimiter token, encoded, and split at its id, in the loop.",
        "$joined  # of $batch texts, a delimiter after each",
        _JOINED,
        run=f"{_RUN}    compare(texts)\n",
        in_loop=True,
    ),
    "pool": Way(
        "process pool",
        "A pool of $workers processes that tokenize.",
        "pool.imap(encode, texts, chunksize=$batch)",
        _POOL,
        imports="import multiprocessing",
        run=_RUN_POOL,
    ),
    "dataloader": Way(
        "DataLoader",
        "A DataLoader with $workers workers that tokenize.",
        "DataLoader(texts, batch_size=8, num_workers=$workers)",
        _DATALOADER,
        imports="import torch\nfrom torch.utils.data import DataLoader, Dataset",
        run=_RUN_DATALOADER,
    ),
    "build": Way(
        "tokenmill build",
        "tokenmill build, once, before training.",
        "tokenmill.build(file, tokenizer=..., workers=$workers)",
        "",
        load="import tokenmill",
        run=_BUILD,
        feeds=False,
    ),
    "loader": Way(
        "tokenmill Loader",
        "tokenmill.Loader on the store that build.py wrote.",
        'tokenmill.Loader("store", seq_len=$seq_len, batch_size=8)',
        _LOADER,
        load="import tokenmill",
        run=_RUN_LOADER,
    ),
}
UNITS_PER_WORKER = 4
SMALLEST_UNIT = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WayJob:
    """A way with its setting."""

    way: str
    folder: str  # where the sample is, and where programs and stores are written
    tokenizer: str
    kind: str
    calls: Calls
    workers: int
    batch: int
    seconds: float
    seq_len: int
    shape: Mapping[str, object] = field(default_factory=dict)  # options of a build, for its rows

    @property
    def file(self) -> str:
        """What the program is told to read, in its folder."""
        if self.way == "loader":
            return self.store
        has_rows = self.way == "build" and (Path(self.folder) / ROWS).exists()
        return ROWS if has_rows else LINES

    @property
    def store(self) -> str:
        """The store of a build with so many workers, in the folder."""
        return f"store-{self.workers}"

    @property
    def source(self) -> str:
        """The program."""
        way = WAYS[self.way]
        imports = f"\n{way.imports}\n" if way.imports else ""
        load = f"\n{way.load}\n" if way.load != "$load" or self.calls.load else ""
        clock = "" if self.way == "build" else _CLOCK
        head = _HEAD.replace("$about", way.about)
        return self.fill("".join((head, imports, load, way.program, clock, way.run)))

    def fill(self, template: str) -> str:
        calls = self.calls
        return Template(template).substitute(
            {each.name: getattr(calls, each.name) for each in dataclasses.fields(calls)},
            name=self.way,
            file=self.file,
            delimiter=repr(tuple(calls.delimiter or ())),
            batch=self.batch,
            workers=self.workers,
            rounds=ROUNDS,
            seq_len=self.seq_len,
            options=self._options() if self.way == "build" else "",
        )

    def _options(self) -> str:
        size = (Path(self.folder) / self.file).stat().st_size
        options = {
            "tokenizer": self.tokenizer,
            "out": self.store,
            "eos": False,  # so that all ways make the same tokens of the same text
            "workers": self.workers,
            "unit_bytes": max(SMALLEST_UNIT, size // (UNITS_PER_WORKER * self.workers)),
            **self.shape,
        }
        return ",\n        ".join(f"{name}={value!r}" for name, value in options.items())

    def result(self, **found: Any) -> WayResult:
        """What the way reached, beside what was known of it before."""
        way = WAYS[self.way]
        known = {"title": way.title, "in_loop": way.in_loop, "feeds": way.feeds}
        known["engine"] = way.engine or REFERENCES[self.kind]
        known["workers"] = 1 if self.way in ALONE else self.workers
        return WayResult(key=self.way, batch=self.batch, **{**known, **found})


# Ways that are one thread, whatever the number of workers.
ALONE = ("one-by-one", "with-transformers", "joined", "loader")

# -------------------------------------------------------------------------------------------------
# Runs a program, and looks at its process and their children from outside.
#
# Memory is the sum of resident sets: a page that two processes share counts twice, as it does in
# the budget of a build. Looking takes time as well, on machines with thousands of processes most of
# all, so the pause between two looks is long beside the look. CPU in the time that counts is found
# between the looks around it: clocks that are monotonic are the same in all processes.

LOOK_SECONDS = 0.05
LOOK_SHARE = 0.03  # most of a core that looking may take
LATEST_SECONDS = 300.0
SHORT_SECONDS = 0.2
SMALL = "the sample is so small that most of the time is start-up: a larger input is faster"


class Look(NamedTuple):
    """The way and the machine at one moment."""

    at: float
    memory_bytes: int
    cpu_seconds: float  # of the way's processes
    busy_seconds: float  # of all programs but this one, on the cores that it may use


def run_way(job: WayJob) -> WayResult:
    """Run the program; what goes wrong in it is told by the result."""
    if job.way == "joined" and job.calls.delimiter is None:
        return job.result(engine="", problem=job.calls.no_delimiter)
    program = Path(job.folder) / f"{job.way}.py"
    program.write_text(job.source, encoding="utf-8")
    # The modules that this process sees.
    paths = os.pathsep.join(filter(None, sys.path))
    how: dict[str, Any] = {"cwd": job.folder, "env": {**os.environ, "PYTHONPATH": paths}}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        how |= {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        command = [sys.executable, "-P", program.name, job.file, str(job.seconds)]
        began = time.monotonic()
        # A group of its own, so that workers end with it whatever becomes of it.
        process = psutil.Popen(command, start_new_session=True, **how)
        with _ended(process):
            looks = _watch(process)
            is_late = process.poll() is None
        out.seek(0)
        err.seek(0)
        told = [json.loads(line) for line in out.read().splitlines() if line.startswith(b"{")]
        said = err.read().decode("utf-8", errors="replace").strip().splitlines()
    found = _found(job, told, looks, began) if process.returncode == 0 else {}
    if process.returncode:
        why = f": {said[-1]}" if said else ""
        found = {"problem": f"its process ended with exit code {process.returncode}{why}"}
        if is_late:
            found = {"problem": f"it was not done after {LATEST_SECONDS:.0f} s"}
    peak = max((look.memory_bytes for look in looks), default=0)
    source, call = job.source, job.fill(WAYS[job.way].call)
    return job.result(**found, peak_memory_bytes=peak, source=source, call=call)


def _found(
    job: WayJob, told: Sequence[dict[str, Any]], looks: Sequence[Look], began: float
) -> dict[str, Any]:
    """What a program printed, by the names that a result has."""
    rounds = [each for each in told if "tokens" in each]
    found: dict[str, Any] = {}
    if job.way == "build":
        (built,) = rounds
        found = {name: built.pop(name) for name in ("engine", "workers")}
        whole = built.pop("whole_seconds")
        if built["seconds"] < SHORT_SECONDS:
            built.update(start=built["start"] + built["seconds"] - whole, seconds=whole)
            found["note"] = SMALL
        found["startup_seconds"] = whole - built["seconds"]
    if job.way == "loader":
        rows = f"a sample is a row of up to {job.seq_len:,} tokens"
        found = {"engine": "none: ids are read"}
        found["note"] = f"{rows}; the store is in the system's cache"
    for name in ("documents", "text_bytes", "tokens", "seconds"):
        found[name] = sum(each[name] for each in rounds)
    if job.way == "loader":
        found["documents"] = 0
    found["rates"] = tuple(each["tokens"] / each["seconds"] for each in rounds)
    found["cpu_rates"] = tuple(
        each["tokens"] / max(each["cpu_seconds"], 1e-9) for each in rounds if "cpu_seconds" in each
    )
    start, end = rounds[0]["start"], rounds[-1]["start"] + rounds[-1]["seconds"]
    for each in told:
        if "ready" in each:
            found["startup_seconds"] = each["ready"] - began
        elif "milliseconds" in each:
            found["sample_ms" if each["samples"] == 1 else "chunk_ms"] = each["milliseconds"]
        elif "compared_documents" in each:
            found |= each
    if job.way == "dataloader":
        found["chunk_ms"] = 1000 * CHUNK * found["seconds"] / found["documents"]
        found["note"] = "batches of 8 samples, made ahead by the workers"
    used = None
    if job.way in (*ALONE, "batched"):  # all in one process, which has counted it
        used = sum(each["cpu_seconds"] for each in rounds) / found["seconds"]
    return found | cores_between(looks, start, end, used)


def cores_between(
    looks: Sequence[Look], start: float, end: float, used: float | None = None
) -> dict[str, float]:
    """Cores that the way and all others had from one moment to another; `used` is the way's."""
    times = [look.at for look in looks] or [start]
    counted = [look.cpu_seconds for look in looks], [look.busy_seconds for look in looks]
    cpu, busy = (
        float(np.ptp(np.interp([start, end], times, values or [0.0]))) for values in counted
    )
    long = max(end - start, 1e-9)
    used = cpu / long if used is None else used
    return {"cpu_cores": used, "other_cores": max(0.0, busy / long - used)}


def _watch(process: psutil.Popen) -> list[Look]:
    """Looks until the process ends."""
    started = time.monotonic()
    looks: list[Look] = []
    while process.poll() is None and time.monotonic() - started < LATEST_SECONDS:
        at, cost = time.monotonic(), time.thread_time()
        busy, members = _busy_seconds() - time.process_time(), tree(process)
        looks.append(Look(at, sum(map(rss_bytes, members)), cpu_seconds(members), busy))
        time.sleep(max(LOOK_SECONDS, (time.thread_time() - cost) / LOOK_SHARE))
    return looks


def _busy_seconds() -> float:
    """CPU seconds of everything on these cores; what a host took from a virtual one counts."""
    usable, total = usable_cores(), 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if core in usable:
            # Time of guests is counted in user time already.
            idle = ("idle", "iowait", "guest", "guest_nice")
            total += sum(v for k, v in times._asdict().items() if k not in idle)
    return total


@contextlib.contextmanager
def _ended(process: psutil.Popen) -> Iterator[None]:
    """Ends the process with all of its group, also where this process is killed."""
    group = f"cat; kill -KILL -{process.pid}"
    with subprocess.Popen(["/bin/sh", "-c", group], stdin=subprocess.PIPE) as guard:
        try:
            yield
        finally:
            guard.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
