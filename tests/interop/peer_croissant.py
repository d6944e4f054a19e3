"""Reads a Croissant description with mlcroissant, MLCommons' own package."""

from __future__ import annotations

import json
import sys

import mlcroissant


def main(path: str) -> tuple[list[str], list[dict[str, object]]]:
    """What it finds wrong, and the records of the set `seen`."""
    try:
        dataset = mlcroissant.Dataset(jsonld=path)
    except mlcroissant.ValidationError as error:
        return str(error).splitlines() or ["not valid"], []
    issues = dataset.metadata.ctx.issues
    records = [
        {name: v.decode() if isinstance(v, bytes) else v for name, v in each.items()}
        for each in dataset.records("seen")
    ]
    return sorted(map(str, issues.errors)), records


print(json.dumps(main(*json.loads(sys.argv[1]))))
