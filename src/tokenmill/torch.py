"""Torch users begin here: `from tokenmill.torch import DeviceFeeder`."""

from tokenmill.loader.torch.feeder import DeviceFeeder
from tokenmill.loader.torch.tensors import (
    BatchDataset,
    TensorBatch,
    TokenDataset,
    distributed_ranks,
    slice_row,
    to_tensors,
)

__all__ = [
    "BatchDataset",
    "DeviceFeeder",
    "TensorBatch",
    "TokenDataset",
    "distributed_ranks",
    "slice_row",
    "to_tensors",
]
