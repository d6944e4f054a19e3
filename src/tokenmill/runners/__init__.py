"""Where tasks run: this process, a pool of processes, or a Ray cluster (`runners.ray`)."""

from tokenmill.runners.base import (
    Event,
    Job,
    PlaceState,
    Report,
    Runner,
    TaskDone,
    TaskReport,
    Worker,
    WorkerLost,
    WorkerReady,
    WorkerUsage,
)
from tokenmill.runners.local import LocalRunner
from tokenmill.runners.serial import SerialRunner

__all__ = [
    "Event",
    "Job",
    "LocalRunner",
    "PlaceState",
    "Report",
    "Runner",
    "SerialRunner",
    "TaskDone",
    "TaskReport",
    "Worker",
    "WorkerLost",
    "WorkerReady",
    "WorkerUsage",
]
