"""One training run: store, feeder, trainer, journal, checkpoints and signals, put together.

    resume -> step, step, ... -> (log) -> (evaluate) -> (save) -> ... -> evaluate, save

What is done every so many steps is decided by the number of the step alone, so that all ranks do
the same, and a resumed run does what the interrupted one would have done.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from tokenmill.errors import UsageError
from tokenmill.loader.loader import Loader
from tokenmill.stalls import StallMeter
from tokenmill.torch import DeviceFeeder
from tokenmill.trainer.checkpoint import (
    PREFIX,
    Checkpoints,
    random_states,
    set_random_states,
)
from tokenmill.trainer.evaluation import NO_SPLIT, Evaluation
from tokenmill.trainer.journal import Journal, require_tensorboard
from tokenmill.trainer.loop import Collector, Trainer
from tokenmill.trainer.memory import is_out_of_memory, memory_error, peak_bytes
from tokenmill.trainer.metrics import LateReader
from tokenmill.trainer.progress import TrainProgress, TrainResult
from tokenmill.trainer.setup import Ranks, Setup, peak_flops, settle
from tokenmill.trainer.signals import StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenmill.store.reader import Store
    from tokenmill.trainer.checkpoint import Checkpoint
    from tokenmill.trainer.metrics import Reading
    from tokenmill.trainer.options import TrainOptions

    OnProgress = Callable[[TrainProgress], None]

PARTS_OF_A_RUN = 10
"""Checkpoints, and evaluations, of a run that does not say how often ..."""
LEAST_STEPS = 100
"""... but not more often than every so many steps."""
UNCHECKED = (
    "{path!r} was written by an older tokenmill, without checksums: its tensors are taken as they"
    " are; the next checkpoint has them"
)


def run_training(
    store: Store, val: Store | None, options: TrainOptions, *, on_progress: OnProgress | None = None
) -> TrainResult:
    """Train on a store. The ranks of torchrun are found in the environment."""
    if options.tensorboard:
        require_tensorboard()
    ranks = Ranks.from_environment()
    setup = settle(options, vocab_size=store.vocab_size, ranks=ranks)
    with _process_group(setup):
        run = TrainingRun(store, val, setup, on_progress if ranks.rank == 0 else None)
        try:
            return run.run()
        except Exception as error:
            if is_out_of_memory(error):
                raise memory_error(setup) from error
            raise
        finally:
            run.close()


@contextlib.contextmanager
def _process_group(setup: Setup) -> Iterator[None]:
    """The ranks in touch with each other; nothing where there is one, or where they are already."""
    if setup.device.type == "cuda":
        torch.cuda.set_device(setup.device)
    if setup.ranks.world_size == 1 or distributed.is_initialized():
        yield
        return
    is_cuda = setup.device.type == "cuda"
    distributed.init_process_group(
        "nccl" if is_cuda else "gloo", device_id=setup.device if is_cuda else None
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


class TrainingRun:
    """Everything of one run in this process."""

    def __init__(
        self, store: Store, val: Store | None, setup: Setup, on_progress: OnProgress | None
    ) -> None:
        options = setup.options
        self.setup = setup
        self.options = options
        self.store = store
        self.out = Path(options.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints", keep=options.keep)
        self.notes: list[str] = [] if val is not None else [NO_SPLIT]
        self._tell = on_progress
        self._begun = time.perf_counter()
        self._seen = TrainProgress(phase="starting", steps=options.steps)
        self._rates: list[float] = []
        self._stops = False
        """Whether any rank was asked to stop, as all ranks know it."""
        self._resources = contextlib.ExitStack()
        self._collector = Collector()
        self._resources.callback(self._collector.close)
        self._resume_from = self._find_resume()
        self._say("starting", *self.notes, self._opening())
        loader = self._make_loader()
        self.feeder = DeviceFeeder(loader, device=setup.device, fields=setup.fields)
        self._resources.enter_context(self.feeder)
        self.meter = self._resources.enter_context(StallMeter())
        self.evaluation: Evaluation | None = None
        if val is not None:
            capacity = loader.format(setup.seq_len).capacity
            self.evaluation = Evaluation(val, setup, cu_seqlens_capacity=capacity)

    def _find_resume(self) -> Checkpoint | None:
        if not self.options.resume and (paths := self.checkpoints.paths()):
            step = int(paths[-1].name.removeprefix(PREFIX))
            raise UsageError(
                f"{str(self.out)!r} holds a run already, at step {step:,}",
                hint="go on with it: --resume; or begin another in another folder: --out FOLDER",
            )
        newest = self.checkpoints.newest()
        if newest is not None:
            newest.require(self._essentials())
            if not newest.is_checked:
                self.notes.append(UNCHECKED.format(path=str(newest.path)))
        return newest

    def _essentials(self) -> dict[str, object]:
        return {**self.options.essentials(), "vocab_size": self.setup.vocab_size}

    def _opening(self) -> str:
        """What is about to be done, and what was decided for the user, in one line."""
        setup = self.setup
        compiled = ", compiled in the first step" if setup.compiles else ""
        lean = ", activations computed again" if setup.checkpointing else ""
        how = "" if self.options.micro_batch or self.options.accumulate else " (chosen to fit)"
        ranks = f" on each of {setup.ranks.world_size} ranks" if setup.ranks.world_size > 1 else ""
        at = f", from step {self._resume_from.step:,}" if self._resume_from else ""
        return (
            f"training {self.options.model}, {self._parameters / 1e6:,.1f}M parameters,"
            f" {str(setup.dtype).removeprefix('torch.')}{compiled}{lean} on {setup.device};"
            f" {setup.batch_tokens:,} tokens a step: {setup.accumulate} x {setup.micro_batch} rows"
            f" of {setup.seq_len:,}{ranks}{how}{at}"
        )

    @property
    def _parameters(self) -> int:
        return self.setup.config.num_parameters(self.setup.vocab_size)

    def _make_loader(self) -> Loader:
        options, ranks = self.options, self.setup.ranks
        loader = Loader(
            self.store,
            seq_len=options.seq_len,
            batch_size=self.setup.micro_batch,
            packing=options.packing,
            boundaries=options.boundaries,
            shuffle=options.shuffle,
            seed=options.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        if self._resume_from is not None:
            try:
                loader.load_state_dict(self._resume_from.facts["loader"])
            except RecursionError as error:
                raise self._resume_from.damaged("nests its loader's state too deep") from error
        return loader

    def run(self) -> TrainResult:
        """All steps that are left."""
        # Reading ahead begins while the model is made.
        batches = self.meter.watch(self.feeder)
        self.trainer = Trainer(self.setup, batches=batches)
        start = self._load()
        is_first = self.setup.ranks.rank == 0
        if is_first:
            self.checkpoints.sweep()
        self.journal = Journal(
            self.out,
            resumed_at=start,
            tensorboard=self.options.tensorboard,
            is_writer=is_first,
        )
        self._resources.callback(self.journal.close)
        self.reader = LateReader(self.setup.device)
        request = StopRequest(lambda: self._say(self._seen.phase, "stopping after this step"))
        with request.listening():
            stopped = self._steps(start, request)
            is_done = start == self.options.steps
            checkpoint = self._save() if stopped or is_done else self._finish()
        if stopped:
            request.pass_on()
        return self._result(start, checkpoint)

    def _load(self) -> int:
        found = self._resume_from
        if found is None:
            return 0
        device, rank = self.setup.device, self.setup.ranks.rank
        if found.step > self.options.steps:
            raise UsageError(
                f"the run in {str(self.out)!r} has made {found.step:,} steps already, more than"
                f" steps={self.options.steps:,}",
                hint=f"use --steps with a number above {found.step}",
            )
        state = {name: found.load(name, device=device) for name in ("model", "optimizer")}
        states = found.load("rng")
        try:
            set_random_states(states, device, rank=rank)
            self.trainer.load_state(state, step=found.step)
        except ValueError as error:
            raise found.damaged(f"is not of this run: {error}", name="") from error
        return found.step

    def _steps(self, start: int, request: StopRequest) -> bool:
        """Step by step to the end; True if it was asked to stop before."""
        options, trainer = self.options, self.trainer
        often = max(LEAST_STEPS, options.steps // PARTS_OF_A_RUN)
        save_every, eval_every = options.save_every or often, options.eval_every or often
        for step in range(start + 1, options.steps + 1):
            trainer.step()
            self._collector.after_step(step - start)
            if step == start + 1:
                self.reader.begin(step)  # compiling is no part of the rate
            is_logged = step % options.log_every == 0 or step in (start + 1, options.steps)
            stops = self._log(step, request) if is_logged else False
            if step == options.steps:
                break
            if stops or (request.signal is not None and self.setup.ranks.world_size == 1):
                return True
            is_evaluated = self.evaluation is not None and step % eval_every == 0
            if is_evaluated:
                self._evaluate()
            if step % save_every == 0:
                self._save()
            if is_evaluated or step % save_every == 0:
                self.reader.begin(step)
        return False

    def _log(self, step: int, request: StopRequest) -> bool:
        """Send this step's numbers on their way, write those that have arrived; True to stop."""
        trainer, is_alone = self.trainer, self.setup.ranks.world_size == 1
        trainer.stop_wanted = request.signal is not None
        # All ranks must see the same numbers at the same step: they decide by them.
        readings = list(self.reader.read(wait=not is_alone))
        self.reader.send(step, trainer.row)
        self._write(readings)
        return self._stops

    def _write(self, readings: list[Reading]) -> None:
        for reading in readings:
            row, setup = reading.row, self.setup
            self._stops = self._stops or row.stop > 0
            rate = None
            if reading.steps and reading.seconds > 0:
                rate = reading.steps * setup.batch_tokens / reading.seconds
                self._rates.append(rate)
            self._seen = self._progress(
                "training",
                step=reading.step,
                loss=row.loss,
                learning_rate=row.learning_rate,
                grad_norm=row.grad_norm,
                tokens=reading.step * setup.batch_tokens,
                tokens_per_second=rate or self._seen.tokens_per_second,
                mfu=self._mfu(rate) or self._seen.mfu,
                **self._waits(),
                memory_bytes=peak_bytes(setup.device),
                eta_seconds=self._eta(reading.step),
            )
            self.journal.write(reading.step, journal_line(self._seen, rate=rate))
            self._send(self._seen)

    def _progress(self, phase: str, **changes: Any) -> TrainProgress:
        seconds = time.perf_counter() - self._begun
        return replace(self._seen, phase=phase, seconds=seconds, message=None, **changes)

    def _waits(self) -> dict[str, float | None]:
        report = self.meter.report()
        return {
            "wait_share": report.wait_share,
            "wait_p50_ms": report.p50_ms,
            "wait_p99_ms": report.p99_ms,
        }

    def _mfu(self, rate: float | None) -> float | None:
        setup = self.setup
        peak = peak_flops(setup.device, setup.dtype)
        if peak is None or rate is None:
            return None
        flops = setup.config.flops_per_token(setup.seq_len, setup.vocab_size)
        return rate * flops / (peak * setup.ranks.world_size)

    def _eta(self, step: int) -> float | None:
        if not self._rates:
            return None
        rate = statistics.median(self._rates[-20:])
        return (self.options.steps - step) * self.setup.batch_tokens / rate

    def _evaluate(self) -> None:
        assert self.evaluation is not None
        self._send(self._progress("evaluating"))
        loss = self.evaluation.loss(self.trainer)
        self._write(list(self.reader.read(wait=True)))
        self._seen = self._progress("training", val_loss=loss)
        self.journal.write(self.trainer.step_number, {"val_loss": loss})
        self._send(self._seen)

    def _save(self) -> Path:
        """A checkpoint of this step, written by the first rank."""
        self._write(list(self.reader.read(wait=True)))
        self._send(self._progress("saving"))
        ranks, device = self.setup.ranks, self.setup.device
        states: list[Any] = [random_states(device)]
        if ranks.world_size > 1:
            mine = states[0]
            states = [None] * ranks.world_size
            distributed.all_gather_object(states, mine)
        self._collector.pause()
        step = self.trainer.step_number
        if ranks.rank:
            return self.checkpoints.folder
        facts = {
            "loader": self.feeder.state_dict(),
            "essentials": self._essentials(),
            "options": self.options.as_json(),
            "tokens": step * self.setup.batch_tokens,
            "versions": {"torch": torch.__version__},
        }
        tensors = {**self.trainer.state(), "rng": states}
        return self.checkpoints.write(step=step, tensors=tensors, facts=facts)

    def _finish(self) -> Path:
        if self.evaluation is not None:
            self._evaluate()
        return self._save()

    def _result(self, start: int, checkpoint: Path) -> TrainResult:
        seen = self._seen
        rate = statistics.median(self._rates) if self._rates else None
        return TrainResult(
            out=self.out,
            steps=self.trainer.step_number,
            resumed_from=start or None,
            parameters=self._parameters,
            loss=float("nan") if seen.loss is None else seen.loss,
            val_loss=seen.val_loss,
            tokens=self.trainer.step_number * self.setup.batch_tokens,
            seconds=time.perf_counter() - self._begun,
            tokens_per_second=rate,
            mfu=self._mfu(rate),
            wait_share=seen.wait_share,
            wait_p50_ms=seen.wait_p50_ms,
            wait_p99_ms=seen.wait_p99_ms,
            memory_bytes=peak_bytes(self.setup.device),
            checkpoint=checkpoint,
            notes=self.notes,
        )

    def _say(self, phase: str, *messages: str) -> None:
        for message in messages:
            self._send(replace(self._seen, phase=phase, message=message))

    def _send(self, progress: TrainProgress) -> None:
        if self._tell is not None:
            self._tell(progress)

    def close(self) -> None:
        """End threads, close files."""
        self._resources.close()


def journal_line(seen: TrainProgress, *, rate: float | None) -> dict[str, float | int | None]:
    """What is written down of a step."""
    return {
        "loss": seen.loss,
        "tokens": seen.tokens,
        "tokens_per_second": rate,
        "mfu": seen.mfu if rate is not None else None,
        "wait_share": seen.wait_share,
        "wait_p50_ms": seen.wait_p50_ms,
        "wait_p99_ms": seen.wait_p99_ms,
        "memory_bytes": seen.memory_bytes,
        "seconds": round(seen.seconds, 3),
        "lr": seen.learning_rate,
        "grad_norm": seen.grad_norm,
    }
