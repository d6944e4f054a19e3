from __future__ import annotations

import json
import random
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from tests.command import tokenmill as run_apart
from tests.command import tokenmill_here
from tests.once import once
from torch.utils.data import DataLoader

import tokenmill
from tokenmill.auditing.lookup import Lookup
from tokenmill.auditing.reading import rows_of
from tokenmill.errors import UsageError
from tokenmill.torch import BatchDataset, TokenDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.auditing.checks import AuditReport

LENGTH, ROWS = 128, 8
EOS, IGNORED = 256, -100
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


def make_texts(number: int) -> list[str]:
    chance = random.Random(number)
    return [
        " ".join(
            f"{chance.choice(WORDS)}{chance.randrange(1000)}"
            for _ in range(chance.randrange(1, 60))
        )
        for _ in range(number)
    ]


def build_stores(folder: Path) -> dict[str, Path]:
    texts = make_texts(120)
    plain, chats = folder / "plain.jsonl", folder / "chats.jsonl"
    plain.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pairs = [{"prompt": f"{a}?", "completion": b[:90]} for a, b in pairwise(texts)]
    chats.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    out = {"text": plain, "plain": folder / "store", "masked": folder / "masked"}
    tokenmill.build(plain, tokenizer="bytes", out=out["plain"], serial=True)
    tokenmill.build(
        chats, tokenizer="bytes", out=out["masked"], format="prompt-completion", serial=True
    )
    return out


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return once(tmp_path_factory, "audited", build_stores)


@pytest.fixture(scope="module")
def stream(stores: dict[str, Path]) -> NDArray[np.int64]:
    return np.concatenate(list(tokenmill.Store(stores["plain"]))).astype(np.int64)


def kinds(report: AuditReport) -> set[str]:
    return {finding.kind for finding in report.findings}


Batch = dict[str, Any]
T = TypeVar("T")


def batched(values: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    kept = iter(values)
    while some := tuple(islice(kept, size)):
        yield some


def shuffled(number: int, epoch: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(epoch).permutation(number)]


def cut(stream: NDArray[np.int64], epoch: int = 0, skip: int = 0) -> Iterator[Batch]:
    """Rows of a stream of tokens and the next ones, as nanoGPT's readers cut them."""
    rows = shuffled((len(stream) - 1) // LENGTH, epoch)
    for some in list(batched(rows, ROWS))[skip:]:
        starts = np.array(some)[:, None] * LENGTH + np.arange(LENGTH)
        yield {"input_ids": stream[starts], "labels": stream[starts + 1]}


def padded(
    documents: list[NDArray[Any]],
    *,
    length: int = LENGTH,
    labels: str = "next",
    pad_labels: bool = True,
    epoch: int = 0,
) -> Iterator[Batch]:
    """A document to a row, cut off where it is longer."""
    for some in batched(shuffled(len(documents), epoch), ROWS):
        ids = np.full((len(some), length + 1), EOS, np.int64)
        wanted = ids.copy()
        for row, number in enumerate(some):
            document = documents[number][: length + 1]
            ids[row, : len(document)] = document
            wanted[row] = ids[row]
            if pad_labels:
                wanted[row, len(document) :] = IGNORED
        if labels == "next":
            yield {"input_ids": ids[:, :-1], "labels": wanted[:, 1:]}
        else:
            yield {"input_ids": ids[:, :-1], "labels": wanted[:, :-1]}


# -------------------------------------------------------------------------------------------------
# What is right.


def loader(store: Path, packing: str = "concat", *, epoch: int = 0, **given: Any) -> Any:
    return tokenmill.Loader(
        store, seq_len=LENGTH, batch_size=ROWS, packing=packing, seed=epoch, epochs=1, **given
    )


def own(packing: str, store: Path) -> Callable[..., Any]:
    def make(rank: int = 0, world_size: int = 1, epoch: int = 0) -> Any:
        return loader(store, packing, rank=rank, world_size=world_size, epoch=epoch)

    return make


def for_transformers(store: Path, epoch: int = 0) -> Iterator[Batch]:
    """Labels that are the tokens, and positions that begin again with documents."""
    for batch in loader(store, epoch=epoch):
        labels = batch.tokens[:, :-1].astype(np.int64)
        mask = batch.loss_mask[:, :-1]
        labels[:, 1:][~mask] = IGNORED
        yield {
            "input_ids": torch.from_numpy(batch.input_ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(batch.position_ids),
        }


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_found_of_a_loader(stores: dict[str, Path], packing: str, ranks: int) -> None:
    report = tokenmill.audit(own(packing, stores["plain"]), store=stores["plain"], ranks=ranks)
    assert report.findings == ()
    assert report.epoch_is_whole
    assert report.labels == "next"
    assert report.rows > 90


def test_nothing_is_found_of_masked_rows(stores: dict[str, Path]) -> None:
    report = tokenmill.audit(own("best-fit", stores["masked"]), store=stores["masked"])
    assert report.findings == ()


def test_nothing_is_found_of_rows_of_a_stream(
    stores: dict[str, Path], stream: NDArray[np.int64]
) -> None:
    report = tokenmill.audit(partial(cut, stream), store=stores["plain"], labels="next")
    assert report.findings == ()
    assert any("attention goes across" in remark for remark in report.remarks)


def test_nothing_is_found_of_pairs_and_of_ids_alone(
    stores: dict[str, Path], stream: NDArray[np.int64]
) -> None:
    def pairs(epoch: int = 0) -> Iterator[Any]:
        return ((batch["input_ids"], batch["labels"]) for batch in cut(stream, epoch))

    def ids(epoch: int = 0) -> Iterator[Any]:
        return (torch.from_numpy(batch["input_ids"]) for batch in cut(stream, epoch))

    assert tokenmill.audit(pairs, store=stores["plain"]).findings == ()
    assert tokenmill.audit(ids, store=stores["plain"]).findings == ()


def test_nothing_is_found_of_a_dataloader_that_is_shuffled(stores: dict[str, Path]) -> None:
    rows = TokenDataset(stores["plain"], seq_len=LENGTH)
    made = DataLoader(rows, batch_size=ROWS, shuffle=True)
    assert tokenmill.audit(made, store=stores["plain"]).findings == ()


def test_nothing_is_found_of_a_dataset_of_batches(stores: dict[str, Path]) -> None:
    made = DataLoader(BatchDataset(loader(stores["plain"])), batch_size=None)
    report = tokenmill.audit(lambda: made, store=stores["plain"])
    assert kinds(report) <= {"same-order"}  # it is one epoch, again and again


def test_nothing_is_found_of_rows_for_transformers(stores: dict[str, Path]) -> None:
    report = tokenmill.audit(
        partial(for_transformers, stores["plain"]), store=stores["plain"], labels="same"
    )
    assert report.findings == ()
    assert report.labels == "same"


def test_nothing_is_found_of_text_that_is_given_itself(
    stores: dict[str, Path], stream: NDArray[np.int64]
) -> None:
    report = tokenmill.audit(partial(cut, stream), text=stores["text"], tokenizer="bytes")
    assert report.findings == ()
    assert report.epoch_is_whole


def test_nothing_is_found_without_a_text_and_it_says_what_that_leaves_out(
    stream: NDArray[np.int64],
) -> None:
    report = tokenmill.audit(partial(cut, stream))
    assert report.findings == ()
    assert any("the text was not given" in what for what in report.unchecked)
    report = tokenmill.audit(lambda: (batch for batch in cut(stream)))
    (why,) = [what for what in report.unchecked if "order of a second epoch" in what]
    assert why.endswith("the loader was read once, and the function takes no `epoch` (0, then 1)")


def test_of_a_loader_without_its_function_a_resume_is_not_checked(stores: dict[str, Path]) -> None:
    loader = tokenmill.Loader(stores["plain"], seq_len=64, batch_size=4)
    report = tokenmill.audit(loader, batches=8)
    (why,) = [what for what in report.unchecked if "resume" in what]
    assert why.startswith("resume: the loader itself was given; a function")


def test_a_module_that_is_not_there_is_told_with_what_to_type() -> None:
    with pytest.raises(UsageError, match="there is no module 'my_dat'") as caught:
        tokenmill.audit("my_dat:right")
    assert str(caught.value.hint).endswith("or name the file: my_dat.py:right")


# -------------------------------------------------------------------------------------------------
# What is wrong.


def test_labels_that_are_shifted_twice(stores: dict[str, Path], stream: NDArray[np.int64]) -> None:
    report = tokenmill.audit(partial(cut, stream), store=stores["plain"], labels="same")
    assert kinds(report) == {"shifted-twice"}


def test_a_model_of_transformers_says_what_it_expects(stream: NDArray[np.int64]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=1))
    assert kinds(tokenmill.audit(partial(cut, stream), model=model)) == {"shifted-twice"}


def test_labels_that_are_the_inputs_in_a_loop_that_shifts_nothing(
    stores: dict[str, Path],
) -> None:
    report = tokenmill.audit(partial(for_transformers, stores["plain"]), labels="next")
    assert "not-shifted" in kinds(report)


def test_labels_that_are_the_token_after_the_next(stream: NDArray[np.int64]) -> None:
    def made() -> Iterator[Batch]:
        for batch in cut(stream):
            yield {"input_ids": batch["input_ids"][:, :-1], "labels": batch["labels"][:, 1:]}

    assert kinds(tokenmill.audit(made)) == {"labels"}


def test_labels_of_other_rows(stream: NDArray[np.int64]) -> None:
    def made() -> Iterator[Batch]:
        for batch in cut(stream):
            yield batch | {"labels": batch["labels"][::-1]}

    assert kinds(tokenmill.audit(made)) == {"labels"}


def test_a_loader_that_crops_what_is_longer_than_a_row(stores: dict[str, Path]) -> None:
    documents = list(tokenmill.Store(stores["plain"]))
    lost = sum(max(0, len(each) - LENGTH - 1) for each in documents)
    report = tokenmill.audit(partial(padded, documents), store=stores["plain"], labels="next")
    assert "never-read" in kinds(report)
    (found,) = (each for each in report.findings if each.kind == "never-read")
    total = sum(map(len, documents))
    assert found.problem.startswith(f"{100 * lost / total:.0f}") or "%" in found.problem
    assert "in part" in found.problem


def test_rows_that_are_mostly_padding(stores: dict[str, Path]) -> None:
    documents = list(tokenmill.Store(stores["masked"]))
    report = tokenmill.audit(partial(padded, documents, length=1100))
    assert kinds(report) == {"padding"}
    assert report.padding > 0.6 * report.places


def test_padding_whose_labels_count(stores: dict[str, Path]) -> None:
    documents = list(tokenmill.Store(stores["masked"]))
    made = partial(padded, documents, length=300, pad_labels=False)
    assert "padding-is-learned" in kinds(tokenmill.audit(made, store=stores["masked"]))


def test_the_remainder_that_is_dropped_after_every_few_documents(
    stores: dict[str, Path],
) -> None:
    """As packing in `datasets.map` loses it, a thousand rows at a time."""

    def made(epoch: int = 0) -> Iterator[Batch]:
        rows: list[NDArray[Any]] = []
        for some in batched(tokenmill.Store(stores["plain"]), 5):
            joined = np.concatenate(some).astype(np.int64)
            whole = len(joined) // LENGTH
            rows += list(joined[: whole * LENGTH].reshape(whole, LENGTH))
        for part in batched(shuffled(len(rows), epoch), ROWS):
            ids = np.stack([rows[row] for row in part])
            yield {"input_ids": ids, "labels": ids}

    assert "never-read" in kinds(tokenmill.audit(made, store=stores["plain"], labels="same"))


def test_rows_that_come_twice(stores: dict[str, Path], stream: NDArray[np.int64]) -> None:
    def made(epoch: int = 0) -> Iterator[Batch]:
        for batch in cut(stream, epoch):
            yield batch
            yield batch

    assert "read-twice" in kinds(tokenmill.audit(made, store=stores["plain"]))


def test_ranks_that_read_the_same_rows(stores: dict[str, Path]) -> None:
    def made(rank: int = 0) -> Any:
        return loader(stores["plain"])

    report = tokenmill.audit(made, store=stores["plain"], ranks=2)
    assert {"same-rows-on-ranks", "read-twice"} <= kinds(report)


def test_a_rank_whose_rows_nobody_reads(stores: dict[str, Path]) -> None:
    """As where one process reads for all of them what was meant for itself."""

    def made(rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        for batch in loader(stores["plain"], rank=0, world_size=world_size):
            some = slice(rank, None, world_size)
            yield {"input_ids": batch.input_ids[some], "labels": batch.labels[some]}

    assert "never-read" in kinds(tokenmill.audit(made, store=stores["plain"], ranks=2))


def test_an_order_that_does_not_change(stores: dict[str, Path], stream: NDArray[np.int64]) -> None:
    def made(epoch: int = 0) -> Iterator[Batch]:
        return cut(stream, 0)

    assert kinds(tokenmill.audit(made, store=stores["plain"])) == {"same-order"}


def test_a_loader_that_begins_anew_after_a_resume(stream: NDArray[np.int64]) -> None:
    def right(skip: int = 0) -> Iterator[Batch]:
        return cut(stream, 0, skip)

    def wrong(skip: int = 0) -> Iterator[Batch]:
        return cut(stream, 0, 0)

    assert kinds(tokenmill.audit(right)) == set()
    report = tokenmill.audit(wrong)
    assert kinds(report) == {"resume"}
    assert "begins anew" in report.findings[0].problem


def test_a_state_that_forgets_where_it_was(stores: dict[str, Path]) -> None:
    class Forgetful:
        def __init__(self) -> None:
            self.loader = loader(stores["plain"])

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: object) -> None:
            pass

    def made() -> Forgetful:
        return Forgetful()

    assert kinds(tokenmill.audit(made, store=stores["plain"])) == {"resume"}


def test_loss_on_prompts_and_answers_without(stores: dict[str, Path]) -> None:
    def unmasked() -> Iterator[Batch]:
        for batch in loader(stores["masked"], "best-fit"):
            labels = batch.tokens[:, 1:].astype(np.int64)
            labels[batch.doc_ids < 0] = IGNORED
            yield {"input_ids": batch.input_ids, "labels": labels, "doc_ids": batch.doc_ids}

    def inverted() -> Iterator[Batch]:
        for batch in loader(stores["masked"], "best-fit"):
            labels = batch.tokens[:, 1:].astype(np.int64)
            labels[batch.loss_mask | (batch.doc_ids < 0)] = IGNORED
            yield {"input_ids": batch.input_ids, "labels": labels, "doc_ids": batch.doc_ids}

    report = tokenmill.audit(unmasked, store=stores["masked"])
    assert kinds(report) == {"loss-on-prompts"}
    store = tokenmill.Store(stores["masked"])
    told = int(report.findings[0].problem.split("where ")[1].split()[0].replace(",", ""))
    assert 0.98 * store.num_counted < told <= store.num_counted  # rows begin without a label
    assert {"loss-on-prompts", "answers-not-learned"} == kinds(
        tokenmill.audit(inverted, store=stores["masked"])
    )


def test_conversations_in_a_row_that_see_each_other(stores: dict[str, Path]) -> None:
    def made() -> Iterator[Batch]:
        for batch in loader(stores["masked"], "best-fit"):
            yield {"input_ids": batch.input_ids, "labels": batch.labels}

    assert kinds(tokenmill.audit(made, store=stores["masked"])) == {"attention-across-documents"}


def test_an_attention_mask_that_undoes_positions(stores: dict[str, Path]) -> None:
    def made(epoch: int = 0) -> Iterator[Batch]:
        for batch in for_transformers(stores["plain"], epoch):
            yield batch | {"attention_mask": torch.ones_like(batch["input_ids"])}

    report = tokenmill.audit(made, store=stores["plain"], labels="same")
    assert kinds(report) == {"attention-across-documents"}
    assert "attention_mask" in report.findings[0].problem


def test_positions_that_do_not_begin_again(stores: dict[str, Path]) -> None:
    def made() -> Iterator[Batch]:
        for batch in loader(stores["plain"]):
            yield {
                "input_ids": batch.input_ids,
                "labels": batch.labels,
                "cu_seqlens": batch.cu_seqlens,
                "position_ids": np.tile(np.arange(LENGTH), (len(batch.input_ids), 1)),
            }

    assert kinds(tokenmill.audit(made, store=stores["plain"])) == {"positions"}


def test_boundaries_that_are_elsewhere(stores: dict[str, Path]) -> None:
    def made() -> Iterator[Batch]:
        for batch in loader(stores["plain"]):
            doc_ids = np.roll(batch.doc_ids, 9, axis=1)
            yield {"input_ids": batch.input_ids, "labels": batch.labels, "doc_ids": doc_ids}

    assert kinds(tokenmill.audit(made, store=stores["plain"])) == {"boundaries"}


def test_end_tokens_that_are_missing_or_double(stores: dict[str, Path]) -> None:
    documents = [each.astype(np.int64) for each in tokenmill.Store(stores["plain"])]

    def made(ends: list[int]) -> Iterator[Batch]:
        return cut(
            np.concatenate([np.append(each[:-1], np.array(ends, np.int64)) for each in documents])
        )

    assert kinds(tokenmill.audit(partial(made, []), store=stores["plain"])) == {"no-eos"}
    assert "double-eos" in kinds(tokenmill.audit(partial(made, [EOS, EOS]), store=stores["plain"]))


def test_special_tokens_that_came_from_text(tmp_path: Path) -> None:
    texts = [f"{text} <|endoftext|> {text[::-1]}" for text in make_texts(60)]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenmill.build(source, tokenizer="bytes", out=tmp_path / "store", serial=True)
    parsed: list[int] = []
    for text in texts:
        for part in text.split("<|endoftext|>"):
            parsed += [*part.encode(), EOS]
    report = tokenmill.audit(partial(cut, np.array(parsed)), store=tmp_path / "store")
    assert "special-from-text" in kinds(report)


def test_tokens_of_another_text(stores: dict[str, Path]) -> None:
    other = np.concatenate([np.frombuffer(t.upper().encode(), np.uint8) for t in make_texts(30)])
    report = tokenmill.audit(partial(cut, other.astype(np.int64)), store=stores["plain"])
    assert {"other-text", "never-read"} <= kinds(report)


def test_files_that_are_no_training_data(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "validation-00000.jsonl"):
        (tmp_path / name).write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in make_texts(40))
        )
    (tmp_path / "README.txt").write_text("how this data was made")
    files = sorted(tmp_path.iterdir())
    out = tmp_path / "store"
    tokenmill.build(files, tokenizer="bytes", out=out, split_by_name=False, serial=True)
    report = tokenmill.audit(lambda: loader(tmp_path / "store"), store=tmp_path / "store")
    assert kinds(report) == {"held-out-files", "stray-files"}


def test_documents_that_end_in_the_end_of_a_turn(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: id_ for id_, each in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    made.save(str(tmp_path / "tokenizer.json"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(50)))
    for eos, found in (("<|im_end|>", {"end-of-turn"}), ("<|endoftext|>", set())):
        store = tmp_path / eos.strip("<|>")
        tokenmill.build(texts, tokenizer=tmp_path, out=store, eos=eos, serial=True)
        assert kinds(tokenmill.audit(partial(loader, store), store=store)) == found


# -------------------------------------------------------------------------------------------------
# How it reads, and what it refuses.


def test_what_a_row_shares_with_the_store_is_found_to_the_token(stores: dict[str, Path]) -> None:
    store = tokenmill.Store(stores["plain"])
    documents = Lookup(store)
    chance = np.random.default_rng(0)
    for _ in range(50):
        wanted: list[tuple[int, int]] = []
        rows = []
        for number in chance.integers(0, len(store), 4):
            size = int(documents.ends[number] - documents.starts[number])
            # One that follows in the store too would be one run with it.
            if size > 40 and documents.starts[number] not in {a + b for a, b in wanted}:
                rows.append(store[int(number)].astype(np.int32))
                wanted.append((int(documents.starts[number]), size))
        runs = documents.find(np.concatenate([*rows, np.zeros(0, np.int32)]))
        assert [(run.place, run.length) for run in runs] == wanted


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ({"input": torch.ones(2, 5, dtype=torch.long)}, [5, 5]),
        (({"input": np.arange(6).reshape(1, 6)}, np.arange(6).reshape(1, 6)), [6]),
        ([[1, 2, 3], [4, 5, 6]], [3, 3]),
        ({"input_ids": [5, 6, 7, 8]}, [4]),
        ({"input_ids": np.array([[5, 6, 9, 9]]), "attention_mask": np.array([[1, 1, 0, 0]])}, [2]),
    ],
)
def test_rows_are_found_in_whatever_a_loader_gives(batch: object, shape: list[int]) -> None:
    if isinstance(batch, list):
        batch = np.array(batch)
    rows = rows_of(batch, rank=0, number=0, pads={0})
    assert [len(row.ids) for row in rows] == shape


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing", "does not name a function"),
        ("no_such_module:loader", "there is no module"),
        ("json:no_such_name", "has no 'no_such_name'"),
        ("no_such.py:loader", "there is no file"),
        (3, "neither a function nor an iterable"),
        (lambda path: [path], "needs path"),
        (list, "gave no batch"),
        (lambda: [{"text": "abc"}], "a dict with text"),
        (lambda: ["abc"], "a str"),
    ],
)
def test_what_is_no_loader_is_refused_with_what_it_is(target: object, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        tokenmill.audit(target)
    assert caught.value.hint


def test_options_that_contradict_each_other_are_refused(stores: dict[str, Path]) -> None:
    for given in (
        {"store": stores["plain"], "text": "x.jsonl"},
        {"text": stores["text"]},
        {"labels": "both"},
        {"ranks": 0},
        {"ranks": 2},
    ):
        with pytest.raises(UsageError):
            tokenmill.audit(lambda: iter([np.ones((1, 4))]), **given)


def test_a_batch_that_does_not_end_the_epoch_says_what_cannot_be_known(
    stores: dict[str, Path],
) -> None:
    report = tokenmill.audit(own("concat", stores["plain"]), store=stores["plain"], batches=3)
    assert not report.epoch_is_whole
    assert report.batches == 3
    assert any("tokens that never come" in what for what in report.unchecked)
    assert report.findings == ()


PROGRAM = """
import numpy as np
import tokenmill

def right(rank=0, world_size=1, epoch=0):
    return tokenmill.Loader({store!r}, seq_len=128, batch_size=8, epochs=1, seed=epoch,
                            rank=rank, world_size=world_size)

def of_environment():
    import os
    return right(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

def wrong():
    for batch in right():
        yield batch.input_ids[:, :-1], batch.labels[:, 1:]
"""


def test_the_command_says_what_it_found_and_exits_with_1(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "audited_loader.py").write_text(PROGRAM.format(store=str(stores["plain"])))
    store = ("--store", str(stores["plain"]))
    right = tokenmill_here("audit", "audited_loader.py:right", *store, folder=tmp_path)
    assert "nothing found" in right.stdout
    wrong = tokenmill_here("audit", "audited_loader.py:wrong", *store, folder=tmp_path, code=1)
    assert "labels: each label is the token after the next one" in wrong.stdout
    assert "see" in wrong.stdout
    found = tokenmill_here(
        "audit", "audited_loader.py:wrong", *store, "--json", folder=tmp_path, code=1
    )
    told = json.loads(found.stdout)
    assert told["ok"] is False
    assert [each["kind"] for each in told["findings"]] == ["labels"]


def test_ranks_are_processes_with_the_environment_of_torchrun(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "audited_ranks.py").write_text(PROGRAM.format(store=str(stores["plain"])))
    store = ("--store", str(stores["plain"]), "--ranks", "2")
    found = run_apart("audit", "audited_ranks:of_environment", *store, folder=tmp_path)
    assert "nothing found" in found.stdout
    assert "2 ranks" in found.stdout
    found = run_apart("audit", "audited_ranks.py:wrong", *store, folder=tmp_path, code=1)
    assert "same-rows-on-ranks" in found.stdout


ACCELERATED = """
import accelerate, tokenmill, torch
from torch.utils.data import DataLoader, IterableDataset

class Batches(IterableDataset):
    # One's own, since those of tokenmill.torch refuse to be dealt out.
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for batch in self.rows:
            yield {{"input_ids": torch.tensor(batch.input_ids.tolist())}}

def loader(dispatch):
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
    )
    of_rank = {{"rank": accelerator.process_index, "world_size": accelerator.num_processes}}
    rows = tokenmill.Loader({store!r}, seq_len=128, batch_size=8, epochs=1, **of_rank)
    dataset = Batches(rows)
    if not dispatch:
        return DataLoader(dataset, batch_size=None)
    return accelerator.prepare(DataLoader(dataset, batch_size=None))

def dispatched():
    for batch in loader(True):
        yield dict(batch)

def apart():
    return loader(False)
"""


@pytest.mark.slow
def test_rows_that_accelerate_reads_on_the_first_rank_alone_are_missed(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "accelerated.py").write_text(ACCELERATED.format(store=str(stores["plain"])))
    given = ("--store", str(stores["plain"]), "--ranks", "2")
    apart = run_apart("audit", "accelerated:apart", *given, folder=tmp_path)
    assert "nothing found" in apart.stdout
    dealt = run_apart("audit", "accelerated:dispatched", *given, folder=tmp_path, code=1)
    assert "never-read" in dealt.stdout
