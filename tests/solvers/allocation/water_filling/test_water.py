"""Water filling against a slow oracle that tests every job for room by a program of its own."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.planning.checks.allocation import check
from hetflow.schema.errors import BackendError
from hetflow.schema.jobs import Entity
from hetflow.solvers.allocation import allocate, instance_of
from hetflow.solvers.allocation.water_filling import water
from hetflow.tests.profiles import examples

seeds = st.integers(0, 10_000)
drawn = settings(max_examples=examples(8))

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


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_levels_of_plain_water_filling(seed, space_sharing, draw, oracle):
    problem = draw(seed, num_jobs=6, space_sharing=space_sharing)
    instance = instance_of(problem)
    unit = instance.equal / instance.scale
    wanted = oracle(problem).levels(unit, lambda active: np.where(active, instance.weight, 0.0))
    found = allocate(problem, "las_water_filling")
    assert check(found, problem) == []
    assert list(found.throughputs.values()) == pytest.approx(unit * wanted, rel=1e-5)


@drawn
@given(seed=seeds)
def test_levels_of_a_deep_hierarchy_with_fifo_inside(seed, draw, oracle):
    problem = draw(seed, num_jobs=8, entities=TREE)
    instance = instance_of(problem)
    unit = instance.equal / instance.scale
    wanted = oracle(problem).levels(unit, lambda active: shares(problem, active))
    found = allocate(problem, "hierarchical")
    assert check(found, problem) == []
    levels = np.array(list(found.throughputs.values())) / unit
    assert levels == pytest.approx(wanted, rel=1e-5, abs=1e-6 * wanted.max())


def mixed(seed, draw, *, space_sharing=False):
    """A problem of any size and shape up to 39 jobs, on up to five types, in a deep tree."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 40))
    models, types = int(rng.integers(1, number + 1)), int(rng.integers(1, 6))
    agnostic = rng.random() < 0.25
    return draw(
        seed, num_jobs=number, num_models=models, num_types=types, entities=GUESTS,
        space_sharing=space_sharing, heterogeneity="agnostic" if agnostic else "aware",
    )  # fmt: skip


GUESTS = (
    *TREE,
    Entity(name="g1", parent="guests"),
    Entity(name="g2", parent="guests", weight=4.0),
    Entity(name="g3", parent="g2", policy="fifo"),
)


def test_a_basis_that_leads_astray_is_left_behind(draw):
    problem = mixed(165, draw, space_sharing=True)
    found = allocate(problem, "hierarchical")
    assert check(found, problem) == []
    assert "shared bottlenecks" in found.certificate.method


@pytest.mark.parametrize("seed", [51, 387, 632, 677])
@pytest.mark.parametrize("policy", ["las_water_filling", "hierarchical"])
def test_problems_that_once_broke_down_or_went_unproved(seed, policy, draw):
    """51: prices seven orders apart; the others: programs without an optimum."""
    problem = mixed(seed, draw)
    found = allocate(problem, policy)
    assert check(found, problem) == []
    assert found.certificate.termination == "optimal"


@pytest.mark.parametrize("seed", [78, 122, 145, 298])
def test_numbers_that_give_out_near_tight_slos_are_no_traceback(seed, draw):
    problem = mixed(seed, draw)
    found = allocate(problem, "min_dollars_slo")
    assert check(found, problem) == []
    assert found.certificate.termination == "optimal"


@pytest.mark.parametrize("space_sharing", [False, True])
@settings(drawn, max_examples=examples(5))
@given(seed=st.integers(0, 10_000))
def test_where_the_quick_way_breaks_down_the_slow_one_gives_the_same_levels(
    seed, space_sharing, draw
):
    problem = mixed(seed, draw, space_sharing=space_sharing)
    quick = allocate(problem, "hierarchical")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(water, "_highest", breaks_down)
        slow = allocate(problem, "hierarchical")
    assert "level by level" in slow.certificate.method
    assert check(slow, problem) == []
    assert slow.certificate.termination == "optimal"
    if problem.heterogeneity == "agnostic":
        return  # levels are unique to that eye; throughputs are the true ones
    best = {job.id: max(rates_of(problem, job).values()) for job in problem.jobs.jobs}
    for name, throughput in quick.throughputs.items():
        assert slow.throughputs[name] == pytest.approx(throughput, rel=1e-5, abs=1e-5 * best[name])


def breaks_down(*_):
    raise BackendError("no optimum")


def rates_of(problem, job):
    table = {(e.model, e.scale_factor): e.steps_per_second for e in problem.throughputs.models}
    return table[job.model, job.scale_factor]


LARGE = st.integers(10_000, 20_000)
QUEUES = (
    *TREE,
    Entity(name="early", parent="guests"),
    Entity(name="late", parent="guests", weight=4.0),
    Entity(name="last", parent="late", policy="fifo"),
)


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=LARGE)
def test_every_level_is_proved_to_a_checker_that_knows_only_the_definition(
    seed, space_sharing, draw
):
    number, types, agnostic = 1 + seed % 37, 1 + seed % 5, seed % 4 == 0
    problem = draw(
        seed, num_jobs=number, num_types=types, num_models=1 + seed % number, entities=QUEUES,
        space_sharing=space_sharing, heterogeneity="agnostic" if agnostic else "aware",
    )  # fmt: skip
    for policy in ("las_water_filling", "hierarchical"):
        found = allocate(problem, policy)
        assert check(found, problem) == []
        assert found.certificate.termination == "optimal"


@pytest.mark.parametrize("policy", ["las_water_filling", "hierarchical"])
def test_the_checker_misses_a_level_without_its_proof(policy, draw):
    problem = draw(11, num_jobs=20, entities=TREE)
    found = allocate(problem, policy)
    assert found.certificate.levels
    bare = dataclasses.replace(found.certificate, levels=())
    faults = check(dataclasses.replace(found, certificate=bare), problem)
    assert any("nothing shows" in fault for fault in faults)


def test_the_checker_sees_a_level_that_could_be_higher(draw):
    """Whoever stops at the LAS objective, which water filling goes beyond, could rise."""
    problem = draw(11, num_jobs=20)
    level = allocate(problem, "las_water_filling")
    flat = allocate(problem, "las_weighted")
    instance = instance_of(problem)
    least = flat.certificate.objective * instance.weight * instance.equal / instance.scale
    shares = {
        name: {c: time * float(least[m]) / level.throughputs[name] for c, time in row.items()}
        for m, (name, row) in enumerate(level.x.items())
    }
    slower = dataclasses.replace(
        level, x=shares, throughputs=dict(zip(level.x, least.tolist(), strict=True))
    )
    assert any("nothing shows" in fault for fault in check(slower, problem))


@pytest.mark.parametrize("space_sharing", [False, True])
@pytest.mark.parametrize("policy", ["las_water_filling", "hierarchical"])
def test_the_checker_refuses_a_job_in_the_middle_a_thousandth_too_low(policy, space_sharing, draw):
    """Each job that is not at its own best, lowered by 1e-3 with all else as it was."""
    problem = draw(11, num_jobs=20, entities=TREE, space_sharing=space_sharing)
    found = allocate(problem, policy)
    assert check(found, problem) == []
    order = sorted(found.throughputs, key=lambda name: found.throughputs[name])
    tried = 0
    for name in order[5:15]:
        if not found.x[name] or max(found.x[name].values()) == 0.0:
            continue
        row = {column: time * 0.999 for column, time in found.x[name].items()}
        lost = sum(
            (time - row[column]) * rates_of(problem, job).get(column, 0.0)
            for job in problem.jobs.jobs
            if job.id == name
            for column, time in found.x[name].items()
        )
        lower = {**found.throughputs, name: found.throughputs[name] - lost}
        if lost < 5e-4 * found.throughputs[name]:
            continue
        worse = dataclasses.replace(found, x={**found.x, name: row}, throughputs=lower)
        faults = check(worse, problem)
        assert any(f"job {name!r}: nothing shows" in fault for fault in faults)
        tried += 1
    assert tried >= 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["las_water_filling", "hierarchical"])
def test_hundreds_of_distinct_jobs_are_proved_level_by_level(policy, draw):
    problem = draw(5, num_jobs=400, num_models=400, entities=TREE)
    found = allocate(problem, policy)
    assert check(found, problem) == []
    assert len(found.certificate.levels) <= len(problem.num_devices)
