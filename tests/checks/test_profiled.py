"""Memory, layers and times of a problem against the profiles that it was built from."""

import dataclasses

import pytest

import hetflow
from hetflow.planning.checks.profiled import pipeline_faults, split_faults, split_view_faults
from hetflow.planning.costs.memory import COMPARED_BYTES, LOSS_BYTES, NUMBERS_BYTES
from hetflow.planning.pipeline_problem import pipeline_problem
from hetflow.planning.split_problem import split_problem
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.plan import Plan
from hetflow.schema.problem import Problem
from hetflow.schema.profile import (
    BatchPoint,
    BusyHost,
    LayerGraph,
    LayerNode,
    PipelineCosts,
    Profile,
)
from hetflow.solvers.split.solve import solve
from hetflow.tests.plan_parts import with_groups

NODES = tuple(
    LayerNode(
        id=f"l{i}", op="Linear", forward_seconds=0.1 * (i + 1), backward_seconds=0.3,
        activation_bytes=100, weight_bytes=1000, stashed_bytes=150, workspace_bytes=10 * i,
    )
    for i in range(3)
)  # fmt: skip
PROFILE = Profile(
    model="m", device_type="V100", device_memory_bytes=20_000_000, weight_bytes=3000,
    update_seconds=0.01, optimizer=named_optimizer("sgd"),
    batch_curve=tuple(
        BatchPoint(batch_size=size, step_seconds=0.1 * size, peak_memory_bytes=4000 + 1000 * size)
        for size in (2, 8)
    ),
    layers=LayerGraph(microbatch_size=2, nodes=NODES, edges=(("l0", "l1"), ("l1", "l2"))),
)  # fmt: skip
POOL = Cluster.parse("1xV100")


def split(size: int) -> Plan:
    return solve(split_problem(Problem([PROFILE], POOL, size), interpolate=True))


def test_a_pass_that_does_not_fit_is_refused() -> None:
    plan = split(8)  # 12,000 bytes
    assert split_faults(plan, Problem([PROFILE], POOL, 8)) == []
    small = Cluster.parse("V100:1:11KB")
    assert any(
        "needs 12000 bytes on a V100 of" in f
        for f in split_faults(plan, Problem([PROFILE], small, 8))
    )
    # Adam keeps twice 3,000 bytes more than what the peak was measured with; between two sizes
    # memory is on the line: 4,000 + 5,000.
    adam = named_optimizer("adam")
    tight = dataclasses.replace(PROFILE, device_memory_bytes=14_999)
    (group,) = plan.groups
    between = dataclasses.replace(
        group, virtual_node_batch_size=5, samples=5, pass_seconds=None, memory_bytes=None
    )
    assert split_faults(
        with_groups(plan, groups=(dataclasses.replace(group, memory_bytes=11_998),)),
        Problem([PROFILE], POOL, 8),
    ) == ["groups[0]: memory_bytes is 11998, it takes 12000"]
    middle = with_groups(plan, groups=(between,), global_batch_size=5)
    assert split_faults(middle, Problem([tight], POOL, 8)) == []
    (fault,) = split_faults(middle, Problem([tight], POOL, 8, optimizer=adam))
    assert "needs 15000 bytes on a V100 of 14999: 1 too many" in fault


def test_a_pass_that_was_measured_for_other_plans_is_refused() -> None:
    """One device goes by 0.1 s a sample, two that share a host by twice as much."""
    busy = BusyHost(
        num_devices=2,
        batch_curve=tuple(
            dataclasses.replace(point, step_seconds=2 * point.step_seconds)
            for point in PROFILE.batch_curve
        ),
        update_seconds=0.02,
    )
    told = [dataclasses.replace(PROFILE, busy=busy)]
    one, two = Cluster.parse("1xV100"), Cluster.parse("2xV100")
    single, both = (solve(split_problem(Problem(told, pool, 16))) for pool in (one, two))
    assert both.num_devices == 1  # company costs more than it helps
    wide = solve(split_problem(Problem(told, Cluster.parse("8xV100"), 16)))
    assert wide.num_devices == 8
    assert wide.groups[0].pass_seconds == pytest.approx(0.4)
    eight = Cluster.parse("8xV100")
    assert (
        split_faults(single, Problem(told, one, 8))
        == split_faults(wide, Problem(told, eight, 8))
        == []
    )
    (fault,) = split_faults(wide, Problem([PROFILE], eight, 8))
    assert "pass_seconds is 0.4, measured for a plan on 8 device(s) were 0.2" in fault
    apart = Cluster.parse("8x(1xV100)")  # no device has company on its host
    assert any("were 0.2" in fault for fault in split_faults(wide, Problem(told, apart, 8)))
    assert (
        split_faults(solve(split_problem(Problem(told, apart, 16))), Problem(told, apart, 8)) == []
    )


def test_the_split_s_problem_counts_the_optimizer_that_will_train() -> None:
    def sizes(name: str, memory: int) -> list[int]:
        told = dataclasses.replace(PROFILE, device_memory_bytes=memory)
        problem = split_problem(Problem([told], POOL, 8, optimizer=named_optimizer(name)))
        assert problem.optimizer == named_optimizer(name)
        return [point.batch_size for point in problem.devices[0].batch_curve]

    assert sizes("sgd", 12_000) == [2, 8]
    assert sizes("adam", 12_000) == [2]
    assert sizes("adam", 18_000) == [2, 8]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_bytes": 30_000}, "memory_bytes is 30000, the profiles give 20000000"),
        ({"workspace_bytes": 0}, "workspace_bytes is 0, the profiles give 141312"),
        ({"base_memory_bytes": 7}, "base_memory_bytes is 7, the profiles give None"),
        ({"forward_seconds": (0.1, 0.1, 0.3)}, "forward_seconds is 0.1, the profiles give 0.2"),
        ({"update_seconds": 0.0}, "update_seconds is 0.0, the profiles give 0.01"),
    ],
)
def test_a_pool_at_odds_with_its_profile_is_refused(changes: dict, said: str) -> None:
    problem = pipeline_problem(Problem([PROFILE], POOL, 8))
    assert pipeline_faults(problem, Problem([PROFILE], POOL, 8)) == []
    wrong = dataclasses.replace(problem, pools=(dataclasses.replace(problem.pools[0], **changes),))
    assert any(said in fault for fault in pipeline_faults(wrong, Problem([PROFILE], POOL, 8)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_bytes": 1}, "weight_bytes is 1, the profiles give 1000"),
        ({"stashed_bytes": None}, "kept_bytes is 100, the profiles give 150"),
    ],
)
def test_layers_at_odds_with_their_profile_are_refused(changes: dict, said: str) -> None:
    problem = pipeline_problem(Problem([PROFILE], POOL, 8))
    first = dataclasses.replace(problem.layers[0], **changes)
    wrong = dataclasses.replace(problem, layers=(first, *problem.layers[1:]))
    faults = pipeline_faults(wrong, Problem([PROFILE], POOL, 8))
    assert faults == [f"the problem's V100: l0: {said}"]


def test_a_cpu_s_base_and_update_are_set_aside() -> None:
    told = dataclasses.replace(PROFILE, base_memory_bytes=9_000, update_workspace_bytes=500)
    problem = pipeline_problem(Problem([told], POOL, 8))
    (pool,) = problem.pools
    beside = COMPARED_BYTES + NUMBERS_BYTES + 4 * LOSS_BYTES  # of four microbatches
    assert (pool.base_memory_bytes, pool.workspace_bytes) == (9_000, beside + 500)
    assert pool.limit_bytes == 20_000_000 - 9_500 - beside
    assert pipeline_faults(problem, Problem([told], POOL, 8)) == []
    wrong = dataclasses.replace(problem, pools=(dataclasses.replace(pool, workspace_bytes=0),))
    said = "workspace_bytes is 0, the profiles give 141812"
    assert any(said in fault for fault in pipeline_faults(wrong, Problem([told], POOL, 8)))
    among = dataclasses.replace(told, group_workspace_bytes=30)
    assert pipeline_problem(Problem([among], POOL, 8)).pools[0].workspace_bytes == beside + 530
    assert (
        pipeline_faults(pipeline_problem(Problem([among], POOL, 8)), Problem([among], POOL, 8))
        == []
    )
    said = "workspace_bytes is 141812, the profiles give 141842"
    assert any(said in fault for fault in pipeline_faults(problem, Problem([among], POOL, 8)))
    for fragments, more in ((20, 30), (80, 80)):  # both measurements hold fragments
        costs = PipelineCosts(
            pass_seconds=0.0, message_seconds=0.0, fixed_seconds=0.0, fragmentation_bytes=fragments
        )
        pieces = dataclasses.replace(among, pipeline=costs)
        problem = pipeline_problem(Problem([pieces], POOL, 8))
        assert problem.pools[0].workspace_bytes == beside + 500 + more
        assert pipeline_faults(problem, Problem([pieces], POOL, 8)) == []
    full = dataclasses.replace(told, device_memory_bytes=9_720)
    with pytest.raises(
        InfeasibleError, match="needs 142212 bytes .* beside 9000 before there is a"
    ):
        pipeline_problem(Problem([full], POOL, 8))


@pytest.mark.parametrize("shards", [(), ("all",)])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update_seconds": 0.02}, "update_seconds is 0.02, the profiles give 0.04"),
        ({"fixed_seconds": 0.5}, "fixed_seconds is 0.5, the profiles give 0.25"),
        ({"step_error": 0.5}, "step_error is 0.5, the profiles give None"),
        ({"alone": None}, "alone is not as the profiles were measured"),
        ({"num_devices": 3}, "num_devices is 3, the profiles give 2"),
    ],
)
def test_a_split_s_devices_at_odds_with_their_profile_are_refused(
    shards: tuple, changes: dict, said: str
) -> None:
    busy = BusyHost(
        num_devices=2, batch_curve=PROFILE.batch_curve, update_seconds=0.04, fixed_seconds=0.25
    )
    asked = Problem([dataclasses.replace(PROFILE, busy=busy)], Cluster.parse("2xV100"), 8)
    view = split_problem(asked, shards=shards)
    assert split_view_faults(view, asked) == []
    (option,) = view.devices
    wrong = dataclasses.replace(view, devices=(dataclasses.replace(option, **changes),))
    assert any(said in fault for fault in split_view_faults(wrong, asked))


def test_a_plan_repeats_how_fast_its_devices_were() -> None:
    told = [dataclasses.replace(PROFILE, reference_seconds=0.002)]
    plan = hetflow.solve(told, POOL, batch_size=8)
    assert plan.reference_seconds == {"V100": 0.002}
    assert hetflow.check(plan, told) == []
    wrong = dataclasses.replace(plan, reference_seconds={"V100": 0.003})
    assert any("reference_seconds" in fault for fault in hetflow.check(wrong, told))
    older = dataclasses.replace(plan, reference_seconds=None)
    assert hetflow.check(older, told) == []
