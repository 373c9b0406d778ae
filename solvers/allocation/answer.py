"""From a problem to an allocation: the one entry point of the cluster policies."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...schema.errors import InfeasibleError
from ...schema.jobs import (
    Allocation,
    AllocationProblem,
    Certificate,
    DollarCut,
    LevelPrices,
    PairShare,
    RegionPrices,
)
from ..effort import never
from .engine import Outcome
from .instance import Instance, instance_of
from .policy import Policy, policy_named, solve
from .program import Floats

# Devices that an allocation leaves idle, and how many of them jobs could use.

# Smaller parts of a job's time, and smaller parts of a type's devices, are rounding.
NEGLIGIBLE_TIME = 1e-5
NEGLIGIBLE_PART = 1e-6
NEGLIGIBLE_RATE = 1e-6  # of the best rate: slower columns are of no use to the job


def idle_devices(instance: Instance, outcome: Outcome) -> tuple[Floats, Floats]:
    """Devices of each type that stand idle, and those of them that jobs could use [types]."""
    # A job could use an idle column for the time that it has left, and for the time it spends on
    # slower ones. Types are looked at one at a time, everything else staying as it is. A job that
    # shares could also leave for an idle column that is faster for it than its company, where its
    # partner loses nothing by that.
    idle = np.maximum(instance.capacity - _used(instance, outcome), 0.0)
    idle = np.where(idle > NEGLIGIBLE_PART * instance.capacity, idle, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.where(instance.resources > 0, idle[:, None] / instance.resources, np.inf)
    rate, x = instance.rate, outcome.x
    order = np.argsort(rate, axis=1, kind="stable")
    sorted_rate, before = np.take_along_axis(rate, order, 1), np.zeros_like(x)
    before[:, 1:] = np.cumsum(np.take_along_axis(x, order, 1), axis=1)[:, :-1]
    # Of equal columns none is slower than another: each counts what the first of them has below.
    first = np.where(np.diff(sorted_rate, axis=1, prepend=-1.0) > 0, np.arange(x.shape[1]), 0)
    below = np.take_along_axis(before, np.maximum.accumulate(first, axis=1), 1)
    time = np.zeros_like(x)
    np.put_along_axis(time, order, np.where(sorted_rate > 0, below, 0.0), 1)
    spent = x.sum(axis=1)
    if outcome.pairs is not None and instance.pair_rate is not None:
        p, kind = outcome.pairs, instance.kind
        for one, two in ((p.a, p.b), (p.b, p.a)):
            spent = spent + np.bincount(one, weights=p.time, minlength=len(spent))
            own = instance.pair_rate[kind[one], kind[two], p.column]
            beside = instance.pair_rate[kind[two], kind[one], p.column]
            stays = rate[two, p.column] >= beside
            leaves = (rate[one] > own[:, None]) & stays[:, None]
            np.add.at(time, one, leaves * p.time[:, None])
    time = time + np.where(rate > 0, np.maximum(1.0 - spent, 0.0)[:, None], 0.0)
    useful = rate > NEGLIGIBLE_RATE * rate.max(axis=1, keepdims=True)
    movable = np.where((time > NEGLIGIBLE_TIME) & useful, time, 0.0)
    each = np.minimum(instance.usage * movable, room.min(axis=0))  # units of columns
    uses = instance.resources[: instance.num_types]
    wanted = np.array([(row[row > 0] * each[:, row > 0]).max(axis=1).sum() for row in uses])
    idle = idle[: instance.num_types]
    return idle, np.minimum(idle, wanted)


def _used(instance: Instance, outcome: Outcome) -> Floats:
    """Of each resource [resources]."""
    used: Floats = instance.resources @ (instance.usage * outcome.x).sum(axis=0)
    if outcome.pairs is not None:
        p = outcome.pairs
        held = instance.usage[p.a, p.column] * p.time
        used = used + instance.resources[:, p.column] @ held
    return used


OPTIMAL_GAP = 1e-6


def allocate(
    problem: AllocationProblem,
    policy: str,
    *,
    fills: bool = True,
    should_stop: Callable[[], bool] = never,
) -> Allocation:
    """Share the pool among the jobs as a policy asks, with a proof.

    Deterministic. Of several optima of a max-min policy: the one that goes on lexicographically
    (``filling``). Without ``fills``, and of other policies: without space sharing a point inside
    the optimal face (equal jobs get equal shares); with it a vertex over groups of alike
    jobs, dealt out by demand (``groups``) and spread evenly over equal jobs.

    Args:
        problem: Jobs, throughputs, pool and options; ``heterogeneity`` agnostic solves the
            same policy with a flat throughput matrix.
        policy: A name of ``all_policies()``.
        fills: Whether to share out what a max-min policy's optimum leaves idle.
        should_stop: Asked between pieces of work; True ends with the best that is proved by then.

    Returns:
        Time fractions that ``checks.allocation.check`` accepts for ``problem``; jobs that fit
        nowhere are left out, and named. Without jobs it is empty.

    Raises:
        InfeasibleError: SLOs or a budget cannot be met; says by how much. Or no job fits.
        ProblemError: No such policy, or it needs something that the problem lacks.
        OutOfTimeError: The limit came before there was an allocation.
    """
    chosen = policy_named(policy)
    if not problem.jobs.jobs:
        return _empty(problem, chosen)
    fitting, left_out = _split(problem)
    instance = replace(instance_of(fitting), should_stop=should_stop)
    seen = instance.flat() if problem.heterogeneity == "agnostic" else instance
    outcome = solve(seen, chosen, fills=fills)
    idle, usable = idle_devices(seen, outcome)
    types = instance.resource_names[: instance.num_types]
    reached = effective_throughput(instance, outcome)
    return Allocation(
        policy=policy,
        heterogeneity=problem.heterogeneity,
        x=_shares(instance, outcome),
        pairs=_pairs(instance, outcome),
        throughputs=dict(zip(map(str, instance.ids), reached.tolist(), strict=True)),
        certificate=_certificate(instance, chosen, outcome),
        left_out=left_out,
        fill="lexicographic" if outcome.is_filled else None,
        idle_devices=_present(types, idle),
        usable_idle_devices=_present(types, usable),
        idle_reason=_idle_reason(chosen, outcome, fills) if usable.any() else None,
    )


def _split(problem: AllocationProblem) -> tuple[AllocationProblem, dict[str, str]]:
    """The problem without the jobs that fit nowhere, and why each of these does not."""
    jobs = problem.jobs.jobs
    misfits = np.flatnonzero(instance_of(problem).rate.max(axis=1) <= 0)
    left_out = {
        jobs[place].id: problem.why_left_out(jobs[place])
        or f"its {jobs[place].scale_factor} devices cannot be consolidated in this pool; give its "
        "unconsolidated throughput, or larger servers"
        for place in misfits.tolist()
    }
    if len(left_out) == len(jobs):
        name, reason = next(iter(left_out.items()))
        others = f" ({len(jobs)} jobs, and none fits)" if len(jobs) > 1 else ""
        raise InfeasibleError(f"job {name!r} fits nowhere{others}: {reason}")
    kept = tuple(job for job in jobs if job.id not in left_out)
    return replace(problem, jobs=replace(problem.jobs, jobs=kept)), left_out


def _empty(problem: AllocationProblem, policy: Policy) -> Allocation:
    """The answer where there are no jobs: nothing to share, and nothing better."""
    return Allocation(
        policy=policy.name,
        heterogeneity=problem.heterogeneity,
        x={},
        throughputs={},
        certificate=Certificate(
            termination="optimal", sense=policy.sense, objective=0.0, bound=0.0, gap=0.0,
            method="no jobs",
        ),
        idle_devices={name: float(number) for name, number in problem.num_devices.items()},
        usable_idle_devices={},
    )  # fmt: skip


def _present(types: Sequence[str], devices: Floats) -> dict[str, float]:
    named = zip(types, devices.tolist(), strict=True)
    return {name: number for name, number in named if number > 0}


def _idle_reason(policy: Policy, outcome: Outcome, fills: bool) -> str:
    """Why devices that jobs could use stand idle."""
    asked = "the policy's objective does not ask for them" if fills else "no filling was asked for"
    return outcome.unfilled or policy.leaves_idle or asked


def effective_throughput(instance: Instance, outcome: Outcome) -> Floats:
    """throughput(m, X) of every job, in steps per second, pairs counted for both (5.3.1)."""
    reached: Floats = (instance.rate * outcome.x).sum(axis=1)
    if outcome.pairs is not None and instance.pair_rate is not None:
        a, b, c = outcome.pairs.a, outcome.pairs.b, outcome.pairs.column
        kind, rate, time = instance.kind, instance.pair_rate, outcome.pairs.time
        np.add.at(reached, a, rate[kind[a], kind[b], c] * time)
        np.add.at(reached, b, rate[kind[b], kind[a], c] * time)
    return reached


def _shares(instance: Instance, outcome: Outcome) -> dict[str, dict[str, float]]:
    shares: dict[str, dict[str, float]] = {str(name): {} for name in instance.ids}
    rows, columns = np.nonzero(outcome.x)
    for m, c in zip(rows.tolist(), columns.tolist(), strict=True):
        shares[str(instance.ids[m])][instance.columns[c]] = float(outcome.x[m, c])
    return shares


def _pairs(instance: Instance, outcome: Outcome) -> tuple[PairShare, ...]:
    if outcome.pairs is None:
        return ()
    times: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for a, b, c, time in zip(
        outcome.pairs.a, outcome.pairs.b, outcome.pairs.column, outcome.pairs.time, strict=True
    ):
        shares = times[min(a, b), max(a, b)]
        name = instance.columns[c]
        shares[name] = shares.get(name, 0.0) + float(time)
    return tuple(
        PairShare(jobs=(str(instance.ids[a]), str(instance.ids[b])), shares=shares)
        for (a, b), shares in sorted(times.items())
    )


def _certificate(instance: Instance, policy: Policy, outcome: Outcome) -> Certificate:
    names = [*instance.resource_names, "budget"]
    resources = zip(names, outcome.resource_prices.tolist(), strict=False)
    known = bool(np.isfinite(outcome.bound))
    return Certificate(
        termination="optimal" if outcome.gap <= OPTIMAL_GAP else "feasible",
        sense=policy.sense,
        objective=float(outcome.objective),
        bound=float(outcome.bound) if known else None,
        gap=float(outcome.gap) if known else None,
        method=outcome.method,
        resource_prices=dict(resources),
        job_prices=_named(instance, outcome.job_prices),
        time_prices=_named(instance, outcome.time_prices),
        levels=tuple(
            LevelPrices(
                resource_prices=dict(zip(names, proof.resource_prices.tolist(), strict=False)),
                job_prices=_named(instance, proof.job_prices),
                time_prices=_named(instance, proof.time_prices),
            )
            for proof in outcome.levels
        ),
        regions=tuple(
            RegionPrices(
                cuts=tuple(
                    DollarCut(
                        job=str(instance.ids[cut.job]),
                        side="at_most" if cut.is_at_most else "at_least",
                        dollars_per_hour=cut.dollars,
                    )
                    for cut in proof.cuts
                ),
                resource_prices=dict(zip(names, proof.resource_prices.tolist(), strict=False)),
            )
            for proof in outcome.regions
        ),
    )


def _named(instance: Instance, prices: Floats | None) -> dict[str, float]:
    if prices is None:
        return {}
    kept = np.flatnonzero(prices > 0)
    return {str(instance.ids[m]): float(prices[m]) for m in kept.tolist()}
