"""Policies in the form that a simulator calls thousands of times: on arrays."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.jobs import Entity
from ....schema.spelling import did_you_mean
from ....solvers.allocation import Instance, Policy, make_instance, solve
from ....solvers.allocation.engine import Outcome
from ....solvers.allocation.goals import MaxMin
from ....solvers.allocation.instance import CONSOLIDATED, isolated_rate
from ....solvers.allocation.policy import POLICIES
from ..arrays import Floats, Ints
from ..cluster.active import Active
from .las import FlatLas, WarmLas
from .shares import BASELINES, OPTIMA, Allocator, Shares


class PolicyAllocator:
    """Any policy of ``solvers.allocation``, solved anew each time.

    It gives the policy's optimum without water filling, as Gavel's simulator does; the mechanism
    gives devices that the optimum leaves idle to other jobs. Of several optima: the one that
    ``solvers.allocation.solve`` states.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        agnostic: bool = False,
        blind: bool = False,
        shares_space: bool = False,
        entities: tuple[Entity, ...] = (),
    ) -> None:
        """Wrap a policy.

        Args:
            policy: The policy.
            agnostic: Show it one rate a job for all types.
            blind: As the published agnostic policies: the rate on the pool's first type
                everywhere, types that cannot run the job included.
            shares_space: Whether pairs of jobs may share devices.
            entities: The tree that jobs name their nodes of, for hierarchies.
        """
        self.shares_space, self.entities = shares_space, entities
        self._node = {entity.name: i for i, entity in enumerate(entities)}
        self.policy, self.agnostic, self.blind = policy, agnostic, blind
        self.name, self.leaves_idle = policy.name, bool(policy.leaves_idle)
        self._isolated_rate: dict[str, tuple[float, float]] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Solve for the jobs present."""
        instance = self._instance(active, now_seconds)
        found, lost = solve_what_can_be_met(instance, self.policy)
        active.given_up.update(active.jobs[job].id for job in lost)
        return Shares(found.x.T, found.pairs)

    def _instance(self, active: Active, now_seconds: float) -> Instance:
        pool, hourly = active.pool, active.pool.hourly()
        types, capacity = len(pool.types), active.capacity.astype(float)
        rate = active.rate[:types].T
        isolated = active.isolated_rate()
        if self.blind:
            known = np.where(rate[:, 0] > 0, rate[:, 0], rate.max(axis=1))
            rate = np.where(active.scale[:, None] <= capacity, known[:, None], 0.0)
            # It believes this of the past too: steps made took less time alone than they did.
            isolated = isolated_rate(rate, active.scale.astype(float), pool.capacity.astype(float))
        self._count_isolated(active, isolated)
        deadlines = [
            np.inf
            if job.slo_seconds is None or job.id in active.given_up
            else job.arrival_seconds + job.slo_seconds
            for job in active.jobs
        ]
        arrivals = np.array([job.arrival_seconds for job in active.jobs])
        given: dict[str, object] = {
            "weight": active.weight,
            "steps": active.left,
            # Not before they came, though a clock that was set may say so of a live cluster's.
            "elapsed_seconds": np.maximum(now_seconds - arrivals, 0.0),
            "isolated_seconds": active.isolated,
            "slo_seconds": np.array(deadlines) - now_seconds,
        }
        if hourly is not None:
            given["dollars"] = hourly
        if self.entities:
            given["entities"] = self.entities
            given["entity"] = np.array([self._node.get(j.entity or "", -1) for j in active.jobs])
        instance = make_instance(
            rate=rate,
            scale=active.scale.astype(float),
            capacity=capacity,
            columns=pool.types,
            **given,
        )
        if len(pool.columns) > types:
            instance = _with_columns(instance, active)
        if self.shares_space:
            kind, rates = pair_table(active)
            instance = replace(instance, kind=kind, pair_rate=rates)
        instance = instance.flat() if self.agnostic and not self.blind else instance
        # A type without a device up runs nobody; its limit of 0 leaves a program no interior.
        return replace(instance, capacity=np.where(instance.capacity > 0, instance.capacity, 1.0))

    def _count_isolated(self, active: Active, isolated: Floats) -> None:
        """Add to t^isolated what the steps since the last call would have taken in isolation."""
        rates, left, so_far = isolated.tolist(), active.left.tolist(), active.isolated
        for i, job in enumerate(active.jobs):
            before = self._isolated_rate.get(job.id)
            if before is not None:
                so_far[i] += (before[0] - left[i]) / before[1]
        waits = {
            id_: self._isolated_rate[id_] for id_ in active.waiting & self._isolated_rate.keys()
        }
        self._isolated_rate = waits | {
            job.id: (left[i], rates[i]) for i, job in enumerate(active.jobs)
        }


def _with_columns(instance: Instance, active: Active) -> Instance:
    """The mixes, or the unconsolidated types and the limit on consolidated ones, besides."""
    pool, rate = active.pool, active.rate.T
    best = rate.max(axis=1)
    resources, capacity = pool.limits(active.capacity, active.consolidated)
    usage = np.where(pool.is_mix == 1, 1.0, active.scale[:, None])
    fits = (usage[:, None, :] * resources <= capacity[:, None]).all(axis=1)
    rate = np.where(fits, rate, 0.0)
    close = [name + CONSOLIDATED for name in pool.types]
    return replace(
        instance,
        columns=pool.columns,
        rate=rate,
        usage=usage,
        resources=resources.astype(float),
        capacity=capacity.astype(float),
        resource_names=(*pool.types, *close)[: len(capacity)],
        equal=np.where(instance.equal > 0, instance.equal, best),
        isolated=np.where(instance.isolated > 0, instance.isolated, best / len(rate)),
    )


def pair_table(active: Active) -> tuple[Ints, Floats]:
    """Kinds of the jobs present [jobs], and the rate of each beside each [kinds, kinds, columns].

    A type that does not run a job alone is shut to its pairs.
    """
    pool = active.pool
    _, first, kind = np.unique(active.kind, return_index=True, return_inverse=True)
    keys = [(active.jobs[i].model, active.jobs[i].scale_factor) for i in first]
    rates = np.zeros((len(keys), len(keys), len(pool.columns)))
    for a, one in enumerate(keys):
        for b, two in enumerate(keys[: a + 1]):
            rates[a, b], rates[b, a] = pool.pair_rates(one, two)
    return kind.reshape(-1), rates


def allocator_named(
    name: str,
    *,
    agnostic: bool = False,
    warm: bool = True,
    columns: bool = False,
    blind: bool = False,
    shares_space: bool = False,
    seed: int = 0,
    entities: tuple[Entity, ...] = (),
    others: Sequence[str] = (),
) -> Allocator:
    """The allocator of a policy's name.

    Args:
        name: A policy of ``solvers.allocation``, or a baseline such as ``fifo_greedy``.
        agnostic: Whether the policy is blind to what device types differ in.
        warm: Whether LAS ends in a vertex, from its last basis (fast), rather than in the centre.
        columns: Whether there are other columns than device types (mixes, placements).
        blind: See ``PolicyAllocator``.
        shares_space: Whether pairs of jobs may share devices.
        seed: Of what a policy draws at random.
        entities: The tree of a hierarchy.
        others: What the caller knows by name besides, for the error where there is none.

    Raises:
        ProblemError: There is none of that name, it does not share space, or it makes no sense
            for jobs that come and go.
    """
    policy = POLICIES.find(name)
    baseline = BASELINES.find(name) if policy is None else None
    if baseline is not None:
        if shares_space and not baseline.shares_space:
            raise ProblemError(f"{name} runs every job alone; leave space sharing out")
        return baseline.make(seed)
    if policy is None:
        known = [*POLICIES.names(), *BASELINES.names(), *others]
        fix = did_you_mean(name, known, f"known: {', '.join(known)}")
        raise ProblemError(f"no policy {name!r}; {fix}")
    if policy.incremental is not None and not columns:
        weighted = policy.incremental.weighted
        if agnostic and not shares_space:
            return FlatLas(weighted=weighted, blind=blind)
        if warm and not agnostic:
            return WarmLas(weighted=weighted, shares_space=shares_space)
        if not agnostic and not shares_space:
            return OPTIMA.get("centre")(weighted)
    if policy.single_use:
        raise ProblemError(
            f"{name} {policy.single_use}; with jobs that come and go it means nothing",
            hint="use `hetflow allocate`, or min_cost_slo, or makespan",
        )
    return PolicyAllocator(
        policy, agnostic=agnostic, blind=blind, shares_space=shares_space, entities=entities
    )


def always_pairs(name: str) -> bool:
    """Whether an allocator pairs jobs in any case, so that it needs the pairs' throughputs."""
    baseline = BASELINES.find(name)
    return baseline is not None and baseline.shares_space


def most_devices(name: str) -> int | None:
    """Devices that an allocator gives one job at most; None where a job gets what it asks for."""
    baseline = BASELINES.find(name)
    return None if baseline is None else baseline.most_devices


def solve_what_can_be_met(instance: Instance, policy: Policy) -> tuple[Outcome, list[int]]:
    """Solve a policy, dropping SLOs until the others can be met.

    Dropped at once: SLOs in the past, and those that ask for more than the job's fastest devices.
    Then, one after another, the SLO whose throughput costs most at the prices of the bottleneck
    (of the program that raises all floors together). Of equals it is the earlier job's.

    Args:
        instance: The jobs; SLOs that are in the past are not positive.
        policy: Any policy; without floors nothing is dropped.

    Returns:
        The outcome, and the jobs (places) whose SLO was dropped.

    Raises:
        InfeasibleError: Something else than SLOs cannot be met.
    """
    slo = instance.slo_seconds.copy()
    floor = _floor(replace(instance, slo_seconds=np.where(slo > 0, slo, np.inf)), policy)
    if floor is None:
        return solve(instance, policy), []
    best = instance.rate.max(axis=1)
    fast = best * (1 - 1e-9) if instance.pair_rate is None else best
    lost = np.flatnonzero((slo <= 0) | (floor > fast)).tolist()
    while True:
        slo[lost] = np.inf
        fewer = replace(instance, slo_seconds=slo)
        try:
            return solve(fewer, policy), lost
        except InfeasibleError:
            floor = _floor(fewer, policy)
            if floor is None or not (floor > 0).any():
                raise
            prices = MaxMin(level=floor).optimise(fewer).job_prices
            lost.append(int(np.argmax(np.where(floor > 0, prices * floor + 1e-300, 0.0))))


def _floor(instance: Instance, policy: Policy) -> Floats | None:
    """The least throughputs that a policy asks for [jobs], None where it asks for none."""
    floor: Floats | None = getattr(policy.goal(instance), "floor", None)
    return floor
