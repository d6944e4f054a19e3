"""Models of transformers, trained through each way of feeding them, with the real packages.

Documents are alphabets: a model that was trained on the next token goes on with the next letter,
and one whose labels were shifted twice leaves out every other one.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.loader.stores import write_store

import tokenmill
from tokenmill.errors import StateError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage

transformers = pytest.importorskip("transformers")
dealing = pytest.importorskip("accelerate.data_loader")
import torch  # noqa: E402
from torch.utils.data import DataLoader, default_collate  # noqa: E402

from tokenmill.hf import ModelFeeder, ModelInputs, TrainerDataset, as_dataset  # noqa: E402
from tokenmill.torch import BatchDataset, DeviceFeeder, TokenDataset  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenmill.store.reader import Store

LETTERS, END = 26, 256
NUM_IDS = 257
SEQ_LEN = 24


def alphabet(start: int, length: int) -> list[int]:
    return [(start + place) % LETTERS for place in range(length)] + [END]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    random = np.random.default_rng(0)
    shapes = zip(random.integers(26, size=300), random.integers(3, 40, size=300), strict=True)
    documents = [alphabet(int(start), int(length)) for start, length in shapes]
    shards = [documents[:100], documents[100:]]
    return write_store(tmp_path_factory.mktemp("hf") / "store", shards, vocab_size=NUM_IDS)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Of each document, only what comes after the fifth letter counts."""
    documents = [alphabet(place, 9 + place % 7) for place in range(60)]
    masks = [[int(place > 4) for place in range(len(document))] for document in documents]
    path = tmp_path_factory.mktemp("hf") / "chats"
    return write_store(path, [documents], vocab_size=NUM_IDS, masks=[masks])


def make_model(kind: str = "Llama", *, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": NUM_IDS, "tie_word_embeddings": False, "pad_token_id": 0}
    if kind == "GPT2":
        shape |= {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
        config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=END)
        return transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention)
    config = getattr(transformers, f"{kind}Config")(
        **shape,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")
    return model._from_config(config, attn_implementation=attention)


def goes_on(model: Any) -> str:
    """What the model writes after "abcde"."""
    model.eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        for _ in range(8):
            best = model(input_ids=ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat((ids, best[None, None]), dim=1)
    return "".join(chr(97 + int(each)) for each in ids[0, 5:])


def make_trainer(model: Any, folder: Path, rows: Any, **options: Any) -> Any:
    """A Trainer of the rows; what begins with a capital is the Trainer's, else its arguments'."""
    given = {"train_dataset": rows}
    if isinstance(rows, TrainerDataset):
        given |= {"data_collator": rows.collate, "callbacks": [rows.callback]}
    given |= {name.lower(): options.pop(name) for name in list(options) if name[0].isupper()}
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 60,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    return transformers.Trainer(model=model, args=arguments, **given)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Recorded(TrainerDataset):
    """Rows that note which places of the run were read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read: list[int] = []

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        self.read += map(int, numbers)
        return super().__getitems__(numbers)


def test_the_trainers_model_goes_on_with_the_alphabet(store: Store, tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(model, tmp_path, TrainerDataset(store, seq_len=SEQ_LEN, model=model))
    trainer.train()
    assert goes_on(model) == "fghijklm"


@pytest.mark.parametrize("kind", ["GPT2", "Qwen3"])
def test_a_model_called_with_a_batch_goes_on_with_the_alphabet(store: Store, kind: str) -> None:
    model = make_model(kind)
    loader = Loader(store, seq_len=SEQ_LEN, batch_size=4, labels="same", boundaries="mask")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ModelFeeder(loader, model) as feeder, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, batch in zip(range(80), feeder, strict=False):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert loader.step == 80
    assert goes_on(model) == "fghijklm"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen3"])
@pytest.mark.parametrize("flatten", [False, True])
def test_no_document_sees_another(store: Store, kind: str, attention: str, flatten: bool) -> None:
    model = make_model(kind, attention=attention).eval()
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model, flatten=flatten)
    batch = rows.collate(rows.__getitems__([0, 5, 9]))
    whole = model(**batch).logits.reshape(3, SEQ_LEN, NUM_IDS)

    found = 0
    for row, origin in enumerate(rows.loader.gather([0, 5, 9]).doc_ids):
        for document in range(origin.max() + 1):
            here = origin == document
            ids = batch["input_ids"].reshape(3, -1)[row, here]
            alone = model(input_ids=ids[None]).logits[0]
            assert torch.allclose(whole[row, here], alone, atol=1e-5)
            found += 1
    assert found > 3


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """transformers' own way to flash attention, with a kernel for this device at its end."""
    used: list[int] = []

    def varlen(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        softmax_scale: float | None,
        dropout_p: float = 0.0,
    ) -> torch.Tensor:
        assert dropout_p == 0.0
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert int(cu_seqlens_q[-1]) == int(cu_seqlens_k[-1]) == len(q) == len(k)
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
        out = torch.zeros_like(q)
        bounds = (each.tolist() for each in (cu_seqlens_q, cu_seqlens_k))
        for (start, end), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
            out[start:end] = torch.nn.functional.scaled_dot_product_attention(
                q[start:end].transpose(0, 1),
                k[first:last].transpose(0, 1),
                v[first:last].transpose(0, 1),
                is_causal=causal,
                scale=softmax_scale,
                enable_gqa=True,
            ).transpose(0, 1)
        used.append(len(cu_seqlens_q) - 1)
        return out

    def dense(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("this is what transformers takes where it is told of no documents")

    kernels = transformers.modeling_flash_attention_utils
    if hasattr(kernels, "_lazy_imports"):
        monkeypatch.setattr(kernels, "_loaded_implementation", None)
        monkeypatch.setattr(
            kernels, "_lazy_imports", lambda *_, **__: (dense, varlen, None, None, None)
        )
    else:  # before transformers 4.54, which imports them where it is imported
        monkeypatch.setattr(kernels, "flash_attn_2_func", dense, raising=False)
        monkeypatch.setattr(kernels, "flash_attn_2_varlen_func", varlen, raising=False)
        for name in ("pad_input_fa2", "unpad_input_fa2"):
            monkeypatch.setattr(kernels, name, None, raising=False)
        monkeypatch.setattr(kernels, "_flash_supports_window_size", True, raising=False)
    return used


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_flash_attention_by_its_names_has_the_loss_of_a_mask(
    store: Store, flash: list[int], tmp_path: Path, kind: str
) -> None:
    model = make_model(kind)
    loader = Loader(store, seq_len=SEQ_LEN, batch_size=3, labels="same")
    masked = [
        model(**batch).loss.item() for batch in itertools.islice(ModelFeeder(loader, model), 4)
    ]
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model)
    by_trainer = model(**rows.collate(rows.__getitems__([0, 1, 2]))).loss.item()

    assert flash == []
    model.config._attn_implementation = "flash_attention_2"
    loader.seek(0)
    for loss, batch in zip(masked, ModelFeeder(loader, model), strict=False):
        assert batch["input_ids"].shape == (1, 3 * SEQ_LEN)
        assert model(**batch).loss.item() == pytest.approx(loss, abs=1e-5)
    flat = TrainerDataset(store, seq_len=SEQ_LEN, model=model)
    batch = flat.collate(flat.__getitems__([0, 1, 2]))
    assert model(**batch).loss.item() == pytest.approx(by_trainer, abs=1e-5)
    assert max(flash) > 3
    trainer = make_trainer(model, tmp_path, flat)
    trainer.args._n_gpu = 2
    with pytest.raises(UsageError, match="with 2 GPUs, cuts cu_seq_lens_q into parts"):
        trainer.train()
    with pytest.raises(UsageError, match="cuts cu_seq_lens_q into parts"):
        ModelFeeder(loader, torch.nn.DataParallel(model))
    trainer = make_trainer(model, tmp_path, flat)
    trainer.train()
    model.config._attn_implementation = "sdpa"
    assert goes_on(model) == "fghijklm"


def leaking(kind: str) -> Any:
    """Models of transformers 5 that take position ids and keep no documents apart by them."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": NUM_IDS, "pad_token_id": 0, "hidden_size": 32}
    shape["num_hidden_layers"] = 2
    if kind == "OPT":
        shape |= {"ffn_dim": 64, "num_attention_heads": 2, "word_embed_proj_dim": 32}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**shape))
    if kind == "Bloom":
        return transformers.BloomForCausalLM(transformers.BloomConfig(**shape, n_head=2))
    shape |= {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"head_dim": 16, "num_experts_per_tok": 1, "layer_types": LAYERS[kind]}
    if kind == "GptOss":
        return transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**shape, num_local_experts=2)
        )
    shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2}
    shape |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**shape))


LAYERS = {
    "GptOss": ["sliding_attention", "full_attention"],
    "Qwen3Next": ["linear_attention", "full_attention"],
}


@pytest.mark.parametrize("kind", ["OPT", "Bloom", "GptOss", "Qwen3Next"])
def test_a_model_in_which_documents_see_each_other_is_refused(
    store: Store, tmp_path: Path, kind: str
) -> None:
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"this transformers has no {kind}")
    model = leaking(kind).train()
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model)
    trainer = make_trainer(model, tmp_path, rows, max_steps=1)
    loader = Loader(store, seq_len=SEQ_LEN, batch_size=2, labels="same")
    for start in (trainer.train, lambda: ModelFeeder(loader, model)):
        with pytest.raises(UsageError, match="ForCausalLM does not keep documents apart") as told:
            start()
        assert "packing='pad'" in str(told.value.hint)
    assert all(module.training for module in model.modules())

    alone = Loader(store, seq_len=SEQ_LEN, batch_size=2, labels="same", packing="pad")
    for fed, documents in ((alone, True), (loader, False)):
        batch = next(iter(ModelFeeder(fed, model, documents=documents)))
        assert ("position_ids" in batch) == documents
        assert model(**batch).loss > 0
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model, documents=False)
    make_trainer(model, tmp_path, rows, max_steps=1).train()


def test_flash_attention_gets_one_row_and_its_names(
    store: Store, flash: list[int], tmp_path: Path
) -> None:
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model)
    batch = rows.collate(rows.__getitems__([0, 1]))

    ends = batch["cu_seq_lens_q"]
    assert ends is batch["cu_seq_lens_k"]
    assert ends.dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == int(ends.diff().max())
    assert batch["input_ids"].shape == (1, 2 * SEQ_LEN)
    lengths = [np.bincount(ids) for ids in rows.loader.gather([0, 1]).doc_ids]
    assert ends.diff().tolist() == np.concatenate(lengths).tolist()
    # The label after each end, which its document does not have, is nobody's.
    assert (batch["labels"][0, ends[:-1].long()] == -100).all()
    assert "attention_mask" not in batch
    assert batch["use_cache"] is False

    loader = Loader(store, seq_len=SEQ_LEN, batch_size=2, labels="same")
    fed = next(iter(ModelFeeder(loader, model)))
    assert fed["input_ids"].shape == (1, 2 * SEQ_LEN)
    assert int(fed["cu_seq_lens_q"][-1]) == 2 * SEQ_LEN
    assert int(fed["cu_seq_lens_q"].diff().max()) <= fed["max_length_q"]

    trainer = make_trainer(
        model, tmp_path, rows, Data_collator=transformers.default_data_collator, max_steps=1
    )
    with pytest.raises(UsageError, match="flash attention keeps documents apart only in batches"):
        trainer.train()


def test_a_mask_of_the_store_is_in_the_labels(chats: Store) -> None:
    rows = TrainerDataset(chats, seq_len=20, model=make_model(), packing="best-fit")
    counted = [
        row["labels"][row["labels"] >= 0].tolist() for row in (rows[k] for k in range(len(rows)))
    ]
    assert sum(map(len, counted)) == chats.num_counted


def test_a_checkpoint_goes_on_with_the_next_row_and_reads_none_before(
    store: Store, tmp_path: Path
) -> None:
    def train(folder: str, until: int, **options: Any) -> tuple[Recorded, Any]:
        model = make_model()
        rows = Recorded(store, seq_len=SEQ_LEN, model=model)
        trainer = make_trainer(
            model, tmp_path / folder, rows, max_steps=until, save_strategy="steps", **options
        )
        resume = options.get("save_steps") == 4 and until > 4
        trainer.train(resume_from_checkpoint=resume)
        return rows, trainer

    # 272 rows: the epoch ends within the 20th of these steps.
    whole, straight = train("straight", 22, save_steps=50, gradient_accumulation_steps=2)
    _, begun = train("resumed", 4, save_steps=4, gradient_accumulation_steps=2)
    then, resumed = train("resumed", 22, save_steps=4, gradient_accumulation_steps=2)
    assert losses(resumed) == losses(straight)
    assert losses(begun) == losses(straight)[:4]
    used = 4 * 2 * 4
    assert then.read == whole.read[used:]
    assert whole.read[:used] == list(range(used))


def test_a_checkpoint_goes_on_with_another_batch_size(store: Store, tmp_path: Path) -> None:
    model = make_model()
    rows = Recorded(store, seq_len=SEQ_LEN, model=model)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    make_trainer(model, tmp_path, rows, max_steps=5, **options).train()
    for skips in (False, True):
        model = make_model()
        rows = Recorded(store, seq_len=SEQ_LEN, model=model)
        options |= {"per_device_train_batch_size": 6, "ignore_data_skip": skips}
        trainer = make_trainer(model, tmp_path, rows, max_steps=8, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
        # The Trainer of transformers 4 goes on with the batch size of the checkpoint.
        used = 3 * trainer.state.train_batch_size
        assert used in (12, 18)
        # What accelerate reads one batch ahead is used by nobody.
        assert rows.read[:used] == list(range(20, 20 + used))

    others = TrainerDataset(store, seq_len=SEQ_LEN, model=model, seed=7)
    trainer = make_trainer(model, tmp_path, others, max_steps=8, **options)
    with pytest.raises(StateError, match="seed"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_an_epoch_is_every_row_once_with_the_callback_or_without(
    store: Store, tmp_path: Path
) -> None:
    for with_callback in (True, False):
        model = make_model()
        rows = Recorded(store, seq_len=SEQ_LEN, model=model)
        callbacks = [rows.callback] if with_callback else []
        options = {"max_steps": -1, "num_train_epochs": 1, "Callbacks": callbacks}
        make_trainer(model, tmp_path, rows, per_device_train_batch_size=16, **options).train()
        expected = len(rows) + (-len(rows) % 16 if with_callback else 0)
        assert Counter(rows.read) == Counter(range(expected))
        assert (rows.read == sorted(rows.read)) == with_callback


def test_a_mixture_with_stages_needs_the_callback(
    store: Store, chats: Store, tmp_path: Path
) -> None:
    mixture = Mixture(
        {"a": (store, 0.5), "b": (chats, 0.5)},
        stages=[Stage(tokens=40 * SEQ_LEN), Stage(weights={"a": 0, "b": 1})],
    )
    model = make_model()
    rows = Recorded(mixture, seq_len=SEQ_LEN, model=model)
    make_trainer(model, tmp_path, rows, max_steps=12).train()
    assert rows.read[:48] == list(range(48))
    sources = rows.loader.gather(rows.read[:48]).sources.tolist()
    assert Counter(sources[:40]) == {0: 20, 1: 20}
    assert set(sources[40:]) == {1}

    trainer = make_trainer(model, tmp_path, rows, max_steps=2, Callbacks=[])
    with pytest.raises(UsageError, match="stages of a mixture come one after the other"):
        trainer.train()
    longer = Mixture({"a": (store, 1)}, stages=[Stage(tokens=960), Stage(seq_len=48)])
    with pytest.raises(UsageError, match="a stage of this mixture changes seq_len"):
        TrainerDataset(longer, seq_len=SEQ_LEN, model=model)


def test_evaluation_needs_no_callback(store: Store, tmp_path: Path) -> None:
    model = make_model()
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model)
    held_out = Recorded(store, seq_len=SEQ_LEN, model=model, shuffle=False)
    trainer = make_trainer(model, tmp_path, rows, Eval_dataset=held_out)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(np.log(NUM_IDS), rel=0.1)
    assert held_out.read == list(range(len(held_out)))


def test_rows_go_to_other_processes(store: Store) -> None:
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=make_model())
    again = pickle.loads(pickle.dumps(rows))
    assert torch.equal(again[3]["labels"], rows[3]["labels"])


# Labels that would be shifted twice.


def test_a_trainer_refuses_rows_whose_labels_are_the_next_tokens(
    store: Store, tmp_path: Path
) -> None:
    model = make_model()
    for keep in (True, False):
        rows = TokenDataset(store, seq_len=SEQ_LEN)
        trainer = make_trainer(model, tmp_path, rows, max_steps=1, remove_unused_columns=keep)
        with pytest.raises(UsageError, match="learn the token after the next"):
            trainer.train()
    same = TokenDataset(store, seq_len=SEQ_LEN, labels="same")
    make_trainer(model, tmp_path, same, max_steps=1).train()


def test_a_trainer_takes_next_tokens_where_a_collator_says_what_they_are(
    store: Store, tmp_path: Path
) -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        batch = default_collate(rows)
        return {**batch, "shift_labels": batch["labels"]}

    model, rows = make_model(), TokenDataset(store, seq_len=SEQ_LEN)
    for removes in (True, False):
        options = {"max_steps": 1, "remove_unused_columns": removes}
        make_trainer(model, tmp_path, rows, Data_collator=collate, **options).train()


def batches_of(store: Store, labels: str) -> Iterator[Any]:
    """The first batch of each way to have one."""
    loader = Loader(store, seq_len=SEQ_LEN, batch_size=2, labels=labels)
    yield next(iter(DeviceFeeder(loader, device="cpu")))
    yield next(iter(DataLoader(BatchDataset(loader), batch_size=None)))
    yield next(iter(DataLoader(BatchDataset(loader), batch_size=None, num_workers=1)))
    yield next(iter(DataLoader(TokenDataset(store, seq_len=SEQ_LEN, labels=labels), batch_size=2)))


def test_a_model_of_transformers_called_with_next_tokens_is_warned_about(store: Store) -> None:
    model = make_model()
    other = torch.nn.Linear(1, 1)
    other.forward = lambda **batch: batch["labels"]  # type: ignore[method-assign]

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.DataParallel(model)

        def step(self, batch: Any) -> Any:
            return self.model(**batch)

    module = Module()
    for batch in batches_of(store, "next"):
        assert batch.labels_are == "next"
        copied = copy.copy(batch)
        for given in (batch, batch.to("cpu"), type(batch)({**batch})):
            with pytest.warns(UserWarning, match="LlamaForCausalLM shifts labels by itself"):
                model(**given)
        with pytest.warns(UserWarning, match="LlamaForCausalLM shifts labels by itself"):
            module.step(copied)
    for batch in batches_of(store, "same"):
        assert batch.labels_are == "same"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**batch)
            module.step(type(batch)({**batch}))


def test_a_model_of_ones_own_takes_next_tokens_without_a_word(store: Store) -> None:
    class Own(torch.nn.Module):
        def forward(self, input_ids: Any, labels: Any) -> Any:
            return labels

    own = Own()
    for batch in batches_of(store, "next"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            own(**batch)


def test_what_is_no_model_of_transformers_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="has no config as models of transformers have"):
        ModelInputs(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"Loader\(\.\.\., labels=.same.\)|shifts labels"):
        ModelFeeder(Loader(store, seq_len=8, batch_size=1), make_model())
    windowed = Loader(store, seq_len=8, batch_size=1, labels="same", window=4)
    with pytest.raises(UsageError, match=r"window=.* with the one it has it would see whole"):
        ModelFeeder(windowed, make_model())
    assert ModelFeeder(windowed, make_model(), flatten=True).loader is windowed


def test_a_model_without_an_embedding_for_an_id_is_refused(store: Store, tmp_path: Path) -> None:
    model = make_model()
    # A tokenizer of more ids than the model has is fine where no document has them.
    larger = write_store(tmp_path / "larger", [[alphabet(0, 30)]], vocab_size=NUM_IDS + 50)
    assert len(TrainerDataset(larger, seq_len=8, model=model)) == 5
    other = write_store(tmp_path / "other", [[[5]], [[NUM_IDS, 3] * 9]], vocab_size=NUM_IDS + 50)
    mixture = Mixture({"a": (larger, 1), "b": (other, 1)})
    fed = Loader(other, seq_len=8, batch_size=1, labels="same")
    for make in (
        lambda: TrainerDataset(other, seq_len=8, model=model),
        lambda: TrainerDataset(mixture, seq_len=8, model=model),
        lambda: TrainerDataset(larger, seq_len=8, model=model, pad_id=NUM_IDS),
        lambda: ModelFeeder(fed, model),
    ):
        with pytest.raises(UsageError, match=f"has the id {NUM_IDS}, of a tokenizer of") as caught:
            make()
        assert "model.resize_token_embeddings(307)" in str(caught.value.hint)
    model.resize_token_embeddings(NUM_IDS + 50)
    assert ModelFeeder(fed, model).loader is fed


# Several ranks.


def test_pairs_have_other_columns_for_each_trainer_and_none_is_guessed(
    store: Store, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "chosen": " b", "rejected": " c"}]
    options: dict[str, Any] = {"tokenizer": "bytes", "format": "preference", "serial": True}
    tokenmill.build(rows, out=tmp_path / "pairs", **options)
    for trainer in (None, "sft"):
        with pytest.raises(UsageError, match="mean something else"):
            as_dataset(tmp_path / "pairs", trainer=trainer)
    with pytest.raises(UsageError, match="no pairs"):
        as_dataset(store, trainer="dpo")


def test_accelerate_is_refused_what_it_would_read_on_one_rank_for_all(store: Store) -> None:
    for world_size in (1, 2):
        loader = Loader(store, seq_len=SEQ_LEN, batch_size=1, world_size=world_size, epochs=1)
        plain = DataLoader(BatchDataset(loader), batch_size=None)
        assert len(list(plain)) == len(loader)
        shard = dealing.IterableDatasetShard(BatchDataset(loader), batch_size=1, num_processes=2)
        for dealt in (shard, dealing.DataLoaderDispatcher(BatchDataset(loader), batch_size=None)):
            if world_size == 1:
                assert next(iter(dealt))["labels"].shape == (1, SEQ_LEN)
                continue
            with pytest.raises(UsageError, match="rows of other ranks would never be read"):
                next(iter(dealt))


def test_the_callback_says_what_it_cannot_be_used_with(store: Store, tmp_path: Path) -> None:
    model = make_model()
    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model)
    same = TokenDataset(store, seq_len=SEQ_LEN, labels="same")
    trainer = make_trainer(model, tmp_path, same, Callbacks=[rows.callback], max_steps=1)
    with pytest.raises(UsageError, match="the Trainer trains on something else: TokenDataset"):
        trainer.train()
    deals = {"dispatch_batches": True}
    trainer = make_trainer(model, tmp_path, rows, max_steps=1, accelerator_config=deals)
    with pytest.raises(UsageError, match="dispatch_batches=True has rank 0 read"):
        trainer.train()


@pytest.mark.slow
def test_workers_read_the_same_rows(store: Store, tmp_path: Path) -> None:
    def train(**options: Any) -> list[float]:
        model = make_model()
        rows = TrainerDataset(store, seq_len=SEQ_LEN, model=model)
        # An epoch ends within these steps.
        options |= {"per_device_train_batch_size": 16, "max_steps": 30}
        trainer = make_trainer(model, tmp_path, rows, **options)
        trainer.train()
        return losses(trainer)

    workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    assert train(**workers) == train()


RANK = """
import json, sys
import torch
sys.path.insert(0, {root!r})
from tests import test_hf
from tokenmill.store.reader import Store
from tokenmill.hf import TrainerDataset

store, folder, until, resume = sys.argv[1:]
model = test_hf.make_model()
rows = test_hf.Recorded(Store(store, split=None), seq_len=test_hf.SEQ_LEN, model=model)
options = dict(max_steps=int(until), save_strategy="steps", save_steps=10, ddp_backend="gloo")
trainer = test_hf.make_trainer(model, folder, rows, **options)
trainer.train(resume_from_checkpoint=resume == "resume")
rank = trainer.args.process_index
state = dict(read=rows.read, losses=test_hf.losses(trainer), goes_on=test_hf.goes_on(model))
with open(f"{{folder}}/rank-{{rank}}-{{until}}.json", "w") as file:
    json.dump(state, file)
# Threads of gloo that are still there when the interpreter ends abort it, now and then.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_read_every_row_once_and_go_on_exactly(store: Store, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(root=str(Path(__file__).parents[1])))

    def train(folder: str, until: int, how: str = "anew") -> list[dict[str, Any]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        arguments = [str(script), str(store.path), str(tmp_path / folder), str(until), how]
        done = subprocess.run(
            [
                *launch,
                "--master-port=0",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        names = [tmp_path / folder / f"rank-{rank}-{until}.json" for rank in range(2)]
        return [json.loads(name.read_text()) for name in names]

    rows = TrainerDataset(store, seq_len=SEQ_LEN, model=make_model())
    epoch = -(-len(rows) // 8)
    straight = train("straight", epoch + 6)
    used = [rank["read"][: 4 * epoch] for rank in straight]
    assert Counter(used[0] + used[1]) == Counter(range(8 * epoch))
    assert used[0][:8] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert used[1][:8] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert straight[0]["losses"] == straight[1]["losses"]
    assert straight[0]["goes_on"] == "fghijklm"

    train("resumed", 10)
    resumed = train("resumed", epoch + 6, "resume")
    assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in straight]
    assert [rank["read"] for rank in resumed] == [rank["read"][40:] for rank in straight]
