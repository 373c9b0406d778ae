"""The state of rounds between two decisions, and the rules that all kinds of rounds keep to.

Among these is the choice between all combinations of jobs where pairs may share devices (thesis
5.3.1, 5.5).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from ...schema.errors import ProblemError
from ...schema.jobs import Job
from .pool import NOWHERE, Active, ClusterPool, Floats, Ints
from .seats import Servers


def _ints() -> Ints:
    return np.zeros(0, dtype=np.int64)


def _floats() -> Floats:
    return np.zeros(0)


@dataclass(slots=True)
class PairShares:
    """Pairs that have a share: jobs ``first`` and ``second`` (places among those present).

    ``column`` is where they share, ``share`` the part of time, ``received`` seconds since the
    allocation, ``rate`` and ``beside`` the steps per second of first and second [pairs].
    """

    first: Ints = field(default_factory=_ints)
    second: Ints = field(default_factory=_ints)
    column: Ints = field(default_factory=_ints)
    share: Floats = field(default_factory=_floats)
    received: Floats = field(default_factory=_floats)
    rate: Floats = field(default_factory=_floats)
    beside: Floats = field(default_factory=_floats)

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def of(
        cls, active: Active, first: Ints, second: Ints, column: Ints, share: Floats, head: float
    ) -> "PairShares":
        """Pairs as an allocator gives them, where both run; ``head`` seconds count as received."""
        jobs = active.jobs
        keys = [(job.model, job.scale_factor) for job in jobs]
        both = np.zeros((2, len(first)))
        known: dict[tuple[int, int], Floats] = {}
        for i, (a, b, c) in enumerate(
            zip(first.tolist(), second.tolist(), column.tolist(), strict=True)
        ):
            kinds = (int(active.kind[a]), int(active.kind[b]))
            # The rates of two kinds beside each other are the same for all their jobs.
            if kinds not in known:
                known[kinds] = active.pool.pair_rates(keys[a], keys[b])
            both[:, i] = known[kinds][:, c]
        runs = (both > 0).all(axis=0)
        received = np.full(int(runs.sum()), head)
        return cls(first[runs], second[runs], column[runs], share[runs], received, *both[:, runs])

    def drop(self, done: Ints, number: int) -> None:
        """Forget the pairs of jobs that leave, of ``number`` jobs, and count places anew."""
        kept = np.ones(number, dtype=bool)
        kept[done] = False
        # Places after the gaps are closed.
        place = np.cumsum(kept) - 1
        both = kept[self.first] & kept[self.second]
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[both])
        self.first, self.second = place[self.first], place[self.second]


@dataclass(slots=True)
class Chosen:
    """The jobs of a round: job ``first``, beside it ``second`` (-1: none).

    ``column`` is what they were chosen for, ``placed`` what they hold: the same, the type of an
    unconsolidated column, or a mix that has it and leftover devices besides. ``pair`` is the place
    among the pairs, -1 for a job alone.
    """

    first: Ints
    second: Ints
    column: Ints
    placed: Ints
    pair: Ints


def choose_combinations(
    active: Active,
    pairs: PairShares,
    ranked: Floats,
    paired: Floats,
    free: Ints,
    order: list[int] | None,
    ties: Floats | None = None,
) -> Chosen:
    """Algorithm 2 with pairs: the highest priority first, no job twice, what fits.

    Args:
        active: The jobs.
        pairs: Pairs with a share.
        ranked: Priorities of jobs alone, minus infinity where one must not run [columns, jobs].
        paired: Priorities of the pairs [pairs].
        free: Devices of each type [types].
        order: Columns one after another, or None: all in one queue.
        ties: Of equal priorities of jobs alone the larger goes first [columns, jobs].
    """
    number, pool = len(active), active.pool
    jobs = ranked.shape[1]
    flat = ranked.ravel()
    # Jobs alone first, then pairs: of equal priorities the stable order keeps it so.
    able = (flat > -np.inf).nonzero()[0]
    urgency = np.concatenate((flat[able], paired))
    first = np.concatenate((able % jobs, pairs.first))
    second = np.concatenate((np.full(len(able), -1), pairs.second))
    column = np.concatenate((able // jobs, pairs.column))
    pair = np.concatenate((np.full(len(able), -1), np.arange(len(pairs))))
    keys: list[Floats | Ints] = [-urgency]
    if ties is not None:
        keys.insert(0, np.concatenate((-ties.ravel()[able], np.zeros(len(pairs)))))
    # The last key of ``lexsort`` counts first: the column's turn, then urgency, then ties.
    if order is not None:
        turn = np.empty(len(order), dtype=np.int64)
        turn[order] = np.arange(len(order))
        keys.append(turn[column])
    ranking = np.lexsort(tuple(keys))
    uses, room = pool.limits(free, active.consolidated)
    needs = [
        [(kind, count) for kind, count in enumerate(held) if count] for held in uses.T.tolist()
    ]
    times = pool.is_mix.tolist()
    left, idle = room.tolist(), int(room.sum())
    busy = [False] * (number + 1)  # the last is nobody
    scale = active.scale.tolist()
    taken = []
    for place, a, b, c in zip(
        ranking.tolist(), first[ranking].tolist(), second[ranking].tolist(),
        column[ranking].tolist(), strict=True,
    ):  # fmt: skip
        if busy[a] or (b >= 0 and busy[b]):
            continue
        # A mix is held once; a type as often as the job asks for devices.
        often = times[c] or scale[a]
        if any(count * often > left[kind] for kind, count in needs[c]):
            continue
        for kind, count in needs[c]:
            left[kind] -= count * often
            idle -= count * often
        busy[a] = True
        if b >= 0:
            busy[b] = True
        taken.append(place)
        # Nothing is left: whoever follows would not fit.
        if idle <= 0:
            break
    kept = np.array(taken, dtype=np.int64)
    placed = pool.devices_of[column[kept]]
    chosen = Chosen(first[kept], second[kept], column[kept], placed, pair[kept])
    if idle > 0 and pool.uses_mixes:
        _extend(active, chosen, np.array(left))
    return chosen


def _extend(active: Active, chosen: Chosen, idle: Ints) -> None:
    """Let jobs, in the order chosen, hold leftover devices of other types (VirtualFlow 6.5.2)."""
    pool = active.pool
    for place, job in enumerate(chosen.first.tolist()):
        column = int(chosen.column[place])
        if chosen.second[place] >= 0 or not idle.any():
            continue
        held = pool.resources * active.usage(job)
        # Only what is added to what it holds has to be idle.
        more = held - held[:, column][:, None]
        fits = ((more >= 0) & (more <= idle[:, None])).all(axis=0)
        rate = np.where(fits & (pool.is_mix == 1), active.rate[:, job], 0.0)
        best = int(rate.argmax())
        if rate[best] > active.rate[column, job]:
            chosen.placed[place] = best
            idle = idle - more[:, best]


ANY_SHARE = 1e-300
"""Less than any share that a policy gives."""
SHORTEST_ROUND = 1.0  # seconds: shorter than any restart, and a simulated day takes hours
LONGEST_ROUND = 1e7  # seconds, four months: events within a round are drawn one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """How rounds decide.

    ``reset_seconds`` is the least time between allocations. ``fills_idle`` gives devices away
    that no job has a share of. For ``convention`` and ``selection`` see ``decide``.
    """

    round_seconds: float = 360.0
    reset_seconds: float = 1920.0
    convention: Literal["text", "published"] = "text"
    selection: Literal["by_type", "joint"] = "by_type"
    fills_idle: bool = True

    def __post_init__(self) -> None:
        if (
            not SHORTEST_ROUND <= self.round_seconds <= LONGEST_ROUND
            or not 0 <= self.reset_seconds < math.inf
        ):
            raise ProblemError(
                f"rounds must last {SHORTEST_ROUND:g} to {LONGEST_ROUND:g} s, and resets >= 0 s "
                f"and end; got {self.round_seconds} and {self.reset_seconds}"
            )

    @property
    def head_start_seconds(self) -> float:
        """What every job counts as having received at an allocation: half a round."""
        # Else f = 0, and a job with next to no share goes before one with a large share that has
        # had its first round.
        return self.round_seconds / 2.0


@dataclass(slots=True)
class RoundState:
    """Jobs with the time they received, and the devices that are up.

    ``up`` [types] are devices that work; ``worker_seconds`` [columns] the sum of the seconds
    received there since the last allocation, at ``last_reset`` (None: there was none).
    ``changed`` says that jobs or devices are others than that allocation saw. ``order`` is the one
    in which types are served, None where it has to be found anew. ``servers`` is None where
    placement does not count. ``random`` draws the order of types for policies that are blind to
    them.
    """

    pool: ClusterPool
    random: np.random.Generator
    servers: Servers | None = None
    active: Active = field(init=False)
    up: Ints = field(init=False)
    worker_seconds: Floats = field(init=False)
    last_reset: float | None = None
    changed: bool = False
    order: list[int] | None = None
    pairs: PairShares = field(default_factory=PairShares)

    @classmethod
    def empty(
        cls, pool: ClusterPool, servers: Sequence[Sequence[int]] | None = None, seed: int = 0
    ) -> "RoundState":
        """No jobs, and every device up.

        ``servers`` [types][servers] are devices of each type on each server that has it; None:
        placement does not count.
        """
        seats = None if servers is None else Servers([list(sizes) for sizes in servers])
        return cls(pool, np.random.default_rng(seed), seats)

    def __post_init__(self) -> None:
        self.active = Active(self.pool)
        self.up = self.pool.capacity
        self.worker_seconds = np.zeros(len(self.pool.columns))

    def admit(self, jobs: list[Job], head_start_seconds: float) -> None:
        """Let jobs in that fit the pool; they have no share before the next allocation."""
        self.active.add(jobs, head_start_seconds)
        self.order = None
        self.worker_seconds += head_start_seconds * len(jobs)
        self.changed = True

    def see(self, up: Ints) -> bool:
        """Note which devices work [types]; whether these are others than before."""
        if not (up != self.up).any():
            return False  # the same array, by which policies know what they solved
        self.up = self.active.capacity = up
        self.changed = True
        return True

    def lost_jobs(self) -> None:
        """Note that jobs left ``active``."""
        self.changed, self.order = True, None

    def leave(self, ids: Collection[str]) -> None:
        """Remove jobs, whatever became of them."""
        places = [place for place, job in enumerate(self.active.jobs) if job.id in ids]
        if not places:
            return
        number = len(self.active)
        self.active.leave(places)
        self.active.sweep()
        self.pairs.drop(np.array(places, dtype=np.int64), number)
        self.lost_jobs()


FORMAT = "hetflow.rounds/1"
_BY_COLUMN = ("received", "share", "deficit", "held")
_BY_JOB = ("left", "isolated", "started", "restarts")
_OF_JOB = tuple(field.name for field in fields(Job))
_OF_PAIRS = ("first", "second", "column")


def stored(state: RoundState) -> dict[str, Any]:
    """What ``resumed`` needs besides the pool, as plain JSON values; numbers are exact.

    Jobs that have left must have been swept from ``state.active``.
    """
    active, columns = state.active, state.pool.columns
    jobs = []
    for place, job in enumerate(active.jobs):
        kind = int(active.last_type[place])
        row: dict[str, Any] = {
            "job": {name: value for name in _OF_JOB if (value := getattr(job, name)) is not None},
            "alone_seconds": active.alone[place],
            "last_column": None if kind == NOWHERE else columns[kind],
        }
        for name in _BY_JOB:
            row[name] = getattr(active, name)[place].item()
        for name in _BY_COLUMN:
            row[name] = dict(zip(columns, getattr(active, name)[:, place].tolist(), strict=True))
        jobs.append(row)
    pairs = {name: getattr(state.pairs, name).tolist() for name in PairShares.__slots__}
    return {
        "schema": FORMAT,
        "columns": list(columns),
        "mixes": _mixes(state.pool),
        "jobs": jobs,
        "given_up": sorted(active.given_up),
        "up": dict(zip(state.pool.types, state.up.tolist(), strict=True)),
        "worker_seconds": dict(zip(columns, state.worker_seconds.tolist(), strict=True)),
        "last_reset_seconds": state.last_reset,
        "changed": state.changed,
        "order": state.order,
        "random": state.random.bit_generator.state,
        "pairs": pairs,
        "servers": None if state.servers is None else state.servers.sizes,
        "seats": None
        if state.servers is None
        else {
            job: [kind, sorted(at.items())] for job, (kind, at) in state.servers.held.items()
        },
    }  # fmt: skip


def _mixes(pool: ClusterPool) -> list[str]:
    return [name for name, mix in zip(pool.columns, pool.is_mix.tolist(), strict=True) if mix]


def resumed(document: Mapping[str, Any], pool: ClusterPool) -> RoundState:
    """The state that was stored.

    Args:
        document: What ``stored`` gave.
        pool: The same device types, with throughputs that know all jobs; numbers may differ, and
            mixes may have come or gone.

    Raises:
        ProblemError: It is of another format or other device types, or a job is unknown.
    """
    if document.get("schema") != FORMAT:
        raise ProblemError(f"a state of rounds says {FORMAT!r}, got {document.get('schema')!r}")
    # Mixes may have come or gone with the jobs; all other columns must be the same.
    gone = {*document.get("mixes", ()), *_mixes(pool)}
    if [c for c in document["columns"] if c not in gone] != [
        c for c in pool.columns if c not in gone
    ]:
        raise ProblemError(
            f"the stored rounds are on {', '.join(document['columns'])}, the pool has "
            f"{', '.join(pool.columns)}; start on the same device types"
        )
    state = RoundState.empty(pool, document["servers"])
    active, rows = state.active, document["jobs"]
    active.add([Job(**row["job"]) for row in rows], 0.0)
    for place, row in enumerate(rows):
        active.alone[place] = row["alone_seconds"]
        for name in _BY_JOB:
            getattr(active, name)[place] = row[name]
        for name in _BY_COLUMN:
            # A column that is new was never received.
            values = [row[name].get(column, 0.0) for column in pool.columns]
            getattr(active, name)[:, place] = values
        last = row["last_column"]
        # A job whose mix is gone counts as one that held nothing.
        active.last_type[place] = pool.columns.index(last) if last in pool.columns else NOWHERE
    active.given_up.update(document["given_up"])
    state.see(np.array([document["up"][name] for name in pool.types], dtype=np.int64))
    worked = document["worker_seconds"]
    state.worker_seconds[:] = [worked.get(column, 0.0) for column in pool.columns]
    state.last_reset, state.changed = document["last_reset_seconds"], document["changed"]
    state.order = document["order"]
    state.random.bit_generator.state = document["random"]
    for name, values in document["pairs"].items():
        kind = np.int64 if name in _OF_PAIRS else np.float64
        setattr(state.pairs, name, np.array(values, dtype=kind))
    if state.servers is not None:
        state.servers.held = {
            job: (kind, dict(map(tuple, at))) for job, (kind, at) in document["seats"].items()
        }
    return state
