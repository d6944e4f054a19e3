"""The verb `plan`: what a build would do and cost, before it runs.

The units are the real ones. Tokens, disk and time come from encoding a few megabytes of the input
with the engine that the build would use, in this process.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.builder.encode import Encoding, RowEncoder, cut_lengths
from tokenmill.builder.run import make_run
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.describe import describe
from tokenmill.engines.load import load_engine
from tokenmill.options import PlanOptions, with_options
from tokenmill.sources.base import SourceFile, SourceOptions, open_source, plan_units
from tokenmill.store.format import index_bytes, token_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.builder.run import BuildRun, Work
    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.records import RowBatch

_SAMPLE_BYTES = 4 << 20
_SAMPLE_FILES = 4
_NO_STORE = "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan:
    """What a build would do; numbers with `estimated` come from a sample."""

    store: str
    files: int
    input_bytes: int
    """As the files lie on disk."""
    units_to_build: int | None
    """None where compressed files hide it."""
    units_complete: int
    bytes_to_build: int
    """Text in the files to be worked on; an estimate where they are compressed."""
    workers: int
    memory_budget_bytes: int
    memory_per_worker_bytes: int
    max_document_bytes: int
    dtype: str
    vocab_size: int
    engine: str
    engine_note: str | None
    eos: str | None
    bos: str | None
    sample_bytes: int
    sample_documents: int
    sample_rejected: int
    estimated_documents: int
    estimated_tokens: int
    estimated_disk_bytes: int
    estimated_seconds: float
    bytes_per_token: float
    skipped_files: tuple[tuple[str, str], ...]


@dataclass(kw_only=True, slots=True)
class _Sample:
    """What a part of the input became."""

    input_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    rejected: int = 0
    tokens: int = 0
    seconds: float = 0.0


@with_options(PlanOptions)
def plan(options: PlanOptions) -> BuildPlan:
    """What `build` with the same arguments would do and cost; writes nothing."""
    run = make_run(dataclasses.replace(options, out=options.out or _NO_STORE))
    try:
        return _estimate(run)
    finally:
        run.close()


def _estimate(run: BuildRun) -> BuildPlan:
    work = run.prepare(run.discover())
    request = work.request
    policy = SpecialTokens(run.options.special_tokens)
    engine = load_engine(
        request.info or describe(request.files, policy=policy),
        choice=run.options.engine,
        special_tokens=policy,
    )
    encoder = RowEncoder(engine, request.identity)
    # A file that the build would have no room for can still be looked into here.
    options = dataclasses.replace(
        work.options, batch_bytes=_SAMPLE_BYTES // 4, room_bytes=SourceOptions().room_bytes
    )
    sample = _encode_sample(work.discovery.files, options, encoder)
    return _plan(run, work, engine, sample)


def _plan(run: BuildRun, work: Work, engine: CheckedEngine, sample: _Sample) -> BuildPlan:
    identity, memory, plan = work.request.identity, work.memory, work.plan
    share = plan.bytes_to_do / max(sample.input_bytes, 1)
    documents = round(sample.documents * share)
    tokens = round(sample.tokens * share)
    dtype = token_dtype(identity.tokenizer.vocab_size)
    return BuildPlan(
        store=run.layout.name,
        files=sum(len(file.members) or 1 for file in work.discovery.files),
        input_bytes=sum(file.size for file in work.discovery.files),
        units_to_build=plan.units_to_do,
        units_complete=len(plan.done),
        bytes_to_build=plan.bytes_to_do,
        workers=memory.workers,
        memory_budget_bytes=memory.budget,
        memory_per_worker_bytes=memory.worker_bytes,
        max_document_bytes=memory.max_document_bytes,
        dtype=dtype.name,
        vocab_size=identity.tokenizer.vocab_size,
        engine=engine.name,
        engine_note=engine.refusal,
        eos=None if identity.eos is None else identity.eos.token,
        bos=None if identity.bos is None else identity.bos.token,
        sample_bytes=sample.input_bytes,
        sample_documents=sample.documents,
        sample_rejected=sample.rejected,
        estimated_documents=documents,
        estimated_tokens=tokens,
        estimated_disk_bytes=tokens * (dtype.itemsize + identity.mask) + index_bytes(documents),
        estimated_seconds=sample.seconds * share / memory.workers,
        bytes_per_token=sample.text_bytes / max(sample.tokens, 1),
        skipped_files=tuple((skipped.path, skipped.reason) for skipped in work.discovery.skipped),
    )


def _add(sample: _Sample, batch: RowBatch, encoder: RowEncoder) -> None:
    """Count what a build would make of a batch."""
    made = encoder.encode(batch.texts, batch.rows, Encoding(keeps_texts=False))
    lengths = encoder.framed(made).lengths
    lengths, limit = lengths[lengths > 0], encoder.shape.piece_tokens
    sample.input_bytes += batch.num_bytes
    sample.text_bytes += int(made.sizes.sum())
    sample.documents += len(lengths if limit is None else cut_lengths(lengths, limit)[0])
    sample.rejected += len(batch.rejects) + len(made.rejects)
    sample.tokens += int(lengths.sum())


def _encode_sample(
    files: Sequence[SourceFile], options: SourceOptions, encoder: RowEncoder
) -> _Sample:
    """Read and encode the first megabytes of a few files, spread over the input."""
    sample = _Sample()
    step = max(1, len(files) // _SAMPLE_FILES)
    chosen = files[::step][:_SAMPLE_FILES]
    for file in chosen:
        _encode_some(sample, file, options, encoder, most_bytes=_SAMPLE_BYTES // len(chosen))
    return sample


def _encode_some(
    sample: _Sample,
    file: SourceFile,
    options: SourceOptions,
    encoder: RowEncoder,
    *,
    most_bytes: int,
) -> None:
    start = time.perf_counter()
    unit = next(plan_units(file, options), None)
    if unit is None:
        return
    taken = 0
    with closing(open_source(file, options)) as source:
        for batch in source.read(unit):
            _add(sample, batch, encoder)
            taken += batch.num_bytes
            if taken >= most_bytes:
                break
    sample.seconds += time.perf_counter() - start
