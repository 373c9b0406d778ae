"""What jobs were to get, and what they had: device-seconds, the time of rounds, and steps left.

Targets come from the shares that the policy gave at the last decision. Time and steps come from
leases: the steps that are left are an estimate, by the rates that decisions see.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...schema.errors import ProblemError
from ..mechanisms.easyscale import Elastic
from ..mechanisms.rounds.decide import receive
from ..mechanisms.rounds.state import RoundState
from . import leases
from .known_jobs import KnownJobs
from .leases import Lease
from .occupancy import Places
from .store import ClusterStore

_AIMED = "aimed"  # until when shares were counted
_LEAST_STEPS = 1.0  # left of a job that is not done, whatever was predicted


class Ledger:
    """Counts until now, in a transaction: in the state of rounds that it is given, and the file."""

    def __init__(self, store: ClusterStore, places: Places, known: KnownJobs) -> None:
        """Go on where the file is."""
        self._store, self._places, self._known = store, places, known

    def count_targets(self, state: RoundState, now: float) -> None:
        """Count the device-seconds that the policy's shares gave jobs since this was done last."""
        since, active = self._store.get(_AIMED), state.active
        self._store.set(_AIMED, now)
        if since is None or not len(active):
            return
        devices = active.share.sum(axis=0) * active.scale
        self._store.run_each(
            "UPDATE jobs SET target_seconds = target_seconds + ? WHERE number = ?",
            [
                (held * max(0.0, now - since), int(job.id))
                for job, held in zip(active.jobs, devices.tolist(), strict=True)
                if held
            ],
        )

    def forget_future(self, now: float) -> None:
        """Count no targets until a time again that a clock gave before it was set back."""
        since = self._store.get(_AIMED)
        if since is not None and since > now:
            self._store.set(_AIMED, now)

    def pause_targets(self, state: RoundState, now: float) -> None:
        """Count targets, and none of the time from now until they are counted next."""
        self.count_targets(state, now)
        self._store.set(_AIMED, None)

    def count_leases(self, state: RoundState, given: Sequence[Lease], now: float) -> None:
        """Count the time that leases trained since they were counted last, and its steps."""
        places = {job.id: place for place, job in enumerate(state.active.jobs)}
        for lease in given:
            place = places.get(str(lease.job))
            if lease.trained is not None and place is not None:
                active = state.active
                seconds = max(0.0, now - max(lease.trained, lease.credited or lease.trained))
                kinds = Counter(kind for kind, _, _ in self._places.seat(lease.devices))
                rate = self._receive(state, place, kinds, seconds)
                active.left[place] = max(_LEAST_STEPS, active.left[place] - seconds * rate)
                leases.credit(self._store, lease, now)

    def _receive(self, state: RoundState, place: int, kinds: Counter[int], seconds: float) -> float:
        """Count the time that a job had on devices of each type; its steps per second there."""
        active, pool = state.active, state.pool
        job, number = active.jobs[place], kinds.total()
        if (column := _column(state, place, kinds)) is None:
            for kind, part in kinds.items():
                _count(state, place, kind, seconds * part / number)
            wish = self._known.wish(job.id)
            counts = tuple(kinds[kind] for kind in range(len(pool.types)))
            return wish.rate(counts) if isinstance(wish, Elastic) else 0.0
        _count(state, place, column, seconds)
        if number in self._known.numbers.get(job.id, ()):
            return float(pool.rate(replace(job, scale_factor=number))[column])
        return float(active.rate[column, place])


def _column(state: RoundState, place: int, kinds: Counter[int]) -> int | None:
    """Where policies see these devices of a job; None for several types within its range."""
    try:
        column = state.pool.column_of(kinds)
    except ProblemError:
        return None
    alike = len(kinds) == 1 or state.active.rate[column, place] > 0
    return column if alike else None


def _count(state: RoundState, place: int, column: int, seconds: float) -> None:
    receive(state, np.array([column]), np.array([place]), np.array([seconds]))
    state.active.held[column, place] += seconds
