"""Find hanging workers: those without heartbeats, and those that others wait for too long."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .workers import WorkerLine, Workers

_PARTED_SECONDS = 3.0  # in which neither moves: an exchange that ends takes milliseconds
_HEARD_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """How long a worker may be silent, and how long others may wait for it, in seconds."""

    heartbeat_seconds: float
    progress_seconds: float


class Watch:
    """Ends workers that hang; their failures say so."""

    def __init__(self, workers: Workers, limits: SilenceLimits) -> None:
        self._workers, self._limits = workers, limits
        self._stopped_since: dict[str, float] = {}

    def look(self, names: Iterable[str]) -> None:
        """End those of some workers that hang.

        There is no limit on a worker's start while it sends heartbeats. Imports may delay
        heartbeats, so during the start only a worker that a signal has stopped is ended soon. The
        same holds for a worker that has finished: its interpreter may take any time to end.
        """
        lines = self._workers.lines()
        watched = {name: lines[name] for name in names if name in lines}
        now = time.monotonic()
        found = dict(hung(watched, self._limits, now))
        for name, line in watched.items():
            if line.is_finished:
                why = self._stopped(name, now, "left")
            else:
                why = None if line.is_prepared else self._stuck(name, line, now)
            if why is not None:
                found[name] = why
        for name, why in found.items():
            self._workers.kill(name, f"{why} and was killed")

    def _stopped(self, name: str, now: float, doing: str) -> str | None:
        """The message about a worker that a signal has stopped for too long."""
        since = self._stopped_since.setdefault(name, now)
        if not self._workers.is_stopped(name):
            del self._stopped_since[name]
        elif now - since > self._limits.heartbeat_seconds:
            return f"was stopped for {now - since:.1f} s while it {doing}"
        return None

    def _stuck(self, name: str, line: WorkerLine, now: float) -> str | None:
        """The message about a worker that has not reached ``hf.prepare`` and makes no progress."""
        quiet = now - (line.began if line.heard_at is None else line.heard_at)
        if why := self._stopped(name, now, "started"):
            return why
        if quiet > self._limits.progress_seconds:
            return f"gave no sign of life for {quiet:.1f} s while it started"
        return None


def hung(
    lines: Mapping[str, WorkerLine], limits: SilenceLimits, now: float
) -> Iterator[tuple[str, str]]:
    """The workers that hang, each with what to say of it.

    A frozen or stopped process falls silent. One that hangs in its own code beats on, but gets no
    further while at least one other waits in an exchange. One that has not come to ``hf.prepare``,
    or has finished, does neither.
    """
    others_wait = any(line.is_waiting for line in lines.values())
    for name, line in lines.items():
        if line.heard_at is None or not line.is_prepared or line.is_finished:
            continue
        silent = now - line.heard_at
        if silent > limits.heartbeat_seconds:
            yield name, f"gave no sign of life for {silent:.1f} s"
        elif others_wait and not line.is_waiting and now - line.moved_at > limits.progress_seconds:
            yield name, f"got no further for {limits.progress_seconds:g} s"


def parted(lines: Mapping[str, WorkerLine], now: float) -> tuple[str, str] | None:
    """A worker whose script has ended, and one that waits for it in its loop; None as a rule."""
    still = {
        name: line
        for name, line in lines.items()
        if line.heard_at is not None
        and not line.is_finished
        and now - line.heard_at < _HEARD_SECONDS
        and now - line.moved_at > _PARTED_SECONDS
    }
    left = [name for name, line in still.items() if line.left_at is not None]
    waits = [name for name, line in still.items() if line.is_waiting and line.left_at is None]
    return (left[0], waits[0]) if left and waits else None
