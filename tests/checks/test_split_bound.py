"""A split's bound is refuted by any faster split, not only by splits of equal devices."""

import random
from dataclasses import replace

import pytest
from tests.checks.tampered import PROFILES

import hetflow
from hetflow.planning.checks.batch_split import check
from hetflow.planning.checks.split_bound import faster
from hetflow.schema.problem import DeviceCosts, DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint, Sync, SyncPoint
from hetflow.solvers.split.solve import solve


def drawn(draw: random.Random) -> SplitProblem:
    def curve(slowness: float) -> tuple[BatchPoint, ...]:
        sizes = sorted(draw.sample(range(1, 12), 3))
        return tuple(
            BatchPoint(batch_size=s, step_seconds=slowness * (0.3 + s), peak_memory_bytes=1)
            for s in sizes
        )

    options = []
    for name in "ABC"[: draw.randint(1, 3)]:
        slowness = draw.choice((0.7, 1.0, 2.3))
        own = curve(slowness)
        alone = DeviceCosts(batch_curve=own, update_seconds=0.1) if draw.random() < 0.5 else None
        sync = Sync(
            num_devices=2,
            sync_seconds=draw.random(),
            by_batch_size=tuple(
                SyncPoint(batch_size=p.batch_size, sync_seconds=draw.random()) for p in own
            )
            if draw.random() < 0.5
            else (),
        )
        options.append(
            DeviceOption(
                device_type=name, num_devices=draw.randint(1, 3), batch_curve=own, alone=alone,
                update_seconds=draw.random(), fixed_seconds=draw.random(), weight_bytes=1,
                sync=sync,
            )
        )  # fmt: skip
    return SplitProblem(model="m", global_batch_size=draw.randint(10, 60), devices=tuple(options))


@pytest.mark.parametrize("seed", range(60))
def test_only_a_bound_above_the_optimum_is_refuted(seed: int) -> None:
    problem = drawn(random.Random(seed))
    try:
        plan = solve(problem, fastest=True)
    except hetflow.InfeasibleError:
        assert faster(problem, 1e9) is None
        return
    assert faster(problem, plan.proof.objective) is None
    assert check(plan, problem) == []
    # Synchronisation here does not depend on the number of devices, so any step is refuted.
    assert faster(problem, plan.proof.objective * (1 + 1e-6)) is not None


def test_a_plan_for_fewer_devices_is_no_optimum_of_the_whole_pool() -> None:
    plan = hetflow.solve(PROFILES, "1xA,1xB", batch_size=64, strategy="split", fastest=True)
    assert hetflow.check(plan, PROFILES, "1xA,1xB") == []
    (fault,) = hetflow.check(plan, PROFILES, "1xA,2xB")
    assert "is refuted: several of" in fault


def test_equal_virtual_nodes_are_judged_at_their_size_only() -> None:
    problem = replace(drawn(random.Random(2)), global_batch_size=24)
    size = problem.devices[0].batch_curve[0].batch_size
    problem = replace(problem, global_batch_size=12 * size, virtual_nodes=12)
    plan = solve(problem, fastest=True)
    assert faster(problem, plan.proof.objective) is None
    assert faster(replace(problem, virtual_nodes=None), plan.proof.objective * 2) is not None
