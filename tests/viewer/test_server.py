"""The server alone: who may ask, for what, and what is answered."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import tokenmill
from tokenmill.diagnosis.page import thinned
from tokenmill.diagnosis.values import read_run
from tokenmill.errors import UsageError
from tokenmill.options import PACKINGS
from tokenmill.viewer import runs

from .conftest import HOSTILE, LONG_WORDS, files_of

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Viewer

QUESTIONS = ("about", "overview", "frequencies", "documents", "rejects", "packings")


def test_it_listens_to_this_machine_alone(viewer: Viewer) -> None:
    listening = [
        each.laddr
        for each in psutil.Process(viewer.pid).net_connections()
        if each.status == psutil.CONN_LISTEN
    ]
    assert [(each.ip, each.port) for each in listening] == [("127.0.0.1", viewer.port)]


def test_nobody_is_answered_without_the_token(viewer: Viewer) -> None:
    for path in ("/", "/?token=guess", f"/?token={viewer.token}x", "/api/about"):
        assert viewer.get(path)[0] == 403, path
    assert viewer.get("/api/about", Authorization="Bearer guess")[0] == 403
    # The address of a page gets into logs and histories: it does not open what holds data.
    assert viewer.get(f"/api/about?token={viewer.token}")[0] == 403
    assert viewer.get(f"/?token={viewer.token}")[0] == 200


def test_no_other_site_is_answered(viewer: Viewer) -> None:
    bearer = {"Authorization": f"Bearer {viewer.token}"}
    here = f"127.0.0.1:{viewer.port}"
    assert viewer.get("/api/about", **bearer)[0] == 200
    assert viewer.get("/api/about", **bearer, Origin=f"http://{here}")[0] == 200
    for headers in (
        {"Host": f"evil.example:{viewer.port}"},  # a name that was made to mean this machine
        {"Host": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ):
        assert viewer.get("/api/about", **bearer, **headers)[0] == 403, headers
    assert viewer.get(f"/?token={viewer.token}", Host="evil.example")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert viewer.get("/api/about", method=method, **bearer)[0] == 405


def test_no_file_can_be_asked_for(viewer: Viewer) -> None:
    bearer = {"Authorization": f"Bearer {viewer.token}"}
    for path in (
        "/../pyproject.toml",
        "/page.html",
        "/stores.py",
        "/uplot/../server.py",
        "/api/%2e%2e%2fserver.py",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
    ):
        status, _, body = viewer.get(path, **bearer)
        assert status in (400, 404), path
        assert b"import" not in body
    for given in ({"of": "/etc"}, {"of": 9}, {"source": "../x"}, {"path": "/etc/passwd"}):
        assert "error" in viewer.ask("documents", **given)
    for name in ("__init__", "about.name", "whole", "_raw"):
        assert "error" in viewer.ask(name)


def test_every_answer_forbids_what_is_not_needed(viewer: Viewer) -> None:
    bearer = {"Authorization": f"Bearer {viewer.token}"}
    for path in (f"/?token={viewer.token}", "/page.js", "/api/about", "/nothing", "/"):
        _, headers, _ = viewer.get(path, **bearer)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_page_of_a_large_document_is_small(viewer: Viewer) -> None:
    found = viewer.ask("documents", least=LONG_WORDS)
    (large,) = found["documents"]
    page = viewer.ask("document", number=large["number"])
    assert page["tokens"] > LONG_WORDS
    assert len(page["ids"]) == len(page["texts"]) == 2000
    last = viewer.ask("document", number=large["number"], first=page["tokens"] - 10)
    assert (len(last["ids"]), last["special"]) == (10, [9])
    assert len(json.dumps(page)) < 100_000


def test_documents_are_found_by_what_is_asked(viewer: Viewer) -> None:
    store = tokenmill.Store(viewer.folder / "store", split=None)
    lengths = store.lengths()
    found = viewer.ask("documents", least=400, most=500, count=200)
    wanted = [k for k, length in enumerate(lengths) if 400 <= length <= 500]
    assert [each["number"] for each in found["documents"]] == wanted
    odd = viewer.ask("documents", source=0)
    assert len(odd["documents"]) == len(HOSTILE) + 2
    assert {store.source(each["number"]).path for each in odd["documents"]} == {
        store.manifest.sources[0].path
    }
    kept = tokenmill.Store(viewer.folder / "store").select("lang == 'py' and tokens > 400")
    found = viewer.ask("documents", split="train", where="lang == 'py' and tokens > 400", count=9)
    shown = [viewer.ask("document", split="train", number=n["number"]) for n in found["documents"]]
    assert [each["ids"] for each in shown] == [ids[:2000].tolist() for ids in kept][:9]
    assert [each["columns"] for each in shown] == [{"lang": "py"}] * len(shown)
    assert "tongue" in viewer.ask("documents", where="tongue == 'py'")["error"]
    val = viewer.ask("documents", split="val")
    assert {each["split"] for each in val["documents"]} == {"val"}
    assert val["end"] == store.manifest.splits["val"].documents
    numbers: list[int] = []
    at: int | None = 0
    while at is not None:  # an answer is what was found in a tenth of a second
        found = viewer.ask("documents", text='ONERROR="', first=at)  # whatever the case
        numbers += [each["number"] for each in found["documents"]]
        at = found["next"]
    assert [store.decode(number) for number in numbers] == [HOSTILE[0]]


def test_a_document_is_what_the_store_has(viewer: Viewer) -> None:
    store = tokenmill.Store(viewer.folder / "store", split=None)
    for number in range(0, len(store), 5):
        found = viewer.ask("document", number=number)
        assert found["ids"] == store[number][:2000].tolist()
        if len(store[number]) <= 2000:
            assert found["text"] == store.decode(number)
            row = viewer.ask("row", number=number)
            assert row["text"] == found["text"]
    assert "error" in viewer.ask("document", number=len(store))
    assert "error" in viewer.ask("document", number=-1)


def test_rejected_rows_are_shown_with_what_they_are(viewer: Viewer) -> None:
    found = viewer.ask("rejects")
    assert [row["raw"] for row in found["rows"]] == ['{"text": 12}\n', '{"broken\n']
    assert sum(found["reasons"].values()) == found["of"] == 2


def test_batches_are_those_of_a_loader(viewer: Viewer) -> None:
    how = {"seq_len": 200, "packing": "best-fit", "seed": 3}
    found = viewer.ask("batch", step=2, rows=2, ranks=3, balance="true", **how)
    store = tokenmill.Store(viewer.folder / "store")
    for rank, shown in enumerate(found["ranks"]):
        loader = tokenmill.Loader(
            store,
            batch_size=2,
            rank=rank,
            world_size=3,
            balance="attention",
            **how,  # type: ignore[arg-type]
        )
        batch = loader.batch(2)
        assert shown["pairs"] == batch.attention_pairs
        drawn = [
            [(part.document, part.first_token, part.tokens, part.at) for part in row.parts]
            for row in loader.rows(2)
        ]
        assert [[tuple(p) for p in row["parts"] if p[0] >= 0] for row in shown["rows"]] == drawn


def test_what_packings_waste_is_what_layout_says(viewer: Viewer) -> None:
    said = tokenmill.layout(viewer.folder / "store", seq_len=300).accounts
    shutil.rmtree(viewer.folder / "store" / "layouts")
    found = viewer.ask("packings", seq_len=300)["packings"]
    for account, shown in zip(said, found, strict=True):
        assert (shown["name"], shown["rows"]) == (account.packing, account.rows)
        assert shown["padding"] == account.padding / account.places
        assert shown["dropped"] == account.dropped / account.tokens
        assert shown["split"] == account.split_documents / account.documents


def test_a_long_run_comes_in_parts_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "READ_SECONDS", 0.001)
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": k, "loss": 9 / k, "lr": 0.1}) + "\n" for k in range(1, 20_000)]
    lines.insert(7, "not json\n")
    file.write_text("".join(lines))
    shown = runs.ShownRun(tmp_path)
    answers: list[dict[str, Any]] = []
    while not answers or answers[-1]["unread"]:
        answers.append(shown.run())
    lefts = [answer["unread"] for answer in answers]
    assert len(lefts) > 1
    assert lefts == sorted(lefts, reverse=True)
    points = thinned(read_run(file).series("loss"), np.mean)
    x, y = answers[-1]["lines"]["loss"]
    assert x == [step for step, _ in points]
    assert y == pytest.approx([loss for _, loss in points])
    assert (answers[-1]["last"]["step"], answers[-1]["bad_lines"]) == (19_999, 1)
    with file.open("a") as more:  # half a line is none yet
        more.write('{"step": 200000, ')
        more.flush()
        assert shown.run()["last"]["step"] == 19_999
        more.write('"loss": 0.5}\n')
    assert shown.run()["last"]["loss"] == 0.5
    file.write_text('{"step": 1, "loss": 4.0}\n' * 40_000)  # another run, and longer
    assert shown.run()["last"]["step"] == 1


def test_nothing_is_written(viewer: Viewer) -> None:
    before = files_of(viewer.folder)
    for question in QUESTIONS:
        viewer.ask(question)
    for packing in PACKINGS:
        viewer.ask("batch", packing=packing, seq_len=100)
    assert files_of(viewer.folder) == before


def test_what_cannot_be_shown_is_an_error_before_a_page_is_opened(tmp_path: object) -> None:
    with pytest.raises(UsageError, match="nothing to show"):
        tokenmill.view([], no_open=True)
