"""A sum of ratios under SLOs: against every corner of the polytope, and its proof."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.planning.checks.allocation import check
from hetflow.planning.checks.allocation_bounds import covers
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.jobs import (
    AllocationProblem,
    DollarCut,
    Job,
    Jobs,
    ModelThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import allocate
from hetflow.tests.profiles import examples

POLICY = "min_cost_per_job_slo"


def problem(
    rates: list[list[float]],
    slos: list[float | None],
    devices: list[int],
    dollars: list[float],
) -> AllocationProblem:
    """Jobs of 1000 steps, with what their SLOs ask for in steps per second (None: nothing)."""
    types = [f"type{place}" for place in range(len(devices))]
    jobs = tuple(
        Job(id=f"job{i}", model=f"m{i}", steps=1000.0, slo_seconds=slo and 1000.0 / slo)
        for i, slo in enumerate(slos)
    )
    models = tuple(
        ModelThroughput(model=f"m{i}", steps_per_second=dict(zip(types, row, strict=True)))
        for i, row in enumerate(rates)
    )
    return AllocationProblem(
        jobs=Jobs(jobs=jobs),
        throughputs=Throughputs(models=models),
        num_devices=dict(zip(types, devices, strict=True)),
        dollars_per_hour=dict(zip(types, dollars, strict=True)),
    )


def best_corner(asked: AllocationProblem) -> float | None:
    """The most over every corner of {T x = floor, sum x <= 1, sum over jobs <= devices}.

    A convex function is largest at a corner, and a corner has as many tight limits as variables.
    """
    table = [list(entry.steps_per_second.values()) for entry in asked.throughputs.models]
    rates, jobs = np.array(table), len(table)
    dollars = np.array(list(asked.dollars_per_hour.values()))
    devices = np.array(list(asked.num_devices.values()), float)
    floor = np.array([1000.0 / (job.slo_seconds or np.inf) for job in asked.jobs.jobs])
    kinds = len(devices)
    exact = np.zeros((jobs, jobs * kinds))
    time, used = np.zeros_like(exact), np.tile(np.eye(kinds), jobs)
    for m in range(jobs):
        exact[m, m * kinds : (m + 1) * kinds] = rates[m]
        time[m, m * kinds : (m + 1) * kinds] = 1.0
    below = np.vstack((time, used, -np.eye(jobs * kinds)))
    room = np.concatenate((np.ones(jobs), devices, np.zeros(jobs * kinds)))
    most = None
    for tight in combinations(range(len(below)), jobs * kinds - jobs):
        rows = np.vstack((exact, below[list(tight)]))
        if abs(np.linalg.det(rows)) < 1e-9:
            continue
        x = np.linalg.solve(rows, np.concatenate((floor, room[list(tight)])))
        if (below @ x <= room + 1e-9).all():
            spent = (x.reshape(jobs, kinds) * dollars).sum(axis=1)
            value = float((floor / spent).sum())
            most = value if most is None else max(most, value)
    return most


def test_a_worked_case() -> None:
    """Two jobs want the only cheap device; who leaves it is no linear question.

    Both need 1 step/s and do 2 on cheap (1 $/h) and on dear devices (a: 2, b: 4; 4 $/h): on cheap
    each has 2 steps/s per $/h, on dear a has 0.5 and b 1. Both fit on the cheap one in half the
    time each. With an SLO of 1.5 they need 1.5 of it: b leaves half its work, 1.5 / 1.375 beside 2.
    """
    roomy = problem([[2.0, 2.0], [2.0, 4.0]], [1.0, 1.0], [1, 1], [1.0, 4.0])
    assert allocate(roomy, POLICY).certificate.objective == pytest.approx(4.0)
    tight = problem([[2.0, 2.0], [2.0, 4.0]], [1.5, 1.5], [1, 1], [1.0, 4.0])
    found = allocate(tight, POLICY)
    # a stays: 0.75 of the time on cheap. b: 0.25 of it, 0.5 steps/s, and 1 step/s on dear in 0.25.
    assert found.certificate.objective == pytest.approx(2.0 + 1.5 / (0.25 + 1.0))
    assert found.x["job0"] == pytest.approx({"type0": 0.75})
    assert check(found, tight) == []


@st.composite
def problems(draw) -> AllocationProblem:
    jobs, kinds = draw(st.sampled_from([(2, 2), (3, 2), (2, 3)]))
    some = st.integers(2, 20).map(lambda n: n / 4)
    rates = [[draw(some) for _ in range(kinds)] for _ in range(jobs)]
    slos: list[float | None] = [
        max(row) * draw(st.sampled_from([0.3, 0.5, 0.7, 0.9])) for row in rates
    ]
    devices = [draw(st.integers(1, 2)) for _ in range(kinds)]
    return problem(rates, slos, devices, [draw(some) for _ in range(kinds)])


@settings(max_examples=examples(60), deadline=None)
@given(asked=problems())
def test_no_corner_is_better(asked: AllocationProblem) -> None:
    expected = best_corner(asked)
    if expected is None:
        with pytest.raises(InfeasibleError, match="SLO"):
            allocate(asked, POLICY)
        return
    found = allocate(asked, POLICY)
    assert found.certificate.objective == pytest.approx(expected, rel=1e-6)
    assert found.certificate.termination == "optimal"
    assert check(found, asked) == []


def contested() -> AllocationProblem:
    """Ten jobs, and too few cheap devices: several are cut."""
    rng = np.random.default_rng(4)
    rates = np.sort(rng.uniform(0.5, 2.0, (10, 3)), axis=1)
    slos: list[float | None] = [float(row[-1]) * 0.7 for row in rates]
    return problem(rates.tolist(), slos, [4, 3, 3], [0.4, 1.0, 2.5])


def test_the_proof_is_judged() -> None:
    asked = contested()
    found = allocate(asked, POLICY)
    regions = found.certificate.regions
    assert len(regions) > 1
    assert check(found, asked) == []
    for place in range(len(regions)):
        fewer = regions[:place] + regions[place + 1 :]
        claim = replace(found.certificate, regions=fewer)
        faults = check(replace(found, certificate=claim), asked)
        assert any("prices prove inf" in fault for fault in faults), faults
    free = tuple(replace(region, resource_prices={}) for region in regions)
    faults = check(replace(found, certificate=replace(found.certificate, regions=free)), asked)
    assert any("the prices prove" in fault for fault in faults)


def test_regions_must_cover_everything() -> None:
    low = DollarCut(job="a", side="at_most", dollars_per_hour=1.0)
    high = replace(low, side="at_least")
    other = replace(high, dollars_per_hour=2.0)
    inner = DollarCut(job="b", side="at_most", dollars_per_hour=1.0)
    assert covers([()])
    assert covers([(low,), (high,)])
    assert covers([(low, inner), (high,), (low, replace(inner, side="at_least"))])
    assert not covers([])
    assert not covers([(low,)])
    assert not covers([(low,), (other,)])
    assert not covers([(low, inner), (high,)])


def test_jobs_without_an_slo_keep_to_their_cheapest_devices() -> None:
    asked = problem([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], [None, None, 1.9], [1, 1], [1.0, 3.0])
    found = allocate(asked, POLICY)
    assert found.x["job0"] == pytest.approx({"type0": found.x["job0"]["type0"]})
    assert found.throughputs["job0"] == pytest.approx(found.throughputs["job1"])
    assert found.throughputs["job0"] > 0.4  # of the cheap device, what the SLO leaves
    assert check(found, asked) == []
    nobody = replace(asked, jobs=Jobs(jobs=asked.jobs.jobs[:2]))
    assert allocate(nobody, POLICY).certificate.objective == pytest.approx(2.0)
    assert check(allocate(nobody, POLICY), nobody) == []


def test_pairs_are_not_weighed() -> None:
    asked = replace(contested(), space_sharing=True)
    with pytest.raises(ProblemError, match="throughputs of pairs"):
        allocate(asked, POLICY)
