"""What a run has shown, told from its state: what its loaders say of every step."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.command import tokenmill_here
from tests.interop import peers
from tests.loader.stores import numbered_store
from tests.loader.test_trace import LENGTHS, brute_force, loaders, place_of
from tests.once import once

import tokenmill
from tokenmill import history
from tokenmill.errors import SourceError, StateError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.loader.order import NearbyWindows
from tokenmill.store.layout import seal

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.reader import Store


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    def make(root: Path) -> Path:
        for name, lengths in LENGTHS.items():
            numbered_store(root / name, lengths)
        return root

    root = once(tmp_path_factory, "shown", make)
    return {name: tokenmill.Store(root / name) for name in LENGTHS}


def save(path: Path, loader: Loader, how: str) -> Path:
    """The state of a loader and its recipe, as the trainer and other programs keep them."""
    saved: Any = {"loader": loader.state_dict(), "recipe": loader.recipe()}
    if how == "checkpoint":
        folder = path / "run" / "checkpoints" / "step-00000010"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint.json").write_bytes(seal(saved))
        return path / "run"
    if how == "json":
        (path / "state.json").write_text(json.dumps({"callbacks": [saved]}))
        return path / "state.json"
    torch.save({"model": {"weights": torch.zeros(3)}, "state": saved}, path / "state.pt")
    return path / "state.pt"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), how=st.sampled_from(["checkpoint", "json", "torch"]))
def test_a_document_is_traced_from_a_saved_state_alone(
    stores: dict[str, Store], tmp_path: Path, data: st.DataObject, how: str
) -> None:
    made = data.draw(loaders(stores))
    loader, steps = made[0], made[0].num_steps
    assert steps is not None
    now = data.draw(st.integers(0, steps))
    for each in made:
        each.seek(now)
    path = save(tmp_path, loader, how)
    expected = brute_force(made, range(steps))
    for name, store in zip(loader.mixture.names, loader.mixture.stores, strict=True):
        for document in data.draw(st.sets(st.integers(0, len(store) - 1), max_size=4)):
            found = history.trace(store.path, state=path, doc=document, limit=10_000)
            (traced,) = found.documents
            assert (found.step, found.ranks, traced.name) == (now, len(made), name)
            places = expected[name, document]
            shown = set(map(place_of, traced.shown))
            assert shown == {place for place in places if (place[0] or 0) < now}
            assert set(map(place_of, traced.coming)) == places - shown
            assert traced.num_shown == len(shown)


def test_as_many_showings_are_told_as_one_wants(stores: dict[str, Store], tmp_path: Path) -> None:
    loader = Loader(stores["web"], seq_len=8, batch_size=4)
    loader.seek(100)
    path = save(tmp_path, loader, "json")
    (all_of_it,) = history.trace(stores["web"], state=path, doc=4, limit=50).documents
    (few,) = history.trace(stores["web"], state=path, doc=4, limit=3).documents
    assert (few.num_shown, few.shown) == (all_of_it.num_shown, all_of_it.shown[-3:])
    assert few.coming == all_of_it.coming[:3]
    assert [each.step for each in all_of_it.coming] == sorted(
        each.step or 0 for each in all_of_it.coming
    )


def test_a_state_without_a_recipe_needs_to_be_told_what_a_step_is(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    loader = Loader(stores["web"], seq_len=8, batch_size=4, world_size=2, labels="same", seed=5)
    loader.seek(9)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(loader.state_dict()))
    with pytest.raises(UsageError, match="how many rows a step has") as caught:
        history.trace(stores["web"], state=path, doc=4)
    assert "--batch-size" in str(caught.value.hint)
    found = history.trace(stores["web"], state=path, doc=4, batch_size=4, ranks=2, limit=99)
    expected = takewhile(lambda each: (each.step or 0) < 9, loader.trace(4))
    assert found.documents[0].shown == tuple(expected)
    assert found.documents[0].num_shown


def test_a_row_and_a_text_are_traced_as_their_documents(tmp_path: Path) -> None:
    for name in ("one", "two"):
        lines = [{"text": f"{name} {number} " + "x" * number} for number in range(30)]
        lines.insert(3, {"text": ""})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenmill.build(
        tmp_path, tokenizer="bytes", out=tmp_path / "store", max_length=20, serial=True, val=0.2
    )
    store = tokenmill.Store(tmp_path / "store")
    loader = Loader(store, seq_len=16, batch_size=2)
    path = save(tmp_path, loader, "torch")
    for row in (0, 2, 4, 25):
        wanted = [
            number
            for number in range(len(store))
            if (store.source(number).path.endswith("two.jsonl"), store.source(number).row)
            == (True, row)
        ]
        if not wanted:
            with pytest.raises(UsageError, match=f"no document of row {row}"):
                history.trace(store, state=path, row=f"two.jsonl:{row}")
            continue
        found = history.trace(store, state=path, row=f"two.jsonl:{row}")
        assert [each.document for each in found.documents] == wanted
    documents = [number for number in range(len(store)) if "one 1" in store.decode(number)]
    found = history.trace(store, state=path, text="one 1")
    assert [each.document for each in found.documents] == documents
    for wrong, why in (
        ("two.jsonl:3", "no document of row 3"),  # an empty text
        ("three.jsonl:1", "no document of a file"),
        ("two.jsonl", "is no row of a file"),
    ):
        with pytest.raises(UsageError, match=why):
            history.trace(store, state=path, row=wrong)
    with pytest.raises(UsageError, match=r"no document .* holds"):
        history.trace(store, state=path, text="never")
    for document, row_of_it in ((None, None), (1, "two.jsonl:1")):
        with pytest.raises(UsageError, match="one thing can be traced"):
            history.trace(store, state=path, doc=document, row=row_of_it)


def test_what_says_nothing_of_a_run_is_refused(stores: dict[str, Store], tmp_path: Path) -> None:
    def refused(content: object, name: str = "state.json") -> pytest.ExceptionInfo[Any]:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
        with pytest.raises((StateError, SourceError)) as caught:
            history.trace(stores["web"], state=tmp_path / name, doc=1)
        return caught

    loader, other = (
        Loader(stores[name], seq_len=8, batch_size=4, seed=3) for name in ("web", "code")
    )
    state = loader.state_dict()
    assert "is no state" in str(refused("{").value)
    assert "no state of a loader" in str(refused({"step": 3}).value)
    assert "2 states of loaders" in str(refused([state, other.state_dict()]).value)
    assert "does not read" in str(refused(other.state_dict()).value)
    changed = {"loader": {**state, "step": 4}, "recipe": loader.recipe()}
    assert "was changed after it was saved" in str(refused(changed).value)
    broken = {"loader": state, "recipe": {**loader.recipe(), "max_epochs": 3}}
    assert "cannot be understood" in str(refused(broken).value)
    # A pickle that would run something is not run.
    assert "would run what it says" in str(refused("cos\nsystem\n(S'exit 1'\ntR.", "x.pt").value)
    with pytest.raises(StateError, match="is not there"):
        history.trace(stores["web"], state=tmp_path / "nowhere", doc=1)
    with pytest.raises(StateError, match="has no checkpoint"):
        history.trace(stores["web"], state=stores["web"].path, doc=1)


# -------------------------------------------------------------------------------------------------
# `ledger`: what all batches of all ranks held, counted.


def inputs_by_document(made: list[Loader], steps: range) -> Counter[tuple[str, int]]:
    """Tokens that ranks were given as inputs, by their documents, from the batches themselves."""
    seen: Counter[tuple[str, int]] = Counter()
    firsts = {
        name: [0, *store.lengths().cumsum().tolist()]
        for name, store in zip(made[0].mixture.names, made[0].mixture.stores, strict=True)
    }
    for step in steps:
        for loader in made:
            batch = loader.batch(step)
            for row, origin in zip(batch.input_ids.tolist(), loader.rows(step), strict=True):
                for part in origin.parts:
                    held = row[part.at : part.at + part.tokens]  # without a last label
                    first = firsts[origin.source][part.document] + part.first_token
                    assert held == [*range(first, first + len(held))]
                    seen[origin.source, part.document] += len(held)
    return seen


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), how=st.sampled_from(["checkpoint", "json", "torch"]))
def test_a_ledger_has_what_all_batches_held(
    stores: dict[str, Store], tmp_path: Path, data: st.DataObject, how: str
) -> None:
    made = data.draw(loaders(stores))
    loader, steps = made[0], made[0].num_steps
    assert steps is not None
    now = data.draw(st.integers(0, steps))
    for each in made:
        each.seek(now)
    found = history.ledger(save(tmp_path, loader, how))
    expected = inputs_by_document(made, range(now))
    assert (found.step, found.ranks, found.seen) == (now, len(made), expected.total())
    counted = loader.state_dict()["seen"]
    for source, store in zip(found.sources, loader.mixture.stores, strict=True):
        by_file: Counter[str] = Counter()
        for number in range(len(store)):
            by_file[store.source(number).path] += expected[source.name, number]
        assert {group.name: group.seen for group in source.by["source"]} == dict(by_file)
        assert source.seen == by_file.total()
        if (now - loader._plan.update_step) % loader.accumulate == 0:
            assert source.rows == counted[source.name]["rows"]
            assert source.epochs == pytest.approx(counted[source.name]["epochs"])
    assert found.rows * 4 <= found.places <= found.rows * 16


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_ledger_counts_rows_that_were_mixed_with_their_neighbours(
    stores: dict[str, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mixed: bool
) -> None:
    """Of several windows, as a store has that is much longer than these."""
    monkeypatch.setattr("tokenmill.loader.order.RUN_TOKENS", 8)
    how: dict[str, Any] = {"seq_len": 4, "shuffle": "nearby", "prefetch": 0}
    source: Any = stores["web"]
    if is_mixed:
        source = Mixture({name: (each, 1) for name, each in stores.items()}, max_epochs=2)
    else:
        how["epochs"] = 2

    def made(batch_size: int) -> list[Loader]:
        given = {**how, "batch_size": batch_size, "world_size": 2}
        return [Loader(source, rank=rank, **given) for rank in range(2)]

    first, second = made(2), made(3)
    rows = first[0].layouts()[0].num_rows
    assert int(NearbyWindows.of(4).holding(np.array([rows - 1]))[0]) >= 3
    expected: Counter[tuple[str, int]] = Counter()
    now = 0
    for each, step in ((first, 1), (first, 5), (second, 9), (second, 12)):
        if each is second and now == 5:
            for loader, before in zip(second, first, strict=True):
                before.seek(5)
                loader.load_state_dict(before.state_dict())
        expected += inputs_by_document(each, range(now, step))
        each[0].seek(step)
        found, now = history.ledger(save(tmp_path, each[0], "json")), step
        assert found.seen == expected.total()
        for told, store in zip(found.sources, each[0].mixture.stores, strict=True):
            by_file: Counter[str] = Counter()
            for number in range(len(store)):
                by_file[store.source(number).path] += expected[told.name, number]
            assert {group.name: group.seen for group in told.by["source"]} == dict(by_file)


def test_a_ledger_goes_on_over_a_resume_with_another_batch_size(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"seq_len": 8, "packing": "best-fit", "seed": 4}
    first = Loader(stores["web"], batch_size=4, **options)
    first.seek(13)
    second = Loader(stores["web"], batch_size=6, **options)
    second.load_state_dict(first.state_dict())
    second.seek(second.step + 5)
    expected = inputs_by_document([first], range(13))
    expected += inputs_by_document([second], range(second.step - 5, second.step))
    found = history.ledger(save(tmp_path, second, "json"))
    assert found.seen == expected.total()
    assert found.rows == 13 * 4 + 5 * 6


def test_a_ledger_counts_by_annotations_and_over_a_store_that_grew(tmp_path: Path) -> None:
    def write(name: str, numbers: range) -> None:
        rows = [
            {"text": f"{name} {n} " + "x" * n, "lang": "de" if n % 3 else "en", "n": n}
            for n in numbers
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "corpus" / f"{name}.jsonl").write_text(lines)

    (tmp_path / "corpus").mkdir()
    write("one", range(20))
    build: dict[str, Any] = {"tokenizer": "bytes", "out": tmp_path / "store", "serial": True}
    tokenmill.build(tmp_path / "corpus", **build)
    options: dict[str, Any] = {"seq_len": 16, "batch_size": 3, "seed": 1}
    before = Loader(tmp_path / "store", **options)
    before.seek(before.layouts()[0].num_rows // 2)
    state = before.state_dict()
    write("two", range(20, 30))  # of a group that is cut anew
    tokenmill.build(tmp_path / "corpus", **build)
    tokenmill.annotate(tmp_path / "store", columns="lang,n")
    loader = Loader(tmp_path / "store", **options)
    loader.load_state_dict(state)
    assert loader.growth()
    loader.seek(loader.step + 60)
    found = history.ledger(save(tmp_path, loader, "checkpoint"))
    (source,) = found.sources
    assert [*source.by] == ["source", "lang"]
    seen: dict[str, Counter[str]] = {"source": Counter(), "lang": Counter()}
    for step in range(loader.step):
        # Numbers of documents are those of the store that a row was read from.
        for origin in loader.rows(step):
            for part in origin.parts:
                tokens = min(part.tokens, 16 - part.at)
                row = part.source
                number = row.row + (20 if row.path.endswith("two.jsonl") else 0)
                seen["source"][row.path] += tokens
                seen["lang"]["de" if number % 3 else "en"] += tokens
    for column, counts in seen.items():
        assert {group.name: group.seen for group in source.by[column]} == dict(counts)
    assert len(seen["source"]) == 2
    (only,) = history.ledger(tmp_path / "run", by="folder,n").sources
    assert ([*only.by], len(only.by["n"])) == (["folder", "n"], 30)
    assert sum(group.seen for group in only.by["n"]) == source.seen
    with pytest.raises(UsageError, match="no column 'nothing'"):
        history.ledger(tmp_path / "run", by="nothing")


def test_a_ledger_of_a_mixture_by_source_names_each_and_its_store(tmp_path: Path) -> None:
    for name in ("one", "two"):
        lines = [{"text": f"{name} {number} " + "x" * number} for number in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenmill.build(
        [tmp_path / "one.jsonl", tmp_path / "two.jsonl"],
        tokenizer="bytes",
        out=tmp_path / "store",
        serial=True,
    )
    mixture = tokenmill.Mixture.from_store(
        tmp_path / "store", by="source", weights={"one.jsonl": 3, "two.jsonl": 1}
    )
    loader = Loader(mixture, seq_len=8, batch_size=4)
    loader.seek(50)
    found = tokenmill.ledger(save(tmp_path, loader, "torch"))
    assert {source.name.rpartition("/")[2]: source.rows for source in found.sources} == {
        "one.jsonl": 150,
        "two.jsonl": 50,
    }
    assert {source.store for source in found.sources} == {str(tmp_path / "store")}
    assert len({source.manifest for source in found.sources}) == 1


def test_a_ledger_as_markdown_and_as_json(stores: dict[str, Store], tmp_path: Path) -> None:
    loader = Loader(stores["web"], seq_len=8, batch_size=4, packing="pad")
    loader.seek(7)
    path = save(tmp_path, loader, "json")
    found = history.ledger(path)
    page = tokenmill_here("ledger", path, "--to", "markdown", folder=tmp_path).stdout
    assert f"{found.seen:,} tokens in 28 rows, before step 7" in page
    assert "| part-0.jsonl |" in page
    assert page.count("\n| --- ") == 2
    told = json.loads(tokenmill_here("ledger", path, "--json", folder=tmp_path).stdout)
    assert told["sources"][0]["by"]["source"][0]["seen"] == found.sources[0].by["source"][0].seen
    shown = tokenmill_here("ledger", path, folder=tmp_path).stdout
    assert f"{found.seen} tokens in 28 rows" in shown
    odd = history.ledger_markdown(
        replace(found, sources=(replace(found.sources[0], name="a|b\n*c*"),))
    )
    assert "a\\|b \\*c\\*" in odd


def test_a_croissant_description_is_valid_and_has_the_records(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    peers.require("mlcroissant")
    mixture = Mixture({"web": (stores["web"], 1), "code": (stores["code"], 3)})
    loader = Loader(mixture, seq_len=8, batch_size=4)
    loader.seek(11)
    path = save(tmp_path, loader, "json")
    found = history.ledger(path)
    said = tokenmill_here("ledger", path, "--to", "croissant", folder=tmp_path).stdout
    (tmp_path / "croissant.json").write_text(said)
    errors, records = peers.run("croissant", tmp_path / "croissant.json")
    assert errors == []
    wholes = {each["seen/source"]: each for each in records if not each["seen/column"]}
    assert {name: each["seen/seen"] for name, each in wholes.items()} == {
        each.name: each.seen for each in found.sources
    }
    assert len(records) == 2 + sum(len(each.by["source"]) for each in found.sources)
    broken = json.loads((tmp_path / "croissant.json").read_text())
    del broken["recordSet"][0]["field"][0]["dataType"]
    del broken["distribution"][0]["sha256"]
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    errors, _ = peers.run("croissant", tmp_path / "broken.json")
    assert errors
