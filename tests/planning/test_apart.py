"""Servers told apart: stages are placed on those that suit them, as the plan's devices say."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetflow
from hetflow.planning.apart import parts_to_tell_apart, told_apart
from hetflow.planning.parallel_problem import parallel_problem
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.cluster import Cluster, ServerGroup
from hetflow.schema.plan import Plan
from hetflow.schema.problem import Problem
from hetflow.tests.planning.test_pool_parts import LINKS, PROFILES, RATES, cluster, stated
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.parallel.every_plan import fastest


def server(rate: float = 1e10, **devices: int) -> ServerGroup:
    return ServerGroup(count=1, devices=devices, intra_bytes_per_second=rate)


UNLIKE = cluster(server(A=3), server(A=1), inter=1e6)


def solved(pool: Cluster) -> Plan:
    return hetflow.solve(
        PROFILES, pool, batch_size=8, strategy="parallel", recompute=False, num_model_chunks=1
    )


def test_a_group_lies_in_the_server_that_holds_it() -> None:
    plan = solved(UNLIKE)  # servers of 3 and 1 have no common width but 1
    groups = [(g.tensor_parallel_size, g.held) for s in plan.stages for g in s.replicas]
    assert 2 in [degree for degree, _ in groups]
    assert all(set(held) <= {0, 1, 2} for _, held in groups)
    workers = [(one.device_type, one.device) for one in lower(plan).workers]
    assert workers == [("A", device) for _, held in groups for device in held]
    assert hetflow.check(plan, PROFILES, UNLIKE) == hetflow.check(plan, PROFILES) == []
    assert plan.proof.bound == "replayed"


@pytest.mark.parametrize(
    ("moved", "fault"),
    [(1, "twice"), (None, "no first_device"), (2, "whose devices are in one server")],
)
def test_a_judge_refuses_devices_that_no_server_gives(moved: int | None, fault: str) -> None:
    plan = solved(UNLIKE)
    held = [stage.held for stage in plan.stages]
    place = next(n for n, own in enumerate(held) if own == (0, 1))
    stages = list(plan.stages)
    group = replace(stages[place].replicas[0], first_device=moved)
    stages[place] = replace(stages[place], replicas=(group,))
    faults = hetflow.check(replace(plan, stages=tuple(stages)), PROFILES, UNLIKE)
    assert any(fault in each for each in faults)


@st.composite
def pools(draw: st.DrawFn) -> Cluster:
    """Two servers of which one has one type, with up to five devices."""
    numbers, rates = st.integers(1, 2), st.sampled_from(RATES)
    first = {"A": draw(numbers)} | draw(st.sampled_from(({}, {"B": 1})))
    second = {draw(st.sampled_from("AB")): draw(st.integers(1, 3))}
    one, other = (
        ServerGroup(count=1, devices=each, intra_bytes_per_second=draw(rates))
        for each in (first, second)
    )
    return cluster(one, other, inter=draw(st.sampled_from((1e6, 1e9))), links=tuple(draw(LINKS)))


ALIKE = [[("A", 2)] * 2, [("A", 3)] * 2, [("A", 1)] * 3, [("B", 2)] * 2]


@settings(max_examples=examples(4))
@given(st.sampled_from(ALIKE), st.sampled_from(RATES), st.sampled_from((1e6, 1e9)))
def test_servers_that_are_alike_need_not_be_told_apart(
    servers: list[tuple[str, int]], rate: float, inter: float
) -> None:
    pool = cluster(*(server(rate, **dict([each])) for each in servers), inter=inter)
    problem = Problem(PROFILES, pool, 8)
    assert (parts_to_tell_apart(pool).apart == []) == (rate >= inter)
    apart, plan = told_apart(problem), solved(pool)
    assert apart is not None
    least = fastest(parallel_problem(apart.problem, recompute=False))
    assert plan.predicted.step_seconds <= least * (1 + 1e-9)


@settings(max_examples=examples(10))
@given(pools())
def test_a_plan_is_the_best_over_all_placements(pool: Cluster) -> None:
    plan, apart = solved(pool), told_apart(Problem(PROFILES, pool, 8))
    assert hetflow.check(plan, PROFILES, pool) == []
    if apart is not None:
        least = fastest(parallel_problem(apart.problem, recompute=False))
        assert plan.predicted.step_seconds <= least * (1 + 1e-9)
        assert plan.proof.lower_bound <= least * (1 + 1e-9)
    workers = iter(lower(plan).workers)
    for degree in (g.tensor_parallel_size for s in plan.stages for g in s.replicas):
        assert len({one.device_type for one in islice(workers, degree)}) == 1


@settings(max_examples=examples(60))
@given(pools())
def test_servers_told_apart_have_the_links_of_their_pairs(pool: Cluster) -> None:
    apart = told_apart(Problem(PROFILES, pool, 16))
    if apart is None:
        assert len(pool.num_devices) == sum(len(group.devices) for group in pool.servers)
        return
    view = parallel_problem(apart.problem)
    own = {name: (int(name[-1]), name[0]) for name in apart.devices}
    for each in view.pools:
        if each.num_devices > 1:
            place = own[each.device_type]
            assert each.link(1).coefficients == (stated(pool, place, place)[0],)
    for link in view.between:
        one, other = (own[name] for name in link.device_types)
        assert link.curve.coefficients == (stated(pool, one, other)[0],)


@pytest.mark.slow
def test_one_more_server_than_can_be_told_apart_slows_nothing_down() -> None:
    servers = [server(A=3), server(A=1), server(1e9, A=2), server(B=3), server(B=1)]
    servers.append(server(1e8, B=2))
    pool = cluster(*servers, server(A=1), inter=1e8)
    before, after = solved(cluster(*servers, inter=1e8)), solved(pool)
    assert after.predicted.step_seconds <= before.predicted.step_seconds * (1 + 1e-9)
    assert hetflow.check(after, PROFILES, pool) == []
