"""A parallel plan lowered: ranks, groups, microbatches, devices, and what is refused."""

from dataclasses import replace

import pytest

import hetflow
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import ProblemError
from hetflow.tests.plan_parts import whole_group, with_groups

from .. import handmade
from ..parallel_plans import parallel_plan


def test_ranks_go_through_stages_replicas_and_devices() -> None:
    plan = parallel_plan([(("a",), (2, 2)), (("b",), (1, 1))], microbatch_size=2)
    config = lower(plan, seed=5)
    assert config.pipeline is not None
    first, second = config.pipeline.stages
    assert (first.replicas, second.replicas) == (((0, 1), (2, 3)), ((4,), (5,)))
    assert config.pipeline.placement == ((0, 1), (2, 3))
    held = [[node.index for node in slot.virtual_nodes] for slot in config.workers]
    assert held == [[0, 2], [0, 2], [1, 3], [1, 3], [0, 2], [1, 3]]
    assert (config.seed, config.world_size) == (5, plan.num_devices)


def test_the_last_microbatch_may_be_smaller() -> None:
    config = lower(parallel_plan([(("a",), (2,))], microbatch_size=3))
    assert [node.batch_size for node in config.workers[1].virtual_nodes] == [3, 3, 2]


def test_groups_begin_at_multiples_of_their_degree() -> None:
    plan = parallel_plan([(("a",), (1,)), (("b",), (2,)), (("c",), (1,))])
    assert [slot.device for slot in lower(plan).workers] == [2, 0, 1, 3]


def test_stages_of_a_position_share_its_ranks() -> None:
    parts = [((name,), (2, 1) if name in "ac" else (1, 1)) for name in "abcd"]
    plan = parallel_plan(parts, num_model_chunks=2)
    config = lower(plan)
    assert (plan.num_devices, plan.devices_by_type) == (5, {"cpu:x": 5})
    assert config.pipeline is not None
    replicas = [stage.replicas for stage in config.pipeline.stages]
    assert replicas[:2] == replicas[2:] == [((0, 1), (2,)), ((3,), (4,))]
    assert sorted(slot.device for slot in config.workers) == [0, 1, 2, 3, 4]
    with pytest.raises(ProblemError, match=r"stages\[3\] must have the replicas of stages\[1\]"):
        parallel_plan([*parts[:3], (("d",), (2, 1))], num_model_chunks=2)
    with pytest.raises(ProblemError, match="3 stages do not divide into 2 chunks"):
        parallel_plan(parts[:3], num_model_chunks=2)


def test_a_stage_recomputes_by_itself() -> None:
    plan = parallel_plan([(("a",), (2,)), (("b",), (2,))])
    again = replace(plan, stages=(replace(plan.stages[0], recompute="full"), plan.stages[1]))
    work = lower(again).pipeline
    assert work is not None
    assert [work.recomputes(number) for number in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"microbatch_size": 8}, "too few for 2 replicas"),
    ],
)
def test_what_cannot_be_launched(changes: dict[str, int], said: str) -> None:
    plan = parallel_plan([(("a",), (1, 2))], **changes)
    with pytest.raises(ProblemError, match=said):
        lower(plan)


def test_plans_that_are_too_large_to_list_are_refused() -> None:
    """A launch of one hung, also with --dry-run."""
    one = parallel_plan([(("a",), (1,))])
    group = one.stages[0].replicas[0]
    for degree, batch, said in (
        (10**9, 8, "1000000000 workers; at most 65536"),
        (1, 10**9, "500000000 virtual nodes in a step; at most 1048576"),
    ):
        replicas = (
            replace(group, tensor_parallel_size=degree, samples=batch, virtual_nodes=batch),
        )
        stages = (replace(one.stages[0], replicas=replicas),)
        plan = replace(one, global_batch_size=batch, num_microbatches=-(-batch // 2), stages=stages)
        with pytest.raises(ProblemError, match=said):
            lower(plan)
    shares = whole_group(
        device_type="cpu",
        num_devices=2,
        device_batch_size=10**9,
        virtual_nodes=10**9,
        virtual_node_batch_size=1,
    )
    split = hetflow.solve([handmade.profile("cpu", 1.0)], "cpu", batch_size=16)
    assert split.kind == "split"
    with pytest.raises(ProblemError, match="2000000000 virtual nodes in a step"):
        lower(with_groups(split, global_batch_size=2 * 10**9, groups=(shares,)))
