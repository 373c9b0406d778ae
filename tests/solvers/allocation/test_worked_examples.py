"""The thesis's worked examples: 5.3.1, 5.4.1, 5.4.3."""

import numpy as np
import pytest

from hetflow.planning.checks.allocation import check, effective_throughputs
from hetflow.planning.checks.allocation_policies import Pool
from hetflow.schema.jobs import (
    Allocation,
    AllocationProblem,
    Certificate,
    Entity,
    Job,
    Jobs,
    ModelThroughput,
    PairShare,
    PairThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import allocate


def problem(rates, num_devices, jobs=None, **options):
    models = tuple(
        ModelThroughput(model=f"m{i}", steps_per_second=row) for i, row in enumerate(rates)
    )
    jobs = jobs or tuple(Job(id=f"job{i}", model=f"m{i}", steps=100.0) for i in range(len(rates)))
    pairs = options.pop("pairs", ())
    entities = options.pop("entities", ())
    return AllocationProblem(
        jobs=Jobs(jobs=jobs, entities=entities),
        throughputs=Throughputs(models=models, pairs=pairs),
        num_devices=num_devices,
        **options,
    )


def of_541(**options):
    rates = [{"V100": 40.0, "K80": 10.0}, {"V100": 12.0, "K80": 4.0}, {"V100": 100.0, "K80": 50.0}]
    return problem(rates, {"V100": 1, "K80": 1}, **options)


def test_max_min_of_541_is_eight_elevenths_and_the_printed_matrix_scores_less():
    asked = of_541()
    found = allocate(asked, "las")
    assert found.certificate.objective == pytest.approx(8 / 11, rel=1e-9)
    x = np.array([[found.x[f"job{i}"].get(c, 0.0) for c in ("V100", "K80")] for i in range(3)])
    exact = np.array([[5 / 11, 0], [5 / 11, 1 / 11], [1 / 11, 10 / 11]])
    assert x == pytest.approx(exact, abs=1e-6)
    assert x == pytest.approx(np.array([[0.45, 0], [0.45, 0.09], [0.09, 0.91]]), abs=0.01)
    rates = np.array([[40.0, 10.0], [12.0, 4.0], [100.0, 50.0]])
    printed = np.array([[0.45, 0], [0.45, 0.09], [0.09, 0.91]])
    assert ((rates * printed).sum(1) / rates.mean(1)).min() < 8 / 11
    isolated = rates.mean(1) * 2 / 3 / rates.mean(1)
    assert 8 / 11 / isolated.min() == pytest.approx(1.09, abs=0.01)  # "about 10 % higher"


def test_water_filling_of_543_gives_the_three_light_jobs_whole_devices():
    jobs = tuple(
        Job(id=f"job{i}", model="m0", steps=1.0, priority_weight=3.0 if i == 1 else 1.0)
        for i in range(1, 5)
    )
    asked = problem([{"V100": 1.0}], {"V100": 4}, jobs)
    first = allocate(asked, "las_weighted")
    assert first.certificate.objective == pytest.approx(1 / 3, rel=1e-9)
    filled = allocate(asked, "las_water_filling")
    assert list(filled.throughputs.values()) == pytest.approx([1.0] * 4, rel=1e-8)
    assert check(filled, asked) == []


def test_hierarchy_of_figure_56_passes_a_saturated_jobs_share_on():
    # Product team (fairness): jobs 1 to 3; research team (FIFO): jobs 4 and 5; equal weights.
    entities = (Entity(name="product"), Entity(name="research", policy="fifo"))
    jobs = tuple(
        Job(id=f"job{i}", model="m0", steps=1.0, entity="product" if i < 4 else "research")
        for i in range(1, 6)
    )
    found = allocate(problem([{"V100": 1.0}], {"V100": 4}, jobs, entities=entities), "hierarchical")
    reached = [found.throughputs[f"job{i}"] for i in range(1, 6)]
    # Level 1: jobs 1-3 at 1/3 each, job 4 at 1 and stuck; its weight goes to job 5. The two
    # devices left are shared evenly: jobs 1-3 rise by 1/3 each to 2/3, job 5 to 1; stuck. The
    # last device lifts jobs 1-3 to 2/3: 4 = 3 * 2/3 + 1 + 1.
    assert reached == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1.0, 1.0], rel=1e-8)


def test_effective_throughput_of_531():
    rates = [{"V100": 40.0, "P100": 20.0, "K80": 10.0}, {"V100": 15.0, "P100": 10.0, "K80": 5.0},
             {"V100": 1.0, "P100": 1.0, "K80": 1.0}]  # fmt: skip
    pair = PairThroughput(models=("m0", "m1"), steps_per_second={"V100": (20.0, 7.5)})
    asked = problem(rates, {"V100": 1, "P100": 1, "K80": 1}, pairs=(pair,), space_sharing=True)
    certificate = Certificate(
        termination="feasible", sense="max", objective=1.0, bound=None, gap=None, method="by hand"
    )
    x = {"job0": {"V100": 0.6, "P100": 0.4}, "job1": {"V100": 0.2, "P100": 0.6, "K80": 0.2},
         "job2": {"V100": 0.2, "K80": 0.8}}  # fmt: skip
    example = Allocation(policy="las", x=x, throughputs={}, certificate=certificate)
    reached = effective_throughputs(example, Pool(asked))
    assert reached == pytest.approx({"job0": 32.0, "job1": 10.0, "job2": 1.0})
    shared = PairShare(jobs=("job0", "job1"), shares={"V100": 0.5})
    x = {"job0": {"V100": 0.25}, "job1": {"P100": 0.5}, "job2": {}}
    together = Allocation(
        policy="las", x=x, pairs=(shared,), throughputs={}, certificate=certificate
    )
    reached = effective_throughputs(together, Pool(asked))
    assert reached == pytest.approx({"job0": 20.0, "job1": 8.75, "job2": 0.0})


def test_a_pair_counts_only_where_both_of_it_run_alone():
    """Beside m1 m0 would make 3 steps/s on a V100, on which it does not run."""
    rates = [{"P100": 1.0}, {"V100": 2.0, "P100": 1.5}]
    pair = PairThroughput(models=("m0", "m1"), steps_per_second={"V100": (3.0, 1.5)})
    asked = problem(rates, {"V100": 2, "P100": 4}, pairs=(pair,), space_sharing=True)
    found = allocate(asked, "las")
    assert found.throughputs == pytest.approx({"job0": 1.0, "job1": 2.0})
    assert check(found, asked) == []


def test_makespan_within_a_budget_of_643():
    # One job, 100 steps: V100 40 steps/s at 4 dollars, K80 10 steps/s at 0.5: the K80 is
    # cheaper a step (0.05 against 0.1 dollars per hour and step/s).
    asked = problem(
        [{"V100": 40.0, "K80": 10.0}],
        {"V100": 1, "K80": 1},
        dollars_per_hour={"V100": 4.0, "K80": 0.5},
        budget_dollars=0.002,
    )
    found = allocate(asked, "makespan_budget")
    # Time a on V100 and b on K80: 40 a + 10 b = 100 and (4 a + 0.5 b) / 3600 = 0.002.
    b = (4 * 2.5 - 7.2) / (4 * 0.25 - 0.5)
    assert found.certificate.objective == pytest.approx(2.5 - 0.25 * b + b, rel=1e-7)
    assert check(found, asked) == []
