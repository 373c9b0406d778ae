"""The judge of plans of three dimensions finds every claim that was changed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hetflow.planning.checks.parallel import check
from hetflow.schema.errors import ProblemError
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
from hetflow.tests.plan_parts import replica_group, with_rounds


def pool(name: str, slowness: float) -> ParallelPool:
    return ParallelPool(
        device_type=name,
        num_devices=2,
        devices_per_server=2,
        memory_bytes=600,
        times=(
            ShardTimes(
                tensor_parallel_size=1,
                microbatch_size=1,
                forward_seconds=(slowness,) * 4,
                backward_seconds=(2 * slowness,) * 4,
                update_seconds=(0.25,) * 4,
            ),
        ),
        links=(DegreeLink(tensor_parallel_size=1, curve=LinkCurve(coefficients=(100.0,))),),
    )


@pytest.fixture(scope="module")
def problem() -> ParallelProblem:
    return ParallelProblem(
        model="m",
        global_batch_size=8,
        layers=("a", "b", "c", "d"),
        output_bytes=(10,) * 4,
        pools=(pool("fast", 1.0), pool("slow", 2.0)),
        sizes=(
            ShardSizes(tensor_parallel_size=1, weight_bytes=(50,) * 4, stashed_bytes=(10.0,) * 4),
        ),
    )


@pytest.fixture(scope="module")
def plan(problem: ParallelProblem) -> Plan:
    found = solve(problem)
    assert len(found.stages) > 1  # one device cannot hold the weights
    return found


def with_stage(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], **changes), *plan.stages[1:]))


def with_group(plan: Plan, **changes: Any) -> Plan:
    first, *others = plan.stages[0].replicas
    return with_stage(plan, replicas=(replace(first, **changes), *others))


CHANGES: list[tuple[str, Callable[[Plan], Plan]]] = [
    ("model is", lambda p: replace(p, model="other")),
    ("all layers once", lambda p: with_stage(p, layers=p.stages[0].layers[:-1])),
    ("is not judged", lambda p: replace(p, schedule="gpipe")),
    ("virtual nodes (number, size) are", lambda p: with_group(p, virtual_nodes=9)),
    ("replicas share optimizer", lambda p: replace(p, shard_optimizer=True)),
    ("which was not asked for", lambda p: with_stage(p, recompute="full")),
    ("the pool has no", lambda p: with_group(p, device_type="fats")),
    ("hold no group of 4", lambda p: with_group(p, tensor_parallel_size=4)),
    ("was not timed at degree 2", lambda p: with_group(p, tensor_parallel_size=2)),
    ("replicas; all must have", lambda p: with_group(p, num_replicas=7)),
    ("memory_bytes is", lambda p: with_group(p, memory_bytes=7)),
    ("compute_seconds is", lambda p: with_stage(p, compute_seconds=7.0)),
    ("transfer_seconds is", lambda p: with_stage(p, transfer_seconds=7.0)),
    ("reduce_seconds is", lambda p: with_stage(p, reduce_seconds=7.0)),
    ("update_seconds is", lambda p: with_stage(p, update_seconds=7.0)),
    ("step_seconds is", lambda p: replace(p, predicted=replace(p.predicted, step_seconds=7.0))),
    (
        "samples/s in",
        lambda p: replace(p, predicted=replace(p.predicted, samples_per_second=7.0)),
    ),
    ("memory_bytes is", lambda p: with_group(p, memory_bytes=None)),
    ("objective 7.0 s is not", lambda p: replace(p, proof=replace(p.proof, objective=7.0))),
    ("is above the objective", lambda p: replace(p, proof=replace(p.proof, lower_bound=1e9))),
    ("leaves a gap of", lambda p: replace(p, proof=replace(p.proof, lower_bound=1.0))),
    ("no lower_bound", lambda p: replace(p, proof=replace(p.proof, lower_bound=None))),
]  # fmt: skip


def test_the_plan_itself_holds(plan: Plan, problem: ParallelProblem) -> None:
    assert check(plan, problem) == []


@pytest.mark.parametrize(("said", "change"), CHANGES, ids=[said for said, _ in CHANGES])
def test_every_change_is_found(
    plan: Plan,
    problem: ParallelProblem,
    said: str,
    change: Callable[[Plan], Plan],
) -> None:
    faults = check(change(plan), problem)
    assert any(said in fault for fault in faults), faults


def test_what_crosses_a_boundary(problem: ParallelProblem) -> None:
    """A group of 2 sends twice the bytes without scatter/gather; blocking ends count them twice."""
    one = problem.pools[0].times[0]
    half = ShardSizes(tensor_parallel_size=2, weight_bytes=(50,) * 4, stashed_bytes=(5.0,) * 4)
    pools = tuple(
        replace(
            pool,
            times=(replace(one, tensor_parallel_size=2),),
            links=(
                *pool.links,
                DegreeLink(tensor_parallel_size=2, curve=LinkCurve(coefficients=(50.0,))),
            ),
        )
        for pool in problem.pools
    )
    grouped = replace(problem, pools=pools, sizes=(*problem.sizes, half))
    transfers = []
    for rule in ("scattered", "whole", "blocking"):
        asked = replace(grouped, boundary_rule=rule)
        found = solve(asked)
        assert check(found, asked) == []
        assert [g.tensor_parallel_size for s in found.stages for g in s.replicas] == [2, 2]
        transfers.append(found.stages[0].transfer_seconds)
    assert transfers == pytest.approx([10 / 50, 20 / 50, 20 / 50])


def test_devices_and_memory_that_are_not_there(plan: Plan, problem: ParallelProblem) -> None:
    fewer = replace(problem, pools=tuple(replace(p, num_devices=1) for p in problem.pools))
    assert any("are used, there are 1" in fault for fault in check(plan, fewer))
    small = replace(problem, pools=tuple(replace(p, memory_bytes=100) for p in problem.pools))
    assert any("which has 0.0 MiB" in fault for fault in check(plan, small))


def test_shares_that_do_not_add_up(plan: Plan) -> None:
    group = plan.stages[0].replicas[0]
    with pytest.raises(ProblemError, match="not the global batch of 8"):
        with_group(plan, samples=group.samples - 1)
    lone = replica_group(device_type="fast", tensor_parallel_size=1, num_replicas=1, samples=8)
    with pytest.raises(ProblemError, match="which take at most"):
        replace(lone, virtual_nodes=1)
    with pytest.raises(ProblemError, match="are not the global batch of 8"):
        replace(plan, num_microbatches=plan.num_microbatches + 1)


def with_batches_of(plan: Plan, size: int) -> Plan:
    """The plan with one microbatch of the whole batch on its only replicas."""
    stages = with_rounds(plan.stages, 1, size)
    return replace(plan, microbatch_size=size, num_microbatches=1, stages=stages)


@pytest.fixture(scope="module")
def interleaved(problem: ParallelProblem) -> tuple[Plan, ParallelProblem]:
    fast = replace(problem.pools[0], memory_bytes=700)
    asked = replace(problem, pools=(fast,), num_model_chunks=(2,))
    return solve(asked), asked


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("is not judged", lambda p: replace(p, schedule="1f1b")),
        ("do not interleave", lambda p: with_batches_of(p, 8)),
        ("memory_bytes is", lambda p: with_group(p, memory_bytes=7)),
        ("compute_seconds is", lambda p: with_stage(p, compute_seconds=7.0)),
        ("step_seconds is", lambda p: replace(p, predicted=replace(p.predicted, step_seconds=7.0))),
    ],
)
def test_every_change_of_an_interleaved_plan_is_found(
    interleaved: tuple[Plan, ParallelProblem],
    said: str,
    change: Callable[[Plan], Plan],
) -> None:
    plan, asked = interleaved
    assert plan.num_model_chunks == 2
    assert check(plan, asked) == []
    faults = check(change(plan), asked)
    assert any(said in fault for fault in faults), faults
    assert "2 chunks a device were not asked for" in check(
        plan, replace(asked, num_model_chunks=(1,))
    )
