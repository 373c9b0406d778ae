"""Water filling against a slow oracle that tests every job for room by a program of its own."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetflow.checks.allocation import check
from hetflow.schema.jobs import Entity
from hetflow.solvers.allocation import allocate, instance_of

seeds = st.integers(0, 10_000)
drawn = settings(max_examples=8, deadline=None, derandomize=True)

TREE = (
    Entity(name="company"),
    Entity(name="research", parent="company", weight=2.0),
    Entity(name="vision", parent="research", policy="fifo"),
    Entity(name="speech", parent="research", weight=3.0),
    Entity(name="product", parent="company"),
    Entity(name="guests", policy="fifo"),
)


def shares(problem, active):
    """Each active job's share by the definition of 5.4.3, recursively."""
    jobs, entities = problem.jobs.jobs, problem.jobs.entities

    def inside(entity, job):
        node = {e.name: e for e in entities}
        name = job.entity
        while name is not None and name != entity:
            name = node[name].parent
        return name == entity

    def visit(name, policy, share):
        own = [m for m, job in enumerate(jobs) if job.entity == name and active[m]]
        below = [(e, [m for m, j in enumerate(jobs) if inside(e.name, j) and active[m]])
                 for e in entities if e.parent == name]  # fmt: skip
        below = [(e, members) for e, members in below if members]
        if policy == "fifo":
            first = min([*own, *(min(members) for _, members in below)])
            if first in own:
                answer[first] = share
            for e, members in below:
                if first in members:
                    visit(e.name, e.policy, share)
            return
        total = sum(jobs[m].priority_weight for m in own) + sum(e.weight for e, _ in below)
        for m in own:
            answer[m] = share * jobs[m].priority_weight / total
        for e, _ in below:
            visit(e.name, e.policy, share * e.weight / total)

    answer = np.zeros(len(jobs))
    visit(None, "fairness", 1.0)
    return answer


def slow_levels(problem, other, unit, share_of):
    """Raise all, then ask of each job alone whether it can still rise."""
    level = np.zeros(len(unit))
    active = np.ones(len(unit), dtype=bool)
    for _ in range(4 * len(unit)):
        if not active.any():
            return level
        share = share_of(active)
        rise, _ = other.max_min(unit * share, unit * level)
        level = level + max(rise, 0.0) * share
        for m in np.flatnonzero(share > 0):
            alone = np.zeros(len(unit))
            alone[m] = unit[m]
            room, _ = other.max_min(alone, unit * level * (1 - 1e-9))
            if room <= 1e-6 * (level[m] + 1e-2 * level.max()):
                active[m] = False
    assume(False)  # the oracle's own tolerances lost the thread
    return level


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_levels_of_plain_water_filling(seed, space_sharing, draw, oracle):
    problem = draw(seed, num_jobs=6, space_sharing=space_sharing)
    instance = instance_of(problem)
    unit = instance.equal / instance.scale
    wanted = slow_levels(
        problem, oracle(problem), unit, lambda active: np.where(active, instance.weight, 0.0)
    )
    found = allocate(problem, "las_water_filling")
    assert check(found, problem) == []
    assert list(found.throughputs.values()) == pytest.approx(unit * wanted, rel=1e-5)


@drawn
@given(seed=seeds)
def test_levels_of_a_deep_hierarchy_with_fifo_inside(seed, draw, oracle):
    problem = draw(seed, num_jobs=8, entities=TREE)
    instance = instance_of(problem)
    unit = instance.equal / instance.scale
    wanted = slow_levels(problem, oracle(problem), unit, lambda active: shares(problem, active))
    found = allocate(problem, "hierarchical")
    assert check(found, problem) == []
    levels = np.array(list(found.throughputs.values())) / unit
    assert levels == pytest.approx(wanted, rel=1e-5, abs=1e-6 * wanted.max())
