"""Torch users begin here: `from tokenmill.torch import DeviceFeeder`."""

from tokenmill.loader.context_parallel import slice_row
from tokenmill.loader.torch.datasets import BatchDataset, TokenDataset
from tokenmill.loader.torch.distributed import distributed_ranks
from tokenmill.loader.torch.feeder import DeviceFeeder
from tokenmill.loader.torch.tensors import TensorBatch, to_tensors

__all__ = [
    "BatchDataset",
    "DeviceFeeder",
    "TensorBatch",
    "TokenDataset",
    "distributed_ranks",
    "slice_row",
    "to_tensors",
]
