from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Cli


@pytest.mark.slow
def test_ways_are_shown_in_80_columns_with_what_they_mean(cli: Cli, corpus: Path) -> None:
    shown = cli(
        "diagnose", corpus.name, "-t", "bytes", "--tokens-per-second", "1e12", "--gpus", "8",
        "--seconds", "0.05", "--workers", "1", COLUMNS="80",
    )  # fmt: skip
    lines = shown.out.splitlines()
    at_most = [line for line in lines if "tokenmill build corpus" not in line]
    assert max(map(len, at_most)) <= 80 + len("import tokenmill; loader = ")
    for title, call in {
        "one at a time": "list(text.encode())",
        "in batches": "[list(text.encode()) for text in batch]",
        "process pool": "pool.imap(encode, texts, chunksize=64)",
        "tokenmill build": "tokenmill.build(file, tokenizer=..., workers=1)",
        "tokenmill Loader": 'tokenmill.Loader("store", seq_len=1024, batch_size=8)',
    }.items():
        row, timed = (line.rstrip() for line in lines if line.startswith(title + " "))
        assert len(row) <= 80
        assert ("too slow" in row) == ("build" not in title)
        assert timed.endswith(call)
    assert "Not measured: joined: bytes have no string" in shown.out.replace("\n", " ")
    assert "8 GPUs take 8.0T tokens/s" in shown.out.replace("\n", " ")
    assert "tokenmill build corpus.jsonl --tokenizer bytes --out store" in shown.out
    assert "[1/" in shown.err


def test_a_run_alone_makes_a_report(cli: Cli) -> None:
    run = cli.folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "tokens_per_second": 1000}\n')
    found = cli("diagnose", "--run", "run", "--report", "report.html", "--json").json
    assert found["schema"] == "tokenmill.diagnosis/1"
    assert found["ways"] == []
    assert found["evidence"]["run"] == {"path": "run", "lines": 1, "bad_lines": 0}
    assert "<svg" in (cli.folder / "report.html").read_text()
    shown = cli("diagnose", "--run", "run").out
    assert "Training run: 1.0k tokens/s, loss 2.500 at step 1." in shown


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "nothing to diagnose"),
        (("corpus.jsonl",), 2, "--tokenizer"),
        (("corpus.jsonl", "-t", "bytes", "--model", "big"), 2, "'big'"),
        (("corpus.jsonl", "-t", "absent.json"), 1, "absent.json"),
        (("absent.jsonl", "-t", "bytes"), 1, "absent.jsonl"),
        (("--run", "nowhere"), 2, "metrics"),
    ],
)
def test_what_cannot_be_done_is_said_in_two_lines(
    cli: Cli, corpus: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    outcome = cli("diagnose", "--quiet", *args, code=code)
    error, hint = outcome.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert words in error + hint
