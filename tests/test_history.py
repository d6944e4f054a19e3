"""What a run has shown, told from its state: what its loaders say of every step."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store
from tests.loader.test_trace import LENGTHS, brute_force, loaders, place_of
from tests.once import once

import tokenmill
from tokenmill import history
from tokenmill.errors import SourceError, StateError, UsageError
from tokenmill.loader.loader import Loader
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
