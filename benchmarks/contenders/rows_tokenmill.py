"""tokenmill on supervised rows: a file on disk to a finished, checked, fsynced store with masks.

In the time: the whole call of `tokenmill.build`, or, as `working_seconds`, the part of it after all
workers have started. The digest of the first rows shows that ids and masks are those of the others.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import tokenmill


def main() -> None:
    """Build one job and say what it took and what came out."""
    job = json.loads(sys.argv[1])
    options = job["options"]
    if "template" in job:
        options["chat_template"] = Path(job["out"]).with_suffix(".jinja")
        options["chat_template"].write_text(job["template"])
    result = tokenmill.build(
        job["file"],
        tokenizer=job["tokenizer"],
        out=job["out"],
        workers=job["workers"],
        **options,
    )
    report = {
        "seconds": result.working_seconds,
        "whole_seconds": result.seconds,
        "rows": result.totals.rows,
        "tokens": result.totals.tokens,
        "rejected": result.totals.rejected,
        "digest": _digest(job["out"], job["compared_rows"], masks=job["compares_masks"]),
    }
    print(json.dumps(report))


def _digest(store: str, rows: int, *, masks: bool) -> str:
    opened = tokenmill.Store(store)
    found: list[object] = []
    for number in range(min(rows, len(opened))):
        mask = opened.mask(number)
        assert mask is not None
        ids = opened[number].tolist()
        found.append((ids, mask.tolist()) if masks else ids)
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


if __name__ == "__main__":
    main()
