"""Print the counts of the last run, and put them into docs/security.md."""

from __future__ import annotations

import json
import platform
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from tests.hostile.attack import COUNTS

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- counts -->", "<!-- end of counts -->"


def main() -> None:
    """Put a table of what was tried between the markers of the page."""
    total: Counter[str] = Counter()
    forms = set()
    for file in sorted(COUNTS.glob("*.json")):
        found = json.loads(file.read_text())
        total.update(found["tried"])
        forms.add(found["form"])
    when = datetime.now(UTC).date().isoformat()
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [
        f"Run of {when}, {' and '.join(sorted(forms))} form, {machine}:",
        "",
        "| attack | cases |",
        "| --- | ---: |",
        *(f"| {kind} | {cases:,} |" for kind, cases in sorted(total.items())),
    ]
    print("\n".join(lines))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
