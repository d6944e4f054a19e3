"""What a loader gives must never change: a run that was begun is resumed by any later release."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
from tests.loader.stores import write_store

from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.reader import Store

GOLDEN: dict[str | tuple[str, str], str] = {
    ("concat", "full"): "24430f51873e2e44",
    ("concat", "block"): "adb4513f21cf7e41",
    ("concat", "none"): "e251e4d1b5ed5452",
    ("best-fit", "full"): "a972f18a468bce4e",
    ("pad", "full"): "0197a0505de12b60",
    "mixture": "8ed348d9935e86f7",
    "state": "71f88855f686eee2",
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    folder = tmp_path_factory.mktemp("golden")
    one = [[range(k, k + 1 + k * 7 % 61) for k in range(40)], [range(5, 300)], [range(9)]]
    two = [[range(1000 + k, 1000 + k + 1 + k * 3 % 17) for k in range(30)]]
    return write_store(folder / "one", one), write_store(folder / "two", two)


def digest(loader: Loader) -> str:
    """Of everything in the first forty batches, as little-endian integers."""
    found = hashlib.blake2b(digest_size=8)
    for _, batch in zip(range(40), loader, strict=False):
        for field in (batch.sources, batch.epochs, batch.rows, batch.input_ids, batch.labels):
            found.update(field.astype("<i8").tobytes())
        for field in (batch.position_ids, batch.doc_ids):
            found.update(field.astype("<i8").tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(("packing", "shuffle"), [key for key in GOLDEN if isinstance(key, tuple)])
def test_the_batches_of_a_seed_never_change(
    stores: tuple[Store, Store], packing: str, shuffle: str
) -> None:
    loader = Loader(
        stores[0],
        seq_len=32,
        batch_size=3,
        packing=packing,
        shuffle=shuffle,
        boundaries="mask",
        seed=42,
    )
    assert digest(loader) == GOLDEN[packing, shuffle]


def mixed(stores: tuple[Store, Store]) -> Loader:
    one, two = stores
    mixture = Mixture(
        {"one": (one, 0.65), "two": (two, 0.35)},
        stages=[Stage(tokens=32 * 36), Stage(weights={"one": 1, "two": 2}, seq_len=16)],
        max_epochs={"two": 3},
    )
    return Loader(mixture, seq_len=32, batch_size=4, seed=7)


def test_the_batches_of_a_mixture_never_change(stores: tuple[Store, Store]) -> None:
    assert digest(mixed(stores)) == GOLDEN["mixture"]


def test_the_state_of_a_mixture_never_changes(stores: tuple[Store, Store]) -> None:
    loader = mixed(stores)
    loader.seek(17)
    state = json.dumps(loader.state_dict(), sort_keys=True)
    assert hashlib.blake2b(state.encode(), digest_size=8).hexdigest() == GOLDEN["state"]


def test_nothing_depends_on_where_a_store_lies(stores: tuple[Store, Store], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    stores[0].layout.root.rename(moved)
    try:
        loader = Loader(moved, seq_len=32, batch_size=3, boundaries="mask", seed=42)
        assert digest(loader) == GOLDEN["concat", "full"]
    finally:
        moved.rename(stores[0].layout.root)
