from __future__ import annotations

import json
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tokenmill.errors import TrainingError, UsageError
from tokenmill.trainer.run import Checkpoints, Journal, random_states, set_random_states

if TYPE_CHECKING:
    from pathlib import Path


FACTS: dict[str, Any] = {"loader": {}, "essentials": {}}


def write(checkpoints: Checkpoints, step: int, **facts: object) -> Path:
    return checkpoints.write(
        step=step, tensors={"model": {"w": torch.full((3,), step)}}, facts=FACTS | facts
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    assert checkpoints.newest() is None
    path = write(checkpoints, 7, loader={"step": 3})
    found = checkpoints.newest()
    assert found is not None
    assert (found.path, found.step) == (path, 7)
    assert found.facts["loader"] == {"step": 3}
    assert found.load("model")["w"].tolist() == [7, 7, 7]


def test_only_the_last_ones_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        write(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


@pytest.mark.parametrize("damage", ["no facts", "cut facts", "cut tensors", "no tensors", "link"])
def test_one_that_is_not_whole_is_refused_with_the_one_before(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path / "my run", keep=5)
    write(checkpoints, 5)
    path = write(checkpoints, 10)
    facts, tensors = path / "checkpoint.json", path / "model.pt"
    damaged = facts
    if damage == "no facts":
        facts.unlink()
    elif damage == "cut facts":
        facts.write_bytes(facts.read_bytes()[:20])
    else:
        damaged = tensors
        whole = tensors.read_bytes()
        tensors.unlink()
        if damage == "cut tensors":
            tensors.write_bytes(whole[:-1])
        elif damage == "link":
            (tmp_path / "elsewhere.pt").write_bytes(whole)
            tensors.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(TrainingError) as caught:
        checkpoints.newest()
    assert str(damaged) in caught.value.message
    hint = str(caught.value.hint)
    assert "'step-00000005'" in hint
    command = hint.partition(": ")[2].partition(", then")[0]
    subprocess.run(shlex.split(command), check=True)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 5
    assert write(checkpoints, 10).name == "step-00000010"
    assert [each.name[-2:] for each in checkpoints.paths()] == ["05", "10"]


def test_what_a_crash_left_behind_is_passed_over_and_swept_up(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    write(checkpoints, 5)
    write(checkpoints, 10).rename(tmp_path / ".unfinished-step-00000010-abcd")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 5
    checkpoints.sweep()
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot write the checkpoint") as caught:
        write(Checkpoints(tmp_path / "file" / "checkpoints", keep=1), 1)
    assert "--resume" in str(caught.value.hint)


def test_a_checkpoint_is_data_and_no_program(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write(step=1, tensors={"model": {"f": print}}, facts=FACTS)
    newest = checkpoints.newest()
    assert newest is not None
    with pytest.raises(TrainingError, match=r"[Ww]eights.only"):
        newest.load("model")


def test_another_model_is_refused_with_what_the_run_has(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    write(checkpoints, 1, essentials={"model": "tiny", "seq_len": 64})
    newest = checkpoints.newest()
    assert newest is not None
    newest.require({"model": "tiny", "seq_len": 64})
    with pytest.raises(UsageError, match="has seq_len=64, and this command seq_len=32") as caught:
        newest.require({"model": "tiny", "seq_len": 32})
    assert "model=tiny, seq_len=64" in str(caught.value.hint)


def test_random_numbers_go_on() -> None:
    device = torch.device("cpu")
    states = random_states(device)
    expected = torch.rand(3)
    torch.rand(5)
    set_random_states([states], device)
    assert torch.equal(torch.rand(3), expected)


def test_lines_after_the_resumed_step_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (5, 10, 15)]
    path.write_text("\n".join(lines) + '\n{"step": 20, "lo')
    journal = Journal(tmp_path, resumed_at=10)
    journal.write(15, {"loss": 2.0})
    journal.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in found] == [(5, 1), (10, 1), (15, 2)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run", resumed_at=0, is_writer=False)
    journal.write(1, {"loss": 2.0})
    journal.close()
    assert not list(tmp_path.iterdir())
