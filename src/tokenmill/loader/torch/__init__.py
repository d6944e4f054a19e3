"""Torch tensors from the loader: the only home of torch in this package.

    tensors.py   a batch as tensors; datasets for DataLoader and StatefulDataLoader
    feeder.py    batches on the device, ahead of time

Users import from `tokenmill.torch`.
"""

from __future__ import annotations

from importlib.util import find_spec

from tokenmill.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError("torch", extra="torch", purpose="feeding tensors")
