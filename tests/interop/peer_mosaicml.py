"""MosaicML's own MDSWriter and reader, and hashes as its downloads check them.

`import streaming` also imports its image datasets, and they take two names from torchvision, which
tokens do not need: stand-ins take their place.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import transformers  # noqa: F401 - looks for torchvision itself, and must not find stand-ins

_STAND_INS: dict[str, dict[str, object]] = {
    "torchvision": {},
    "torchvision.datasets": {"VisionDataset": object},
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {"to_tensor": None},
}
for _name, _members in _STAND_INS.items():
    sys.modules[_name] = types.ModuleType(_name)
    vars(sys.modules[_name]).update(_members)

import streaming  # noqa: E402
from streaming.base.format import reader_from_json  # noqa: E402
from streaming.base.hashing import get_hash  # noqa: E402


def read(folder: str) -> dict[str, Any]:
    """Samples of all shards, and whether their hashes are those of the index."""
    index = json.loads((Path(folder) / "index.json").read_text())
    samples, hashes = [], []
    for shard in index["shards"]:
        reader = reader_from_json(folder, None, shard)
        samples += [reader[number] for number in range(len(reader))]
        data = (Path(folder) / shard["raw_data"]["basename"]).read_bytes()
        found = shard["raw_data"]["hashes"]
        hashes += [get_hash(name, data) == value for name, value in found.items()]
    lists = [{name: array.tolist() for name, array in sample.items()} for sample in samples]
    types_ = sorted({str(sample["tokens"].dtype) for sample in samples})
    return {"samples": lists, "hashes": hashes, "types": types_}


def dataset(folder: str) -> list[list[int]]:
    """Rows as StreamingDataset gives them, in order."""
    streaming.base.util.clean_stale_shared_memory()
    found = streaming.StreamingDataset(local=folder, shuffle=False, batch_size=1)
    return [found[number]["tokens"].tolist() for number in range(found.num_samples)]


def write(
    folder: str, columns: dict[str, str], samples: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """A folder of samples; lists become arrays of their column's type, or bytes of int64."""
    with streaming.MDSWriter(out=folder, columns=columns, **options) as writer:
        for sample in samples:
            writer.write({name: _value(columns[name], sample[name]) for name in columns})


def _value(encoding: str, value: Any) -> Any:
    kind, *details = encoding.split(":")
    if kind == "bytes":
        return np.array(value, np.int64).tobytes()
    if kind == "ndarray":
        return np.array(value, details[0] if details else np.int32)
    return value


if __name__ == "__main__":
    functions: dict[str, Any] = {"read": read, "dataset": dataset, "write": write}
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        print("\n> " + json.dumps(functions[function](*arguments)), flush=True)
