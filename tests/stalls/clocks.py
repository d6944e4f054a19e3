"""A clock that goes as it is told, and a device whose stream follows it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Clock:
    """Stands still unless it is moved."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Device:
    """What `torch.cuda` is to the meter: one stream, which works behind the host's back."""

    clock: Clock
    free_at: float = 0.0
    """When everything that was put into the stream so far is done."""
    is_initialized_now: bool = True
    is_capturing: bool = False
    breaks: bool = False
    call_seconds: float = 0.0
    """What recording an event takes the host."""
    events: list[Event] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        """Put work into the stream; the host goes on at once."""
        self.free_at = max(self.free_at, self.clock.now) + seconds

    def is_initialized(self) -> bool:
        return self.is_initialized_now

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802 (torch's name)
        assert enable_timing
        event = Event(self)
        self.events.append(event)
        return event


@dataclass
class Event:
    device: Device
    done_at: float | None = None

    def record(self) -> None:
        assert not self.device.is_capturing
        if self.device.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.device.clock.pass_by(self.device.call_seconds)
        self.device.launch(0.0)
        self.done_at = self.device.free_at

    def query(self) -> bool:
        return self.done_at is not None and self.done_at <= self.device.clock.now

    def elapsed_time(self, later: Event) -> float:
        assert self.query(), "an event that is not done cannot be read without waiting"
        assert later.query()
        assert self.done_at is not None
        assert later.done_at is not None
        return 1000 * (later.done_at - self.done_at)
