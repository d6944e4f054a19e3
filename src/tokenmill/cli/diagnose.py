"""`tokenmill diagnose`: is a training starved, by what, and what would mend it."""

from typing import Any

from tokenmill.cli import options as opt
from tokenmill.cli.options import stoppable
from tokenmill.options import DiagnoseOptions


@opt.command(DiagnoseOptions)
def diagnose(
    *,
    inputs: opt.MaybeInputs = None,
    options: dict[str, Any],
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Time your text and tokenizer the ways people do it; say which would starve a GPU.

    Each way runs in a process of its own for a second or so: one sample at a time, in batches,
    joined, in a process pool, in DataLoader workers, and pretokenized through tokenmill. What it
    feeds is held against what the GPU takes.

    \b
    Examples:
      tokenmill diagnose data.jsonl -t tokenizer.json --model small
      tokenmill diagnose data/ -t llama/ --tokens-per-second 450000 --gpus 8 --report report.html
      tokenmill diagnose data.jsonl -t tokenizer.json --sweep
      tokenmill diagnose --run run/ --report report.html
    """
    import tokenmill
    from tokenmill.cli import verdicts

    with stoppable("nothing was kept"), verdicts.watch_steps(quiet=quiet) as on_step:
        found = tokenmill.diagnose(inputs or (), on_step=on_step, **options)
    verdicts.diagnosis_result(found, report=options["report"], as_json=as_json)
