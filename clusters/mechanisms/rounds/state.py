"""The state of rounds between two decisions, and the rules that all kinds of rounds keep to."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from ....schema.errors import ProblemError
from ....schema.jobs import Job
from ..cluster.active import Active
from ..cluster.pool import NOWHERE, ClusterPool, Floats, Ints
from ..cluster.seats import Servers
from .pairs import PairShares

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
        """What every job counts as having received at an allocation: half a round.

        Else f = 0, and a job with next to no share goes before one with a large share that has
        had its first round.
        """
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

        Args:
            pool: Devices and throughputs.
            servers: Devices of each type on each server that has it [types][servers]; None:
                placement does not count.
            seed: Of the draws.
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
        """Note which devices work [types]; whether these are others than before.

        What changed is a reason to allocate anew.
        """
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
            values = [row[name].get(column, 0.0) for column in pool.columns]
            getattr(active, name)[:, place] = values
        last = row["last_column"]
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
