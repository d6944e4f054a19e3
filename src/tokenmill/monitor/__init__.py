"""The time line of a build: what machine and processes did while it ran, as JSON Lines.

    recorder.py    record(): a thread that writes a sample twice a second, and never fails a build
    sampler.py     one sample: cores, memory, disk
    timeline.py    read_timeline(): the file as arrays

    {"kind": "header", "schema": "tokenmill.timeline/1", "machine": {...}, "build": {...}, ...}
    {"kind": "sample", "seconds": 0.5, "cpu_percent": [97.1, 98.4], "memory_rss_bytes": ..., ...}
    {"kind": "summary", "outcome": "done", "seconds": ..., "peak_memory_bytes": ..., ...}

A build that goes on writes behind what is there: a header begins a new segment. A build that was
killed has no summary, and at worst half a last line.
"""

from tokenmill.monitor.recorder import Recorder, record
from tokenmill.monitor.timeline import Segment, Timeline, read_timeline

__all__ = ["Recorder", "Segment", "Timeline", "read_timeline", "record"]
