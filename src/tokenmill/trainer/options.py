"""What a training run is told: the one home of every option, for the command and for Python.

Checked here as far as it can be without looking at the store or the device; what follows from them
is worked out in loop.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from tokenmill import files
from tokenmill.errors import MissingExtraError, StoreError, TokenmillError, UsageError
from tokenmill.files import is_remote
from tokenmill.markup import Told
from tokenmill.options import (
    PACKINGS,
    BuildOptions,
    as_list,
    check_choices,
    flags_of,
    option,
    same,
    with_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenmill.files import PathInput
    from tokenmill.store.following import Follower
    from tokenmill.store.reader import Store
    from tokenmill.trainer.beside import BuildBeside


# -------------------------------------------------------------------------------------------------
# The models by name, as plain numbers: `diagnose` needs their cost without loading torch.
#
# A block has 12 * width^2 parameters in matrices (attention 4, feed-forward 8); the embedding is
# also the output layer. The cost of a token is counted as is usual for a share of a GPU's peak:
# six operations for each parameter (forward 2, backward 4), and 12 * layers * width for each pair
# of tokens of which one looks at the other: what causal attention does, not what it leaves out.

# The vocabulary is filled up to a multiple of this: matrices of odd sizes are slow.
VOCAB_MULTIPLE = 128


def padded_vocab(vocab_size: int) -> int:
    """Rows of the embedding of a vocabulary."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model, and what it is trained with unless one says otherwise."""

    num_layers: int
    width: int
    num_heads: int
    max_seq_len: int
    """Longest row it may be trained on."""
    rope_base: float = 10_000.0
    """Slowest rotation of the position encoding: larger for longer rows."""
    batch_tokens: int = 524_288
    """Of a step, over all ranks."""
    learning_rate: float = 6e-4

    def __post_init__(self) -> None:
        if self.width % self.num_heads or self.width // self.num_heads % 8:
            raise UsageError(
                f"width {self.width} in {self.num_heads} heads: a head must have a multiple of 8",
                hint="use heads of 64 or 128, like width=768, num_heads=12",
            )

    def num_parameters(self, vocab_size: int) -> int:
        """Parameters, the embedding counted once."""
        norms = (2 * self.num_layers + 1) * self.width
        return self._num_in_matrices(vocab_size) + norms

    def flops_per_token(
        self, seq_len: int, vocab_size: int, *, pairs: float | None = None
    ) -> float:
        """Floating-point operations that training on one token takes.

        `pairs` are the tokens that one looks at, on average, itself counted: half of the row and
        one half, unless attention stays within documents.
        """
        pairs = (seq_len + 1) / 2 if pairs is None else pairs
        return 6 * self._num_in_matrices(vocab_size) + 12 * self.num_layers * self.width * pairs

    def _num_in_matrices(self, vocab_size: int) -> int:
        return 12 * self.num_layers * self.width**2 + padded_vocab(vocab_size) * self.width


_LONG = 500_000.0
# With GPT-2's vocabulary of 50,257: 3.3, 10.5, 124, 861 and 1,814 million parameters.
PRESETS: dict[str, ModelConfig] = {
    # Layers, width, heads, longest row, rotation, tokens of a step, learning rate.
    "tiny": ModelConfig(2, 64, 2, 1024, batch_tokens=1024, learning_rate=3e-3),
    "mini": ModelConfig(8, 160, 5, 2048, batch_tokens=65_536, learning_rate=2e-3),
    "small": ModelConfig(12, 768, 12, 4096),
    "medium": ModelConfig(20, 1792, 14, 16_384, _LONG, learning_rate=3e-4),
    "large": ModelConfig(34, 2048, 16, 32_768, _LONG, 1_048_576, learning_rate=2e-4),
}


def preset(name: str) -> ModelConfig:
    """The model of this name."""
    if name not in PRESETS:
        raise UsageError(f"there is no model {name!r}", hint=f"use one of: {', '.join(PRESETS)}")
    return PRESETS[name]


MODEL = "What is trained"
STEP = "What a step is"
DATA = "What it is fed"
BUILT = "Text instead of a store"
RUN = "Where it goes"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Everything a run is told. None means: follows from the rest."""

    # A store; or, with a tokenizer, text: files, folders and globs.
    inputs: PathInput | Store | Sequence[PathInput] = field(kw_only=False)
    model: str = option("small", MODEL, "NAME")
    """tiny (runs on a CPU in seconds), mini (10M), small (124M), medium (861M, rows of up to
    16,384) or large (1.8B, up to 32,768); sizes with GPT-2's vocabulary."""
    seq_len: int = option(1024, MODEL, "TOKENS")
    """Inputs of a row."""
    attention: str = option("flash", MODEL, choices=("flash", "documents"))
    """Look back over the whole row, or only within the own document."""
    window: str | None = option(None, MODEL, "FROM:TOKENS,...", shown="none")
    """How far back attention looks within documents, as a schedule over the tokens of the run:
    0:1024,2e9:4096,20e9:all; or one number for the whole run."""
    precision: str = option(
        "auto",
        MODEL,
        "bf16|fp32",
        choices=("auto", "bf16", "fp32"),
        shown="bf16 where the device has it",
    )
    """What the model computes in; weights are kept in fp32."""
    compile: bool | None = option(None, MODEL, flag="--compile/--no-compile", shown="on a GPU")
    """torch.compile the whole model."""
    checkpointing: bool | None = option(
        None,
        MODEL,
        flag="--checkpointing/--no-checkpointing",
        shown="of the layers that do not fit",
    )
    """Compute activations of all layers, or of none, again in the backward pass."""
    device: str = option("auto", MODEL, "NAME")
    """auto, cuda, cuda:1 or cpu."""
    steps: int = option(1000, STEP, "N")
    """Steps of the whole run, resumed or not."""
    batch_tokens: int | None = option(None, STEP, "TOKENS", shown="the model's")
    """Tokens of a step, over all ranks."""
    micro_batch: int | None = option(None, STEP, "ROWS", shown="what should fit")
    """Rows that go through the model at once, on one rank."""
    accumulate: int | None = option(None, STEP, "N", shown="what comes out")
    """Micro-batches of a step, on one rank. With --micro-batch, the two say what --batch-tokens
    would."""
    optimizer: str = option("adamw", STEP, choices=("adamw", "adamw8bit"))
    """adamw8bit keeps its state in 8 bits; it needs the package bitsandbytes, or torchao."""
    learning_rate: float | None = option(None, STEP, "RATE", flag="--lr", shown="the model's")
    """The highest learning rate."""
    schedule: str = option("cosine", STEP, choices=("cosine", "wsd"))
    """How it falls: all the way, or (wsd) over the last fifth of the steps."""
    warmup: int | None = option(None, STEP, "STEPS", shown="a fiftieth")
    """Steps in which it rises."""
    mixture: str | None = option(None, DATA, "BY[:NAME=WEIGHT,...]", shown="the store as it is")
    """Mix the documents by source, folder or an annotation: 'source' gives each the share of tokens
    that it has, 'folder:web=0.6,code=0.3,*=0.1' says the shares; * is all that are not named."""
    packing: str = option("concat", DATA, choices=tuple(PACKINGS))
    """How documents fill rows; tokenmill layout shows what each would do."""
    boundaries: str = option("keep", DATA, choices=("keep", "mask"))
    """Whether the first token of a document is to be predicted from the one before it."""
    follow: bool = option(False, DATA)
    """Train on a store whose build still goes on, here or on other machines, in an order of rows
    that the build cannot change; a run goes on with it when the store is finished."""
    feed: str = option("store", DATA, choices=("store", "encode", "encode_batch", "workers"))
    """From the store; or, to see what that costs, tokenize its text while training: a document in a
    call, 64 in a call, or in the workers of a DataLoader."""
    text: PathInput | None = option(None, DATA, "FILES", kind=str | None, shown="what was built")
    """The text that --feed encode and its like read, in the order of its documents: a file, folder
    or glob."""
    feed_workers: int | None = option(None, DATA, "N", shown="a core each, but one")
    """Processes that --feed workers starts."""
    seed: int = option(0, DATA, "N")
    """Of the weights and the order of rows."""
    tokenizer: PathInput | None = option(
        None, BUILT, "PATH|ID", short="-t", kind=str | None, shown=False
    )
    """The tokenizer of the text that is named instead of a store, as for `tokenmill build`. Rows
    are trained on while the rest is built, in the order of --follow."""
    store: PathInput | None = option(
        None, BUILT, "FOLDER|URL", kind=str | None, shown="store, in --out"
    )
    """Where the store of the text is built."""
    text_field: str = same(BuildOptions, "text_field", panel=BUILT)
    format: str = same(BuildOptions, "format", panel=BUILT)
    where: str | None = same(BuildOptions, "where", panel=BUILT)
    limit: int | None = same(BuildOptions, "limit", panel=BUILT)
    val: float = same(BuildOptions, "val", panel=BUILT)
    eos: str | bool | None = same(BuildOptions, "eos", panel=BUILT)
    build_workers: int | None = option(None, BUILT, "N", shown="physical cores but one")
    """Processes that build it. Never changes a byte of the store, nor a batch."""
    out: PathInput = option("run", RUN, "FOLDER", short="-o")
    """Where checkpoints and metrics.jsonl are written."""
    resume: bool = option(False, RUN)
    """Go on from the newest checkpoint in --out; begin, if there is none."""
    save_every: int | None = option(None, RUN, "STEPS", shown="a tenth, 100 at least")
    """Steps between checkpoints."""
    keep: int = option(2, RUN, "N")
    """Checkpoints that stay."""
    eval_every: int | None = option(None, RUN, "STEPS", shown="a tenth, 100 at least")
    """Steps between evaluations on the split val."""
    log_every: int = option(10, RUN, "STEPS")
    """Steps between two lines."""
    tensorboard: bool = option(False, RUN)
    """Write TensorBoard files to --out as well."""
    weight_decay: float = 0.1
    """On matrices alone."""
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    shuffle: bool | str = True
    eval_rows: int | None = None
    """Rows of the split val that are looked at, the same every time: 256, on a CPU what 8 steps
    have."""
    on_progress: Callable[[TrainProgress], None] | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        for each in fields(self):
            value = getattr(self, each.name)
            is_right = (type(value) is int and value > 0) or (value is None and "None" in each.type)
            if each.type.startswith("int") and each.name not in ("seed", "warmup") and not is_right:
                raise UsageError(
                    f"{each.name}={value!r} is not a whole number above 0",
                    hint=f"give one, like {each.name}=8",
                )
        self._check_inputs()
        self._check_feed()
        parse_mixture(self.mixture)
        if self.follow:
            self._check_follow()
        if self.window is not None and self.attention != "documents":
            raise UsageError(
                f"window={self.window!r} would have no effect with attention={self.attention!r}: a"
                " window is cut into documents",
                hint="add --attention documents",
            )
        attention_windows(self.window)
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise UsageError(
                f"warmup={self.warmup} leaves no step of {self.steps} for anything else",
                hint="use fewer steps of warmup",
            )
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value!r} is not above 0", hint="use a number above 0")
        if not self.weight_decay >= 0:
            raise UsageError(f"weight_decay={self.weight_decay!r} is below 0", hint="use 0 or more")
        longest = preset(self.model).max_seq_len
        if self.seq_len > longest:
            raise UsageError(
                f"seq_len={self.seq_len:,} is longer than the context of the model"
                f" {self.model!r}, {longest:,} tokens",
                hint=f"use {longest} or less, or a model with a longer context (medium, large)",
            )

    @property
    def trained(self) -> PathInput | Store:
        """The store that is trained on."""
        if self.tokenizer is not None:
            return self.store or files.join(os.fspath(self.out), "store")
        return cast("PathInput | Store", self.inputs)

    @property
    def build(self) -> BuildOptions:
        """The build beside the run, where it is given text."""
        assert self.tokenizer is not None
        names = [name for name, flag in flags_of(TrainOptions).items() if flag.like]
        return BuildOptions(
            as_list(cast("PathInput", self.inputs)),
            tokenizer=self.tokenizer,
            out=cast("PathInput", self.trained),
            workers=self.build_workers,
            followed=True,
            **{name: getattr(self, name) for name in names},
        )

    def _check_inputs(self) -> None:
        """One store, or text and what it takes to build one of it."""
        if self.tokenizer is not None:
            if hasattr(self.inputs, "manifest"):
                raise UsageError(
                    f"tokenizer={str(self.tokenizer)!r} is for text, and this is a store",
                    hint="leave the tokenizer out: a store has its own",
                )
            _ = self.build  # which refuses what does not go together
            object.__setattr__(self, "follow", True)
            return
        defaults = {each.name: each.default for each in fields(self)}
        for name, flag in flags_of(TrainOptions).items():
            if flag.panel == BUILT and getattr(self, name) != defaults[name]:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is for a store that is built of text while it"
                    " is trained on, and no tokenizer is given",
                    hint="leave it out, or name the text and its tokenizer: tokenmill train FILES"
                    " -t TOKENIZER",
                )
        if isinstance(self.inputs, list | tuple):
            if len(self.inputs) != 1:
                raise UsageError(
                    f"{len(self.inputs):,} inputs are given, and a run is trained on one store",
                    hint="to train on text, name its tokenizer: tokenmill train FILES -t TOKENIZER;"
                    " to mix stores, use tokenmill.Mixture in a loop of your own",
                )
            object.__setattr__(self, "inputs", self.inputs[0])

    def _check_feed(self) -> None:
        """Refuse what a feed would leave out in silence."""
        if self.feed == "store":
            given = {"text": self.text, "feed_workers": self.feed_workers}
            for name, value in given.items():
                if value is not None:
                    raise UsageError(
                        f"{name}={value!r} has no meaning with feed='store': the store is read",
                        hint="leave it out, or use --feed encode or --feed workers",
                    )
            return
        said = {"packing": "concat", "attention": "flash", "resume": False, "mixture": None}
        for name, needed in said.items():
            value = getattr(self, name)
            if value != needed:
                raise UsageError(
                    f"{name}={value!r} cannot be had with feed={self.feed!r}: text that is"
                    " tokenized in the loop is cut end to end, from its beginning",
                    hint="use --feed store, which can",
                )
        if self.feed_workers is not None and self.feed != "workers":
            raise UsageError(
                f"feed_workers={self.feed_workers} has no meaning with feed={self.feed!r}",
                hint="leave it out, or use --feed workers",
            )

    def _check_follow(self) -> None:
        """Refuse what a store does not have while it is built, before anything waits for one."""
        from tokenmill.loader.loader import check_followed

        if self.feed != "store":
            raise UsageError(
                f"feed={self.feed!r} reads the text of a store that is finished",
                hint="leave out --follow, or use --feed store",
            )
        if self.mixture is not None:
            raise UsageError(
                f"mixture={self.mixture!r} draws from the whole store, which is not there yet",
                hint="leave out --follow, or wait for the end of the build",
            )
        if self.shuffle is True:
            object.__setattr__(self, "shuffle", "nearby")
        check_followed(self.trained, packing=self.packing, shuffle=self.shuffle, epochs=None)

    @property
    def windows(self) -> list[tuple[int, int | None]] | None:
        """What a Loader takes for `window`."""
        return attention_windows(self.window)

    def essentials(self) -> dict[str, object]:
        """What a resumed run must have in common with the one it goes on with."""
        names = ("model", "seq_len", "optimizer", "attention", "packing", "boundaries", "seed")
        found = {name: getattr(self, name) for name in names} | {"shuffle": str(self.shuffle)}
        # Checkpoints of before, which were all fed from stores, do not have it.
        return found if self.feed == "store" else {**found, "feed": self.feed}

    def as_json(self) -> dict[str, object]:
        """All of it, as JSON has it."""
        names = (each.name for each in fields(self) if each.name not in ("inputs", "on_progress"))
        values = {name: getattr(self, name) for name in names}
        # JSON has no infinity, which is a fair value for `clip`, and no paths.
        return {
            name: str(value) if value == math.inf or isinstance(value, os.PathLike) else value
            for name, value in values.items()
        }


def parse_mixture(text: str | None) -> tuple[str, dict[str, float] | None] | None:
    """A column, and weights by its values; UsageError if it is no mixture.

    >>> parse_mixture("folder:web=0.6,code=0.3,*=0.1")
    ('folder', {'web': 0.6, 'code': 0.3, '*': 0.1})
    """
    if text is None:
        return None
    by, colon, rest = str(text).partition(":")
    weights: dict[str, float] = {}
    try:
        for part in rest.split(",") if colon else ():
            name, equals, weight = part.rpartition("=")
            if not equals or not name.strip() or name.strip() in weights:
                raise ValueError(part)
            weights[name.strip()] = float(weight)
        if not by.strip():
            raise ValueError(text)
    except ValueError:
        raise UsageError(
            f"mixture={text!r} does not say by which column documents are mixed, and which share of"
            " the tokens each of its values has",
            hint="write --mixture source, or --mixture 'folder:web=0.6,code=0.3,*=0.1'; for a comma"
            " or a colon in a name, write ?",
        ) from None
    return by.strip(), weights if colon else None


def attention_windows(text: str | None) -> list[tuple[int, int | None]] | None:
    """From which token of the run on, how many tokens (None: all); UsageError if it is no schedule.

    >>> attention_windows("0:1024,2e9:4096,20e9:all")
    [(0, 1024), (2000000000, 4096), (20000000000, None)]
    """
    if text is None:
        return None
    found: list[tuple[int, int | None]] = []
    try:
        for part in str(text).replace("_", "").split(","):
            begin, colon, reach = part.strip().rpartition(":")
            first = float(begin) if colon else 0.0
            tokens = None if reach.strip() == "all" else int(reach)
            if first != int(first) or (tokens is not None and tokens < 1):
                raise ValueError(part)
            found.append((int(first), tokens))
    except (ValueError, OverflowError):
        found = []
    begins = [first for first, _ in found]
    if not found or begins[0] or begins != sorted(set(begins)):
        raise UsageError(
            f"window={text!r} is no schedule: from which token of the run on, and how many tokens"
            " back, beginning with 0 and in order",
            hint="write it like --window 0:1024,2e9:4096,20e9:all, or --window 1024",
        )
    return found


# -------------------------------------------------------------------------------------------------
# What GPUs can do at most: dense bfloat16 multiplications with sums in float32, by data sheet
# (float16 where a GPU has no bfloat16). `diagnose` needs it without loading torch.

# Part of a device's name -> operations per second; the first that fits.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_of(device_name: str) -> float | None:
    """Of one GPU, by the name that its driver gives; None: a guess would make all of it a guess."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


# -------------------------------------------------------------------------------------------------
# What a run tells while it goes, and at its end.


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainNumbers:
    """What is told of a run, while it goes and at its end."""

    steps: int = 0
    """Of the whole run; at its end, those that were made."""
    seconds: float = 0.0
    """Of this process, with start, evaluation and checkpoints."""
    val_loss: float | None = None
    tokens: int = 0
    """That went through the model, those before a resume counted."""
    tokens_per_second: float | None = None
    """On the device, over all ranks: since the line before; at the end, the median of all lines."""
    mfu: float | None = None
    """Share of the device's peak; None where that is not known."""
    wait_share: float | None = None
    wait_p50_ms: float | None = None
    wait_p99_ms: float | None = None
    build_wait_seconds: float = 0.0
    """Of the waiting, that for the build that is followed."""
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress(TrainNumbers):
    """Where a run is. Numbers are those of a step or two ago: nothing waits for them."""

    phase: str
    """starting, training, waiting (for a build), evaluating, saving, or building (the rest of the
    store, after the last step)."""
    step: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    eta_seconds: float | None = None
    built: str | None = None
    """How far the build has come that is beside it or waited for, in words."""
    message: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult(Told, TrainNumbers):
    """What a run has come to."""

    out: Path
    resumed_from: int | None
    parameters: int
    loss: float
    """Of the last step."""
    checkpoint: Path
    """The last one."""
    store: str | None = None
    """That was built beside it, whole."""
    notes: list[str] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------
# `tokenmill.train`: opens the store, then loads torch and the rest.


@with_options(TrainOptions)
def train(options: TrainOptions) -> TrainResult:
    """Train the reference model on a store, or on text that becomes one meanwhile.

    >>> tokenmill.train("store", model="small", steps=1000, batch_tokens=524_288, out="run")
    >>> tokenmill.train("corpus/*.jsonl.zst", tokenizer="tokenizer.json", model="small", out="run")

    Ctrl-C ends the step, writes a checkpoint, and raises KeyboardInterrupt; `resume=True` goes on.
    """
    if is_remote(options.out):
        raise UsageError(
            f"out={files.shown(os.fspath(options.out))!r} is an address; a run is kept on a local"
            " disk",
            hint="use a local folder, and copy it from there: --out run",
        )
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose="training")
    refuse_second_run(options)
    is_first = int(os.environ.get("RANK", "0")) == 0
    voice = Voice(options, options.on_progress if is_first else None)
    with contextlib.ExitStack() as resources:
        if options.tokenizer is not None:
            source = build_beside(options, voice, resources, is_first=is_first)
        else:
            source = (
                follow_build(options)
                if options.follow
                else TrainingData(*open_splits(options.trained))
            )
            built = "" if source.follower is None else f"{source.follower.describe()}: "
            voice.say(f"{built}{source.train.num_tokens:,} tokens to train on; loading torch ...")
        from tokenmill.trainer.run import run_training

        result = run_training(source, options, on_progress=voice.tell)
        return result if source.beside is None else _with_store(result, source.beside, voice)


def refuse_second_run(options: TrainOptions) -> None:
    """UsageError where a run would begin in the folder of another."""
    found = Path(options.out).glob("checkpoints/step-*")
    steps = [int(step) for path in found if (step := path.name.removeprefix("step-")).isdigit()]
    if steps and not options.resume:
        raise UsageError(
            f"{str(options.out)!r} holds a run already, at step {max(steps):,}",
            hint="go on with it: --resume; or begin another in another folder: --out FOLDER",
        )


class Voice:
    """What is told of a run, by its own thread and by that of the build beside it."""

    def __init__(
        self, options: TrainOptions, on_progress: Callable[[TrainProgress], None] | None
    ) -> None:
        self._seen = TrainProgress(phase="starting", steps=options.steps)
        self._on_progress = on_progress or (lambda _: None)

    def tell(self, progress: TrainProgress) -> None:
        self._seen = progress
        self._on_progress(progress)

    def say(self, message: str) -> None:
        self._on_progress(replace(self._seen, message=message))


def build_beside(
    options: TrainOptions, voice: Voice, resources: contextlib.ExitStack, *, is_first: bool
) -> TrainingData:
    """Begin to build a store of the text, on the first of all ranks; follow it on each."""
    from tokenmill.trainer.beside import BuildBeside

    beside = None
    if is_first:
        beside = resources.enter_context(BuildBeside(options.build, tell=voice.say))
        try:
            beside.wait_until_planned()
        except StoreError as error:
            hint = "" if error.hint is None else f" ({error.hint})"
            error.hint = f"give another --store, or see what tokenmill build says of it{hint}"
            raise
        voice.say(f"building {beside.options.out} beside the training; loading torch ...")
    # While the first units are built.
    from tokenmill.trainer.run import ranks_in_touch

    resources.enter_context(ranks_in_touch(options))
    return follow_build(options, beside)


def _with_store(result: TrainResult, beside: BuildBeside, voice: Voice) -> TrainResult:
    """The result of a run when its store is whole too."""

    def tell(built: str) -> None:
        last = {each.name: getattr(result, each.name) for each in fields(TrainNumbers)}
        voice.tell(TrainProgress(phase="building", step=result.steps, built=built, **last))

    try:
        made = beside.finish(tell)
    except TokenmillError as error:
        error.message += f"; the training had ended before, with {str(result.checkpoint)!r}"
        raise
    return replace(result, store=made.store, notes=[*result.notes, *made.warnings])


class TrainingData(NamedTuple):
    """What a run reads."""

    train: Store
    val: Store | None
    follower: Follower | None = None  # of a store that is built meanwhile: then `train` grows
    beside: BuildBeside | None = None  # that builds it, on the first rank


def follow_build(options: TrainOptions, beside: BuildBeside | None = None) -> TrainingData:
    """A store whose build may still go on, as soon as there is some of it."""
    from tokenmill.store.following import Follower

    require = None if beside is None else beside.require
    path = cast("PathInput", options.trained)
    follower = Follower(path, split="train", require_builder=require)
    return TrainingData(follower.current, None, follower, beside)


def open_splits(store: PathInput | Store) -> tuple[Store, Store | None]:
    """The split train, and val where there is one; an error that says how to make a store."""
    # Not at the top: the command line reads the options without numpy.
    from tokenmill.store.reader import Store

    path = store.path if isinstance(store, Store) else store
    shown = files.shown(os.fspath(path))
    build = f"tokenmill build FILES --tokenizer TOKENIZER --out {shlex.quote(shown)} --val 0.01"
    on_text = "or train on text: tokenmill train FILES -t TOKENIZER"
    hint = f"build one with: {build}; {on_text}"
    try:
        found = store if isinstance(store, Store) else Store(path)
    except StoreError as error:
        if Path(shown).is_file():  # a view, say: nothing is built there
            hint = f"{error.hint}; {on_text}"
        raise StoreError(error.message, hint=hint) from error
    if not found.num_tokens:
        raise StoreError(f"{shown!r} has no tokens to train on", hint=hint)
    has_val = "val" in found.manifest.splits
    return found, Store(path, split="val") if has_val else None
