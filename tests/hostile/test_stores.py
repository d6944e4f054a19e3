"""Stores that were damaged, or made by someone who wishes harm: an error that names the file."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builder.stores import tree
from tests.hostile.attack import LONG, attack, times, tried
from tests.hostile.guard import run_guarded
from tests.loader.stores import write_store
from tests.store.samples import GOLDEN, SampleStore

import tokenmill
from tokenmill import build, finish
from tokenmill.errors import StoreError, TokenmillError
from tokenmill.loader.loader import Loader
from tokenmill.store import stream
from tokenmill.store.check import check_store
from tokenmill.store.facts import facts_of
from tokenmill.store.layout import checksum_of
from tokenmill.store.reader import Store
from tokenmill.store.stream import MappedTokens
from tokenmill.torch import DeviceFeeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork, links or truncation")


def make_store(root: Path, *, masked: bool = False) -> Store:
    """Three shards of many pages each."""
    shards = [[range(k, k + 40) for k in range(1000)] for _ in range(3)]
    masks = [[[1] * 40 for _ in shard] for shard in shards] if masked else None
    return write_store(root, shards, masks=masks)


def in_a_fork(call: Callable[[], None]) -> int:
    """How a copy of this process ends that does the call: 0, or the signal or -1 for an error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def read_documents(store: Store) -> None:
    for number in range(len(store)):
        store[number].sum()
        if store.has_mask:
            store.mask(number)


def iterate(store: Store) -> None:
    for document in store:
        document.sum()


def read_lengths(store: Store) -> None:
    store.lengths().sum()
    store.num_counted  # noqa: B018


BEFORE_THE_CUT = 4
"""Batches that are taken while the files are whole."""


def batches_of(store: Store, packing: str, *, feeder: bool) -> Iterator[object]:
    # No thread of the loader's own: what it reads while a file is cut off is the race that
    # docs/security.md leaves open.
    loader = Loader(store, seq_len=64, batch_size=8, packing=packing, epochs=200, prefetch=0)
    if feeder:
        fed = DeviceFeeder(loader, device="cpu", fields=["input_ids", "labels", "doc_ids"])
        for number, tensors in enumerate(fed):
            while number < BEFORE_THE_CUT and fed.num_ready < fed.depth:
                time.sleep(0.001)  # until its thread has no room to read into
            yield tensors
        return
    for batch in loader:
        yield batch.loss_mask
        yield batch.doc_ids


WAYS = ["reserved", "mapped", "feeder"]
READERS: dict[str, Callable[[Store], object]] = {
    "documents": read_documents,
    "iteration": iterate,
    "lengths": read_lengths,
}


@posix
@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        *itertools.product(["bin", "idx", "mask"], ["documents", "iteration"]),
        ("idx", "lengths"),
    ],
)
def test_a_file_that_is_cut_off_while_it_is_open_is_named(
    tmp_path: Path, kind: str, reader: str
) -> None:
    make_store(tmp_path / "store", masked=kind == "mask")

    def attack() -> None:
        store = tokenmill.Store(tmp_path / "store")
        for each in READERS.values():
            each(store)
        path = next((tmp_path / "store" / "shards").glob(f"*.{kind}"))
        os.truncate(path, 4096)
        with pytest.raises(StoreError, match="cut off while it was open") as caught:
            READERS[reader](store)
        assert path.name in caught.value.message

    assert in_a_fork(attack) == 0
    tried("files cut off while they were mapped")


@posix
@pytest.mark.parametrize(
    ("kind", "packing", "way"),
    [
        *itertools.product(["bin"], ["concat", "best-fit", "pad"], [*WAYS, "in place"]),
        *itertools.product(["mask"], ["concat", "best-fit", "pad"], WAYS),
        *itertools.product(["idx"], ["concat", "pad"], WAYS),
        *itertools.product(["plan"], ["best-fit"], [*WAYS, "in place"]),
    ],
)
def test_a_file_that_is_cut_off_under_a_loader_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packing: str, way: str
) -> None:
    root = tmp_path / "store"
    make_store(root, masked=kind == "mask")
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))

    def attack() -> None:
        if way == "mapped":
            monkeypatch.setattr(stream, "ReservedTokens", MappedTokens)
        monkeypatch.setattr(stream, "FEW_DOCUMENTS", 0)  # as more documents are read
        if way == "in place":
            prefix = next((root / "shards").glob("*.bin")).with_suffix("")
            store = tokenmill.Store.open_foreign(prefix, format="megatron")
        else:
            store = tokenmill.Store(root)
        batches = batches_of(store, packing, feeder=way == "feeder")
        for _ in range(BEFORE_THE_CUT):
            next(batches)
        for path in sorted(tmp_path.rglob(f"*.{kind}")):
            os.truncate(path, 4096)
        time.sleep(0.01)
        with pytest.raises(StoreError, match="cut off while it was open") as caught:
            list(batches)
        assert f".{kind}' " in caught.value.message

    assert in_a_fork(attack) == 0
    tried("files cut off while they were mapped")


# Files of a store that are sealed anew after they were changed: whoever makes a store can do that.

VALUES: list[object] = [
    *(None, True, False, -1, 0, 1, 2, 7, 255, 65_536, 10**14, 2**31, 2**63, 10**30, 10**5000, 0.5),
    *("", "x", "train", "../../../etc/passwd", "/etc/passwd", "a/b", "0" * 32, "\ud800", "bytes"),
    *([], {}, [1], [-1, 2], [[1]], {"a": 1}, "@nested@", "@infinity@"),
]


def reseal(members: object) -> bytes:
    """The bytes of a JSON value with a checksum that holds."""
    sys.set_int_max_str_digits(0)
    body = json.dumps(members, separators=(",", ":"))[:-1]
    sys.set_int_max_str_digits(4300)
    body = body.replace('"@nested@"', "[" * 100_000 + "]" * 100_000)
    body = body.replace('"@infinity@"', "1e999")
    data = f"{body},".encode()
    return data + f'"checksum":"{checksum_of(data)}"}}\n'.encode()


def places_in(value: object) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key there."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, (dict, list)):
            keys = list(each) if isinstance(each, dict) else list(range(len(each)))
            found += [(each, key) for key in keys]
            left += [each[key] for key in keys]
    return found


def change(members: dict[str, Any], dice: random.Random) -> None:
    """Change a JSON object in one place or two."""
    for _ in range(dice.choice([1, 1, 1, 2])):
        places = places_in(members)
        holder, key = dice.choice(places)
        other, other_key = dice.choice(places)
        match dice.randrange(6):
            case 0 | 1:
                holder[key] = copy.deepcopy(dice.choice(VALUES))
            case 2:
                del holder[key]
            case 3:
                holder[key] = copy.deepcopy(other[other_key])
            case 4 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 5 if isinstance(holder, dict):
                holder[str(dice.choice(VALUES[:5]))] = holder[key]
            case _:
                if type(holder[key]) is int:
                    holder[key] += dice.choice([-1, 1, 10**6, 10**14])


def use_store(root: Path) -> list[object]:
    """All that can be asked of a store."""
    found: list[object] = []
    with Store(root, split=None) as store:
        found += [ids.tolist() for ids in store]
        found += [store[k].tolist() for k in range(min(20, len(store)))]
        found += [store.source(k) for k in range(min(20, len(store)))]
        found += [store.lengths().tolist(), store.content, store.num_counted]
        found += [store.row_lengths(k).tolist() for k in range(len(store.shards))]
        found += [list(store.rejects()), store.tokenizer_dir.name]
        for packing in ("concat", "best-fit", "pad"):
            loader = Loader(store, seq_len=7, batch_size=2, packing=packing, epochs=1)
            for batch in itertools.islice(loader, 20):
                found += [batch.input_ids.tolist(), batch.loss_mask.tolist()]
    return found


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    root = tmp_path_factory.mktemp("sample") / "store"
    files = {"tokenizer.json": b"{}"}
    units = GOLDEN.units
    SampleStore(units=units, tokenizer_files=files, has_mask=True, piece_tokens=9).write(root)
    return root, use_store(root)


def changed_copy(
    root: Path, out: Path, *, kind: str, dice: random.Random, trust: bool = True
) -> Path:
    """A copy of a store with a file of a kind changed, sealed anew."""
    shutil.copytree(root, out)
    path = dice.choice(sorted(out.glob(kind)))
    data = path.read_bytes()
    if path.suffix == ".json":
        members = json.loads(data)
        del members["checksum"]
        change(members, dice)
        path.write_bytes(reseal(members))
        if trust and path.parent.name == "shards":
            trust_receipt(out, path)
    elif path.suffix == ".plan":
        members = json.loads(data[:4096].rstrip(b"\0"))
        del members["checksum"]
        if dice.random() < 0.5:
            change(members, dice)
        path.write_bytes(reseal(members).ljust(4096, b"\0") + spoiled(data[4096:], dice))
    else:
        path.write_bytes(spoiled(data, dice))
    return path


def spoiled(data: bytes, dice: random.Random) -> bytes:
    """Numbers of 4 and 8 bytes overwritten."""
    out = bytearray(data)
    for _ in range(dice.choice([0, 1, 1, 3])):
        size = dice.choice([1, 4, 8])
        if len(out) >= size:
            at = dice.randrange(len(out) - size + 1)
            value = dice.choice([0, 1, 255, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 10**14])
            out[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(out)


def trust_receipt(root: Path, path: Path) -> None:
    """Make the manifest name the receipt as it is."""
    manifest = root / "tokenmill.json"
    members = json.loads(manifest.read_bytes())
    del members["checksum"]
    names = [
        f"{source['prefix']}-{index:05d}"
        for source in members["sources"]
        for index in range(source["units"])
    ]
    unit = members["units"][names.index(path.stem)]
    facts = facts_of(path.read_bytes())
    unit[2], unit[3] = facts.bytes, facts.checksum
    manifest.write_bytes(reseal(members))


KINDS = [
    "tokenmill.json",
    "shards/*.json",
    "shards/*.idx",
    "shards/*.mask",
    "layouts/*.plan",
    "rejects/*.jsonl",
]


@attack(short=50, long=6000, parts=2)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**9))
def test_a_store_with_changed_facts_gives_an_error_or_its_data(
    sample: tuple[Path, list[object]], kind: str, seed: int
) -> None:
    root, _ = sample
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "store"
        path = changed_copy(root, out, kind=kind, dice=random.Random(seed))
        before = (root / path.relative_to(out)).read_bytes()
        with contextlib.suppress(TokenmillError):
            use_store(out)
        with contextlib.suppress(TokenmillError):
            report = check_store(out)
            if kind in ("shards/*.idx", "shards/*.mask", "rejects/*.jsonl"):
                assert report.is_sound == (path.read_bytes() == before)
    tried(f"stores with a changed {kind.rpartition('.')[2]}")


@pytest.mark.slow
def test_changed_stores_are_read_between_guard_pages_too() -> None:
    test = "test_a_store_with_changed_facts_gives_an_error_or_its_data" + ("[0]" if LONG else "")
    plain = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "timeout=0")
    run = run_guarded("pytest", *plain, f"tests/hostile/test_stores.py::{test}")
    assert "1 passed" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
    tried("stores with changed facts, read between guard pages", times(short=50, long=3000))


BUILD: dict[str, Any] = {
    "tokenizer": "bytes",
    "workers": 1,
    "memory": "2GB",
    "unit_bytes": 400,
    "val": 0.3,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an input, the store of it, and parts of the same that are not finished."""
    root = tmp_path_factory.mktemp("built")
    lines = [json.dumps({"text": f"document {k} " * (k % 7)}) for k in range(40)]
    (root / "in.jsonl").write_text("\n".join([*lines, "{bad"]) + "\n")
    build(root / "in.jsonl", out=root / "store", max_rejects=1.0, **BUILD)
    for part in ("1/2", "2/2"):
        build(root / "in.jsonl", out=root / "parts", max_rejects=1.0, part=part, **BUILD)
    return root


@attack(short=6, long=1000, parts=4)
@given(seed=st.integers(0, 10**9), kind=st.sampled_from(["receipt", "manifest", "part", "copy"]))
def test_a_build_makes_the_same_store_of_what_was_changed_or_says_what_is_wrong(
    built: Path, seed: int, kind: str
) -> None:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "store"
        if kind == "copy":
            shutil.copytree(built / "store", out)
            one, other = dice.sample(sorted(out.glob("shards/*.json")), 2)
            shutil.copyfile(one, other)
        else:
            which = {"manifest": "tokenmill.json", "part": "parts/*.json"}
            source = built / ("parts" if kind == "part" else "store")
            pattern = which.get(kind, "shards/*.json")
            changed_copy(source, out, kind=pattern, dice=dice, trust=False)
        with contextlib.suppress(TokenmillError):
            if kind == "part":
                finish(out)
            else:
                build(built / "in.jsonl", out=out, max_rejects=1.0, **BUILD)
            if kind in ("receipt", "manifest"):  # what is sealed is believed, if it can be true
                use_store(out)
            else:
                assert tree(out) == tree(built / "store")
    tried("builds that go on in a store with a changed receipt, manifest or record")


LINKED = [
    "tokenmill.json",
    "runs.jsonl",
    ".lock",
    ".lock-workers",
    ".lock-large",
    "tokenizer",
    "shards",
    "rejects",
    "layouts",
    "tmp",
    "parts",
    "layouts/*.plan",
    "shards/*.json",
    "shards/*.bin",
    "shards/*.idx",
    "rejects/*",
    "tokenizer/extra.json",
    "parts/*.json",
]


@posix
@pytest.mark.parametrize("linked", LINKED)
def test_nothing_of_a_store_may_be_a_link_that_leaves_it(
    built: Path, tmp_path: Path, linked: str
) -> None:
    kind = "parts" if linked.startswith("parts") else "store"
    root, outside = tmp_path / "store", tmp_path / "outside"
    shutil.copytree(built / kind, root)
    if kind == "store":
        list(Loader(Store(root), seq_len=16, batch_size=2, packing="best-fit", epochs=1))
    path = next(iter(sorted(root.glob(linked))), root / linked)
    if path.exists():
        path.rename(outside)
    elif linked == "tmp":
        outside.mkdir()
    else:
        outside.write_text("precious")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(outside)
    before = tree(outside) if outside.is_dir() else outside.read_bytes()
    with pytest.raises(StoreError, match="is a link that leaves the store") as caught:
        if kind == "parts":
            finish(root)
        else:
            build(built / "in.jsonl", out=root, max_rejects=1.0, **BUILD)
    assert str(path) in caught.value.message
    assert (tree(outside) if outside.is_dir() else outside.read_bytes()) == before
    if kind == "store":
        with pytest.raises(StoreError, match="is a link that leaves the store"):
            Store(root)
        assert not check_store(root).is_sound
    tried("links out of a store")


@posix
def test_a_lock_that_is_a_link_to_another_file_of_the_store_spares_that_file(
    built: Path, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(built / "store", root)
    (root / ".lock").unlink()
    (root / ".lock").symlink_to(next(root.glob("shards/*.bin")))
    before = tree(root)
    with pytest.raises(StoreError, match="cannot be locked"):
        build(built / "in.jsonl", out=root, max_rejects=1.0, **BUILD)
    assert tree(root) == before


def test_a_flipped_bit_in_any_file_is_found_by_verify(built: Path, tmp_path: Path) -> None:
    root, dice = tmp_path / "store", random.Random(0)
    shutil.copytree(built / "store", root)
    list(Loader(Store(root), seq_len=16, batch_size=2, packing="best-fit", epochs=1))
    kinds: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.name.startswith(".lock") and path.stat().st_size:
            kinds.setdefault(f"{path.parent.name} {path.suffix}", []).append(path)
    assert len(kinds) == 7, "manifest, log, receipts, tokens, indexes, rejects, plans"
    for paths in kinds.values():
        for _ in range(times(short=2, long=400)):
            path = dice.choice(paths)
            data = path.read_bytes()
            changed = bytearray(data)
            changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            path.write_bytes(changed)
            with contextlib.suppress(StoreError):  # a manifest of another version, say
                report = check_store(root)
                assert path.relative_to(root).as_posix() in {each.file for each in report.findings}
            path.write_bytes(data)
            tried("flipped bits in the files of a store")
    assert check_store(root).is_sound


@pytest.mark.parametrize("number", [10**14, 2**63, 2**64, 10**30, -1])
@pytest.mark.parametrize("column", ["documents", "tokens", "rows", "receipt_bytes"])
def test_absurd_counts_in_a_manifest_are_about_the_store(
    built: Path, tmp_path: Path, number: int, column: str
) -> None:
    root = tmp_path / "store"
    shutil.copytree(built / "store", root)
    members = json.loads((root / "tokenmill.json").read_bytes())
    del members["checksum"]
    columns = members["columns"]
    unit = next(unit for unit in members["units"] if unit[-1])
    if column in columns["unit"]:
        unit[columns["unit"].index(column)] = number
    else:
        shard = unit[-1][0]
        more = number - shard[columns["shard"].index(column)]
        shard[columns["shard"].index(column)] = number
        members["splits"][shard[0]][column] += more
        members["totals"][column] += more
        members["totals"]["rows"] += more if column == "documents" else 0
    (root / "tokenmill.json").write_bytes(reseal(members))
    if column == "rows" and number > 0:
        assert use_store(root)
    else:
        with pytest.raises(StoreError, match=r"tokenmill.json' is not|the store is incomplete"):
            use_store(root)
    with contextlib.suppress(StoreError):
        assert not check_store(root).is_sound
    tried("stores with a changed json")
