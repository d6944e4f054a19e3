"""Where tasks run: this process, a pool of processes, or a Ray cluster (`runners.ray`)."""

from tokenmill.runners.local import (
    Event,
    Job,
    LocalRunner,
    PlaceState,
    Report,
    Runner,
    SerialRunner,
    TaskDone,
    TaskReport,
    Worker,
    WorkerLost,
    WorkerReady,
    WorkerUsage,
)

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
