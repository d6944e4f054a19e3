"""A store in Megatron-LM, with its own boundaries of documents and loss masks: in pretrain_gpt.py

    BlendedMegatronDatasetBuilder(StoreDataset, ...)        # where it has GPTDataset

python examples/feed_megatron.py EXPORT END_ID VOCAB_SIZE

EXPORT is what `tokenmill export STORE --to megatron --out EXPORT --link` made.
Needs: pip install torch megatron-core

Megatron's GPTDataset takes for a beginning whatever follows its tokenizer's end token, and counts
every token; its SFTDataset reads conversations, and tokenizes them itself. Here the index says
where documents begin, and the `.mask` beside it which tokens count. --reset-position-ids and
--reset-attention-mask mean what they mean there; leave --eod-mask-loss out: no document learns the
beginning of the next.
"""

import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from torch import distributed

COUNTS, BEGINS = 1, 2


class Marks:
    """Of each token whether it counts and begins a document, as IndexedDataset gives its id."""

    def __init__(self, ids: IndexedDataset) -> None:
        self.index = ids.index
        path = Path(f"{ids.path_prefix}.mask")
        self.mask = path if path.exists() else None

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        pointer, whole, _ = self.index[idx]
        first = pointer // DType.size(self.index.dtype) + offset
        count = int(whole - offset if length is None else length)
        if self.mask is None:
            marks = np.full(count, COUNTS, np.uint8)
        else:
            marks = np.fromfile(self.mask, np.uint8, count, offset=int(first))
        if offset == 0:
            marks[:1] |= BEGINS
        return marks


class StoreDataset(GPTDataset):  # type: ignore[misc]  # it has no types here
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.config.add_extra_token_to_sequence
        assert not self.config.eod_mask_loss
        self.marks = Marks(self.dataset)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, torch.Tensor] = super().__getitem__(idx)
        # The same places, of the marks.
        ids, self.dataset = self.dataset, self.marks
        row, _ = self._query_document_sample_shuffle_indices(0 if idx is None else idx)
        self.dataset = ids
        marks = torch.from_numpy(row)
        # A label counts if its token does, unless another document ends before it.
        sample["loss_mask"] *= (marks[1:] & (COUNTS | BEGINS)) == COUNTS
        begins = (marks[:-1] & BEGINS) > 0
        begins[0] = True
        places = torch.arange(len(begins))
        if self.config.reset_position_ids:
            sample["position_ids"] = places - torch.where(begins, places, 0).cummax(0).values
        if self.config.reset_attention_mask and self.config.create_attention_mask:
            document = begins.cumsum(0)
            seen = (places[:, None] >= places) & (document[:, None] == document)
            sample["attention_mask"] = ~seen[None]
        return sample


def open_dataset(export: str, *, end_id: int, vocab_size: int, seq_len: int, rows: int) -> Any:
    """So many rows of an export of one split, as Megatron-LM's training builds them."""
    blend = get_blend_from_list(Path(export, "data-args.txt").read_text().split())
    # All that is asked of a tokenizer.
    tokenizer = types.SimpleNamespace(
        eod=end_id, pad=-1, vocab_size=vocab_size, unique_identifiers={"class": "of the store"}
    )
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=seq_len,
        blend=blend,
        split="1,0,0",
        path_to_cache=tempfile.mkdtemp(),
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
    )
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    sizes = [rows, 0, 0]
    return BlendedMegatronDatasetBuilder(StoreDataset, sizes, lambda: True, config).build()[0]


def main(export: str, end_id: str, vocab_size: str) -> None:
    dataset = open_dataset(
        export, end_id=int(end_id), vocab_size=int(vocab_size), seq_len=64, rows=100
    )
    rows = [dataset[number] for number in range(100)]
    counted = sum(int(row["loss_mask"].sum()) for row in rows)
    begun = sum(int((row["position_ids"] == 0).sum()) for row in rows)
    print(f"{len(rows):,} rows: {counted:,} labels count, in {begun:,} parts of documents")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
