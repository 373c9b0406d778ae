"""Interleaved plans of three dimensions against every plan of small problems and the schedule."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.planning.checks.parallel import check, counted_step
from hetflow.planning.checks.parallel_bound import is_proved
from hetflow.planning.schedules.closed_forms import interleaved_in_flight
from hetflow.planning.schedules.registry import generate
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.parallel import (
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardSizes,
    ShardTimes,
)
from hetflow.schema.plan import Plan
from hetflow.schema.schedule import Kind
from hetflow.solvers.parallel.solve import solve
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.parallel.every_plan import (
    ADAM,
    RECOMPUTE,
    SECONDS,
    built,
    compositions,
    fits,
    shared,
)


@st.composite
def problems(draw: st.DrawFn) -> ParallelProblem:
    size = draw(st.integers(4, 6))
    is_equal = draw(st.booleans())
    recompute = draw(st.sampled_from(RECOMPUTE))
    has_cores, knows_workspaces = "selective" in recompute, draw(st.booleans())

    def row(values: st.SearchStrategy) -> tuple:  # type: ignore[type-arg]
        return (draw(values),) * size if is_equal else tuple(draw(values) for _ in range(size))

    pools = tuple(
        ParallelPool(
            device_type=name,
            num_devices=draw(st.integers(2, 6 - 2 * number)),
            devices_per_server=2,
            memory_bytes=draw(st.sampled_from([None, 60, 100, 140])),
            times=tuple(
                ShardTimes(
                    tensor_parallel_size=degree,
                    microbatch_size=1,
                    forward_seconds=row(SECONDS.map(lambda value: value + 1 / 16)),
                    backward_seconds=row(SECONDS),
                    update_seconds=row(SECONDS),
                    core_seconds=row(SECONDS) if has_cores else (),
                    workspace_bytes=row(st.integers(0, 16)) if knows_workspaces else (),
                )
                for degree in (1, 2)
            ),
            links=tuple(
                DegreeLink(
                    tensor_parallel_size=degree,
                    curve=LinkCurve(coefficients=(draw(st.sampled_from([8.0, 64.0])),)),
                )
                for degree in (1, 2)
            ),
        )
        for number, name in enumerate(("A", "B")[: draw(st.integers(1, 2))])
    )
    return ParallelProblem(
        model="m",
        global_batch_size=draw(st.sampled_from([2, 4, 6, 8])),
        # Shared weights come by repeated layers: of one or two of these, or of none.
        layers=tuple(
            draw(st.sampled_from([f"l{i}", f"h.{i}", f"h.{i // 2}.{i}"])) for i in range(size)
        ),
        output_bytes=row(st.integers(0, 8)),
        pools=pools,
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=degree,
                weight_bytes=row(st.integers(0, 8)),
                stashed_bytes=row(st.integers(0, 12).map(float)),
                selective_bytes=row(st.integers(0, 8).map(float)) if has_cores else (),
                core_bytes=row(st.integers(0, 8).map(float)) if has_cores else (),
            )
            for degree in (1, 2)
        ),
        recompute=recompute,
        num_model_chunks=draw(st.sampled_from([(2,), (2, 3)])),
        optimizer=replace(ADAM, workspace_bytes_per_weight_byte=draw(st.sampled_from([None, 3.0]))),
        waiting_bytes=draw(st.sampled_from([0, 6])),
        shards=draw(
            st.sampled_from(
                [(None,), ("optimizer",), ("gradients",), ("all",), (None, "gradients", "all")]
            )
        ),
    )


def every_interleaved(problem: ParallelProblem) -> Iterator[Plan]:
    """All interleaved plans of one type, degree, recomputation and kind of sharing that fit."""
    if len(problem.shards) > 1:
        for own in problem.by_shard:
            yield from every_interleaved(own)
        return
    size = problem.global_batch_size  # microbatches of one sample
    for pool in problem.pools:
        for degree in (1, 2):
            for replicas in (d for d in range(1, size + 1) if size % d == 0):
                most = pool.num_devices // (degree * replicas)
                for cuts in compositions(len(problem.layers)):
                    for v in problem.num_model_chunks:
                        p = len(cuts) // v
                        if len(cuts) % v or not 2 <= p <= most or (size // replicas) % p:
                            continue
                        for again in problem.recompute:
                            chosen = [((((pool.device_type, degree), replicas),), again)]
                            made = built(problem, 1, size // replicas, cuts, chosen * len(cuts))
                            plan = replace(made, schedule="interleaved", num_model_chunks=v)
                            plan = shared(plan, problem)
                            if fits(plan, problem):
                                yield plan


@settings(max_examples=examples(25))
@given(problems())
@pytest.mark.slow
def test_no_interleaved_plan_is_faster(problem: ParallelProblem) -> None:
    least = min((counted_step(p, problem) for p in every_interleaved(problem)), default=None)
    try:
        plan = solve(problem)
    except InfeasibleError:
        assert least is None
        return
    assert check(plan, problem) == []
    assert plan.num_model_chunks in problem.num_model_chunks
    assert least is not None
    bound = plan.proof.lower_bound
    assert bound is not None
    assert bound <= least * (1 + 1e-9)
    assert not is_proved(problem, least * (1 + 1e-6), ())
    assert plan.predicted.step_seconds == pytest.approx(least, rel=1e-9)
    both = replace(problem, num_model_chunks=(1, *problem.num_model_chunks))
    best = solve(both)
    assert check(best, both) == []
    expected = plan.predicted.step_seconds
    try:
        flat = solve(replace(problem, num_model_chunks=(1,))).predicted.step_seconds
        expected = min(expected, flat)
    except InfeasibleError:
        pass
    assert best.predicted.step_seconds == pytest.approx(expected, rel=1e-9)


def test_equal_layers_are_proved_optimal() -> None:
    """8 equal layers on 4 devices: 2 chunks a device halve the bubble of 3 passes."""
    problem = ParallelProblem(
        model="m",
        global_batch_size=8,
        layers=tuple(f"l{i}" for i in range(8)),
        output_bytes=(0,) * 8,
        pools=(
            ParallelPool(
                device_type="A",
                num_devices=4,
                devices_per_server=4,
                memory_bytes=200,  # weights of 2 layers and what they stash, but no whole model
                times=(
                    ShardTimes(
                        tensor_parallel_size=1,
                        microbatch_size=1,
                        forward_seconds=(1.0,) * 8,
                        backward_seconds=(2.0,) * 8,
                        update_seconds=(0.0,) * 8,
                    ),
                ),
                links=(DegreeLink(tensor_parallel_size=1, curve=LinkCurve(coefficients=(1.0,))),),
            ),
        ),
        sizes=(
            ShardSizes(tensor_parallel_size=1, weight_bytes=(20,) * 8, stashed_bytes=(1.0,) * 8),
        ),
        num_model_chunks=(1, 2),
    )
    plan = solve(problem)
    assert check(plan, problem) == []
    assert (plan.num_positions, plan.num_model_chunks, plan.num_devices) == (4, 2, 4)
    assert plan.proof.termination == "optimal"
    assert plan.predicted.step_seconds == pytest.approx(8 * 6.0 + 3 * 6.0 / 2)
    assert plan.predicted.bubble_fraction == pytest.approx(3 / (2 * 8))
    # Sent over a slow link, twice as many messages cost more than the bubble that they save.
    chatty = replace(problem, output_bytes=(2,) * 8)
    assert solve(chatty).num_model_chunks == 1


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (4, 3), (2, 4), (8, 2)])
def test_what_is_in_flight_is_what_the_schedule_holds(p: int, v: int) -> None:
    for m in (p, 2 * p, 5 * p):
        schedule = generate(
            "interleaved", pipeline_parallel_size=p, num_microbatches=m, num_model_chunks=v
        )
        for position, operations in enumerate(schedule.ranks):
            held, seen = [0] * v, set()
            for operation in operations:
                if operation.kind in (Kind.FORWARD, Kind.BACKWARD):
                    held[operation.stage // p] += 1 if operation.kind is Kind.FORWARD else -1
                    seen.add(tuple(held))
            for stashed in ([1] * v, list(range(1, v + 1)), list(range(v, 0, -1)), [5] + [0] * v):
                expected = max(
                    sum(a * b for a, b in zip(one, stashed, strict=False)) for one in seen
                )
                found = interleaved_in_flight(p, m, v, position)
                assert (
                    max(sum(a * b for a, b in zip(one, stashed, strict=False)) for one in found)
                    == expected
                )
