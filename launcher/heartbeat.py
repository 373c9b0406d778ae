"""Which workers hang: silent ones, and those that others wait for in vain."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from .line import Line


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may be silent, and how long others may wait for it, in seconds."""

    heartbeat_seconds: float
    progress_seconds: float


class Watched(Protocol):
    """The worker processes."""

    def lines(self) -> Mapping[str, Line]:
        """The line to each."""

    def is_stopped(self, name: str) -> bool:
        """Whether a signal has stopped one."""

    def kill(self, name: str, why: str) -> None:
        """End one; ``why`` is what its failure says."""


class Watch:
    """Ends workers that hang; their failures say so.

    Args:
        workers: The processes.
        limits: When a worker counts as hung.
    """

    def __init__(self, workers: Watched, limits: Limits) -> None:
        self._workers, self._limits = workers, limits
        self._stopped_since: dict[str, float] = {}

    def trained(self, names: Iterable[str]) -> None:
        """End those of the workers that hang, once they train."""
        self._end(hung(self._lines(names), self._limits, time.monotonic()))

    def silent(self, names: Iterable[str]) -> None:
        """End those that fall silent, or never say anything.

        How long one takes to start is its own affair; but one that a signal has stopped, or that
        does not come as far as its first sign of life, does not hold the others up for ever.
        """
        now = time.monotonic()
        for name, line in self._lines(names).items():
            is_new = line.heard_at is None
            why = self._stuck(name, line, now) if is_new else silence_of(line, self._limits, now)
            if why is not None:
                self._end([(name, why)])

    def _stuck(self, name: str, line: Line, now: float) -> str | None:
        """What to say of a worker that was never heard, where that takes too long."""
        since = self._stopped_since.setdefault(name, now)
        if not self._workers.is_stopped(name):
            del self._stopped_since[name]
        elif now - since > self._limits.heartbeat_seconds:
            return f"was stopped for {now - since:.1f} s before its first sign of life"
        if now - line.began > self._limits.progress_seconds:
            return f"gave no sign of life within {self._limits.progress_seconds:g} s"
        return None

    def _lines(self, names: Iterable[str]) -> dict[str, Line]:
        lines = self._workers.lines()
        return {name: lines[name] for name in names if name in lines}

    def _end(self, found: Iterable[tuple[str, str]]) -> None:
        for name, why in found:
            self._workers.kill(name, f"{why} and was killed")


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
            if now - line.moved_at > limits.progress_seconds and not line.is_finished:
                yield name, f"got no further for {limits.progress_seconds:g} s"


def silence_of(line: Line, limits: Limits, now: float) -> str | None:
    """What to say of a worker that was heard once and not for too long; else None.

    One that has finished falls silent with its interpreter.
    """
    silent = 0.0 if line.heard_at is None else now - line.heard_at
    if silent <= limits.heartbeat_seconds or line.is_finished:
        return None
    return f"gave no sign of life for {silent:.1f} s"
