"""Always full pipelines against every plan of small graphs, counted by the checker."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piper_parts import solve as planner
from piper_parts.check import check, counted_memory, counted_seconds
from piper_parts.problem import (
    SteadyChoice,
    SteadyDegree,
    SteadyEdge,
    SteadyLayer,
    SteadyPlan,
    SteadyProblem,
    SteadyStage,
    SteadySync,
)
from piper_parts.solve import solve

from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.plan import Proof
from hetflow.tests.profiles import examples

UNPROVED = Proof(termination="feasible", objective=0.0, lower_bound=None, gap=None, method="")


def cuts(problem: SteadyProblem, done: frozenset[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to cut the layers that are left into stages that have what they need."""
    left = [i for i in range(len(problem.layers)) if i not in done]
    if not left:
        yield ()
    for chosen in product((False, True), repeat=len(left)):
        stage = tuple(i for i, is_in in zip(left, chosen, strict=True) if is_in)
        there = done | set(stage)
        if stage and all(e.source in there for e in problem.edges if e.target in stage):
            for rest in cuts(problem, there):
                yield (stage, *rest)


def fastest(problem: SteadyProblem) -> float | None:
    """The least slowest stage over every plan that fits."""
    best = None
    batch = problem.num_microbatches
    counts = [d for d in range(1, batch + 1) if batch % d == 0]
    for stages in cuts(problem, frozenset()):
        for shapes in product(product(counts, problem.degrees), repeat=len(stages)):
            if sum(d * t for d, t in shapes) > problem.num_devices:
                continue
            if sum(d for d, _ in shapes) > batch:
                continue
            for plan in built(problem, stages, shapes):
                numbers = range(len(stages))
                if all(counted_memory(plan, problem, i) <= problem.memory_bytes for i in numbers):
                    slowest = max(counted_seconds(plan, problem, i) for i in numbers)
                    best = slowest if best is None else min(best, slowest)
    return best


def built(
    problem: SteadyProblem,
    stages: tuple[tuple[int, ...], ...],
    shapes: tuple[tuple[int, int], ...],
) -> Iterator[SteadyPlan]:
    """The plans of these stages and replicas, by what each layer chooses."""
    names = [
        [choice.name for choice in problem.layers[layer].degrees[problem.degrees.index(t)].choices]
        for stage, (_, t) in zip(stages, shapes, strict=True)
        for layer in stage
    ]
    for chosen in product(*names):
        found, place = [], 0
        for stage, (d, t) in zip(stages, shapes, strict=True):
            found.append(
                SteadyStage(
                    layers=stage,
                    choices=chosen[place : place + len(stage)],
                    tensor_parallel_size=t,
                    num_replicas=d,
                    sample_seconds=0.0,
                    memory_bytes=0,
                )
            )
            place += len(stage)
        yield SteadyPlan(model="m", stages=tuple(found), sample_seconds=0.0, proof=UNPROVED)


NUMBER = st.integers(0, 12).map(float)


@st.composite
def problems(draw: st.DrawFn) -> SteadyProblem:
    size, degrees = draw(st.integers(1, 3)), draw(st.sampled_from([(1,), (1, 2)]))

    def degree(number: int) -> SteadyDegree:
        weight = draw(NUMBER)
        return SteadyDegree(
            tensor_parallel_size=number,
            choices=tuple(
                SteadyChoice(
                    name=name,
                    seconds=draw(NUMBER),
                    weight_bytes=weight,
                    in_flight_bytes=draw(NUMBER),
                    fixed_bytes=draw(NUMBER),
                )
                for name in ("vanilla", "recomputed")[: draw(st.integers(1, 2))]
            ),
        )

    pairs = [(i, j) for i in range(size) for j in range(i + 1, size)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return SteadyProblem(
        model="m",
        layers=tuple(
            SteadyLayer(name=f"l{i}", degrees=tuple(degree(number) for number in degrees))
            for i in range(size)
        ),
        edges=tuple(
            SteadyEdge(
                source=source,
                target=target,
                sent_bytes=draw(NUMBER),
                sync=tuple(
                    SteadySync(
                        tensor_parallel_size=number,
                        source_bytes=draw(NUMBER),
                        target_bytes=draw(NUMBER),
                    )
                    for number in degrees
                ),
            )
            for source, target in edges
        ),
        num_devices=draw(st.integers(1, 4)),
        memory_bytes=draw(st.sampled_from([10, 30, 60, 1000])),
        bytes_per_second=8.0,
        num_microbatches=draw(st.sampled_from([1, 2, 4, 6])),
    )


@settings(max_examples=examples(200))
@given(problems())
def test_the_plan_is_the_fastest_of_all(problem: SteadyProblem) -> None:
    expected = fastest(problem)
    if expected is None:
        with pytest.raises(InfeasibleError):
            solve(problem)
        return
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.sample_seconds == pytest.approx(expected, rel=1e-8)
    assert plan.proof.termination == "optimal"


@settings(max_examples=examples(40))
@given(problems())
def test_where_knapsacks_are_too_large_a_bound_is_left(problem: SteadyProblem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_MOST_PARTIAL", 0)
        try:
            plan = solve(problem)
        except InfeasibleError:
            return
    expected = fastest(problem)
    assert expected is not None
    assert check(plan, problem) == []
    assert plan.proof.lower_bound is not None
    assert plan.proof.lower_bound <= expected * (1 + 1e-9) + 1e-12
    assert expected <= plan.sample_seconds * (1 + 1e-9)


def chain(seconds: float, in_flight: float, num_devices: int) -> SteadyProblem:
    choice = SteadyChoice(
        name="vanilla", seconds=seconds, weight_bytes=0.0, in_flight_bytes=in_flight, fixed_bytes=0
    )
    degree = SteadyDegree(tensor_parallel_size=1, choices=(choice,))
    return SteadyProblem(
        model="m",
        layers=(SteadyLayer(name="a", degrees=(degree,)), SteadyLayer(name="b", degrees=(degree,))),
        edges=(SteadyEdge(source=0, target=1, sent_bytes=0.0),),
        num_devices=num_devices,
        memory_bytes=10,
        bytes_per_second=1.0,
        num_microbatches=8,
    )


def test_memory_forbids_what_devices_would_allow() -> None:
    assert solve(chain(1.0, 1.0, 2)).sample_seconds == 1.0
    # Both layers on one device hold 14 bytes; the first of two stages has two in flight, so 14 too.
    with pytest.raises(InfeasibleError, match="no plan fits 2 devices"):
        solve(chain(1.0, 7.0, 2))
    # With two replicas of the first stage, three later replicas are two in flight for each.
    assert solve(chain(1.0, 5.0, 3)).sample_seconds <= 1.0


def test_a_graph_with_too_many_downsets_is_cut_in_one_order() -> None:
    """13 layers that need nothing of each other have 8,192 downsets; they were refused."""
    alone = chain(1.0, 1.0, 2)
    layers = tuple(replace(alone.layers[0], name=f"l{i}") for i in range(13))
    wide = replace(alone, layers=layers, edges=(), num_devices=2)
    plan = solve(wide)
    assert check(plan, wide) == []
    assert [i for stage in plan.stages for i in stage.layers] == list(range(13))
    assert plan.proof.lower_bound is not None
    assert plan.proof.lower_bound <= plan.sample_seconds
    assert "in the order of their numbers" in plan.proof.method
    narrow = replace(wide, memory_bytes=1)
    with pytest.raises(InfeasibleError, match="in the order of their numbers"):
        solve(narrow)


def test_graphs_that_no_pipeline_can_order() -> None:
    problem = chain(1.0, 1.0, 2)
    back = SteadyEdge(source=1, target=0, sent_bytes=0.0)
    with pytest.raises(ProblemError, match="has a circle"):
        solve(replace(problem, edges=(*problem.edges, back)))
    with pytest.raises(ProblemError, match="ends at layer 2 of 2"):
        replace(problem, edges=(SteadyEdge(source=0, target=2, sent_bytes=0.0),))
    choice = problem.layers[0].degrees[0].choices[0]
    with pytest.raises(ProblemError, match="two choices of one name"):
        SteadyDegree(tensor_parallel_size=1, choices=(choice, choice))
    with pytest.raises(ProblemError, match="unlike weight_bytes"):
        SteadyDegree(
            tensor_parallel_size=1, choices=(choice, replace(choice, name="x", weight_bytes=1.0))
        )


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("devices in use", {"num_replicas": 4}),
        ("do not divide", {"num_replicas": 3}),
        ("does not have", {"tensor_parallel_size": 2}),
        ("does not have", {"choices": ("none", "none")}),
        ("all layers once", {"layers": (1, 1)}),
        ("s, counted", {"sample_seconds": 7.0}),
        ("bytes, counted", {"memory_bytes": 7}),
    ],
)
def test_every_change_is_found(said: str, changes: dict[str, Any]) -> None:
    problem = chain(1.0, 1.0, 2)
    plan = solve(problem)
    assert [stage.layers for stage in plan.stages] == [(0, 1)]  # two replicas of one stage
    with pytest.raises(ProblemError, match="a choice for each"):
        replace(plan.stages[0], layers=(0,))
    first = replace(plan.stages[0], **changes)
    faults = check(replace(plan, stages=(first, *plan.stages[1:])), problem)
    assert any(said in fault for fault in faults), faults
    halves = (replace(plan.stages[0], layers=(i,), choices=("vanilla",)) for i in (1, 0))
    turned = replace(plan, stages=tuple(halves))
    assert any("comes before layer 0" in fault for fault in check(turned, problem))
