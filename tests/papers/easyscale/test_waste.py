"""EasyScale's mapping: every configuration, in order, against trying them all."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.papers.easyscale.waste import solve
from hetflow.planning.checks.batch_split import check
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.plan import ReplicaGroup
from hetflow.schema.problem import DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint
from hetflow.tests.profiles import examples

SIZE = 4


def pool(max_p: int, *devices: tuple[int, float]) -> SplitProblem:
    """Devices as (number, seconds of one mini-batch)."""
    return SplitProblem(
        model="m",
        global_batch_size=max_p * SIZE,
        virtual_nodes=max_p,
        devices=tuple(
            DeviceOption(
                device_type=f"T{index}",
                num_devices=number,
                batch_curve=(
                    BatchPoint(batch_size=SIZE, step_seconds=seconds, peak_memory_bytes=1),
                ),
                update_seconds=0.0,
                weight_bytes=1,
            )
            for index, (number, seconds) in enumerate(devices)
        ),
    )


pools = st.builds(
    lambda max_p, devices: pool(max_p, *devices),
    st.integers(1, 9),
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([1.0, 2.0, 3.0, 0.37, 1.71])),
        min_size=1,
        max_size=3,
    ),
)


def least_overload(problem: SplitProblem, numbers: tuple[int, ...]) -> float | None:
    """f_overload of N devices: the least f at which they hold maxP ESTs."""
    max_p = problem.virtual_nodes
    times = [option.batch_curve[0].step_seconds for option in problem.devices]
    for overload in sorted({a * t for t in times for a in range(1, max_p + 1)}):
        held = sum(
            n * max(a for a in range(max_p + 1) if a * t <= overload)
            for n, t in zip(numbers, times, strict=True)
        )
        if held >= max_p:
            return overload
    return None


def every_configuration(problem: SplitProblem) -> list[tuple[float, float, int, tuple[int, ...]]]:
    """(f_overload, waste, devices, N) of each N that could spare no device, in order."""
    found = []
    for numbers in product(*(range(o.num_devices + 1) for o in problem.devices)):
        overload = least_overload(problem, numbers)
        fewer = [
            least_overload(problem, (*numbers[:i], n - 1, *numbers[i + 1 :]))
            for i, n in enumerate(numbers)
            if n
        ]
        if overload is None or any(f is not None and f <= overload for f in fewer):
            continue
        peak = sum(
            n / o.batch_curve[0].step_seconds for n, o in zip(numbers, problem.devices, strict=True)
        )
        waste = peak - problem.virtual_nodes / overload
        found.append((overload, round(waste, 9), sum(numbers), numbers))
    return sorted(found)


@settings(max_examples=examples(150))
@given(pools)
def test_the_database_is_every_configuration_in_order(problem: SplitProblem) -> None:
    plan = solve(problem, top=10_000)
    assert check(plan, problem) == []
    ranked = [(plan.groups, plan.est), *((a.groups, a.est) for a in plan.alternatives)]
    found = [(est.overload_factor, numbers_of(problem, groups)) for groups, est in ranked]
    assert found == [(entry[0], entry[3]) for entry in every_configuration(problem)]


def numbers_of(problem: SplitProblem, groups: tuple[ReplicaGroup, ...]) -> tuple[int, ...]:
    return tuple(
        sum(g.num_devices for g in groups if g.device_type == option.device_type)
        for option in problem.devices
    )


@settings(max_examples=examples(100))
@given(pools)
def test_throughput_is_max_p_over_f_overload(problem: SplitProblem) -> None:
    plan = solve(problem, top=5)
    for est in (plan.est, *(a.est for a in plan.alternatives)):
        assert est.throughput * est.overload_factor == pytest.approx(problem.virtual_nodes)
        assert est.num_ests >= est.max_p


def test_equations_by_hand() -> None:
    """Two fast devices (C = 1) and one slow (C = 0.4), five ESTs: A = 2, 2, 1 in 2.5 s."""
    plan = solve(pool(5, (2, 1.0), (1, 2.5)))
    assert (plan.est.max_p, plan.est.num_ests, plan.est.overload_factor) == (5, 5, 2.5)
    assert plan.est.waste == pytest.approx(2 * (1 - 2 / 2.5))
    assert plan.est.throughput == pytest.approx(2.0)
    assert plan.est.capability == {"T0": 1.0, "T1": 0.4}
    assert plan.objective == "waste"


def test_over_provision_runs_fewer_ests_on_some_devices() -> None:
    plan = solve(pool(5, (3, 1.0)))
    assert [(g.num_devices, g.virtual_nodes) for g in plan.groups] == [(2, 2), (1, 1)]
    assert plan.est.num_ests == 6


def test_a_large_pool_does_not_explode() -> None:
    problem = pool(4_096, *((512, 0.1 + 0.013 * i) for i in range(8)))
    plan = solve(problem, top=20)
    assert len(plan.alternatives) == 19
    assert check(plan, problem) == []


def test_the_question_must_make_sense() -> None:
    problem = pool(4, (2, 1.0))
    free = SplitProblem(model="m", global_batch_size=16, devices=problem.devices)
    with pytest.raises(ProblemError, match="needs a number of ESTs"):
        solve(free)
    with pytest.raises(ProblemError, match="top must be at least 1"):
        solve(problem, top=0)
    wrong = SplitProblem(model="m", global_batch_size=16, devices=problem.devices, virtual_nodes=8)
    with pytest.raises(InfeasibleError, match="hold 2 samples each") as caught:
        solve(wrong)
    assert "one of 4" in caught.value.hint


def test_a_device_alone_is_ranked_by_what_it_does_alone() -> None:
    """Alone it takes 3 x 1 s; two that slow each other take 2 x 1.6 s, and one of them 3 x 1.6."""
    from dataclasses import replace

    from hetflow.schema.problem import DeviceCosts

    shared = pool(3, (2, 1.6))
    curve = (BatchPoint(batch_size=SIZE, step_seconds=1.0, peak_memory_bytes=1),)
    apart = DeviceCosts(batch_curve=curve, update_seconds=0.0)
    problem = replace(shared, devices=(replace(shared.devices[0], alone=apart),))
    plan = solve(problem, top=5)
    assert check(plan, problem) == []
    assert plan.num_devices == 1
    assert plan.est.throughput == pytest.approx(1.0)
    assert plan.est.capability == {"T0": 1.0}
    (second,) = plan.alternatives
    assert second.est.overload_factor == pytest.approx(3.2)
    assert second.est.capability == {"T0": pytest.approx(1 / 1.6)}
