from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import tokenmill
from tokenmill.diagnosis.values import findings, read_evidence
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def write_run(folder: Path, lines: list[str]) -> Path:
    run = folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("\n".join(lines))
    return run


def test_a_run_is_read_up_to_the_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": step, "loss": 10 / step, "tokens_per_second": 500e3, "wait_share": 0.2})
        for step in (1, 2, 4)
    ]
    lines += [
        '{"step": 4, "val_loss": 2.6}',
        '{"step": 5, "loss": NaN, "mfu": null}',
        '{"step": 6,',
    ]
    run = read_evidence(run=write_run(tmp_path, lines)).run
    assert run is not None
    assert run.series("loss") == [(1, 10), (2, 5), (4, 2.5)]
    assert run.series("val_loss") == [(4, 2.6)]
    assert run.series("mfu") == []
    assert run.bad_lines == 1


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    line = {"step": 9, "loss": 3.14159, "tokens_per_second": 512_000, "wait_share": 0.25}
    [said] = findings(read_evidence(run=write_run(tmp_path, [json.dumps(line)])))
    assert said == (
        "Training run: 512k tokens/s, 25.0% of the time waiting for data (starved), loss 3.142 at"
        " step 9."
    )


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ([0.0, 0.002, 0.004, 0.3, 0.001], "not starved"),
        ([0.0, 0.02, 0.004, 0.3, 0.005], "close"),
        ([0.2, 0.2, 0.004, 0.3, 0.1], "starved"),
    ],
)
def test_a_run_is_called_starved_where_most_of_its_lines_say_so(
    tmp_path: Path, shares: list[float], word: str
) -> None:
    lines = [json.dumps({"step": n, "wait_share": share}) for n, share in enumerate(shares)]
    [said] = findings(read_evidence(run=write_run(tmp_path, lines)))
    assert f"waiting for data ({word})" in said


def test_a_stall_report_is_read_as_the_meter_writes_it(tmp_path: Path) -> None:
    meter = tokenmill.StallMeter()
    for _ in meter.watch(range(50)):
        pass
    path = tmp_path / "stalls.json"
    path.write_text(json.dumps(meter.report().as_json()))
    evidence = read_evidence(stalls=path)
    assert evidence.stalls is not None
    assert evidence.stalls.steps == 50
    assert findings(evidence)[0].startswith("Stall report: ")


def test_an_account_of_steps_is_read_and_drawn(tmp_path: Path) -> None:
    path, report = tmp_path / "account.json", tmp_path / "report.html"
    with tokenmill.StallMeter(account=(2, 6)) as meter:
        for _ in meter.watch(range(10)):
            sum(range(200_000))
    account = meter.account()
    path.write_text(json.dumps(account.as_json()))

    found = tokenmill.diagnose(stalls=path, report=report)
    assert found.evidence.stalls == account
    assert findings(found.evidence)[0].startswith(
        "Account of a step: where the time of a step goes"
    )
    page = report.read_text()
    assert "<h3>Where the time of a step goes</h3>" in page
    assert "computing and Python" in page
    assert "sum(range(200_000))" in page

    path.write_text(json.dumps({**account.as_json(), "parts": [{}]}))
    with pytest.raises(UsageError, match="no account of steps") as refused:
        read_evidence(stalls=path)
    assert refused.value.hint


def test_a_time_line_is_summed_up(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 1000)
    path = tmp_path / "timeline.jsonl"
    tokenmill.build(
        tmp_path / "a.txt", tokenizer="bytes", out=tmp_path / "store", monitor=path, workers=1
    )
    evidence = read_evidence(timeline=path)
    assert evidence.timeline is not None
    assert findings(evidence)[0].startswith("Build: ")


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("run", "", "no line with a step"),
        ("run", '{"loss": 1}\n', "no line with a step"),
        ("stalls", "{", "cannot be read"),
        ("stalls", "[]", "no report of a StallMeter"),
        ("stalls", "{}", "no report of a StallMeter"),
        ("timeline", "{}", "time line"),
    ],
)
def test_files_of_another_kind_are_refused(
    tmp_path: Path, option: str, content: str, words: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=words) as refused:
        read_evidence(**{option: path})
    assert refused.value.hint


@pytest.mark.parametrize("option", ["run", "stalls", "timeline"])
def test_files_that_are_not_there_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match="absent"):
        read_evidence(**{option: tmp_path / "absent"})
