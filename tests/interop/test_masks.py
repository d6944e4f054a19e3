"""Loss masks travel out and back by every format that can carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.stores import import_ids, random_shards
from tests.loader.stores import write_store

import tokenmill

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SEQ_LEN = 16


@pytest.fixture
def store(tmp_path: Path) -> tokenmill.Store:
    """Two shards: of each three tokens two count, and of one document none."""
    shards = random_shards(2, documents=12)
    masks = [[[int(n % 3 > 0) for n in range(len(ids))] for ids in shard] for shard in shards]
    masks[0][4] = [0] * len(shards[0][4])
    write_store(tmp_path / "store", shards, masks=masks)
    return tokenmill.Store(tmp_path / "store")


def stream(store: tokenmill.Store) -> tuple[NDArray[Any], NDArray[Any]]:
    """All ids, and all masks."""
    shards = [store.map_shard(number) for number in range(len(store.shards))]
    masks = [shard.mask for shard in shards if shard.mask is not None]
    return np.concatenate([shard.tokens for shard in shards]), np.concatenate(masks)


@pytest.mark.parametrize("to", ["datatrove", "olmo", "mds", "arrow", "parquet"])
def test_documents_come_back_with_their_masks(
    store: tokenmill.Store, tmp_path: Path, to: str
) -> None:
    tokenmill.export_store(store.path, to=to, out=tmp_path / to, workers=1)
    result = import_ids(tmp_path / to, tmp_path / "back", format_name=to)
    back = tokenmill.Store(tmp_path / "back")
    assert result.has_mask
    assert back.has_mask
    assert back.lengths().tolist() == store.lengths().tolist()
    for found, expected in zip(stream(back), stream(store), strict=True):
        assert np.array_equal(found, expected)
    assert back.num_silent == store.num_silent == 1


@pytest.mark.parametrize("to", ["mds", "arrow", "parquet", "pt"])
def test_rows_come_back_with_their_masks(store: tokenmill.Store, tmp_path: Path, to: str) -> None:
    tokenmill.export_store(store.path, to=to, out=tmp_path / to, seq_len=SEQ_LEN, workers=1)
    import_ids(tmp_path / to, tmp_path / "back", format_name=to)
    (ids, mask), (found_ids, found_mask) = (
        stream(each) for each in (store, tokenmill.Store(tmp_path / "back"))
    )
    assert np.array_equal(found_ids[: len(ids)], ids)
    assert np.array_equal(found_mask[: len(ids)], mask)
    assert not found_mask[len(ids) :].any(), "padding counts for nothing"


def test_targets_that_do_not_count_are_those_of_the_loader(
    store: tokenmill.Store, tmp_path: Path
) -> None:
    tokenmill.export_store(store.path, to="npz", out=tmp_path / "npz", seq_len=SEQ_LEN, workers=1)
    files = sorted((tmp_path / "npz").rglob("*.npz"))
    loader = tokenmill.Loader(store, seq_len=SEQ_LEN, batch_size=1, epochs=1, shuffle=False)
    expected = np.concatenate([batch.loss_mask for batch in loader])
    found = np.concatenate([np.load(file)["mask"] for file in files])
    assert np.array_equal(found[: len(expected)].astype(bool), expected)


def test_files_without_a_mask_among_others_count_as_a_whole(
    store: tokenmill.Store, tmp_path: Path
) -> None:
    tokenmill.export_store(store.path, to="datatrove", out=tmp_path / "ds", workers=1)
    first, _ = sorted((tmp_path / "ds").rglob("*.loss"))
    first.unlink()
    import_ids(tmp_path / "ds", tmp_path / "back", format_name="datatrove")
    back = tokenmill.Store(tmp_path / "back")
    begin = back.shards[0].tokens
    _, mask = stream(back)
    assert mask[:begin].all()
    assert np.array_equal(mask[begin:], stream(store)[1][begin:])
