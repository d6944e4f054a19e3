"""Hugging Face datasets' own load_from_disk, load_dataset, save_to_disk and to_parquet."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
from datasets import data_files

datasets.disable_progress_bars()


def read(folder: str) -> dict[str, Any]:
    """The rows of each split of a folder that `load_from_disk` opens."""
    return _splits(datasets.load_from_disk(folder))


def read_parquet(folder: str, cache: str) -> dict[str, Any]:
    """The rows of each split that `load_dataset` finds."""
    return _splits(datasets.load_dataset("parquet", data_dir=folder, cache_dir=cache))


def files_of_splits(folder: str) -> dict[str, list[str]]:
    """The files that `load_dataset(folder)` would read, by split."""
    patterns = data_files.get_data_patterns(folder)
    found = data_files.DataFilesDict.from_patterns(patterns, base_path=folder)
    return {str(split): sorted(map(str, files)) for split, files in found.items()}


def _splits(found: Any) -> dict[str, Any]:
    named = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    return {
        split: {
            "columns": {name: dataset[:][name] for name in dataset.column_names},
            "types": {name: str(dataset.features[name].feature.dtype) for name in _lists(dataset)},
            "files": len(dataset.cache_files),
        }
        for split, dataset in named.items()
    }


def _lists(dataset: Any) -> list[str]:
    return [name for name in dataset.column_names if hasattr(dataset.features[name], "feature")]


def write(folder: str, columns: dict[str, dict[str, list[Any]]], shards: int) -> None:
    """What `save_to_disk` makes: a folder of splits, or of one where there is only `""`."""
    made = {split: datasets.Dataset.from_dict(each) for split, each in columns.items()}
    if "" in made:
        made[""].save_to_disk(folder, num_shards=shards)
    else:
        datasets.DatasetDict(made).save_to_disk(folder, num_shards=dict.fromkeys(made, shards))


def write_parquet(path: str, columns: dict[str, list[Any]]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(path)


if __name__ == "__main__":
    functions: dict[str, Any] = {
        "read": read,
        "files_of_splits": files_of_splits,
        "read_parquet": read_parquet,
        "write": write,
        "write_parquet": write_parquet,
    }
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        print("\n> " + json.dumps(functions[function](*arguments)), flush=True)
