"""The limit: plain copies of the ids until they are on the disk, on one thread or several."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.contenders.interop import InteropJob, run


def write(job: InteropJob, out: Path) -> int:
    out.mkdir()
    shards = sorted(Path(job.store).glob("shards/*.bin"))

    def copy(shard: Path) -> None:
        shutil.copyfile(shard, out / shard.name)
        with (out / shard.name).open("rb") as file:
            os.fsync(file.fileno())

    with ThreadPoolExecutor(job.workers or os.cpu_count()) as pool:
        list(pool.map(copy, shards))
    return sum(shard.stat().st_size for shard in shards) // 2


if __name__ == "__main__":
    run(write)
