"""`tokenmill train`: a store in, a trained model out."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.layout import PackingChoice
from tokenmill.cli.stopping import same_command, stoppable

MODEL = "What is trained"
STEP = "What a step is"
DATA = "What it is fed"
RUN = "Where it goes"


class Precision(enum.StrEnum):
    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"


class Attention(enum.StrEnum):
    FLASH = "flash"
    DOCUMENTS = "documents"


class Optimizer(enum.StrEnum):
    ADAMW = "adamw"
    ADAMW8BIT = "adamw8bit"


class Schedule(enum.StrEnum):
    COSINE = "cosine"
    WSD = "wsd"


class Boundaries(enum.StrEnum):
    KEEP = "keep"
    MASK = "mask"


Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        rich_help_panel=MODEL,
        help="tiny (runs on a CPU in seconds), mini (10M), small (124M), medium (861M, rows of up "
        "to 16,384) or large (1.8B, up to 32,768); sizes with GPT-2's vocabulary.",
    ),
]
SeqLen = Annotated[
    int,
    typer.Option("--seq-len", metavar="TOKENS", rich_help_panel=MODEL, help="Inputs of a row."),
]
AttentionOption = Annotated[
    Attention,
    typer.Option(
        "--attention",
        metavar="flash|documents",
        rich_help_panel=MODEL,
        help="Look back over the whole row, or only within the own document.",
    ),
]
PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision",
        metavar="bf16|fp32",
        show_default="bf16 where the device has it",
        rich_help_panel=MODEL,
        help="What the model computes in; weights are kept in fp32.",
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        show_default="on a GPU",
        rich_help_panel=MODEL,
        help="torch.compile the whole model.",
    ),
]
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing",
        show_default="from rows of 8,192 on",
        rich_help_panel=MODEL,
        help="Compute activations again in the backward pass instead of keeping them.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", rich_help_panel=MODEL, help="auto, cuda, cuda:1 or cpu."
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps", metavar="N", rich_help_panel=STEP, help="Steps of the whole run, resumed or not."
    ),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(
        "--batch-tokens",
        metavar="TOKENS",
        show_default="the model's",
        rich_help_panel=STEP,
        help="Tokens of a step, over all ranks.",
    ),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        "--micro-batch",
        metavar="ROWS",
        show_default="what should fit",
        rich_help_panel=STEP,
        help="Rows that go through the model at once, on one rank.",
    ),
]
Accumulate = Annotated[
    int | None,
    typer.Option(
        "--accumulate",
        metavar="N",
        show_default="what comes out",
        rich_help_panel=STEP,
        help="Micro-batches of a step, on one rank. With --micro-batch, the two say what "
        "--batch-tokens would.",
    ),
]
OptimizerOption = Annotated[
    Optimizer,
    typer.Option(
        "--optimizer",
        metavar="adamw|adamw8bit",
        rich_help_panel=STEP,
        help="adamw8bit keeps its state in 8 bits; it needs the package torchao.",
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr",
        metavar="RATE",
        show_default="the model's",
        rich_help_panel=STEP,
        help="The highest learning rate.",
    ),
]
ScheduleOption = Annotated[
    Schedule,
    typer.Option(
        "--schedule",
        metavar="cosine|wsd",
        rich_help_panel=STEP,
        help="How it falls: all the way, or (wsd) over the last fifth of the steps.",
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        metavar="STEPS",
        show_default="a fiftieth",
        rich_help_panel=STEP,
        help="Steps in which it rises.",
    ),
]
Packing = Annotated[
    PackingChoice,
    typer.Option(
        "--packing",
        metavar="concat|best-fit|pad",
        rich_help_panel=DATA,
        help="How documents fill rows; tokenmill layout shows what each would do.",
    ),
]
BoundariesOption = Annotated[
    Boundaries,
    typer.Option(
        "--boundaries",
        metavar="keep|mask",
        rich_help_panel=DATA,
        help="Whether the first token of a document is to be predicted from the one before it.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="N", rich_help_panel=DATA, help="Of the weights and the order of rows."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        rich_help_panel=RUN,
        help="Where checkpoints and metrics.jsonl are written.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        rich_help_panel=RUN,
        help="Go on from the newest checkpoint in --out; begin, if there is none.",
    ),
]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        "--save-every",
        metavar="STEPS",
        show_default="a tenth, 100 at least",
        rich_help_panel=RUN,
        help="Steps between checkpoints.",
    ),
]
Keep = Annotated[
    int,
    typer.Option("--keep", metavar="N", rich_help_panel=RUN, help="Checkpoints that stay."),
]
EvalEvery = Annotated[
    int | None,
    typer.Option(
        "--eval-every",
        metavar="STEPS",
        show_default="a tenth, 100 at least",
        rich_help_panel=RUN,
        help="Steps between evaluations on the split val.",
    ),
]
LogEvery = Annotated[
    int,
    typer.Option(
        "--log-every", metavar="STEPS", rich_help_panel=RUN, help="Steps between two lines."
    ),
]
TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard", rich_help_panel=RUN, help="Write TensorBoard files to --out as well."
    ),
]


def train(
    store: opt.StorePath,
    model: Model = "small",
    seq_len: SeqLen = 1024,
    attention: AttentionOption = Attention.FLASH,
    precision: PrecisionOption = Precision.AUTO,
    compile_model: Compile = None,
    checkpointing: Checkpointing = None,
    device: Device = "auto",
    steps: Steps = 1000,
    batch_tokens: BatchTokens = None,
    micro_batch: MicroBatch = None,
    accumulate: Accumulate = None,
    optimizer: OptimizerOption = Optimizer.ADAMW,
    lr: LearningRate = None,
    schedule: ScheduleOption = Schedule.COSINE,
    warmup: Warmup = None,
    packing: Packing = PackingChoice.CONCAT,
    boundaries: BoundariesOption = Boundaries.KEEP,
    seed: Seed = 0,
    out: Out = Path("run"),
    resume: Resume = False,
    save_every: SaveEvery = None,
    keep: Keep = 2,
    eval_every: EvalEvery = None,
    log_every: LogEvery = 10,
    tensorboard: TensorBoard = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Train the reference model on a store.

    Rows are cut, packed and shuffled as they are read, and are on the device before they are asked
    for. Killed at any moment, the same command with --resume goes on with the same losses. Under
    torchrun it trains on several GPUs.

    \b
    Examples:
      tokenmill train my-store --model tiny --seq-len 256 --steps 200
      tokenmill train my-store --model small --batch-tokens 524288 --steps 1000 -o run --resume
      torchrun --nproc-per-node 8 -m tokenmill train my-store --model medium --seq-len 16384
    """
    import tokenmill
    from tokenmill.cli.train_view import show_result, watch_training

    with (
        stoppable(f"the steps that were made are kept in {out}; {how_to_go_on()}"),
        watch_training(quiet=quiet) as tell,
    ):
        result = tokenmill.train(
            store,
            model=model,
            seq_len=seq_len,
            attention=str(attention),
            precision=str(precision),
            compile=compile_model,
            checkpointing=checkpointing,
            device=device,
            steps=steps,
            batch_tokens=batch_tokens,
            micro_batch=micro_batch,
            accumulate=accumulate,
            optimizer=str(optimizer),
            learning_rate=lr,
            schedule=str(schedule),
            warmup=warmup,
            packing=str(packing),
            boundaries=str(boundaries),
            seed=seed,
            out=out,
            resume=resume,
            save_every=save_every,
            keep=keep,
            eval_every=eval_every,
            log_every=log_every,
            tensorboard=tensorboard,
            on_progress=tell,
        )
    show_result(result, as_json=as_json)


def how_to_go_on() -> str:
    """The command that resumes this one."""
    command = same_command()
    return f"go on with:\n  {command if ' --resume' in command else command + ' --resume'}"
