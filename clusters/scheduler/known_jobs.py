"""What a scheduler knows of the jobs present: what they asked for, their speed, what they had.

Rates are planned from profiles when a job comes, and stored with it. What leases measure corrects
them, from the next decision on. The ``Ledger`` counts device-seconds, the time of rounds, and steps
left. Targets come from the shares that the policy gave at the last decision. Time and steps come
from leases: the steps that are left are an estimate, by the rates that decisions see.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...schema.errors import ProblemError
from ...schema.files import from_json
from ...schema.jobs import MixThroughput
from ..mechanisms.easyscale import Elastic, Wish
from ..mechanisms.pool import ClusterPool
from ..mechanisms.round_state import RoundState
from ..mechanisms.rounds import receive
from . import leases
from .leases import Ended, Lease
from .occupancy import Places
from .plans import Rate, kind_of, pool_from, rates_from, wish_of
from .store import ClusterStore
from .submission import Submission

Ratios = dict[str, float]
"""Measured over predicted steps per second of one kind of job, by device types."""


class KnownJobs:
    """Submissions and rates; each is read from the state, or made, when it is first asked for."""

    def __init__(
        self,
        store: ClusterStore,
        num_devices: Mapping[str, int],
        dollars_per_hour: Mapping[str, float],
    ) -> None:
        """Know the jobs that the state says are present."""
        self._store = store
        self._num_devices, self._dollars_per_hour = dict(num_devices), dict(dollars_per_hour)
        self._submissions: dict[int, Submission] = {}
        self._rates: dict[tuple[str, int], Rate] = {}
        self._numbers: dict[str, tuple[int, ...]] = {}
        self._wishes: dict[str, Wish] = {}
        self._ratios: dict[str, Ratios] = {}  # of kinds of jobs, as they are asked for
        self._has_measured = False  # what no decision has seen
        self.read_present()

    def read_present(self) -> None:
        """Take up the rates of the jobs that the state says are present."""
        for row in self._store.rows(
            "SELECT number, throughput FROM jobs WHERE state IN ('queued', 'running')"
        ):
            rates = rates_from(row["throughput"])
            self._rates |= _by_key(rates)
            self._numbers[str(row["number"])] = _numbers_of(rates)

    @property
    def numbers(self) -> Mapping[str, tuple[int, ...]]:
        """Numbers of devices that each job can hold, the fewest first."""
        return self._numbers

    def submission(self, job: int) -> Submission:
        """What a job asked for."""
        if job not in self._submissions:
            [row] = self._store.rows("SELECT submission FROM jobs WHERE number = ?", job)
            self._submissions[job] = from_json(row["submission"], Submission, name=f"job {job}")
        return self._submissions[job]

    def wish(self, job: str) -> Wish:
        """What a job can run on, as EasyScale's schedulers ask for it."""
        if job not in self._wishes:
            asked = self.submission(int(job))
            ratios = self._ratios_of(kind_of(asked))
            rates = [corrected(one, ratios) for key in self._numbers[job]
                     if (one := self._rates.get((kind_of(asked), key)))]  # fmt: skip
            self._wishes[job] = wish_of(
                asked, rates, list(self._num_devices), partial(ratio_on, ratios)
            )
        return self._wishes[job]

    def pool(self) -> ClusterPool:
        """The cluster's devices, and how fast jobs are there by what is known now."""
        rates = (corrected(rate, self._ratios_of(rate.model)) for rate in self._rates.values())
        return pool_from(rates, self._num_devices, self._dollars_per_hour)

    def admit(self, jobs: Mapping[int, Sequence[Rate]], models: Collection[str]) -> bool:
        """Know jobs that come in; whether ``pool`` is another one now."""
        self._numbers |= {str(job): _numbers_of(rates) for job, rates in jobs.items()}
        new = _by_key(rate for rates in jobs.values() for rate in rates)
        if new.items() <= self._rates.items():
            return False
        # The pool is another one anyway, so kinds of jobs that have left go too.
        self._rates = {key: one for key, one in self._rates.items() if key[0] in models} | new
        return True

    def leave(self, job: int) -> None:
        """Forget a job; its rates may be those of others."""
        self._submissions.pop(job, None)
        self._numbers.pop(str(job), None)
        self._wishes.pop(str(job), None)

    def learn(self, ended: Ended, types: Iterable[str]) -> None:
        """Record how fast a job was, in a transaction, for the next ``use_measured``."""
        kind = kind_of(self.submission(ended.lease.job))
        predicted = ended.lease.predicted_steps_per_second
        if note(self._store, kind, types, predicted, ended.measured_steps_per_second):
            self._has_measured = True

    def use_measured(self) -> bool:
        """Correct rates by what was measured from now on; whether ``pool`` is another one now."""
        if not self._has_measured:
            return False
        self._has_measured = False
        self._ratios.clear()
        self._wishes.clear()
        return True

    def _ratios_of(self, kind: str) -> Ratios:
        if kind not in self._ratios:
            self._ratios[kind] = ratios_of(self._store, kind)
        return self._ratios[kind]


def _by_key(rates: Iterable[Rate]) -> dict[tuple[str, int], Rate]:
    return {(rate.model, rate.scale_factor): rate for rate in rates}


def _numbers_of(rates: Iterable[Rate]) -> tuple[int, ...]:
    return tuple(rate.scale_factor for rate in rates)


# How fast jobs really were: what leases measured corrects the throughputs that policies see.
#
# Gavel starts from estimates and goes on with what jobs reach (thesis 5.3.3, 5.6). Here a profile
# makes the first estimate. The ratio of measured to predicted speed is kept for each kind of job
# (see ``plans.kind_of``) on each set of device types, and is applied to every number of these
# devices.


MOST_RATIOS = 5
"""The last ones of a kind of job on a type count, by their median: one disturbed turn is none."""


def note(
    store: ClusterStore,
    kind: str,
    types: Iterable[str],
    predicted: float | None,
    measured: float | None,
) -> bool:
    """Record what a lease measured; whether it says anything."""
    if not predicted or not measured or not math.isfinite(measured / predicted):
        return False
    name = _name(types)
    rows = store.rows("SELECT ratios FROM measured WHERE kind = ? AND types = ?", kind, name)
    before = json.loads(rows[0]["ratios"]) if rows else []
    store.run(
        "INSERT OR REPLACE INTO measured (kind, types, ratios) VALUES (?, ?, ?)",
        kind, name, json.dumps([*before, measured / predicted][-MOST_RATIOS:]),
    )  # fmt: skip
    return True


def ratios_of(store: ClusterStore, kind: str) -> Ratios:
    """What is known of a kind of job; empty where nothing was measured."""
    return {
        row["types"]: statistics.median(json.loads(row["ratios"]))
        for row in store.rows("SELECT types, ratios FROM measured WHERE kind = ?", kind)
    }


def ratio_on(ratios: Ratios, types: Iterable[str]) -> float:
    """Measured over predicted speed on some types; 1 where nothing is known."""
    # A type that was not measured gets the median of those that were: a type is judged better than
    # another than by the profile only when both were measured. On types that were not measured
    # together the slowest one counts: a step ends with it.
    names = sorted(set(types))
    known = ratios.get(_name(names))
    if known is not None or not ratios:
        return 1.0 if known is None else known
    # What several types reached together says little of one.
    alone = [ratio for name, ratio in ratios.items() if "," not in name]
    usual = statistics.median(alone or [*ratios.values()])
    return min(ratios.get(name, usual) for name in names)


def corrected(rate: Rate, ratios: Ratios) -> Rate:
    """A predicted rate as it was measured to be."""
    if not ratios:
        return rate
    if isinstance(rate, MixThroughput):
        return replace(
            rate, steps_per_second=rate.steps_per_second * ratio_on(ratios, rate.devices)
        )
    known: Mapping[str, float] = rate.steps_per_second
    return replace(
        rate, steps_per_second={name: one * ratio_on(ratios, [name]) for name, one in known.items()}
    )


def _name(types: Iterable[str]) -> str:
    return ",".join(sorted(set(types)))


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
        # Even where nothing is counted, as this time must not count later.
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
            # Policies have no column for these, so each type has its part of the time.
            for kind, part in kinds.items():
                _count(state, place, kind, seconds * part / number)
            wish = self._known.wish(job.id)
            counts = tuple(kinds[kind] for kind in range(len(pool.types)))
            return wish.rate(counts) if isinstance(wish, Elastic) else 0.0
        _count(state, place, column, seconds)
        # Its rate with just so many devices; policies may have seen that of another number.
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
