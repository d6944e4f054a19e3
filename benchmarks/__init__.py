"""Measurements of tokenmill beside its peers and beside the engine alone. Nothing here is part of
the package.

    build.py          what is measured, in which order         python -m benchmarks.build
    roster.py         who takes part
    corpora.py        text: ../shared/corpus, or the standard library
    vocabularies.py   tokenizers: ../shared/tokenizers, or one trained on the spot
    environments.py   a virtual environment for each peer that needs one
    contenders/       one small program per thing that is measured
    measure.py        runs one of them in a fresh process and watches its memory
    machine.py        where and with what it was measured
    render.py         results/*.json -> the tables in docs/benchmarks.md
    short_builds.py   start-up, and 20 MB beside the peers     python -m benchmarks.short_builds
    short_builds_table.py  their tables
    flatness.py       memory over an input of 5 GB, run by hand
    outside.py        builds by the clock around the command   python -m benchmarks.outside
    words.py          the engine that encodes word by word     python -m benchmarks.words
    supervised.py     chats and puzzles to ids and masks       python -m benchmarks.supervised
    supervised_table.py    its table
    feed.py           reading the tokens back                  python -m benchmarks.feed
    feeders.py        who takes part in that
    feed_tables.py    its tables
    startup.py        until the first batch of a large store   python -m benchmarks.startup
    hollow.py         stores of a trillion tokens that take no space
    feeding_gpu.py    does a GPU ever wait?                    python -m benchmarks.feeding_gpu
    feeding_gpu_table.py   its table
    training_gpu.py   does tokenizing in the loop starve one?  python -m benchmarks.training_gpu
    training_feeds.py      the ways it is fed
    training_gpu_table.py  its table
    optimizers_gpu.py what an update of the weights costs      python -m benchmarks.optimizers_gpu
    optimizers_gpu_table.py  its table
    balance.py        the slowest of many ranks, simulated     python -m benchmarks.balance
    long_rows_gpu.py  attention within documents, memory       python -m benchmarks.long_rows_gpu
    long_rows_gpu_table.py  its tables
    stall_meter.py    what measuring costs                     python -m benchmarks.stall_meter
    stall_meter_table.py   its table
    stalls_gpu.py     is an account of a step right?           python -m benchmarks.stalls_gpu
    first_step.py     training on text while it is built       python -m benchmarks.first_step
    asking.py         views, trace, grep beside ripgrep        python -m benchmarks.asking
    interop.py        other projects' formats, out and in      python -m benchmarks.interop
    interop_tables.py their tables
    scaling.py        a build of 10 PB, simulated              python -m benchmarks.scaling
    scaling_cores.py  more and more workers on one machine     python -m benchmarks.scaling_cores
    scaling_table.py  the tables of docs/scaling.md
    transports.py     ways to read files at a URL              python -m benchmarks.transports
    candidate.py      tokenizers and its release candidate     python -m benchmarks.candidate

Working files are in .work/bench, which git ignores. Absolute paths never enter the results.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".work" / "bench"
RESULTS = ROOT / "benchmarks" / "results"
SHARED = ROOT.parent / "shared"
