"""From a problem to an allocation: the one entry point of the cluster policies."""

from collections import defaultdict

import numpy as np

from ...schema.jobs import Allocation, AllocationProblem, Certificate, LevelPrices, PairShare
from .engine import Outcome
from .instance import Instance, instance_of
from .policy import Policy, policy_named, solve
from .program import Floats

OPTIMAL_GAP = 1e-6


def allocate(problem: AllocationProblem, policy: str) -> Allocation:
    """Share the pool among the jobs as a policy asks, with a proof.

    Deterministic. Of several optima: without space sharing a point inside the optimal face
    (equal jobs get equal shares); with it a vertex over groups of alike
    jobs, dealt out by demand (``groups``) and spread evenly over equal jobs.

    Args:
        problem: Jobs, throughputs, pool and options; ``heterogeneity`` agnostic solves the
            same policy with a flat throughput matrix.
        policy: A name of ``all_policies()``.

    Returns:
        Time fractions that ``checks.allocation.check`` accepts for ``problem``.

    Raises:
        InfeasibleError: SLOs or a budget cannot be met; says by how much.
        ProblemError: No such policy, or it needs something that the problem lacks.
    """
    chosen = policy_named(policy)
    instance = instance_of(problem)
    seen = instance.flat() if problem.heterogeneity == "agnostic" else instance
    outcome = solve(seen, chosen)
    return Allocation(
        policy=policy,
        heterogeneity=problem.heterogeneity,
        x=_shares(instance, outcome),
        pairs=_pairs(instance, outcome),
        throughputs=dict(zip(map(str, instance.ids), _effective(instance, outcome), strict=True)),
        certificate=_certificate(instance, chosen, outcome),
    )


def effective_throughput(instance: Instance, outcome: Outcome) -> Floats:
    """throughput(m, X) of every job, in steps per second, pairs counted for both (5.3.1)."""
    reached: Floats = (instance.rate * outcome.x).sum(axis=1)
    if outcome.pairs is not None and instance.pair_rate is not None:
        a, b, c = outcome.pairs.a, outcome.pairs.b, outcome.pairs.column
        kind, rate, time = instance.kind, instance.pair_rate, outcome.pairs.time
        np.add.at(reached, a, rate[kind[a], kind[b], c] * time)
        np.add.at(reached, b, rate[kind[b], kind[a], c] * time)
    return reached


def _effective(instance: Instance, outcome: Outcome) -> list[float]:
    return [float(value) for value in effective_throughput(instance, outcome)]


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
    )


def _named(instance: Instance, prices: Floats | None) -> dict[str, float]:
    if prices is None:
        return {}
    kept = np.flatnonzero(prices > 0)
    return {str(instance.ids[m]): float(prices[m]) for m in kept.tolist()}
