"""The process in which one way runs: told its job by a file, tells its result in another.

A fresh interpreter each time, so that caches, threads and memory are the way's own. An error is a
result too: the other ways can still be measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path

from tokenmill.diagnosis.ways import way_function
from tokenmill.diagnosis.ways.base import Job
from tokenmill.errors import TokenmillError
from tokenmill.runners.child import end_with_parent


def main() -> None:
    """Carry out the job in the file that is named last on the command line."""
    end_with_parent()
    told, answer = (Path(name) for name in sys.argv[-2:])
    job = Job(**json.loads(told.read_text()))
    try:
        result = dataclasses.asdict(way_function(job.way)(job))
    except TokenmillError as error:
        result = {"problem": str(error)}
    except Exception as error:  # a process border: the caller gets words, stderr the traceback
        traceback.print_exc()
        result = {"problem": f"{type(error).__name__}: {error}"}
    answer.write_text(json.dumps(result))
