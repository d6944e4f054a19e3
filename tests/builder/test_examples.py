"""The examples for schedulers: they parse, and what they run are the commands that there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.builder.stores import byte_ids, documents, make_texts, write_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = 3

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """`tokenmill` as a command, `srun` that runs it here, and `sbatch` that writes itself down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "tokenmill": f'exec {sys.executable} -m tokenmill "$@"',
        "srun": 'exec "$@"',
        "sbatch": 'printf "%s\\n" "$@" >> sbatch.log',
    }
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def run(command: list[str], *, folder: Path, bin_folder: Path, **environment: str) -> None:
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@needs_bash
def test_the_slurm_array_builds_its_parts_and_queues_the_one_who_finishes(
    tmp_path: Path, bin_folder: Path
) -> None:
    script = (EXAMPLES / "slurm_array.sh").read_text().replace("--memory 32GB", "--memory 1GB")
    assert "--array=1-64" in script
    assert "\nparts=64 " in script
    script = script.replace("parts=64 ", f"parts={PARTS} ")
    (tmp_path / "array.sh").write_text(script)
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm_array.sh")], check=True)
    write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    for number in range(1, PARTS + 1):
        run(
            ["bash", "array.sh", "*.jsonl", "bytes", "store"],
            folder=tmp_path,
            bin_folder=bin_folder,
            SLURM_ARRAY_TASK_ID=str(number),
            SLURM_ARRAY_TASK_MIN="1",
            SLURM_ARRAY_TASK_MAX=str(PARTS),
            SLURM_ARRAY_JOB_ID="77",
            SLURM_CPUS_PER_TASK="1",
        )
    queued = (tmp_path / "sbatch.log").read_text().splitlines()
    assert "--dependency=afterok:77" in queued
    [wrapped] = [line.removeprefix("--wrap=") for line in queued if line.startswith("--wrap=")]
    run(["bash", "-c", wrapped], folder=tmp_path, bin_folder=bin_folder)
    assert documents(tmp_path / "store") == byte_ids(make_texts(50))


@needs_bash
def test_the_kubernetes_jobs_build_the_parts_and_finish_them(
    tmp_path: Path, bin_folder: Path
) -> None:
    parts, finish = yaml.safe_load_all((EXAMPLES / "kubernetes_job.yaml").read_text())
    assert parts["spec"]["completionMode"] == "Indexed"
    assert parts["spec"]["completions"] == parts["spec"]["parallelism"] == 64
    shell, line = container(parts)["command"], container(parts)["args"][0]
    line = here(line, tmp_path).replace("/64", f"/{PARTS}").replace("16GB", "4GB")
    line = re.sub(r"--tokenizer \S+", "--tokenizer bytes", line).replace("--workers 8", "")
    (tmp_path / "raw").mkdir()
    write_jsonl(tmp_path / "raw" / "a.jsonl", make_texts(50))
    line = line.replace("*.jsonl.zst", "*.jsonl")
    for index in range(PARTS):
        run(
            [*shell, line],
            folder=tmp_path,
            bin_folder=bin_folder,
            JOB_COMPLETION_INDEX=str(index),
        )
    command = [here(word, tmp_path) for word in container(finish)["command"]]
    run(command, folder=tmp_path, bin_folder=bin_folder)
    assert documents(tmp_path / "store") == byte_ids(make_texts(50))


def container(job: dict[str, object]) -> dict[str, list[str]]:
    spec = job["spec"]
    assert isinstance(spec, dict)
    [found] = spec["template"]["spec"]["containers"]
    return dict(found)


def here(text: str, folder: Path) -> str:
    return text.replace("/corpus/", f"{folder}/")
