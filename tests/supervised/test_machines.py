"""Supervised builds in parts and in object stores: the bytes of one local build, masks and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.builder.stores import tree
from tests.store.s3_server import BUCKET, remote_tree, s3_session
from tests.supervised.families import CHATML
from tests.supervised.shaping import chat

import tokenmill
from tokenmill.errors import StoreError
from tokenmill.loader.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Case = tuple[dict[str, Any], dict[str, bytes]]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with s3_session():
        yield


@pytest.fixture(params=["chat", "prompt-completion", "template"])
def case(
    request: pytest.FixtureRequest,
    family_dir: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    """Options of a build of several units, and the store that it makes on one machine."""
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"inputs": "rows.jsonl", "unit_bytes": 2000, "val": 0.2}
    options |= {"max_rejects": 1.0, "serial": True}
    if request.param == "chat":
        rows: list[object] = [chat(f"ask {i}", f"say {i} " * (i % 7)) for i in range(80)]
        options |= {"tokenizer": family_dir("chatml"), "format": "chat"}
    elif request.param == "prompt-completion":
        rows = [{"prompt": f"{i}?", "completion": f"{i}! " * (i % 9 + 1)} for i in range(200)]
        options |= {"tokenizer": "bytes", "format": "prompt-completion", "max_length": 30}
    else:
        rows = [{"title": f"T{i}", "body": "b" * (i % 40)} for i in range(200)]
        options |= {"tokenizer": "bytes", "template": "{title}\n{body}"}
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, 5]))
    tokenmill.build(**options, out="local")
    found = tree(Path("local"))
    masks = [name for name in found if name.endswith(".mask")]
    assert len(masks) > 3 or request.param == "template"
    return options, found


@pytest.mark.parametrize("place", ["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def test_parts_make_the_store_of_one_build(
    case: Case, place: str, request: pytest.FixtureRequest
) -> None:
    options, expected = case
    out = "parts" if place == "folder" else f"s3://{BUCKET}/{request.node.name}/store"
    for part in ("2/3", "1/3", "3/3"):
        tokenmill.build(**options, out=out, part=part)
    result = tokenmill.finish(out)
    assert (tree(Path(out)) if place == "folder" else remote_tree(out)) == expected
    whole = tokenmill.build(**options, out="local")
    assert whole.nothing_to_do
    assert result.lengths == whole.lengths
    assert (result.lengths is None) == ("template" in options)


def test_a_template_of_ones_own_is_taken_from_the_store_when_parts_are_finished(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps(chat(f"ask {i}", f"say {i}")) + "\n" for i in range(50))
    Path("rows.jsonl").write_text(rows)
    Path("own.jinja").write_text(CHATML)
    options: dict[str, Any] = {"inputs": "rows.jsonl", "format": "chat", "unit_bytes": 2000}
    options |= {"tokenizer": family_dir("chatml"), "serial": True}
    for part in ("1/2", "2/2"):
        tokenmill.build(**options, out="parts", part=part, chat_template="own.jinja")
    with pytest.raises(StoreError, match="other values of train_on"):
        tokenmill.build(**options, out="parts", part="1/2", train_on="all")
    tokenmill.build(**options, out="whole", chat_template="own.jinja")
    Path("own.jinja").unlink()
    tokenmill.finish("parts")
    assert tree(Path("parts")) == tree(Path("whole"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("chat", marks=pytest.mark.slow),
        pytest.param("prompt-completion", marks=pytest.mark.slow),
        pytest.param("template", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_masks_are_written_to_a_bucket_resumed_checked_and_fed_from_there(
    case: Case, request: pytest.FixtureRequest
) -> None:
    options, expected = case
    out = f"s3://{BUCKET}/{request.node.name}/store"
    result = tokenmill.build(**options, out=out)
    assert remote_tree(out) == expected
    again = tokenmill.build(**options, out=out)
    assert again.nothing_to_do
    assert again.lengths == result.lengths
    assert tokenmill.verify(out, sample=50).ok
    near, far = (Loader(tokenmill.Store(path), seq_len=64, batch_size=2) for path in ("local", out))
    for mine, theirs, _ in zip(near, far, range(4), strict=False):
        assert mine.input_ids.tolist() == theirs.input_ids.tolist()
        assert mine.loss_mask.tolist() == theirs.loss_mask.tolist()
    mask = next((name for name in expected if name.endswith(".mask")), None)
    if mask is None:
        return
    flipped = bytes([expected[mask][0] ^ 1]) + expected[mask][1:]
    import fsspec

    fsspec.filesystem("s3").pipe_file(f"{out}/{mask}", flipped)
    assert [finding.file for finding in tokenmill.verify(out).findings] == [mask]
    fsspec.filesystem("s3").rm_file(f"{out}/{mask}")
    assert tokenmill.build(**options, out=out).units_built == 1
    assert remote_tree(out) == expected
