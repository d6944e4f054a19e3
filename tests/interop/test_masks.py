"""Loss masks travel out and back by every format that can carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.stores import import_ids, random_shards
from tests.loader.stores import write_store

import tokenmill
from tokenmill.errors import SourceError, UsageError

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


@pytest.mark.parametrize(
    "to", ["megatron", "merged", "datatrove", "olmo", "mds", "arrow", "parquet"]
)
def test_documents_come_back_with_their_masks(
    store: tokenmill.Store, tmp_path: Path, to: str
) -> None:
    settings: dict[str, Any] = {"merge": True} if to == "merged" else {}
    to = "megatron" if settings else to
    tokenmill.export_store(store.path, to=to, out=tmp_path / to, workers=1, **settings)
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


@pytest.mark.parametrize("to", ["megatron", "datatrove", "olmo"])
def test_masks_are_linked_and_read_in_place(
    store: tokenmill.Store, tmp_path: Path, to: str
) -> None:
    tokenmill.export_store(store.path, to=to, out=tmp_path / to, workers=1, link=True)
    linked = [path for path in (tmp_path / to).rglob("*") if path.stat().st_nlink > 1]
    assert len([path for path in linked if path.is_file()]) == 4
    foreign = tokenmill.Store.open_foreign(tmp_path / to)
    assert foreign.has_mask
    assert (foreign.num_counted, foreign.num_silent) == (store.num_counted, store.num_silent)
    for found, expected in zip(stream(foreign), stream(store), strict=True):
        assert np.array_equal(found, expected)
    for packing in ("concat", "best-fit", "pad"):
        batches, wanted = (
            tokenmill.Loader(source, seq_len=SEQ_LEN, batch_size=3, packing=packing, pad_id=0)
            for source in (foreign, store)
        )
        for _, batch, other in zip(range(12), batches, wanted, strict=False):
            assert np.array_equal(batch.loss_mask, other.loss_mask)
            assert np.array_equal(batch.labels, other.labels)


def test_masks_that_cannot_be_read_in_place_are_named(
    store: tokenmill.Store, tmp_path: Path
) -> None:
    tokenmill.export_store(store.path, to="datatrove", out=tmp_path / "out", workers=1)
    first, second = sorted((tmp_path / "out").rglob("*.loss"))
    data = first.read_bytes()
    first.write_bytes(b"\x02" + data[1:])
    with pytest.raises(SourceError, match="holds 2, and a mask holds 0 and 1"):
        tokenmill.Store.open_foreign(tmp_path / "out")
    first.write_bytes(data[1:])
    with pytest.raises(SourceError, match="bytes for"):
        tokenmill.Store.open_foreign(tmp_path / "out")
    first.unlink()
    with pytest.raises(UsageError, match="has no loss mask, and other files have one"):
        tokenmill.Store.open_foreign(tmp_path / "out")
    second.unlink()
    assert not tokenmill.Store.open_foreign(tmp_path / "out").has_mask


@pytest.mark.parametrize("to", ["nanogpt", "llmc", "litdata", "datatrove"])
def test_an_export_without_masks_says_so(store: tokenmill.Store, tmp_path: Path, to: str) -> None:
    result = tokenmill.export_store(store.path, to=to, out=tmp_path / to)
    said = any("loss masks are left out" in note for note in result.notes)
    assert said == (to != "datatrove")
