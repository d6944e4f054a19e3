"""Long rows on a GPU: attention within documents beside that over the whole row, and its memory.

    python -m benchmarks.long_rows_gpu --store STORE --json results.json
    python -m benchmarks.long_rows_gpu --tiny --json results.json       a trial on a CPU

    speeds     the reference trainer as it sets itself up, told model, row and attention alone
    kernels    one layer's attention, forward and backward, of each way to compute it
    memory     what a run is estimated to take beside the most that it took
    losses     the same steps with each kernel in bf16, and with a mask in bf16 and in float32

A step has fewer micro-batches than in a run, the rest is a run's own; compiling is timed apart.
Each group of cases is a process of its own, which writes what it has measured at once: what fails,
or has no time left, costs no other case its numbers. The memory of several small cases is measured
side by side, where nothing is timed. `--json` is read first where it exists, and what is in it is
not measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks import machine
from benchmarks.feeding_gpu import Clock, describe, write_store
from benchmarks.long_rows_gpu_table import GOALS, long_rows_body, misses
from tokenmill import Loader, Store
from tokenmill.torch import DeviceFeeder
from tokenmill.trainer.loop import (
    Setup,
    Trainer,
    TrainRanks,
    choose_kernel,
    peak_flops,
    settle,
)
from tokenmill.trainer.model import (
    attend_documents,
    document_boundaries,
    find_kernels,
    try_kernels,
)
from tokenmill.trainer.options import PRESETS, TrainOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PACKAGES = ("numpy", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "torch", "triton")
LONG = 1_000_000
"""Steps of the schedule: the learning rate hardly moves while it is measured."""
STEP_TOKENS = 131_072
"""Of a measured step, at least: the update of the weights is in each."""
SKIPPED = 3
STEPS = 6
LOSS_STEPS = 24
MEMORY_TOKENS = 8_192
SHARE_OF_DEVICE = 0.85
"""That cases whose memory is measured side by side may take together."""
MEMORY_SECONDS = 150
CASE_SECONDS = 200


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is timed."""

    model: str
    seq_len: int
    attention: str
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        eight = "" if self.optimizer == "adamw" else f" {self.optimizer}"
        return f"{self.model}:{self.seq_len}:{self.attention}{eight}"


# In the order in which they are measured, in two processes: what must be reached comes first.
CASES = (
    Case(model="medium", seq_len=2048, attention="flash"),
    Case(model="medium", seq_len=16_384, attention="documents"),
    Case(model="large", seq_len=32_768, attention="documents"),
    Case(model="small", seq_len=1024, attention="flash"),
    Case(model="small", seq_len=1024, attention="documents"),
    Case(model="medium", seq_len=8192, attention="documents"),
    Case(model="medium", seq_len=8192, attention="flash"),
    Case(model="medium", seq_len=16_384, attention="flash"),
    Case(model="large", seq_len=32_768, attention="documents", optimizer="adamw8bit"),
)
TINY_CASES = (
    Case(model="tiny", seq_len=128, attention="flash"),
    Case(model="tiny", seq_len=128, attention="documents"),
)
# Heads, their width, tokens of a row and of a micro-batch.
SHAPES = (
    (14, 128, 16_384, 65_536),
    (16, 128, 32_768, 32_768),
    (14, 128, 8192, 65_536),
    (14, 128, 2048, 65_536),
    (12, 64, 1024, 65_536),
)
TINY_SHAPES = ((2, 32, 128, 256),)
LENGTHS = {
    "tiny": (256, 512, 1024),
    "mini": (512, 1024, 2048),
    "small": (1024, 2048, 4096),
    "medium": (2048, 8192, 16_384),
    "large": (2048, 8192, 16_384),
}


# -------------------------------------------------------------------------------------------------
# Speeds.


def make_setup(case: Case, store: Store, **said: Any) -> Setup:
    """As a run settles it, but for the micro-batches of a step."""
    options = TrainOptions(
        "store",
        model=case.model,
        seq_len=case.seq_len,
        attention=case.attention,
        optimizer=case.optimizer,
        steps=LONG,
        **said,
    )
    setup = settle(options, vocab_size=store.vocab_size, ranks=TrainRanks())
    wanted = STEP_TOKENS if setup.device.type == "cuda" else 1
    tokens = setup.micro_batch * setup.seq_len
    return replace(setup, accumulate=min(setup.accumulate, max(1, wanted // tokens)))


def make_loader(setup: Setup, store: Store) -> Loader:
    return Loader(store, seq_len=setup.seq_len, batch_size=setup.micro_batch)


def lengths_of(loader: Loader, step: int = 0) -> NDArray[np.integer]:
    lengths = np.diff(loader.batch(step).cu_seqlens)
    return lengths[lengths > 0]


def measure_speed(case: Case, store: Store) -> dict[str, Any]:
    """Tokens per second of one case, its memory, and what was chosen for it."""
    torch.compiler.reset()
    setup = make_setup(case, store)
    loader = make_loader(setup, store)
    setup, said, problems = choose_kernel(setup, lambda: lengths_of(loader))
    reset_peak()
    began = time.perf_counter()
    with DeviceFeeder(loader, device=setup.device, fields=setup.fields) as feeder:
        trainer = Trainer(setup, batches=feeder)
        trainer.step()
        synchronize()
        compile_seconds = time.perf_counter() - began
        for _ in range(SKIPPED - 1):
            trainer.step()
        trainer.pairs = 0
        clock = Clock(setup.device)
        clock.mark()
        for _ in range(STEPS):
            trainer.step()
            clock.mark()
        seconds = clock.seconds()
    tokens = setup.batch_tokens
    rate = tokens / statistics.median(seconds)
    pairs = trainer.pairs / (STEPS * tokens)
    flops = setup.config.flops_per_token(setup.seq_len, store.vocab_size, pairs=pairs)
    peak = peak_flops(setup.device, setup.dtype)
    need = setup.need
    return {
        "kernel": said,
        "problems": problems,
        "micro_batch": setup.micro_batch,
        "accumulate": setup.accumulate,
        "recomputed": setup.recomputed,
        "layers": setup.config.num_layers,
        "compile_seconds": round(compile_seconds, 1),
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "pairs_per_token": pairs,
        "mfu": None if peak is None else rate * flops / peak,
        "loss": float(trainer.row[0]),
        "estimated_bytes": need.fixed_bytes + need.activations,
        "peak_bytes": peak_bytes(),
    }


# -------------------------------------------------------------------------------------------------
# Kernels.


def measure_kernels(shape: tuple[int, int, int, int], store: Store) -> dict[str, Any]:
    """Milliseconds of one layer's attention, forward and backward, each way."""
    heads, width, row, tokens = shape
    loader = Loader(store, seq_len=row, batch_size=tokens // row)
    lengths = lengths_of(loader)
    found: dict[str, Any] = {
        "documents": len(lengths),
        "longest": int(lengths.max()),
        "pairs_per_token": float((lengths * (lengths + 1.0)).sum() / 2 / tokens),
    }
    if not torch.cuda.is_available():
        return found
    names = find_kernels(torch.device("cuda"), torch.bfloat16)
    trials, problems = try_kernels(names, lengths=lengths, heads=heads, width=width)
    found |= {each.kernel: each.milliseconds for each in trials} | {"problems": problems}
    if "cudnn" in names:
        given = random_heads(tokens, heads, width)
        extent = len(lengths), int(lengths.max())
        found["cudnn, its number exact"] = attempt(
            lambda: time_of(run_documents(lengths, "cudnn", given, extent))
        )
    batches = [lengths_of(loader, step) for step in range(1, 9)]
    for name in (each.kernel for each in trials):
        found[f"{name}, eight batches"] = attempt(partial(many, name, batches, heads, width))
    found["varlen, filled up to 2,049"] = attempt(lambda: filled_up(lengths, heads, width, row))
    found["flash"] = attempt(lambda: whole_rows(tokens // row, row, heads, width))
    found |= attempt(lambda: by_flex(lengths, tokens // row, row, heads, width), name="flex")
    return found


def attempt(measure: Callable[[], Any], *, name: str | None = None) -> Any:
    """What it measures, or why it did not."""
    try:
        return measure()
    except Exception as error:  # one way must not cost the others their numbers
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        return text if name is None else {name: text}


def time_of(work: Callable[[], object], *, times: int = 7) -> float:
    """Median milliseconds on the device, once it is warm."""
    work()
    work()
    clock = Clock(torch.device("cuda"))
    clock.mark()
    for _ in range(times):
        work()
        clock.mark()
    return 1000 * statistics.median(clock.seconds())


def random_heads(*shape: int) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient."""
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    return [each.requires_grad_() for each in made[:3]] + made[3:]


def run_documents(
    lengths: NDArray[np.integer],
    kernel: str,
    heads: list[torch.Tensor],
    extent: tuple[int, int],
    *,
    room: int = 0,
) -> Callable[[], object]:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    cu_seqlens = torch.from_numpy(starts).cuda()
    filled = max(0, max(extent[0], room) + 1 - len(starts))
    cu_seqlens = functional.pad(cu_seqlens, (0, filled), value=int(starts[-1]))
    _, number, width = heads[0].shape
    boundaries = document_boundaries(
        cu_seqlens, torch.tensor(extent), kernel=kernel, heads=number, width=width
    )

    def work() -> None:
        attend_documents(*heads[:3], *boundaries)[0].backward(heads[3])

    return work


def many(
    kernel: str, batches: list[NDArray[np.integer]], heads: int, width: int
) -> dict[str, float]:
    """Of batches with other documents each: the first time, with plans to make, and after it."""
    given = random_heads(int(batches[0].sum()), heads, width)
    works = [
        run_documents(each, kernel, given, (len(each), int(each.max())), room=2 * len(each))
        for each in batches
    ]
    synchronize()
    began = time.perf_counter()
    for work in works:
        work()
    synchronize()
    first = time.perf_counter() - began
    return {
        "first_ms": 1000 * first / len(works),
        "then_ms": time_of(lambda: [work() for work in works], times=3) / len(works),
    }


def filled_up(lengths: NDArray[np.integer], heads: int, width: int, row: int) -> float:
    given = random_heads(int(lengths.sum()), heads, width)
    return time_of(run_documents(lengths, "varlen", given, (2048, row)))


def whole_rows(rows: int, row: int, heads: int, width: int) -> float:
    given = random_heads(rows, heads, row, width)

    def work() -> None:
        q, k, v, grad = given
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

    return time_of(work)


def by_flex(
    lengths: NDArray[np.integer], rows: int, row: int, heads: int, width: int
) -> dict[str, float]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    numbers = np.repeat(np.arange(len(lengths)), lengths).reshape(rows, row)
    documents = torch.from_numpy(numbers).cuda()

    def is_seen(
        b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    make = torch.compile(create_block_mask, dynamic=False)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    mask = make(is_seen, rows, None, row, row, device="cuda")
    given = random_heads(rows, heads, row, width)

    def work() -> None:
        compiled(*given[:3], block_mask=mask).backward(given[3])

    return {
        "flex": time_of(work),
        "flex, its mask": time_of(lambda: make(is_seen, rows, None, row, row, device="cuda")),
    }


# -------------------------------------------------------------------------------------------------
# Memory.


def memory_setup(model: str, seq_len: int, vocab_size: int) -> Setup:
    options = TrainOptions(
        "store",
        model=model,
        seq_len=seq_len,
        steps=LONG,
        micro_batch=max(1, MEMORY_TOKENS // seq_len),
        accumulate=2,
        checkpointing=False,
    )
    return settle(options, vocab_size=vocab_size, ranks=TrainRanks())


def measure_memory(model: str, seq_len: int, vocab_size: int) -> dict[str, Any]:
    """The estimate, and the most that three steps took."""
    setup = memory_setup(model, seq_len, vocab_size)
    found: dict[str, Any] = {"micro_batch": setup.micro_batch}
    for recomputed in (0, setup.config.num_layers):
        if recomputed and model not in ("small", "medium"):
            continue
        torch.compiler.reset()
        chosen = replace(setup, recomputed=recomputed)
        reset_peak()
        ids = torch.randint(0, 1000, (chosen.micro_batch, seq_len), device=chosen.device)
        trainer = Trainer(chosen, batches=repeat(SimpleNamespace(input_ids=ids, labels=ids)))
        for _ in range(3):
            trainer.step()
        synchronize()
        need = chosen.need
        name = "recomputed" if recomputed else "kept"
        found[name] = {
            "estimated_bytes": need.fixed_bytes + need.activations,
            "fixed_bytes": need.fixed_bytes,
            "peak_bytes": peak_bytes(),
        }
        del trainer
        gc.collect()
        if recomputed == 0 and seq_len != LENGTHS[model][-1]:
            break
    return found


# -------------------------------------------------------------------------------------------------
# Losses.


def measure_losses(case: Case, store: Store) -> dict[str, Any]:
    """Of the same steps: by the kernel, and by a mask, in bf16 and in float32."""
    found: dict[str, Any] = {}
    on_gpu = torch.cuda.is_available()
    names = find_kernels(torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16)
    ways: list[tuple[str, str, str | None]] = [
        *((f"{name}, bf16", "bf16", name) for name in names),
        ("mask, bf16", "bf16", None),
        ("mask, fp32", "fp32", None),
    ]
    for label, precision, kernel in ways:
        setup = make_setup(case, store, precision=precision, compile=False, micro_batch=4)
        setup = replace(setup, kernel=kernel, accumulate=1)
        loader = make_loader(setup, store)
        with DeviceFeeder(loader, device=setup.device, fields=setup.fields) as feeder:
            trainer, losses = Trainer(setup, batches=feeder), []
            for _ in range(LOSS_STEPS):
                trainer.step()
                losses.append(trainer.row[0].clone())
        found[label] = torch.stack(losses).tolist()
        del trainer
        gc.collect()
    return found


# -------------------------------------------------------------------------------------------------
# All of it.


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int | None:
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


def work_on(names: list[str], store: Store, tiny: bool) -> None:
    """In a process of its own: one line of JSON for each case that was measured."""
    cases = {each.name: each for each in (TINY_CASES if tiny else CASES)}
    shapes = {f"kernels:{':'.join(map(str, each))}": each for each in (*SHAPES, *TINY_SHAPES)}
    for name in names:
        began = time.perf_counter()
        if name in cases:
            work = partial(measure_speed, cases[name], store)
        elif name in shapes:
            work = partial(measure_kernels, shapes[name], store)
        elif name == "losses":
            model, row = ("tiny", 128) if tiny else ("mini", 1024)
            case = Case(model=model, seq_len=row, attention="documents")
            work = partial(measure_losses, case, store)
        else:
            _, model, row_text = name.split(":")
            work = partial(measure_memory, model, int(row_text), store.vocab_size)
        found = attempt(work, name="error")
        found["took_seconds"] = round(time.perf_counter() - began, 1)
        print("RESULT " + json.dumps({name: found}), flush=True)
        reset_peak()


class Bench:
    """Starts processes, takes down what they have measured, and ends them in time."""

    def __init__(self, args: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
        self._args, self._store, self._results = args, args.store, results
        self._folder = folder  # for what processes say
        self._end = time.monotonic() + args.budget

    @property
    def left(self) -> float:
        return float(self._end - time.monotonic())

    def start(self, names: list[str], **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        command = [sys.executable, "-m", "benchmarks.long_rows_gpu", "--store", str(self._store)]
        command += ["--work", ",".join(names), *(["--tiny"] if self._args.tiny else [])]
        # Errors go to the same file: what a process has said is kept whatever becomes of it.
        said = self._folder / f"{names[0]}-{time.monotonic_ns()}".replace(":", "-")
        with said.open("a") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment
            )
        return process, said

    def finish(self, process: subprocess.Popen[bytes], said: Path, *, seconds: float) -> None:
        """Wait for it, no longer than so, or than a case may take; take down what it measures."""
        end, known = time.monotonic() + seconds, len(self._results["measurements"])
        patience = time.monotonic() + CASE_SECONDS
        while process.poll() is None and time.monotonic() < min(end, patience):
            time.sleep(0.5)
            self._take_down(said)
            if len(self._results["measurements"]) > known:
                known = len(self._results["measurements"])
                patience = time.monotonic() + CASE_SECONDS
        if process.poll() is None:
            process.kill()
            process.wait()
        self._take_down(said)
        if process.returncode:
            print(said.read_text()[-3000:], flush=True)

    def _take_down(self, said: Path) -> None:
        for line in said.read_text().splitlines(keepends=True):
            if not (line.startswith("RESULT ") and line.endswith("\n")):
                continue
            for name, found in json.loads(line.removeprefix("RESULT ")).items():
                if name not in self._results["measurements"]:
                    self._results["measurements"][name] = found
                    shown = {k: v for k, v in found.items() if k != "step_seconds"}
                    print(f"{name}: {json.dumps(shown)[:700]}", flush=True)
                    self._args.json.write_text(json.dumps(self._results, indent=1) + "\n")

    def wanted(self, names: list[str]) -> list[str]:
        """Those that are not measured yet, and asked for."""
        only = self._args.only.split(",") if self._args.only else [""]
        return [
            name
            for name in names
            if name not in self._results["measurements"] and any(part in name for part in only)
        ]

    def run(self, names: list[str]) -> None:
        """One after the other in one process; if it dies, the rest in another."""
        while (left := self.wanted(names)) and self.left > 20:
            before = len(self._results["measurements"])
            self.finish(*self.start(left), seconds=self.left)
            if len(self._results["measurements"]) == before:
                self._results["measurements"][left[0]] = {"error": "it ended, or took too long"}

    def run_memory(self, names: list[str], vocab_size: int) -> None:
        """Side by side, as far as they should fit."""
        room = SHARE_OF_DEVICE * torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
        waiting = self.wanted(names)
        running: list[tuple[subprocess.Popen[bytes], Path, float]] = []
        end = time.monotonic() + min(self.left, MEMORY_SECONDS)
        while waiting or running:
            for each in [each for each in running if each[0].poll() is not None]:
                running.remove(each)
                self.finish(each[0], each[1], seconds=0)
            used = sum(each[2] for each in running)
            if waiting and time.monotonic() < end:
                _, model, row = waiting[0].split(":")
                need = memory_setup(model, int(row), vocab_size).need
                # With what a process takes besides its tensors.
                takes = 1.2 * (need.fixed_bytes + need.activations) + 2e9
                if not running or (used + takes <= room and len(running) < 8):
                    one = self.start([waiting.pop(0)], TORCHINDUCTOR_COMPILE_THREADS="2")
                    running.append((*one, takes))
                    continue
            elif waiting:
                waiting = []
            if time.monotonic() > end:
                for process, said, _ in running:
                    self.finish(process, said, seconds=0)
                running = []
            time.sleep(0.2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--commit", help="of a copy without its history")
    parser.add_argument("--budget", type=float, default=420, help="seconds for all of it")
    parser.add_argument("--only", help="parts of names of cases, with commas")
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store is None and not args.tiny:
        parser.error("--store is needed")
    if not (torch.cuda.is_available() or args.tiny):
        parser.error("no CUDA device; a trial on the CPU: --tiny")
    return args


def main() -> None:
    args = arguments()
    if args.work:
        work_on(args.work.split(","), Store(args.store, split="train"), args.tiny)
        return
    assert args.json is not None
    with tempfile.TemporaryDirectory() as folder:
        if args.store is None:
            args.store = Path(folder) / "store"
            write_store(args.store, num_tokens=200_000)
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    store = Store(args.store, split="train")
    versions = machine.versions()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = json.loads(args.json.read_text()) if args.json.exists() else {}
    results = machine.origin(commit=args.commit) | {
        "machine": machine.describe(),
        "device": describe(device),
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
        "store": {
            "documents": store.num_documents,
            "tokens": store.num_tokens,
            "vocab_size": store.vocab_size,
        },
        "steps": STEPS,
        "measurements": before.get("measurements", {}),
    }
    bench = Bench(args, folder, results)
    cases = [each.name for each in (TINY_CASES if args.tiny else CASES)]
    kernels = [
        f"kernels:{':'.join(map(str, each))}" for each in (TINY_SHAPES if args.tiny else SHAPES)
    ]
    lengths = {"tiny": (128,)} if args.tiny else LENGTHS
    memory = [f"memory:{model}:{row}" for model in PRESETS for row in lengths.get(model, ())]
    bench.run(cases[:6])
    bench.run_memory(memory, store.vocab_size)
    bench.run(["losses"])
    bench.run([*cases[6:], *kernels])
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(long_rows_body(results))
    print("\n".join(misses(results, GOALS)))


if __name__ == "__main__":
    main()
