"""MosaicML StreamingDataset: rows of seq_len + 1 tokens, written by its MDSWriter, read from the
local folder through its StreamingDataLoader, shuffled in its default way.

Rows are arrays of fixed shape and uint16, which is its smallest encoding. `import streaming` also
imports its image datasets, and they take two names from torchvision, of which there is no build
that goes with this torch everywhere. Tokens are read without them, so stand-ins take their place.
"""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contenders.feeding import FeedJob, Pair, rows, run
from benchmarks.contenders.feeding_map_style import halves

if TYPE_CHECKING:
    from collections.abc import Iterator


def import_streaming() -> Any:
    """The package `streaming`, with stand-ins for what its image datasets import."""
    import transformers  # noqa: F401 - looks for torchvision itself, and must not find stand-ins

    members: dict[str, dict[str, object]] = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, found in members.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(found)
    import streaming

    return streaming


streaming = import_streaming()


def prepare(job: FeedJob) -> None:
    columns = {"ids": f"ndarray:uint16:{job.seq_len + 1}"}
    with streaming.MDSWriter(out=_folder(job), columns=columns) as writer:
        for row in rows(job):
            writer.write({"ids": row})


class MosaicML:
    def __init__(self, job: FeedJob) -> None:
        warnings.filterwarnings("ignore")
        # Blocks of shared memory that a killed run left behind would stop it.
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=_folder(job), shuffle=True, shuffle_seed=0, batch_size=job.batch_size
        )
        self._batches = streaming.StreamingDataLoader(
            dataset,
            batch_size=job.batch_size,
            num_workers=job.workers,
            persistent_workers=job.workers > 0,
            drop_last=True,
        )

    def epoch(self) -> Iterator[Pair]:
        return (halves(batch["ids"]) for batch in self._batches)

    def state(self) -> Any:
        return self._batches.state_dict()

    def restore(self, state: Any) -> None:
        self._batches.load_state_dict(state)


def _folder(job: FeedJob) -> str:
    return str(Path(job.folder) / "mds")


if __name__ == "__main__":
    run(MosaicML, prepare)
