"""Text files that are one document each, put into groups that become one unit.

Where a group ends depends on the name of its last file (and on its size), so a new file changes the
group it falls into and no other. A group is called after the file that ended the group before it:
that name stays when files join the group, first or last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from tokenmill.sources.base import SourceFile
from tokenmill.sources.units import SMALLEST_UNIT_BYTES, text_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenmill.sources.base import SourceOptions

# No path that was normalised contains "//" after a name without a scheme.
FIRST_GROUP = "text//first"
_AFTER = "text//after/"
_FILES_PER_GROUP = 256


def group_texts(files: Sequence[SourceFile], options: SourceOptions) -> Iterator[SourceFile]:
    """Groups of the files, which are sorted by path."""
    limit = options.unit_bytes or SMALLEST_UNIT_BYTES
    name = FIRST_GROUP
    held: list[SourceFile] = []
    size = 0
    for file in files:
        is_large = text_size(file) >= limit
        if is_large and held:
            yield make_group(name, held)
            name, held, size = _AFTER + held[-1].path, [], 0
        held.append(file)
        size += text_size(file)
        if size >= limit or _ends_group(file.path):
            yield make_group(name, held)
            name, held, size = _AFTER + file.path, [], 0
    if held:
        yield make_group(name, held)


def make_group(path: str, members: Sequence[SourceFile]) -> SourceFile:
    """One source file that stands for its members."""
    facts = "".join(f"{member.path}\0{member.size}\0{member.version}\0" for member in members)
    return SourceFile(
        path=path,
        format="text-group",
        compression=None,
        size=sum(member.size for member in members),
        version=xxhash.xxh3_128_hexdigest(facts.encode(errors="surrogateescape")),
        members=tuple(members),
        changed=max(member.changed for member in members),
    )


def _ends_group(path: str) -> bool:
    key = path.encode(errors="surrogateescape")
    return xxhash.xxh3_64_intdigest(key) % _FILES_PER_GROUP == 0
