"""tokenmill itself: files on disk to a finished, checked, fsynced store, through the public
function.

In the time: everything the call does, so also the planning, the probe texts and the comparison with
the reference engine on a sample of every unit. `startup_seconds` is the part until all workers have
their engine and the first unit begins; rates leave it out because it does not grow with the input,
and the tables also show the whole call. Not in it: imports of the parent.
"""

from __future__ import annotations

import tokenmill
from benchmarks.contenders.protocol import Job, Report, answer, read_job


def build(job: Job) -> Report:
    """The one place of the benchmarks that knows tokenmill's interface."""
    result = tokenmill.build(
        job.files,
        tokenizer=job.tokenizer,
        out=job.out,
        workers=job.workers,
        memory=job.memory,
    )
    documents = result.totals.documents
    return Report(
        seconds=result.seconds,
        startup_seconds=result.startup_seconds,
        documents=documents + result.totals.empty,
        # One end-of-text id follows each document; the other contenders write none.
        tokens=result.totals.tokens - documents,
        peak_memory_bytes=result.peak_memory_bytes,
        stage_seconds=dict(result.stage_seconds),
    )


if __name__ == "__main__":
    answer(build(read_job()))
