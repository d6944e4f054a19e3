"""What a loader saves: a few integers and fingerprints, the same on every rank.

A state says how far a run has come, and everything that this position depends on: sources, packing,
sequence length, order. A state of anything else is refused, with the reason; continuing would feed
rows twice, or never, without a word. Batch size, ranks, workers and the form of the batches are no
part of it: they may change from one run to the next.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenmill.errors import StateError
from tokenmill.loader import order
from tokenmill.loader.plan import MAX_NUMBER, Position
from tokenmill.store.fields import brief
from tokenmill.store.sealed import checksum_of

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE_VERSION = 1
_MEMBERS = {
    "version",
    "order",
    "seed",
    "shuffle",
    "packing",
    "seq_len",
    "mixture",
    "stores",
    "layouts",
    "step",
    "position",
    "seen",
    "checksum",
}
_ANEW = "resume with what the run was begun with, or begin anew without load_state_dict"


def make_state(
    facts: Mapping[str, object], *, step: int, position: Position, seen: Mapping[str, object]
) -> dict[str, Any]:
    """A state dict of plain values: it survives JSON, pickle and torch.save."""
    state = {
        "version": STATE_VERSION,
        "order": order.VERSION,
        **facts,
        "step": step,
        "position": position.to_json(),
        "seen": dict(seen),
    }
    return {**state, "checksum": _checksum(state)}


def stage_of(state: object) -> int:
    """The stage that a state is in, as far as it can be told before it is checked."""
    position = state.get("position") if isinstance(state, dict) else None
    stage = position.get("stage") if isinstance(position, dict) else None
    return max(0, stage) if isinstance(stage, int) else 0


def check_state(
    state: object, facts: Mapping[str, object], *, num_sources: int
) -> tuple[int, Position]:
    """Step and position of a state; StateError says what is not as it was saved."""
    if not isinstance(state, dict):
        raise StateError(
            f"{brief(state)} is no state of a loader", hint="give what state_dict() gave"
        )
    for name, known in (("version", STATE_VERSION), ("order", order.VERSION)):
        if name in state and state[name] != known:
            raise StateError(
                f"the state has {name} {brief(state[name])}, and this release reads {name} {known}",
                hint="resume with the release of tokenmill that saved it",
            )
    if set(state) != _MEMBERS:
        names = sorted(map(brief, set(state) - _MEMBERS)) + sorted(_MEMBERS - set(state))
        odd = ", ".join(names)[:200]
        raise StateError(
            f"the state is not one that a loader saved: {odd} is missing or unknown",
            hint="give what state_dict() gave, whole",
        )
    _check_sum(state)
    for name, ours in facts.items():
        _compare(name, state[name], ours)
    step = state["step"]
    if type(step) is not int or not 0 <= step < MAX_NUMBER:
        raise StateError(f"the state has step {brief(step)}", hint="give what state_dict() gave")
    return step, Position.from_json(state["position"], num_sources=num_sources)


def _check_sum(state: dict[str, Any]) -> None:
    members = {name: value for name, value in state.items() if name != "checksum"}
    try:
        found = _checksum(members)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"the state holds what no loader saves: {error}", hint="give what state_dict() gave"
        ) from error
    if found != state["checksum"]:
        raise StateError(
            "the state was changed after it was saved: its checksum does not hold",
            hint="resume from another checkpoint; loader.seek(step) goes to any step by its number",
        )


def _compare(name: str, saved: object, ours: object) -> None:
    if _canonical(saved) == _canonical(ours):
        return
    if name == "stores":
        raise StateError(_other_stores(saved, ours), hint=_ANEW)
    if name == "layouts":
        raise StateError(
            "the state was saved by a release that cut rows by other rules",
            hint="resume with the release of tokenmill that saved it",
        )
    raise StateError(
        f"the state was saved with {name}={brief(saved)}, and this loader has"
        f" {name}={brief(ours)}: the rows would be others",
        hint=_ANEW,
    )


def _other_stores(saved: object, ours: object) -> str:
    if not isinstance(saved, dict) or not isinstance(ours, dict) or set(saved) != set(ours):
        return f"the state is of the sources {brief(saved)}, and this loader has {brief(ours)}"
    names = [repr(name) for name in ours if saved[name] != ours[name]]
    which = "the store" if names == ["''"] else f"the source {', '.join(names)}"
    return (
        f"{which} does not hold what it held when the state was saved (other text, tokenizer,"
        " split or order of shards): its rows are others"
    )


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(members: Mapping[str, object]) -> str:
    return checksum_of(_canonical(members).encode())
