"""Which workers hang: silent ones, and those that others wait for in vain."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .line import Line


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may be silent, and how long others may wait for it, in seconds."""

    heartbeat_seconds: float
    progress_seconds: float


def hung(lines: Mapping[str, Line], limits: Limits, now: float) -> Iterator[tuple[str, str]]:
    """The workers that hang, each with what to say of it.

    A frozen or stopped process falls silent. One that hangs in its own code beats on, but gets no
    further while at least one other waits in an exchange.

    Args:
        lines: The workers that train now.
        limits: The limits.
        now: Monotonic seconds.
    """
    others_wait = any(line.is_waiting for line in lines.values())
    for name, line in lines.items():
        silent = silence_of(line, limits, now)
        if silent is not None:
            yield name, silent
        elif others_wait and not line.is_waiting and line.heard_at is not None:
            if now - line.moved_at > limits.progress_seconds:
                yield name, f"got no further for {limits.progress_seconds:g} s and was killed"


def silence_of(line: Line, limits: Limits, now: float) -> str | None:
    """What to say of a worker that was heard once and not for too long; else None."""
    silent = 0.0 if line.heard_at is None else now - line.heard_at
    if silent <= limits.heartbeat_seconds:
        return None
    return f"gave no sign of life for {silent:.1f} s and was killed"
