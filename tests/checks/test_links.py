"""The judge's own links of a pool: alike the planner's where that is right, and against it else."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import planted

from hetflow.planning.checks.profiled import pipeline_faults, split_view_faults
from hetflow.planning.pipeline_problem import pipeline_problem
from hetflow.planning.split_problem import split_problem
from hetflow.schema.cluster import Cluster, DeviceType, Link, ServerGroup
from hetflow.schema.errors import ProblemError
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.problem import Problem
from hetflow.schema.profile import (
    BatchPoint,
    LayerGraph,
    LayerNode,
    LinkPoint,
    Links,
    Profile,
    Sync,
    TypeLink,
)
from hetflow.tests.profiles import examples

TYPES, LEVELS = ("A", "B", "C"), ("server", "rack", "zone", "pool")
RATES, DELAYS = (1e6, 3e7, 1e9, 2e10), (0.0, 1e-5, 2e-3)


def measured(rate: float, latency_seconds: float) -> Links:
    point = LinkPoint(num_bytes=8, there_seconds=1e-5, back_seconds=1e-5, both_seconds=1e-5)
    return Links(latency_seconds=latency_seconds, bytes_per_second=rate, points=(point,))


def profile(name: str, **changes) -> Profile:
    node = LayerNode(
        id="a", op="Linear", forward_seconds=0.01, backward_seconds=0.02, activation_bytes=1000,
        weight_bytes=4000,
    )  # fmt: skip
    nodes = (node, replace(node, id="b"))
    made = Profile(
        model="m", device_type=name, device_memory_bytes=10**9, weight_bytes=8000,
        update_seconds=0.001, optimizer=named_optimizer("sgd"),
        batch_curve=(BatchPoint(batch_size=2, step_seconds=0.1, peak_memory_bytes=10**6),),
        layers=LayerGraph(microbatch_size=2, nodes=nodes, edges=(("a", "b"),)),
    )  # fmt: skip
    return replace(made, **changes)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rates, delays = st.sampled_from(RATES), st.sampled_from(DELAYS)
    maybe = st.none() | rates
    names = TYPES[: draw(st.integers(1, 3))]
    groups = tuple(
        ServerGroup(
            count=draw(st.integers(1, 3)),
            devices=draw(
                st.dictionaries(st.sampled_from(names), st.integers(1, 3), min_size=1, max_size=2)
            ),
            intra_bytes_per_second=draw(maybe),
            rack=draw(st.sampled_from((None, None, "r", "s"))),
            zone=draw(st.sampled_from((None, None, "z", "y"))),
        )
        for _ in range(draw(st.integers(1, 4)))
    )
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names)).map(lambda p: (*sorted(p),))
    levels = st.sampled_from(LEVELS)
    keys = st.tuples(levels, st.none() | pairs) | st.tuples(st.none(), pairs)
    links = tuple(
        Link(level=level, between=pair, bytes_per_second=draw(rates), latency_seconds=draw(delays))
        for level, pair in draw(st.lists(keys, max_size=4, unique=True))
    )
    used = {name for group in groups for name in group.devices}
    pool = Cluster(
        schema="hetflow.cluster/2", servers=groups, links=links,
        device_types={name: DeviceType() for name in names},
        inter_bytes_per_second=draw(maybe),
    )  # fmt: skip
    found = []
    for name in sorted(used):
        own = draw(st.none() | st.builds(measured, rates, delays))
        others = draw(st.sets(st.sampled_from(TYPES), max_size=2)) - {name}
        to = tuple(
            TypeLink(device_type=other, links=measured(draw(rates), draw(delays)))
            for other in sorted(others)
        )
        ring = draw(st.sampled_from((None, (1e8, 1e-4))))
        sync = ring and Sync(
            num_devices=2, sync_seconds=0.01, bytes_per_second=ring[0], latency_seconds=ring[1]
        )
        found.append(profile(name, links=own, links_to=to, sync=sync))
    return Problem(found, pool, 8, link_bytes_per_second=draw(maybe))


@settings(max_examples=examples(300))
@given(problems())
def test_planner_and_judge_count_the_same_links(problem: Problem) -> None:
    assert split_view_faults(split_problem(problem), problem) == []
    try:
        view = pipeline_problem(problem)
    except ProblemError:  # a link that nobody tells
        assert problem.link_bytes_per_second is None
        return
    assert pipeline_faults(view, problem) == []


def pool_of(*groups: ServerGroup, links: tuple[Link, ...] = (), inter: float | None = None):
    names = sorted({name for group in groups for name in group.devices})
    return Cluster(
        schema="hetflow.cluster/2", servers=groups, links=links, inter_bytes_per_second=inter,
        device_types={name: DeviceType() for name in names},
    )  # fmt: skip


OWN = {"A": measured(2e9, 1e-5), "B": measured(1e9, 2e-5), "C": measured(5e9, 3e-5)}
MEASURED = tuple(profile(name, links=own) for name, own in OWN.items())
ACROSS = (
    replace(MEASURED[0], links_to=(TypeLink(device_type="B", links=measured(3e8, 4e-5)),)),
    replace(MEASURED[1], links_to=(TypeLink(device_type="A", links=measured(2e8, 5e-5)),)),
    MEASURED[2],
)
PLANTED = ("planning/links.py", "planning/pipeline_problem.py", "planning/split_problem.py")
MIXED, PLAIN = {"A": 2, "B": 1}, tuple(profile(name) for name in TYPES)
NEAR = Link(level="server", bytes_per_second=9e9, latency_seconds=1e-6)
FAR = Link(level="pool", bytes_per_second=1e8, latency_seconds=3e-4)
PAIR = Link(between=("A", "B"), bytes_per_second=7e7, latency_seconds=6e-4)
RACK = Link(level="rack", bytes_per_second=6e8, latency_seconds=2e-5)
QUESTIONS = (
    Problem(ACROSS, pool_of(ServerGroup(count=1, devices={"A": 2, "B": 2, "C": 1})), 8),
    Problem(MEASURED, pool_of(ServerGroup(count=3, devices=MIXED), inter=4e8), 8),
    Problem(ACROSS, pool_of(ServerGroup(count=1, devices=MIXED), inter=4e8), 8),
    Problem(PLAIN, pool_of(ServerGroup(count=2, devices=MIXED), links=(NEAR, FAR, PAIR)), 8),
    Problem(
        MEASURED,
        pool_of(
            ServerGroup(count=2, devices={"A": 2}, rack="r", intra_bytes_per_second=8e9),
            ServerGroup(count=2, devices={"A": 2}, rack="s", intra_bytes_per_second=7e9),
            ServerGroup(count=1, devices={"A": 1, "B": 1}, zone="z"),
            links=(RACK, FAR),
        ),
        8,
    ),
    Problem(
        PLAIN,
        pool_of(
            ServerGroup(count=2, devices={"A": 2}, rack="r", zone="y"),
            ServerGroup(count=2, devices={"A": 2}, rack="s", zone="y"),
            links=(RACK, FAR, NEAR, replace(RACK, level="zone", bytes_per_second=2e8)),
        ),
        8,
    ),
    Problem(PLAIN, pool_of(ServerGroup(count=2, devices=MIXED)), 8, link_bytes_per_second=5e7),
    Problem(MEASURED, pool_of(ServerGroup(count=1, devices={"A": 1, "C": 1})), 8),
)


def views(problem: Problem) -> list:
    try:
        return [split_problem(problem), pipeline_problem(problem)]
    except Exception:  # with a fault in it: no view, and so no plan
        return []


def faults(problem: Problem, found: list) -> list[str]:
    split, pipeline = found
    return [*split_view_faults(split, problem), *pipeline_faults(pipeline, problem)]


@pytest.mark.slow
def test_every_fault_in_what_solvers_see_is_caught() -> None:
    right = [views(problem) for problem in QUESTIONS]
    pairs = [*zip(QUESTIONS, right, strict=True)]
    assert [faults(problem, found) for problem, found in pairs] == [[]] * len(QUESTIONS)
    caught, missed = 0, []
    run = planted.lines_run(lambda: [*map(views, QUESTIONS)], PLANTED)
    for site in planted.sites(run):
        with planted.planted(site) as changed:
            for problem, found in pairs if changed else ():
                wrong = views(problem)
                if wrong and wrong != found:
                    caught += 1
                    missed += [] if faults(problem, wrong) else [str(site)]
    assert missed == []
    assert caught > 100
