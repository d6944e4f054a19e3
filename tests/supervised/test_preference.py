"""Pairs of a chosen and a rejected answer: what they become, what is refused, and TRL's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builder.stores import tree
from tests.command import tokenmill_here
from tests.interop import peers
from tests.supervised.families import FAMILIES
from tests.supervised.shaping import chat

import tokenmill
from tokenmill.errors import StoreError, UsageError
from tokenmill.options import RowShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Folder = Callable[[str], Path]


def texts(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"What is {i} + 1? Say", "chosen": f" {i + 1}, sure", "rejected": f" {i}"}
        for i in range(count)
    ]


def talks(count: int) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        prompt = chat(*["a", f"b{i}", "c"][2 * (i % 2) :], system="kind" if i % 3 else None)
        sides = [[{"role": "assistant", "content": text}] for text in (f"yes {i}", f"\n\nno{i}")]
        rows.append({"prompt": prompt["messages"], "chosen": sides[0], "rejected": sides[1]})
    return rows


def implicit(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, of which both sides have the prompt."""
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]


def write(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def columns(store: tokenmill.Store) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in store.pair(number)] for number in range(store.num_pairs)]


def test_a_pair_is_two_documents_of_which_the_answers_count(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    rows = texts(40)
    source = write(tmp_path / "pairs.jsonl", rows)
    options: dict[str, Any] = {"tokenizer": bpe_tokenizer_dir, "format": "preference"}
    result = tokenmill.build(source, out=tmp_path / "s", serial=True, **options)
    assert (result.pairs, result.totals.rows, result.totals.documents) == (40, 40, 80)
    store = tokenmill.Store(tmp_path / "s")
    assert store.has_pairs
    assert store.num_pairs == 40
    for number, row in enumerate(rows):
        for side, name in enumerate(("chosen", "rejected")):
            document, mask = store[2 * number + side], store.mask(2 * number + side)
            assert mask is not None
            assert store.reference.decode(document[:-1]) == row["prompt"] + row[name]
            assert mask.tolist() == sorted(mask.tolist())
            assert store.source(2 * number + side).row == number
        prompt, chosen, rejected = store.pair(number)
        assert store.reference.decode(prompt) == row["prompt"]
        assert store.reference.decode(chosen[:-1]) == row["chosen"]
        assert store.reference.decode(rejected[:-1]) == row["rejected"]
        assert chosen[-1] == rejected[-1] == store.eos_id
    assert json.loads((tmp_path / "s" / "tokenmill.json").read_text())["format_version"] == 8
    assert tokenmill.verify(tmp_path / "s").ok
    for number, answer in enumerate(("chosen", "rejected")):
        shown = tokenmill_here("inspect", "s", "--doc", str(number), folder=tmp_path)
        assert f"row 0, line 1, with its {answer} answer" in shown.stdout


def test_prompts_may_be_implicit_and_rows_texts_or_messages(
    family_dir: Folder, tmp_path: Path
) -> None:
    for name, rows in (("texts", texts(30)), ("talks", talks(30))):
        made = []
        for kind, given in (("given", rows), ("implicit", implicit(rows))):
            source = write(tmp_path / f"{name}-{kind}.jsonl", given)
            out = tmp_path / f"{name}-{kind}"
            options: dict[str, Any] = {"tokenizer": family_dir("chatml"), "format": "preference"}
            tokenmill.build(source, out=out, serial=True, **options)
            assert tokenmill.verify(out).ok
            store = tokenmill.Store(out)
            assert store.num_pairs == 30
            made.append(columns(store))
            wanted = "chat-preference" if name == "talks" else "preference"
            assert store.manifest.identity.config["format"] == wanted
        if name == "talks":
            assert made[0] == made[1]
        else:
            # As long a prompt as both sides have in common, less the space before a word.
            joined = [[pair[0] + pair[1], pair[0] + pair[2]] for pair in made[0]]
            assert joined == [[pair[0] + pair[1], pair[0] + pair[2]] for pair in made[1]]


def test_workers_splits_and_resuming_leave_no_trace(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "pairs.jsonl", texts(600))
    options: dict[str, Any] = {"tokenizer": bpe_tokenizer_dir, "format": "preference", "val": 0.3}
    options["unit_bytes"] = 6_000
    tokenmill.build(source, out=tmp_path / "one", serial=True, **options)
    tokenmill.build(source, out=tmp_path / "two", workers=2, **options)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    before = tree(tmp_path / "one")
    for path in [*(tmp_path / "one" / "shards").glob("*.json")][::2]:
        path.unlink()
    (tmp_path / "one" / "tokenmill.json").unlink()
    tokenmill.build(source, out=tmp_path / "one", serial=True, **options)
    assert tree(tmp_path / "one") == before
    pairs = [tokenmill.Store(tmp_path / "one", split=split).num_pairs for split in ("train", "val")]
    assert sum(pairs) == 600
    assert min(pairs) > 100


def test_a_limit_is_that_of_each_side(bpe_tokenizer_dir: Path, tmp_path: Path) -> None:
    rows = texts(10)
    rows[3]["rejected"] = " no" * 100
    rows[5]["prompt"] = "very " * 100
    source = write(tmp_path / "pairs.jsonl", rows)
    options: dict[str, Any] = {"tokenizer": bpe_tokenizer_dir, "format": "preference"}
    options |= {"serial": True, "max_rejects": 1.0, "max_length": 40}
    with pytest.raises(UsageError, match="too_long='truncate'"):
        tokenmill.build(source, out=tmp_path / "s", **options)
    result = tokenmill.build(source, out=tmp_path / "cut", too_long="truncate", **options)
    cut = tokenmill.Store(tmp_path / "cut")
    assert (result.totals.rows, result.totals.documents, result.totals.rejected) == (10, 18, 1)
    assert [(row.row, row.reason) for row in cut.rejects()] == [(5, "nothing-to-train-on")]
    assert len(cut[7]) == 40
    assert tokenmill.verify(tmp_path / "cut").ok
    tokenmill.build(source, out=tmp_path / "left", too_long="reject", **options)
    left = tokenmill.Store(tmp_path / "left")
    assert [(row.row, row.reason) for row in left.rejects()] == [(3, "too-long"), (5, "too-long")]
    assert left.num_pairs == 8


def test_rows_that_prefer_nothing_are_rejected(family_dir: Folder, tmp_path: Path) -> None:
    good, [talk] = texts(1)[0], talks(1)
    said, asked = talk["chosen"], talk["prompt"]
    for name, first, others in (
        (
            "texts",
            good,
            [
                (good | {"chosen": ""}, "nothing-to-train-on"),
                (good | {"chosen": good["rejected"]}, "nothing-to-train-on"),
                ({"chosen": "a", "rejected": "b"}, "bad-conversation"),
                ({"prompt": "a", "chosen": "b"}, "missing-field"),
                (good | {"rejected": None}, "null-text"),
                (good | {"rejected": ["x"]}, "not-a-string"),
            ],
        ),
        (
            "talks",
            talk,
            [
                (talk | {"chosen": []}, "nothing-to-train-on"),
                (talk | {"rejected": said}, "nothing-to-train-on"),
                ({"chosen": said, "rejected": talk["rejected"]}, "bad-conversation"),
                (talk | {"prompt": [*asked, *said]}, "bad-conversation"),
                (talk | {"rejected": asked}, "no-assistant-turn"),
                (talk | {"rejected": "text"}, "bad-conversation"),
            ],
        ),
    ):
        source = write(tmp_path / f"{name}.jsonl", [first, *(row for row, _ in others), first])
        options: dict[str, Any] = {"tokenizer": family_dir("chatml"), "format": "preference"}
        tokenmill.build(source, out=tmp_path / name, serial=True, max_rejects=1.0, **options)
        store = tokenmill.Store(tmp_path / name)
        assert [row.reason for row in store.rejects()] == [why for _, why in others]
        assert store.num_pairs == 2
        with pytest.raises(IndexError):
            store.pair(2)


def test_what_would_learn_rejected_answers_is_refused(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    write(tmp_path / "pairs.jsonl", texts(30))
    args = ("build", "pairs.jsonl", "-t", bpe_tokenizer_dir, "-o", "s", "--format", "preference")
    said = " ".join(tokenmill_here(*args, folder=tmp_path).stdout.split())
    assert "30: a chosen and a rejected answer" in said
    assert "split into" not in said
    said = " ".join(tokenmill_here("inspect", "s", folder=tmp_path).stdout.split())
    assert "pairs of two documents, chosen and rejected, from texts" in said
    with pytest.raises(UsageError, match="would learn what was rejected"):
        tokenmill.Loader(tmp_path / "s", seq_len=32, batch_size=2)
    with pytest.raises(UsageError, match="would learn what was rejected"):
        tokenmill.export(tmp_path / "s", to="arrow", out=tmp_path / "arrow")
    with pytest.raises(StoreError, match="of another build"):
        tokenmill.build(
            write(tmp_path / "pairs.jsonl", texts(30)),
            tokenizer=bpe_tokenizer_dir,
            out=tmp_path / "s",
            format="prompt-completion",
            completion_field="chosen",
        )
    with pytest.raises(UsageError, match="format='chat-preference'"):
        RowShape(format="preference", chat_date="2024-01-01")


@pytest.mark.slow
def test_columns_and_the_losses_of_dpo_and_reward_are_those_of_trl(
    family_dir: Folder, tmp_path: Path
) -> None:
    peers.require("trl")
    folder = family_dir("qwen")
    merging = [row | {"prompt": row["prompt"] + " "} for row in texts(4)]
    given = {
        "texts": [*texts(12), *merging],
        "talks": talks(12),
        "implicit": implicit(talks(6)),
        "inside": implicit(texts(12)),
    }
    stores = {}
    for name, rows in given.items():
        source, out = write(tmp_path / f"{name}.jsonl", rows), tmp_path / name
        tokenmill.build(source, tokenizer=folder, out=out, format="preference", serial=True)
        stores[name] = out
    answers = peers.run("trl", "prefer", folder, FAMILIES["qwen"].template, given, stores)
    for name, answer in answers.items():
        theirs, ours = answer["columns"]
        assert ours == theirs, name
        assert np.isfinite(answer["losses"]).all()
        assert len(answer["losses"]) == 3
        assert answer["losses"][0] == answer["losses"][1], name
        theirs, ours = answer["reward"]
        assert ours == theirs, name
        # The same rows in a longer batch.
        assert answer["losses"][2] == pytest.approx(answer["losses"][0], rel=1e-6), name


def pairs_store(tokenizer: Path, folder: Path, count: int) -> tokenmill.Store:
    source = write(folder / "pairs.jsonl", texts(count))
    options: dict[str, Any] = {"tokenizer": tokenizer, "format": "preference", "serial": True}
    tokenmill.build(source, out=folder / "s", **options)
    return tokenmill.Store(folder / "s")


def test_a_loader_of_pairs_gives_every_pair_once_to_all_ranks_and_goes_on_anywhere(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    store = pairs_store(bpe_tokenizer_dir, tmp_path, 48)
    options: dict[str, Any] = {"seq_len": 24, "epochs": 2, "seed": 3}
    alone = [*tokenmill.PairLoader(store, batch_size=8, **options)]
    assert len(alone) == 12
    numbers = np.concatenate([batch.pairs for batch in alone])
    for epoch in (numbers[:48], numbers[48:]):
        assert sorted(epoch.tolist()) == [*range(48)]
        assert epoch.tolist() != [*range(48)]
    for batch in alone:
        for place, number in enumerate(batch.pairs.tolist()):
            for row, side in ((place, 0), (place + 8, 1)):
                pair = store.pair(number)
                both = np.concatenate([pair.prompt_ids, pair[1 + side]])[:24].tolist()
                inside = batch.attention_mask[row] == 1
                assert batch.input_ids[row][inside].tolist() == both
                assert (batch.labels[row] != -100).tolist() == (
                    batch.completion_mask[row] == 1
                ).tolist()
                counted = batch.labels[row][batch.labels[row] != -100].tolist()
                assert counted == pair[1 + side].tolist()[: 24 - len(pair.prompt_ids)]
    ranks = [
        tokenmill.PairLoader(store, batch_size=4, rank=r, world_size=2, **options) for r in (0, 1)
    ]
    for batch, *parts in zip(alone, *ranks, strict=True):
        assert np.concatenate([part.pairs for part in parts]).tolist() == batch.pairs.tolist()
    first = tokenmill.PairLoader(store, batch_size=8, **options)
    for _ in range(5):
        batch = next(iter(first))
    again = tokenmill.PairLoader(store, batch_size=4, rank=1, world_size=2, **options)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [part.pairs.tolist() for part in again] == [b.pairs[4:].tolist() for b in alone[5:]]
    with pytest.raises(UsageError, match="seed"):
        again.load_state_dict(first.state_dict() | {"seed": 4})


def test_pairs_that_were_added_come_when_the_epoch_has_ended(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"seq_len": 24, "batch_size": 5, "epochs": 3}
    old = tokenmill.PairLoader(pairs_store(bpe_tokenizer_dir, tmp_path, 12), **given)
    alone = [batch.pairs.tolist() for batch in old]
    old.load_state_dict({**old.state_dict(), "step": 1})
    write(tmp_path / "more.jsonl", texts(19)[12:])
    options: dict[str, Any] = {"tokenizer": bpe_tokenizer_dir, "format": "preference"}
    files = [tmp_path / "pairs.jsonl", tmp_path / "more.jsonl"]
    tokenmill.build(files, out=tmp_path / "s", serial=True, **options)
    new = tokenmill.PairLoader(tmp_path / "s", **given)
    assert new.store.num_pairs == 19
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.num_steps == (12 + 2 * 19) // 5
    drawn = [number for batch in new for number in batch.pairs.tolist()]
    assert drawn[:7] == [number for batch in alone for number in batch][5:12]
    assert sorted(drawn[7:26]) == sorted(drawn[26:45]) == [*range(19)]
    later = tokenmill.PairLoader(tmp_path / "s", **given)
    later.load_state_dict(new.state_dict() | {"step": 4})
    assert [number for batch in later for number in batch.pairs.tolist()] == drawn[15:]
    tokenmill.prune(tmp_path / "s")
    later.load_state_dict(new.state_dict() | {"step": 4})
    assert next(iter(later)).pairs.tolist() == drawn[15:20]
    with pytest.raises(UsageError, match="does not keep what it held until epoch 1"):
        later.batch(0)
    with pytest.raises(UsageError, match="the state has store"):
        later.load_state_dict(old.state_dict())


def test_a_loader_of_pairs_refuses_what_it_cannot_feed(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    store = pairs_store(bpe_tokenizer_dir, tmp_path, 5)
    with pytest.raises(StoreError, match="too_long='truncate'"):
        next(iter(tokenmill.PairLoader(store, seq_len=3, batch_size=2)))
    with pytest.raises(UsageError, match="5 pairs make no batch of 6"):
        tokenmill.PairLoader(store, seq_len=30, batch_size=6, epochs=1)
    with pytest.raises(UsageError, match="rank"):
        tokenmill.PairLoader(store, seq_len=30, batch_size=1, rank=1)
    source = write(tmp_path / "texts.jsonl", [{"text": "x"}])
    tokenmill.build(source, tokenizer=bpe_tokenizer_dir, out=tmp_path / "plain", serial=True)
    with pytest.raises(UsageError, match="holds no pairs"):
        tokenmill.PairLoader(tmp_path / "plain", seq_len=30, batch_size=1)
