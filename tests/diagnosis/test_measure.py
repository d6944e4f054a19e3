from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.conftest import EOS
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tokenmill.diagnosis.ways import (
    BYTES,
    LINES,
    WAYS,
    Calls,
    Look,
    WayJob,
    calls_of,
    cores_between,
    run_way,
    take_sample,
)
from tokenmill.engines.load import describe, find_tokenizer
from tokenmill.engines.references import R50K_PATTERN
from tokenmill.monitor import cpu_seconds, tree, tree_bytes

if TYPE_CHECKING:
    from pathlib import Path


def job(folder: Path, **changes: object) -> WayJob:
    values = {
        "way": "one-by-one",
        "folder": str(folder),
        "tokenizer": "bytes",
        "kind": "bytes",
        "calls": BYTES,
        "workers": 1,
        "batch": 4,
        "seconds": 0.05,
        "seq_len": 32,
    }
    return WayJob(**{**values, **changes})  # type: ignore[arg-type]


def job_of(folder: Path, tokenizer: Path, **changes: object) -> WayJob:
    """A job with a real tokenizer."""
    files = find_tokenizer(tokenizer)
    info = describe(files)
    calls = calls_of(files, info, workers=1)
    told = {"tokenizer": str(tokenizer), "kind": info.kind.value, "calls": calls}
    return job(folder, **{**told, **changes})


def keep(folder: Path, texts: list[str]) -> Path:
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    take_sample([source], folder=folder, most_bytes=10**6)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return keep(tmp_path, ["hello"])


def test_one_document_is_enough_to_measure_on(folder: Path) -> None:
    result = run_way(job(folder))
    assert result.problem is None
    assert result.tokens == 5 * result.documents > 0
    assert result.sample_ms is not None


# What people write, in a program of the test's own: the same calls on the same texts, and a clock.
BARE_LOAD = {
    "sentencepiece": """
from sentencepiece import SentencePieceProcessor
sp = SentencePieceProcessor(model_file={path!r})
""",
    "huggingface": """
import os
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file({path!r})
eos = tokenizer.token_to_id({eos!r})
""",
}
BARE_LOOPS = {
    "one-by-one": """
def loop(texts):
    tokens = 0
    for text in texts:
        tokens += len({one})
    return tokens
""",
    "batched": """
def loop(texts):
    tokens = 0
    for first in range(0, len(texts), 64):
        batch = texts[first : first + 64]
        for ids in {many}:
            tokens += len(ids)
    return tokens
""",
    "joined": """
def loop(texts):
    tokens = 0
    for first in range(0, len(texts), 64):
        batch = texts[first : first + 64]
        ids = tokenizer.encode("".join(text + {eos!r} for text in batch)).ids
        start = 0
        for _ in batch:
            end = ids.index(eos, start)
            tokens += len(ids[start:end])
            start = end + 1
    return tokens
""",
}
BARE_CALLS = {
    "sentencepiece": {"one": "sp.encode(text)", "many": "sp.encode(batch, num_threads=1)"},
    "huggingface": {
        "one": "tokenizer.encode(text).ids",
        "many": "[each.ids for each in tokenizer.encode_batch(batch)]",
    },
}
BARE_CLOCK = """
import json, time
texts = [json.loads(line)["text"] for line in open({lines!r})] * {times}
loop(texts)
for _ in range(8):
    start = time.process_time()
    tokens = loop(texts)
    print(tokens / (time.process_time() - start))
"""


def bare_rate(way: str, kind: str, path: Path, lines: Path, *, times: int) -> float:
    """Tokens for each CPU second of a plain loop, in its best round."""
    code = "".join((BARE_LOAD[kind], BARE_LOOPS[way], BARE_CLOCK))
    how = {"path": str(path), "lines": str(lines), "times": times, "eos": EOS}
    code = code.format(**how, **BARE_CALLS[kind])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return max(map(float, done.stdout.split()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [40, 1000])
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("one-by-one", "sentencepiece"),
        ("one-by-one", "huggingface"),
        ("batched", "sentencepiece"),
        ("batched", "huggingface"),
        ("joined", "huggingface"),
    ],
)
def test_what_is_timed_is_as_fast_as_a_bare_loop(
    way: str,
    kind: str,
    size: int,
    tmp_path: Path,
    training_texts: list[str],
    sentencepiece_unigram_model: Path,
    bpe_tokenizer_dir: Path,
) -> None:
    text = training_texts[0] * (1 + 20_000 // len(training_texts[0]))
    keep(tmp_path, [text[at : at + size] for at in range(0, 20_000, size)])
    files = {"sentencepiece": sentencepiece_unigram_model}
    path = files.get(kind, bpe_tokenizer_dir / "tokenizer.json")
    told = job_of(tmp_path, path, way=way, batch=64, seconds=1.0)
    # By CPU time, the best of all rounds of each: more of them where other programs got between.
    best, bare, tries = 0.0, 0.0, 0
    while tries < 6 and not 0.9 < best / max(bare, 1.0) < 1.1:
        result = run_way(told)
        assert result.problem is None
        assert len(result.cpu_rates) == 5
        best = max(best, *result.cpu_rates)
        bare = max(bare, bare_rate(way, kind, path, tmp_path / LINES, times=4))
        tries += 1
    assert 0.9 < best / bare < 1.1


# The same with workers: their CPU seconds are counted from inside, just before and after.
BARE_WORKERS = {
    "pool": """
def encode(text):
    return {one}

def loop(texts):
    return sum(map(len, workers.imap(encode, texts, chunksize=64)))

workers = multiprocessing.Pool(2)
""",
    "dataloader": """
import itertools, torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return len(texts)

    def __getitem__(self, index):
        text = texts[index]
        return torch.tensor({one})

def endless():
    how = dict(num_workers=2, persistent_workers=True)
    loader = DataLoader(Rows(), batch_size=8, collate_fn=list, **how)
    while True:
        yield from loader

batches = endless()

def loop(texts):
    return sum(len(ids) for batch in itertools.islice(batches, len(texts) // 8) for ids in batch)
""",
}
BARE_WORKERS_CLOCK = """
def cpu():
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (me, *me.children()))

loop(texts)
start, tokens = cpu(), 0
for _ in range({times}):
    tokens += loop(texts)
print(tokens / (cpu() - start))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pool", "dataloader"])
def test_what_is_timed_with_workers_is_as_fast_as_a_bare_one(
    way: str, tmp_path: Path, training_texts: list[str], sentencepiece_unigram_model: Path
) -> None:
    text = training_texts[0] * (1 + 400_000 // len(training_texts[0]))
    keep(tmp_path, [text[at : at + 1000] for at in range(0, 400_000, 1000)])
    path = sentencepiece_unigram_model
    told = job_of(tmp_path, path, way=way, batch=64, workers=2, seconds=4.0)
    lines = f"import json, multiprocessing, psutil\nlines = open({str(tmp_path / LINES)!r})\n"
    lines += 'texts = [json.loads(line)["text"] for line in lines]\n'
    code = BARE_LOAD["sentencepiece"] + lines + BARE_WORKERS[way] + BARE_WORKERS_CLOCK
    code = code.format(path=str(path), times=20, **BARE_CALLS["sentencepiece"])
    best, bare, tries = 0.0, 0.0, 0
    while tries < 6 and not 0.9 < best / max(bare, 1.0) < 1.1:
        result = run_way(told)
        assert result.problem is None
        best = max(best, result.tokens / (result.cpu_cores * result.seconds))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        bare = max(bare, float(done.stdout))
        tries += 1
    assert 0.9 < best / bare < 1.1


def test_a_way_that_fails_tells_why_and_is_no_error(folder: Path) -> None:
    calls = Calls(
        **{name: getattr(BYTES, name) for name in Calls.__slots__} | {"load": "import no"}
    )
    result = run_way(job(folder, calls=calls))
    assert str(result.problem).endswith("exit code 1: ModuleNotFoundError: No module named 'no'")
    assert (result.tokens, result.tokens_per_second) == (0, 0.0)
    assert "there is no store" in str(run_way(job(folder, way="loader")).problem).lower()


def test_a_process_that_is_killed_is_a_way_that_failed(folder: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_way, job(folder, seconds=60.0))
        end = time.monotonic() + 30
        while not (found := _measuring()):
            assert time.monotonic() < end
            time.sleep(0.05)
        found[0].kill()
        assert running.result(30).problem == "its process ended with exit code -9"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pool", "dataloader"])
def test_workers_of_a_way_end_with_it_also_when_they_are_stopped(
    way: str, folder: Path, bpe_tokenizer_dir: Path
) -> None:
    told = job_of(folder, bpe_tokenizer_dir, way=way, seconds=60.0, workers=2)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_way, told)
        workers = _workers_of(2)
        for worker in workers:
            worker.suspend()
        _measuring()[0].kill()
        assert "exit code -9" in str(running.result(30).problem)
        assert not psutil.wait_procs(workers, timeout=3)[1]


@pytest.mark.slow
def test_a_way_and_its_workers_end_with_the_command_that_is_killed(
    tmp_path: Path, bpe_tokenizer_dir: Path
) -> None:
    keep(tmp_path, ["hello"])
    command = ["-m", "tokenmill", "diagnose", "a.jsonl", "-t", str(bpe_tokenizer_dir)]
    command += ["--seconds", "60", "--workers", "2", "--quiet"]
    started = psutil.Popen([sys.executable, *command], cwd=tmp_path)
    ways: list[psutil.Process] = []
    try:
        end = time.monotonic() + 60
        while not (ways := [each for each in started.children() if _is_way(each)]):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        started.kill()
        started.wait()
    assert not psutil.wait_procs(ways, timeout=5)[1]


def _workers_of(number: int) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while True:
        found = [child for each in _measuring() for child in each.children()]
        if len(found) >= number:
            return found
        assert time.monotonic() < end
        time.sleep(0.05)


def _measuring() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if _is_way(each)]


def _is_way(process: psutil.Process) -> bool:
    return any(word.removesuffix(".py") in WAYS for word in process.cmdline())


def test_memory_of_a_process_and_its_children_is_added_up() -> None:
    code = (
        "import subprocess, sys; own = bytearray(50_000_000); "
        "subprocess.run([sys.executable, '-c', 'b = bytearray(70_000_000); input()'])"
    )
    process = psutil.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 30
        while tree_bytes(process) < 120_000_000:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.stdin.close()
        process.wait(30)


def test_cpu_of_a_process_and_its_children_is_added_up() -> None:
    burn = "import os\nwhile os.times().user < 0.3: pass\n"
    code = (
        f"import subprocess, sys\n{burn}subprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    )
    process = psutil.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while cpu_seconds(tree(process)) < 0.6:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.stdin.close()
        process.wait(30)


def test_cores_are_those_of_the_time_that_counts_and_others_are_told_apart() -> None:
    # A second of loading on one core, then two of work on half of one, beside another program.
    looks = [Look(10.0, 0, 0.0, 0.0), Look(11.0, 0, 1.0, 1.0), Look(13.0, 0, 2.0, 5.0)]
    assert cores_between(looks, 11.0, 13.0) == {"cpu_cores": 0.5, "other_cores": 1.5}
    assert cores_between(looks, 10.0, 10.5) == {"cpu_cores": 1.0, "other_cores": 0.0}
    assert cores_between(looks, 11.0, 13.0, 0.75) == {"cpu_cores": 0.75, "other_cores": 1.25}
    assert cores_between([], 1.0, 2.0) == {"cpu_cores": 0.0, "other_cores": 0.0}


SOON = ("one-by-one", "joined", "pool")  # the others are much the same, and take longer to start


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[] if way in SOON else pytest.mark.slow)
        for way in WAYS
        if find_spec({"dataloader": "torch", "with-transformers": "transformers"}.get(way, "json"))
    ],
)
def test_what_is_shown_is_what_ran_and_runs_again(
    way: str, tmp_path: Path, bpe_tokenizer_dir: Path
) -> None:
    keep(tmp_path, ["def one():\n    return 1\n"] * 40)
    if way == "loader":
        assert run_way(job_of(tmp_path, bpe_tokenizer_dir, way="build")).problem is None
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(bpe_tokenizer_dir, tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    told = job_of(tmp_path, tokenizer, way=way)
    result = run_way(told)
    assert result.problem is None
    assert (tmp_path / f"{way}.py").read_text() == result.source
    # But for the names of arguments, the line that stands for it is in it.
    assert result.call.split("(")[0] in result.source
    other = tmp_path / "copied.py"
    other.write_text(result.source.replace("store-1", "store-9"))
    file = "store-1" if way == "loader" else LINES
    done = subprocess.run(
        [sys.executable, other.name, file, "0.05"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert any("tokens" in json.loads(line) for line in done.stdout.splitlines())
    assert ("tokenmill" in result.source) == (way in ("build", "loader"))


@pytest.mark.parametrize("form", [None, "NFC"])
@pytest.mark.parametrize("way", ["one-by-one", "batched", "joined"])
def test_rank_files_are_called_as_tiktoken_is(way: str, form: str | None, tmp_path: Path) -> None:
    path = tmp_path / "my 'own' $ranks.tiktoken"
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    path.write_text("\n".join(lines) + "\n")
    definition = {
        "pattern": R50K_PATTERN,
        "special_tokens": {"<|endoftext|>": 256},
        "eos_token": "<|endoftext|>",
        "normalization": form,
    }
    path.with_name(path.name + ".json").write_text(json.dumps(definition))
    keep(tmp_path, ["cafe\u0301"] * 8)
    result = run_way(job_of(tmp_path, path, way=way))
    assert result.problem is None
    assert result.tokens == result.documents * (5 if form else 6)
    assert not result.changes_ids


@pytest.mark.parametrize("way", ["one-by-one", "batched", "joined"])
def test_no_token_is_put_around_a_document_and_none_is_cut_off(
    way: str, tmp_path: Path, bpe_tokenizer_dir: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(bpe_tokenizer_dir / "tokenizer.json"))
    text = "def one():\n    return 1\n"
    alone = len(tokenizer.encode(text).ids)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    result = run_way(job_of(keep(tmp_path, [text] * 8), tmp_path / "tokenizer.json", way=way))
    assert result.problem is None
    assert result.tokens == alone * result.documents
    assert not result.changes_ids
