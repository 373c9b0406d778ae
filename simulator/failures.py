"""Devices that fail and come back, drawn from a seed."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from ..schema.errors import ProblemError
from .priorities import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """``mean_seconds`` between failures of a device, each gone for ``repair_seconds``.

    Raises:
        ProblemError: Times that make no sense.
    """

    mean_seconds: float
    repair_seconds: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.mean_seconds < math.inf:
            raise ProblemError(
                f"the mean time between failures must be > 0 s and finite, got {self.mean_seconds}"
            )
        if not 0 <= self.repair_seconds < math.inf:
            raise ProblemError(f"repairs must last >= 0 s and end, got {self.repair_seconds} s")


class Failures:
    """Exponential times between failures of each device, a fixed time to repair; by rounds."""

    def __init__(self, options: FailureOptions) -> None:
        self.mean_seconds, self.repair_seconds = options.mean_seconds, options.repair_seconds
        self.random = np.random.default_rng((options.seed, 1))
        self.down: list[tuple[float, int]] = []  # (until, type)
        self.number = 0

    def up(self, capacity: Ints, now_seconds: float) -> Ints:
        """Devices of each type that work now [types]."""
        self.down = [(until, kind) for until, kind in self.down if until > now_seconds]
        up = capacity.copy()
        for _, kind in self.down:
            up[kind] -= 1
        return up

    def strike(self, up: Ints, usage: Ints, now_seconds: float, round_seconds: float) -> Ints:
        """Let devices fail during a round; returns the holders they hit.

        Args:
            up: Devices that work [types].
            usage: Devices that each holder has of each type [types, holders].
            now_seconds: Start of the round.
            round_seconds: Its length.
        """
        chance = float(-np.expm1(-round_seconds / self.mean_seconds))
        hit: set[int] = set()
        for one, devices in enumerate(up.tolist()):
            failed = int(self.random.binomial(devices, chance))
            if not failed:
                continue
            self.number += failed
            self.down.extend([(now_seconds + self.repair_seconds, one)] * failed)
            holders = usage[one].nonzero()[0]
            ends = usage[one][holders].cumsum()
            for device in self.random.choice(devices, size=failed, replace=False).tolist():
                place = int(np.searchsorted(ends, device, side="right"))
                if place < len(holders):
                    hit.add(int(holders[place]))
        return np.array(sorted(hit), dtype=np.int64)


class FailureEvents:
    """The same, each at its own second.

    The next failure of the devices that are up is drawn anew when their number changes; the
    exponential distribution has no memory, so each fails at its own rate.
    """

    def __init__(self, options: FailureOptions, capacity: Ints) -> None:
        self.options, self.number = options, 0
        self._up: list[int] = capacity.tolist()
        self._random = np.random.default_rng((options.seed, 1))
        self._repairs: list[tuple[float, int]] = []  # (when, type), a heap
        self._next = self._drawn(0.0)

    def _drawn(self, after: float) -> float:
        if not any(self._up):
            return math.inf
        return after + self._random.exponential(self.options.mean_seconds / sum(self._up))

    @property
    def next_seconds(self) -> float:
        """When a device fails or comes back."""
        return min(self._next, self._repairs[0][0] if self._repairs else math.inf)

    def up(self) -> list[int]:
        """Devices by type that work."""
        return list(self._up)

    def until(self, now_seconds: float) -> list[tuple[int, int]]:
        """Let time pass; the (type, place among those up) of each device that failed."""
        hit = []
        while (then := self.next_seconds) <= now_seconds:
            if then < self._next:
                self._up[heapq.heappop(self._repairs)[1]] += 1
            else:
                hit.append(self._failed(then))
            self._next = self._drawn(then)
        self.number += len(hit)
        return hit

    def _failed(self, then: float) -> tuple[int, int]:
        place = int(self._random.integers(sum(self._up)))
        kind = 0
        while place >= self._up[kind]:
            place -= self._up[kind]
            kind += 1
        self._up[kind] -= 1
        heapq.heappush(self._repairs, (then + self.options.repair_seconds, kind))
        return kind, place
