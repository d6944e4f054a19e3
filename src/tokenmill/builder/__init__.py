"""Sources, engines, store and runners joined: the verbs `build`, `plan` and `verify`."""

WORKER_ENVIRONMENT = {
    # One thread per worker: the workers are the parallelism.
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # glibc gives each thread an arena of its own, and none of them returns what it once held.
    "MALLOC_ARENA_MAX": "2",
    # Arrow's allocator would map a gigabyte at once, and a limit could not tell what is used.
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
    # Its other allocator would start a thread, and a process with threads cannot be forked.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # A stack for each of eight threads would be counted too.
    "ARROW_IO_THREADS": "2",
}
# What every worker imports, and most of them: rows come from JSON Lines more often than not.
WORKER_MODULES = ("tokenmill.builder.worker", "tokenmill.sources.lines", "tokenizers", "gigatoken")
