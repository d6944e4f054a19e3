"""Checkpoints that were damaged, or made by someone who wishes harm: refused, or the same run."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import attack, times, tried
from tests.trainer.runs import counting_store, losses

import tokenmill
from tokenmill.errors import TokenmillError, TrainingError, UsageError
from tokenmill.store.layout import checksum_of, seal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenmill.trainer.options import TrainResult

FILES = ("checkpoint.json", "model.pt", "optimizer.pt", "rng.pt")
OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "seq_len": 32,
    "batch_tokens": 256,
    "log_every": 1,
    "save_every": 1,
    "device": "cpu",
}


@dataclass(frozen=True)
class Victim:
    """A run of two checkpoints, of which the newer one is attacked."""

    place: Path
    expected: dict[int, float]
    """Losses of the run that nobody attacked."""

    @property
    def newest(self) -> Path:
        return self.place / "run" / "checkpoints" / "step-00000002"

    def fresh(self) -> Path:
        """The newer checkpoint, as it was written."""
        shutil.rmtree(self.place / "run", ignore_errors=True)
        shutil.copytree(self.place / "whole", self.place / "run")
        return self.newest

    def resume(self, *, steps: int = 3) -> TrainResult:
        run = self.place / "run"
        return tokenmill.train(
            self.place / "plain", out=run, resume=True, steps=steps, schedule="wsd", **OPTIONS
        )

    def is_refused(self) -> bool:
        """Whether a resume is refused by an error of ours; if not, it has to be the same run."""
        try:
            self.resume()
        except TokenmillError as error:
            return bool(error.hint)
        assert losses(self.place / "run") == self.expected
        return False


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    place = tmp_path_factory.mktemp("victim")
    counting_store(place / "plain")
    said: dict[str, Any] = {**OPTIONS, "schedule": "wsd"}
    tokenmill.train(place / "plain", out=place / "straight", steps=3, **said)
    tokenmill.train(place / "plain", out=place / "whole", steps=3, **said)
    shutil.rmtree(place / "whole" / "checkpoints" / "step-00000003")
    tokenmill.train(place / "plain", out=place / "first", steps=1, **said)
    shutil.copytree(
        place / "first" / "checkpoints" / "step-00000001",
        place / "whole" / "checkpoints" / "step-00000001",
    )
    return Victim(place, losses(place / "straight"))


def members_of(checkpoint: Path) -> dict[str, Any]:
    members: dict[str, Any] = json.loads((checkpoint / "checkpoint.json").read_bytes())
    del members["checksum"]
    return members


def write_members(checkpoint: Path, members: dict[str, Any], *, sealed: bool) -> None:
    data = seal(members) if sealed else json.dumps(members, indent=1).encode()
    (checkpoint / "checkpoint.json").write_bytes(data)


def as_before(checkpoint: Path) -> dict[str, Any]:
    """Its members as they were before there were checksums."""
    members = members_of(checkpoint)
    del members["checksums"]
    return members


def write_tensors(checkpoint: Path, name: str, data: bytes) -> None:
    """Other bytes, with facts that agree with them."""
    (checkpoint / name).write_bytes(data)
    members = members_of(checkpoint)
    members["files"][name] = len(data)
    members["checksums"][name] = checksum_of(data)
    write_members(checkpoint, members, sealed=True)


def save_tensors(checkpoint: Path, name: str, value: object) -> None:
    torch.save(value, checkpoint / "made")
    write_tensors(checkpoint, name, (checkpoint / "made").read_bytes())
    (checkpoint / "made").unlink()


def test_one_that_nobody_touched_goes_on(victim: Victim) -> None:
    victim.fresh()
    assert not victim.is_refused()


@attack(short=30, long=5000)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flipped_bit_in_any_file_is_refused(
    victim: Victim, name: str, share: float, bit: int
) -> None:
    path = victim.fresh() / name
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 1 << bit
    path.write_bytes(data)
    assert victim.is_refused()
    tried("checkpoint with a flipped bit")


@attack(short=20, long=2000)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.binary(max_size=20))
def test_a_file_that_was_cut_or_grew_is_refused(
    victim: Victim, name: str, share: float, more: bytes
) -> None:
    path = victim.fresh() / name
    data = path.read_bytes()
    cut = data[: int(share * len(data))] + more
    path.write_bytes(cut if cut != data else data + b"x")
    assert victim.is_refused()
    tried("checkpoint with a file cut short or replaced")


def places_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every member and entry of a JSON value, as the way to it."""
    found = [at] if at else []
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, entry in entries:
        found += places_of(entry, (*at, key))
    return found


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["../../outside.pt", "/etc/passwd", "model.pt\0", "step-00000001"]),
    st.lists(st.integers(-5, 5), max_size=3),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
    st.integers(900, 1100).map(lambda depth: json.loads("[" * (depth // 4) + "]" * (depth // 4))),
)


@attack(short=15, long=3000, parts=6)
@given(st.data(), st.booleans())
def test_changed_facts_are_refused_or_mean_nothing(
    victim: Victim, data: st.DataObject, sealed: bool
) -> None:
    """Sealed again by whoever changed them, or written as before there were checksums."""
    checkpoint = victim.fresh()
    members = members_of(checkpoint) if sealed else as_before(checkpoint)
    changed: Any = copy.deepcopy(members)
    *way, last = data.draw(st.sampled_from(places_of(changed)))
    inner = changed
    for key in way:
        inner = inner[key]
    kind = data.draw(st.sampled_from(["replace", "remove", "rename"]))
    if kind == "replace" or isinstance(last, int):
        inner[last] = data.draw(_VALUES)
    elif kind == "remove":
        del inner[last]
    else:
        inner[data.draw(st.text(max_size=12))] = inner.pop(last)
    write_members(checkpoint, changed, sealed=sealed)
    is_refused = victim.is_refused()
    told = ("options", "versions", "feeding")
    told_only = way[:1] in ([name] for name in told) or last in (*told, "tokens")
    assert is_refused or changed == members or told_only
    tried("checkpoint with other facts")


@attack(short=20, long=2000)
@given(st.binary(max_size=200), st.floats(0, 1), st.booleans())
def test_facts_of_any_bytes_are_refused(
    victim: Victim, noise: bytes, share: float, sealed: bool
) -> None:
    path = victim.fresh() / "checkpoint.json"
    if not sealed:
        write_members(path.parent, as_before(path.parent), sealed=False)
    data = path.read_bytes()
    at = int(share * len(data))
    changed = data[:at] + noise + data[at + len(noise) :]
    path.write_bytes(changed)
    if changed != data:
        try:
            same = json.loads(changed) == json.loads(data)
        except (ValueError, RecursionError):
            same = False
        told_only = share > 0.5 and not sealed  # the last half is of options alone
        assert victim.is_refused() or same or told_only
    tried("checkpoint with other facts")


@attack(short=15, long=1500)
@given(
    st.sampled_from(FILES[1:]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_other_bytes_with_facts_that_agree_never_end_in_a_traceback(
    victim: Victim, name: str, changes: list[tuple[float, int]], near: bool, sealed: bool
) -> None:
    """Nobody can tell such weights from others, but they must be weights of this model."""
    checkpoint = victim.fresh()
    data = bytearray((checkpoint / name).read_bytes())
    for share, byte in changes:
        # What is not tensors stands at the beginning and at the end.
        at = int(share * (4000 if near else len(data)))
        data[-at if near and at % 2 else at % len(data)] = byte
    if sealed:
        write_tensors(checkpoint, name, bytes(data))
    else:
        (checkpoint / name).write_bytes(data)
        write_members(checkpoint, as_before(checkpoint), sealed=False)
    with contextlib.suppress(TokenmillError):
        victim.resume()
    tried("tensor file with other bytes and the right checksum")


@pytest.mark.parametrize(
    "facts",
    [
        {"step": -5},
        {"step": [2]},
        {"step": 1},
        {"version": 2},
        {"files": {"../../whole/checkpoints/step-00000002/model.pt": 497977}},
        {"files": {"/etc/passwd": 1}},
        {"files": ["model.pt"]},
        {"loader": []},
        {"essentials": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("sealed", [True, False])
def test_lies_of_facts_are_refused_with_the_checkpoint_before(
    victim: Victim, facts: dict[str, Any], sealed: bool
) -> None:
    checkpoint = victim.fresh()
    members = members_of(checkpoint) if sealed else as_before(checkpoint)
    write_members(checkpoint, members | facts, sealed=sealed)
    with pytest.raises(TrainingError, match=r"checkpoint\.json") as caught:
        victim.resume()
    assert "'step-00000001'" in str(caught.value.hint)
    tried("checkpoint with other facts")


def test_a_damaged_run_is_not_begun_anew_without_a_word(victim: Victim) -> None:
    checkpoint = victim.fresh()
    (checkpoint / "checkpoint.json").write_text("{")
    shutil.rmtree(victim.place / "run" / "checkpoints" / "step-00000001")
    with pytest.raises(TrainingError, match="cannot be understood") as caught:
        victim.resume()
    assert "begin anew in another --out" in str(caught.value.hint)
    with pytest.raises(UsageError, match="holds a run already, at step 2"):
        tokenmill.train(victim.place / "plain", out=victim.place / "run", steps=3, **OPTIONS)
    assert losses(victim.place / "run") == losses(victim.place / "whole")


def test_one_without_checksums_goes_on_and_says_that_it_was_not_checked(victim: Victim) -> None:
    checkpoint = victim.fresh()
    write_members(checkpoint, as_before(checkpoint), sealed=False)
    result = victim.resume()
    assert losses(victim.place / "run") == victim.expected
    assert any("without checksums" in note for note in result.notes)
    assert not any("without checksums" in note for note in victim.resume().notes)


@pytest.mark.parametrize("member", ["checksums", "options", "versions"])
def test_a_member_that_is_null_is_not_one_that_is_missing(victim: Victim, member: str) -> None:
    checkpoint = victim.fresh()
    write_members(checkpoint, members_of(checkpoint) | {member: None}, sealed=True)
    with pytest.raises(TrainingError, match=f"its member '{member}' is null"):
        victim.resume()


def _link(path: Path) -> None:
    outside = path.parents[3] / "outside"
    shutil.copyfile(path, outside)
    path.unlink()
    path.symlink_to(outside)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", [_link, _pipe, _folder], ids=["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_refused(
    victim: Victim, name: str, make: Callable[[Path], None]
) -> None:
    make(victim.fresh() / name)
    assert victim.is_refused()
    tried("checkpoint with links, pipes and folders for files")


def test_a_link_for_the_whole_folder_is_refused(victim: Victim) -> None:
    checkpoint = victim.fresh()
    moved = checkpoint.rename(victim.place / "elsewhere")
    checkpoint.symlink_to(moved)
    assert victim.is_refused()
    shutil.rmtree(moved)
    tried("checkpoint with links, pipes and folders for files")


class _Program:
    """What an unpickler that obeys would run."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("it-ran",)


def _names(state: dict[str, Any]) -> object:
    return {f"{name}.x": value for name, value in state.items()}


_MODELS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a program": lambda _: _Program(),
    "a list": lambda state: list(state.values()),
    "none": lambda _: None,
    "other names": _names,
    "one missing": lambda state: dict(list(state.items())[1:]),
    "one more": lambda state: {**state, "more": torch.zeros(3)},
    "one dimension more": lambda state: {name: value[None] for name, value in state.items()},
    "float64": lambda state: {name: value.double() for name, value in state.items()},
    "complex": lambda state: {name: value.to(torch.complex64) for name, value in state.items()},
    "nothing behind it": lambda state: {name: value.to("meta") for name, value in state.items()},
    "sparse": lambda state: {name: value.to_sparse() for name, value in state.items()},
    "one number for all": lambda state: {
        name: torch.zeros(()).expand(value.shape) for name, value in state.items()
    },
    "huge": lambda state: {name: torch.zeros(()).expand(1 << 50) for name in state},
    "numbers": lambda state: dict.fromkeys(state, 1.0),
}


@pytest.mark.parametrize("kind", _MODELS)
def test_tensors_of_another_model_are_refused(
    victim: Victim, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(victim.place)
    checkpoint = victim.fresh()
    state = torch.load(checkpoint / "model.pt", weights_only=True)
    save_tensors(checkpoint, "model.pt", _MODELS[kind](state))
    assert victim.is_refused()
    assert not (victim.place / "it-ran").exists()
    tried("tensor file that is not of this model")


_MOMENTS: dict[str, Callable[[dict[Any, Any]], object]] = {
    "none": lambda _: {},
    "a list": lambda state: list(state.values()),
    "one missing": lambda state: {n: value for n, value in state.items() if n},
    "other numbers": lambda state: {n + 1: value for n, value in state.items()},
    "no second moment": lambda state: {n: {"step": v["step"]} for n, v in state.items()},
    "another step": lambda state: {n: v | {"step": v["step"] + 7} for n, v in state.items()},
    "steps that are lists": lambda state: {n: v | {"step": [2]} for n, v in state.items()},
    "steps of nothing": lambda state: {
        n: v | {"step": v["step"].to("meta")} for n, v in state.items()
    },
    "one number for all": lambda state: {
        n: v | {"exp_avg": torch.zeros(()).expand(v["exp_avg"].shape)} for n, v in state.items()
    },
    "other shapes": lambda state: {n: v | {"exp_avg_sq": torch.zeros(3)} for n, v in state.items()},
}


@pytest.mark.parametrize("kind", _MOMENTS)
def test_an_optimizer_of_another_run_is_refused(victim: Victim, kind: str) -> None:
    checkpoint = victim.fresh()
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    save_tensors(
        checkpoint,
        "optimizer.pt",
        {"state": _MOMENTS[kind](saved["state"]), "param_groups": saved["param_groups"]},
    )
    assert victim.is_refused()
    tried("tensor file that is not of this model")


@pytest.mark.parametrize(
    "groups", [[], [{"params": [[]]}], 3, [{"params": list(range(14, 0, -1))}], None], ids=str
)
def test_groups_of_another_optimizer_are_refused(victim: Victim, groups: object) -> None:
    checkpoint = victim.fresh()
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    save_tensors(checkpoint, "optimizer.pt", {"state": saved["state"], "param_groups": groups})
    assert victim.is_refused()
    tried("tensor file that is not of this model")


@pytest.mark.parametrize(
    "states",
    [[], {}, None, [3], [{}], [{"cpu": 3}], [{"cpu": torch.zeros(3)}],
     [{"cpu": torch.zeros(5056, dtype=torch.uint8)}], [{"cpu": torch.zeros(7, device="meta")}]],
    ids=str,
)  # fmt: skip
def test_random_numbers_that_are_none_are_refused(victim: Victim, states: object) -> None:
    save_tensors(victim.fresh(), "rng.pt", states)
    assert victim.is_refused()
    tried("tensor file that is not of this model")


def test_an_archive_that_would_grow_is_refused(victim: Victim) -> None:
    checkpoint = victim.fresh()
    with (
        zipfile.ZipFile(checkpoint / "model.pt") as whole,
        zipfile.ZipFile(checkpoint / "made", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    write_tensors(checkpoint, "model.pt", (checkpoint / "made").read_bytes())
    with pytest.raises(TrainingError, match="it is packed"):
        victim.resume()
    tried("tensor file that is not of this model")


@pytest.mark.slow
def test_kill_9_while_checkpoints_are_written_leaves_a_run_that_goes_on(victim: Victim) -> None:
    """A checkpoint at every step, so that most of the time one is being written or removed."""
    steps = times(short=12, long=150)
    out, whole = victim.place / "killed", victim.place / "unkilled"
    said: dict[str, Any] = {**OPTIONS, "schedule": "wsd", "steps": steps, "resume": True}
    tokenmill.train(victim.place / "plain", out=whole, **said)
    code = (
        "import tokenmill\n"
        f"tokenmill.train({str(victim.place / 'plain')!r}, out={str(out)!r}, **{said!r})"
    )
    dice = random.Random(0)
    for _ in range(times(short=1, long=10)):
        process = subprocess.Popen([sys.executable, "-c", code])
        before = set(out.glob("checkpoints/step-*"))
        while process.poll() is None and set(out.glob("checkpoints/step-*")) <= before:
            time.sleep(0.005)
        time.sleep(dice.random() / 5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        tried("kill -9 while a checkpoint is written")
    tokenmill.train(victim.place / "plain", out=out, **said)
    assert losses(out) == losses(whole)
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [f"step-{step:08}" for step in (steps - 1, steps)]
