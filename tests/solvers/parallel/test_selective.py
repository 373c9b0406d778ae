"""Selective recomputation in plans of three dimensions: when it pays, counted by hand."""

from dataclasses import replace

import pytest

from hetflow.planning.checks.parallel import check
from hetflow.planning.schedules.closed_forms import interleaved_in_flight
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.parallel import (
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardSizes,
    ShardTimes,
)
from hetflow.schema.plan import Plan
from hetflow.solvers.parallel.solve import solve

# A block: what attention keeps beside its core, the core, and all the rest.
KEPT, CORE, OUTPUT, WEIGHTS = 100, 400, 10, 2000


def problem(memory_bytes: int, *, num_devices: int = 2, chunks: int = 1) -> ParallelProblem:
    """Four blocks of attention that take 1 s forward (0.125 s of it the core) and 2 s backward."""
    times = ShardTimes(
        tensor_parallel_size=1,
        microbatch_size=1,
        forward_seconds=(1.0,) * 4,
        backward_seconds=(2.0,) * 4,
        update_seconds=(0.0,) * 4,
        core_seconds=(0.125,) * 4,
    )
    return ParallelProblem(
        model="m",
        global_batch_size=4,
        layers=("a", "b", "c", "d"),
        output_bytes=(OUTPUT,) * 4,
        pools=(
            ParallelPool(
                device_type="A",
                num_devices=num_devices,
                devices_per_server=1,
                memory_bytes=memory_bytes,
                times=(times,),
                links=(DegreeLink(tensor_parallel_size=1, curve=LinkCurve(coefficients=(1e9,))),),
            ),
        ),
        sizes=(
            ShardSizes(
                tensor_parallel_size=1,
                weight_bytes=(WEIGHTS // 4,) * 4,  # a quarter: gradients and Adam come on top
                stashed_bytes=(float(KEPT + CORE),) * 4,
                selective_bytes=(float(KEPT),) * 4,
                core_bytes=(float(CORE),) * 4,
            ),
        ),
        recompute=("none", "selective", "full"),
        num_model_chunks=(chunks,),
    )


def chosen(problem: ParallelProblem) -> tuple[Plan, list[str]]:
    plan = solve(problem)
    assert check(plan, problem) == []
    return plan, [stage.recompute for stage in plan.stages]


def test_a_stage_recomputes_no_more_than_its_memory_needs() -> None:
    """Two stages of two blocks; the first has two microbatches in flight, the second one."""
    weights = 2 * WEIGHTS  # a device cannot hold four blocks
    two = weights + 2 * 2 * (KEPT + CORE)
    plan, kinds = chosen(problem(two, num_devices=2))
    assert (len(kinds), set(kinds)) == (2, {"none"})
    assert plan.stages[0].memory_bytes == two
    # A byte less: the first stage recomputes its cores, and has one of them at a time.
    plan, kinds = chosen(problem(two - 1))
    assert kinds == ["selective", "none"]
    assert plan.stages[0].memory_bytes == weights + 2 * 2 * KEPT + CORE
    assert plan.stages[0].compute_seconds == 2 * 3.125
    plan, kinds = chosen(problem(weights + 2 * 2 * KEPT + CORE))
    assert kinds == ["selective", "selective"]
    assert plan.stages[1].memory_bytes == weights + 2 * KEPT + CORE
    # No recomputation keeps less than one microbatch of a stage, or than a core.
    with pytest.raises(InfeasibleError, match="no plan fits"):
        solve(problem(weights + 2 * 2 * KEPT + CORE - 1))


def test_where_inputs_are_small_a_deep_stage_recomputes_all() -> None:
    """Four blocks that keep much beside their cores, over four stages."""
    large = problem(WEIGHTS + KEPT + CORE + 4 * OUTPUT, num_devices=4)
    (sizes,) = large.sizes
    large = replace(large, sizes=(replace(sizes, selective_bytes=(300.0,) * 4),))
    plan, kinds = chosen(large)
    assert len(kinds) == 4
    assert kinds[0] == "full"  # four microbatches in flight
    assert kinds[-1] == "none"


def test_chunks_of_a_device_share_the_room_for_a_core() -> None:
    """Two blocks a device, each a chunk; the schedule holds up to five of them in flight."""
    most = max(sum(one) for one in interleaved_in_flight(2, 4, 2, 0))
    assert most == 5
    plan, kinds = chosen(problem(2 * WEIGHTS + most * (KEPT + CORE), chunks=2))
    assert (plan.num_model_chunks, set(kinds)) == (2, {"none"})
    plan, kinds = chosen(problem(2 * WEIGHTS + most * (KEPT + CORE) - 1, chunks=2))
    assert (plan.num_model_chunks, set(kinds)) == (2, {"selective"})
    assert plan.stages[0].memory_bytes == 2 * WEIGHTS + most * KEPT + CORE


def test_cores_of_unknown_size_are_not_planned() -> None:
    known = problem(10_000)
    with pytest.raises(ProblemError, match="selective_bytes: 0 values for 4 layers"):
        replace(known, sizes=(replace(known.sizes[0], selective_bytes=()),))
    plan, _ = chosen(known)
    faults = check(
        replace(plan, stages=(replace(plan.stages[0], recompute="selective"), *plan.stages[1:])),
        replace(known, recompute=("none", "full")),
    )
    assert faults == ["stage 0 recomputes (selective), which was not asked for"]
