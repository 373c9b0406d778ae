"""Space sharing in groups of rows that differ only in their demands, against rows apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.planning.checks.allocation import check
from hetflow.schema.jobs import Entity
from hetflow.solvers.allocation import allocate
from hetflow.solvers.allocation.space_sharing import column_generation
from hetflow.solvers.allocation.space_sharing.groups import each_apart
from hetflow.tests.profiles import examples

TREE = (Entity(name="a", weight=2.0), Entity(name="b"), Entity(name="c", parent="b"))
POLICIES = ["makespan", "las_weighted", "finish_time_fairness", "min_cost", "hierarchical"]


def solved(problem, policy, **patches):
    """An allocation where even few rows are solved in groups, and pairs generated."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FULL_ROWS": 3, **patches}.items():
            patch.setattr(column_generation, name, value)
        return allocate(problem, policy)


def apart(program, _):
    """Every row a group of its own."""
    return each_apart(len(program.count))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(4))
@given(seed=st.integers(0, 10_000))
def test_groups_reach_what_rows_apart_reach(policy, seed, draw):
    rng = np.random.default_rng(seed)
    problem = draw(
        seed, num_jobs=int(rng.integers(20, 50)), num_models=int(rng.integers(2, 9)),
        num_types=int(rng.integers(1, 5)), entities=TREE, space_sharing=True,
    )  # fmt: skip
    found, other = solved(problem, policy), solved(problem, policy, grouped=apart)
    assert check(found, problem) == []
    assert found.certificate.termination == "optimal"
    assert found.certificate.objective == pytest.approx(other.certificate.objective, rel=1e-7)
    if policy == "hierarchical":
        best = {job.id: max(rates_of(problem, job).values()) for job in problem.jobs.jobs}
        for name, throughput in other.throughputs.items():
            near = pytest.approx(throughput, rel=1e-5, abs=1e-5 * best[name])
            assert found.throughputs[name] == near


def rates_of(problem, job):
    """Steps per second of a job by device type."""
    return next(
        entry.steps_per_second
        for entry in problem.throughputs.models
        if (entry.model, entry.scale_factor) == (job.model, job.scale_factor)
    )


def test_a_job_never_shares_with_itself_though_its_group_may(draw):
    """Few jobs of few models: groups use their own company for less than a job's whole time."""
    clashed = []

    def split(self, groups):
        clashed.append(groups)
        return original(self, groups)

    original = column_generation.Groups.split
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_generation.Groups, "split", split)
        for seed in range(12):
            problem = draw(seed, num_jobs=12, num_models=2, num_types=2, space_sharing=True)
            found = solved(problem, "makespan")
            assert check(found, problem) == []
            assert found.certificate.termination == "optimal"
    assert clashed
