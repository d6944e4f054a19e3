"""Where tasks run: this process, or a pool of processes."""

from tokenmill.runners.base import (
    Event,
    Job,
    Report,
    Runner,
    TaskDone,
    TaskReport,
    Worker,
    WorkerLost,
    WorkerReady,
)
from tokenmill.runners.local import LocalRunner
from tokenmill.runners.serial import SerialRunner

__all__ = [
    "Event",
    "Job",
    "LocalRunner",
    "Report",
    "Runner",
    "SerialRunner",
    "TaskDone",
    "TaskReport",
    "Worker",
    "WorkerLost",
    "WorkerReady",
]
