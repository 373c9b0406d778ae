"""Devices that fail and come back, drawn from a seed."""

import numpy as np

from .priorities import Ints


class Failures:
    """Exponential times between failures of each device, a fixed time to repair."""

    def __init__(self, mean_seconds: float, repair_seconds: float, seed: int) -> None:
        self.mean_seconds, self.repair_seconds = mean_seconds, repair_seconds
        self.random = np.random.default_rng((seed, 1))
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
