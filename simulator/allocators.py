"""Policies as a simulator calls them: thousands of times, on arrays."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..schema.errors import ProblemError
from ..schema.records import nearest
from ..solvers.allocation import Instance, Policy, all_policies, make_instance, policy_named, solve
from ..solvers.allocation.warm import WarmMaxMin
from .active import Active
from .priorities import Floats


class Allocator(Protocol):
    """What shares the pool among the jobs present."""

    name: str
    agnostic: bool

    def allocate(self, active: Active, now_seconds: float) -> Floats:
        """Time fractions X [types, jobs]."""


class PolicyAllocator:
    """Any policy of ``solvers.allocation``, solved anew each time.

    Of several optima: the one that ``solvers.allocation.solve`` states.
    """

    def __init__(self, policy: Policy, *, agnostic: bool = False, blind: bool = False) -> None:
        """Wrap a policy.

        Args:
            policy: The policy.
            agnostic: Show it one rate a job for all types.
            blind: As the published agnostic policies: rate 1, types that cannot run the job
                included.
        """
        self.policy, self.agnostic, self.blind = policy, agnostic, blind
        self.name = policy.name
        self._isolated_rate: dict[str, tuple[float, float]] = {}

    def allocate(self, active: Active, now_seconds: float) -> Floats:
        """Solve for the jobs present."""
        instance = self._instance(active, now_seconds)
        answer: Floats = solve(instance, self.policy).x.T
        return answer

    def _instance(self, active: Active, now_seconds: float) -> Instance:
        self._count_isolated(active)
        pool, hourly = active.pool, active.pool.hourly()
        rate = active.rate.T
        if self.blind:
            rate = np.where(active.scale[:, None] <= pool.capacity, 1.0, 0.0)
        deadlines = [
            np.inf if job.slo_seconds is None else job.arrival_seconds + job.slo_seconds
            for job in active.jobs
        ]
        arrivals = np.array([job.arrival_seconds for job in active.jobs])
        given: dict[str, object] = {
            "weight": active.weight,
            "steps": active.left,
            "elapsed_seconds": now_seconds - arrivals,
            "isolated_seconds": active.isolated,
            "slo_seconds": np.array(deadlines) - now_seconds,
        }
        if hourly is not None:
            given["dollars"] = hourly
        instance = make_instance(
            rate=rate,
            scale=active.scale.astype(float),
            capacity=pool.capacity.astype(float),
            columns=pool.types,
            **given,
        )
        return instance.flat() if self.agnostic and not self.blind else instance

    def _count_isolated(self, active: Active) -> None:
        """Add to t^isolated what the steps since the last call would have taken in isolation."""
        rates = active.isolated_rate().tolist()
        left = active.left.tolist()
        for i, job in enumerate(active.jobs):
            before = self._isolated_rate.get(job.id)
            if before is not None:
                active.isolated[i] += (before[0] - left[i]) / before[1]
        self._isolated_rate = {
            job.id: (left[i], rates[i]) for i, job in enumerate(active.jobs)
        }  # fmt: skip


class WarmLas:
    """LAS over classes of equal jobs, warm from one call to the next: fast.

    Of several optima: the simplex vertex nearest to the last one's basis; equal jobs get equal
    shares.
    """

    agnostic = False

    def __init__(self, *, weighted: bool = False) -> None:
        """Start cold.

        Args:
            weighted: Whether priority weights count.
        """
        self.name = "las_weighted" if weighted else "las"
        self.weighted = weighted
        self._program: WarmMaxMin | None = None
        self._classes: dict[tuple[int, float], int] = {}
        self._counts: list[int] = []

    def allocate(self, active: Active, now_seconds: float) -> Floats:
        """Move the counts of classes to the jobs present, and go on from the last basis."""
        capacity = active.pool.capacity.astype(float)
        if self._program is None:
            self._program = WarmMaxMin(capacity)
        weights = active.weight if self.weighted else np.ones(len(active))
        keys = list(zip(active.kind.tolist(), weights.tolist(), strict=True))
        for i, key in enumerate(keys):
            if key not in self._classes:
                rate, scale = active.rate[:, i], float(active.scale[i])
                equal = float(rate @ capacity / capacity.sum())
                self._classes[key] = self._program.add_class(rate, scale, key[1] * equal / scale)
                self._counts.append(0)
        of = np.array([self._classes[key] for key in keys])
        counts = np.bincount(of, minlength=len(self._counts)).tolist()
        for number, (old, new) in enumerate(zip(self._counts, counts, strict=True)):
            if old != new:
                self._program.set_count(number, new)
        self._counts = counts
        _, times = self._program.solve()
        answer: Floats = (times[of] / np.array(counts)[of][:, None]).T
        return answer


class GreedyFifo:
    """FIFO as Gavel's code has it: in order of arrival, each job on its fastest free type.

    The first job that fits nowhere stops the queue. Unlike the policy ``fifo`` this is no
    linear program: nobody gets part of the time.
    """

    name, agnostic = "fifo_greedy", False

    def allocate(self, active: Active, now_seconds: float) -> Floats:
        """Give each job all of the time on one type, or none."""
        share = np.zeros_like(active.rate)
        free = active.pool.capacity.copy()
        for job, need in enumerate(active.scale.tolist()):
            open_ = free >= need
            if not open_.any():
                break
            kind = int(np.argmax(np.where(open_, active.rate[:, job], -1.0)))
            if active.rate[kind, job] > 0:
                share[kind, job] = 1.0
                free[kind] -= need
        return share


class FifoAnyType:
    """FIFO blind to device types: a waiting job takes a random type with room and keeps it.

    YARN's capacity scheduler in one queue, and the published agnostic FIFO with its mends.
    """

    name, agnostic = "fifo_any_type", True

    def __init__(self, seed: int = 0) -> None:
        """Start empty.

        Args:
            seed: Of the random draws.
        """
        self._random = np.random.default_rng(seed)
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Floats:
        """Keep what runs, and admit from the head of the queue while it fits."""
        here = [job.id for job in active.jobs]
        self._type = {id_: self._type[id_] for id_ in here if id_ in self._type}
        free = active.pool.capacity.copy()
        for job, id_ in enumerate(here):
            if id_ in self._type:
                free[self._type[id_]] -= active.scale[job]
        for job, id_ in enumerate(here):
            if id_ in self._type:
                continue
            runs = np.flatnonzero((free >= active.scale[job]) & (active.rate[:, job] > 0))
            if not len(runs):
                break
            self._type[id_] = int(self._random.choice(runs))
            free[self._type[id_]] -= active.scale[job]
        share = np.zeros_like(active.rate)
        for job, id_ in enumerate(here):
            if id_ in self._type:
                share[self._type[id_], job] = 1.0
        return share


_OWN: dict[str, Callable[[int], Allocator]] = {
    "fifo_greedy": lambda _: GreedyFifo(),
    "fifo_any_type": FifoAnyType,
}


def allocator_named(
    name: str, *, agnostic: bool = False, warm: bool = True, blind: bool = False, seed: int = 0
) -> Allocator:
    """The allocator of a policy's name.

    Args:
        name: A policy of ``solvers.allocation``, ``fifo_greedy`` or ``fifo_any_type``.
        agnostic: Whether the policy is blind to what device types differ in.
        warm: Whether LAS goes on from its last basis (fast); otherwise it is solved anew.
        blind: See ``PolicyAllocator``.
        seed: Of what a policy draws at random.

    Raises:
        ProblemError: There is none of that name.
    """
    if name in _OWN:
        return _OWN[name](seed)
    if warm and not agnostic and name in ("las", "las_weighted"):
        return WarmLas(weighted=name == "las_weighted")
    known = [*all_policies(), *_OWN]
    if name not in known:
        guess = nearest(name, known)
        mend = f"did you mean {guess!r}?" if guess else f"known: {', '.join(known)}"
        raise ProblemError(f"no policy {name!r}; {mend}")
    return PolicyAllocator(policy_named(name), agnostic=agnostic, blind=blind)
