"""The fast search, the MILP with both backends and brute force agree; plans are what they claim."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hetflow.checks.batch_split import check
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.plan import SplitPlan
from hetflow.schema.problem import DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint, Sync
from hetflow.solvers import batch_split_milp
from hetflow.solvers.batch_split import nearest_batches, solve

# Random pools are often infeasible; the properties hold where a plan exists.
REPEATABLE = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.filter_too_much],
}


@st.composite
def syncs(draw: st.DrawFn) -> Sync | None:
    kind = draw(st.sampled_from(["none", "constant", "steep", "flat"]))
    seconds = draw(st.floats(0, 3))
    if kind == "none":
        return None
    if kind == "constant":
        return Sync(num_devices=2, sync_seconds=seconds)
    return Sync(
        num_devices=draw(st.integers(2, 4)),
        sync_seconds=seconds,
        latency_seconds=draw(st.floats(0.0, 1.0 if kind == "steep" else 0.05)),
        bytes_per_second=draw(st.floats(0.2, 10.0)),
    )


@st.composite
def options(draw: st.DrawFn, name: str) -> DeviceOption:
    sizes = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=4)))
    rate, fixed = draw(st.floats(0.2, 4)), draw(st.sampled_from([0.0, 0.125, 1.0]))
    noise = [draw(st.floats(0.7, 1.3)) for _ in sizes]
    exact = draw(st.booleans())  # whole times make ties
    points = tuple(
        BatchPoint(
            batch_size=size,
            step_seconds=float(size) if exact else fixed + size / rate * wobble,
            peak_memory_bytes=10 * size,
        )
        for size, wobble in zip(sizes, noise, strict=True)
    )
    return DeviceOption(
        device_type=name,
        num_devices=draw(st.integers(1, 3)),
        batch_curve=points,
        update_seconds=draw(st.sampled_from([0.0, 0.1, 1.5])),
        weight_bytes=1,
        sync=draw(syncs()),
    )


@st.composite
def problems(draw: st.DrawFn) -> SplitProblem:
    batch = draw(st.integers(1, 36))
    uniform = draw(
        st.sampled_from([None, None, *(n for n in range(1, batch + 1) if batch % n == 0)])
    )
    devices = tuple(draw(options(f"T{i}")) for i in range(draw(st.integers(1, 3))))
    return SplitProblem(model="m", global_batch_size=batch, devices=devices, virtual_nodes=uniform)


def device_costs(problem: SplitProblem, option: DeviceOption) -> dict[int, float]:
    """Samples on one device -> the least time, by trying everything."""
    share = problem.virtual_nodes and problem.global_batch_size // problem.virtual_nodes
    costs: dict[int, float] = {}
    for point in option.batch_curve:
        if share in (None, point.batch_size):
            for passes in range(1, problem.global_batch_size // point.batch_size + 1):
                samples, seconds = passes * point.batch_size, passes * point.step_seconds
                costs[samples] = min(seconds, costs.get(samples, seconds))
    return costs


def brute_force(problem: SplitProblem) -> float | None:
    """The least step time over every assignment of samples to every device."""
    # (samples so far, devices in use, types in use) -> least slowest device: nothing is pruned.
    states: dict[tuple[int, int, frozenset[int]], float] = {(0, 0, frozenset()): 0.0}
    for kind, option in enumerate(problem.devices):
        costs = device_costs(problem, option)
        for _ in range(option.num_devices):
            after = dict(states)
            for (done, used, kinds), slowest in states.items():
                for samples, seconds in costs.items():
                    key = (done + samples, used + 1, kinds | {kind})
                    time = max(slowest, seconds)
                    if key[0] <= problem.global_batch_size and time < after.get(key, time + 1):
                        after[key] = time
            states = after
    return min(
        (
            slowest + overhead(problem, used, kinds)
            for (done, used, kinds), slowest in states.items()
            if done == problem.global_batch_size
        ),
        default=None,
    )


def overhead(problem: SplitProblem, used: int, kinds: frozenset[int]) -> float:
    chosen = [problem.devices[kind] for kind in kinds]
    exposed = max(synchronisation(option, used) for option in chosen) if used > 1 else 0.0
    return exposed + max(option.update_seconds for option in chosen)


def synchronisation(option: DeviceOption, used: int) -> float:
    """VirtualFlow 5.1.2 and docs/decisions.md once more: nothing of the solvers' own is called."""
    sync, cap = option.sync, option.link_bytes_per_second
    if sync is None:
        return 0.0
    if sync.bytes_per_second is None:
        wire = 0.0 if cap is None else hops(used) / used * option.weight_bytes / cap
        return max(sync.sync_seconds, wire)

    def ring(members: int, rate: float) -> float:
        return hops(members) * (sync.latency_seconds + option.weight_bytes / members / rate)

    rate = sync.bytes_per_second
    grown = ring(used, rate if cap is None else min(rate, cap)) - ring(sync.num_devices, rate)
    return max(0.0, sync.sync_seconds + grown)


def hops(members: int) -> int:
    return 2 * (members - 1)


def step_or_none(problem: SplitProblem) -> float | None:
    try:
        plan = solve(problem)
    except InfeasibleError:
        return None
    assert check(plan, problem) == []
    assert plan.proof.termination == "optimal"
    return plan.predicted.step_seconds


@settings(max_examples=400, **REPEATABLE)
@given(problems())
def test_the_fast_search_equals_brute_force(problem: SplitProblem) -> None:
    expected, found = brute_force(problem), step_or_none(problem)
    assert (found is None) == (expected is None)
    assert expected is None or found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("backend", ["cbc", "highs"])
@settings(max_examples=60, **REPEATABLE)
@given(problem=problems())
def test_the_milp_equals_the_fast_search(backend: batch_split_milp.Backend, problem) -> None:
    expected = step_or_none(problem)
    if expected is None:
        with pytest.raises(InfeasibleError):
            batch_split_milp.solve(problem, backend)
        return
    plan = batch_split_milp.solve(problem, backend)
    assert check(plan, problem) == []
    assert plan.predicted.step_seconds == pytest.approx(expected, rel=1e-9)


def with_device(problem: SplitProblem, **changes: object) -> SplitProblem:
    return replace(problem, devices=(replace(problem.devices[0], **changes), *problem.devices[1:]))


@settings(max_examples=150, **REPEATABLE)
@given(problems(), st.integers(1, 4))
def test_more_devices_are_never_worse(problem: SplitProblem, more: int) -> None:
    before = step_or_none(problem)
    assume(before is not None)
    after = step_or_none(with_device(problem, num_devices=problem.devices[0].num_devices + more))
    assert after <= before * (1 + 1e-12)


@settings(max_examples=150, **REPEATABLE)
@given(problems(), st.integers(1, 3))
def test_more_memory_is_never_worse(problem: SplitProblem, drop: int) -> None:
    curve = problem.devices[0].batch_curve
    kept = curve[: max(1, len(curve) - drop)]
    before = step_or_none(with_device(problem, batch_curve=kept))
    assume(before is not None)
    assert step_or_none(problem) <= before * (1 + 1e-12)


def scaled(problem: SplitProblem, factor: float, kinds: Iterator[int] | range) -> SplitProblem:
    devices = list(problem.devices)
    for kind in kinds:
        curve = tuple(
            replace(p, step_seconds=p.step_seconds * factor) for p in devices[kind].batch_curve
        )
        devices[kind] = replace(devices[kind], batch_curve=curve)
    return replace(problem, devices=tuple(devices))


@settings(max_examples=150, **REPEATABLE)
@given(problems(), st.floats(0.3, 1.0))
def test_a_faster_type_is_never_worse(problem: SplitProblem, factor: float) -> None:
    before = step_or_none(problem)
    assume(before is not None)
    assert step_or_none(scaled(problem, factor, range(1))) <= before * (1 + 1e-12)


@settings(max_examples=100, **REPEATABLE)
@given(problems(), st.sampled_from([0.25, 3.7, 1e4]))
def test_scaling_every_time_scales_the_answer(problem: SplitProblem, factor: float) -> None:
    plain = replace(
        problem,
        devices=tuple(replace(o, sync=None, update_seconds=0.0) for o in problem.devices),
    )
    before = step_or_none(plain)
    assume(before is not None)
    after = step_or_none(scaled(plain, factor, range(len(plain.devices))))
    assert after == pytest.approx(before * factor, rel=1e-9)


@settings(max_examples=100, **REPEATABLE)
@given(problems())
def test_the_nearest_batches_have_a_plan_and_none_is_nearer(problem: SplitProblem) -> None:
    free = replace(problem, virtual_nodes=None)
    below, above = nearest_batches(free)

    def feasible(batch: int) -> bool:
        return brute_force(replace(free, global_batch_size=batch)) is not None

    batch = free.global_batch_size
    lower = [b for b in range(1, batch) if feasible(b)]
    assert below == (max(lower) if lower else None)
    assert above == next(b for b in range(batch + 1, 2 * batch + 13) if feasible(b))


def option(name: str, number: int, times: dict[int, float], **fields: object) -> DeviceOption:
    curve = tuple(
        BatchPoint(batch_size=size, step_seconds=seconds, peak_memory_bytes=1)
        for size, seconds in times.items()
    )
    return DeviceOption(
        device_type=name,
        num_devices=number,
        batch_curve=curve,
        **{"update_seconds": 0.0, "weight_bytes": 1_000, **fields},
    )


def free(batch: int, *devices: DeviceOption) -> SplitProblem:
    return SplitProblem(model="m", global_batch_size=batch, devices=devices)


def shape(plan: SplitPlan) -> list[tuple[str, int, int, int]]:
    return [
        (g.device_type, g.num_devices, g.virtual_nodes, g.virtual_node_batch_size)
        for g in plan.groups
    ]


def test_infeasible_names_the_rule_and_the_nearest_batches() -> None:
    with pytest.raises(InfeasibleError) as caught:
        solve(free(30, option("A", 3, {8: 1.0, 12: 1.4})))
    assert "exactly 30" in caught.value.message
    assert "28 and 32" in caught.value.hint
    with pytest.raises(InfeasibleError, match="below 8, the smallest profiled"):
        solve(free(5, option("A", 3, {8: 1.0})))


def test_infeasible_uniform_names_sizes_that_have_a_plan() -> None:
    problem = replace(free(64, option("A", 2, {8: 1.0, 32: 3.0})), virtual_nodes=4)
    with pytest.raises(InfeasibleError, match="hold 16 samples each") as caught:
        solve(problem)
    assert "32 and 128" in caught.value.hint


def test_ties_prefer_all_devices_of_a_type_alike() -> None:
    """Within 4 s, (4, 4) and (1, 0, 0) would do too, and load the faster type more."""
    plan = solve(free(9, option("A", 2, {1: 1.0}), option("B", 3, {1: 4.0})))
    assert shape(plan) == [("A", 2, 3, 1), ("B", 3, 1, 1)]


def test_ties_prefer_fewer_devices_and_virtual_nodes() -> None:
    assert shape(solve(free(4, option("A", 3, {1: 1.0})))) == [("A", 2, 2, 1)]
    assert shape(solve(free(8, option("A", 2, {1: 1.0, 2: 2.0, 4: 4.0})))) == [("A", 2, 1, 4)]


def test_ties_load_the_faster_type_first() -> None:
    """Within 4 s, A could do 4 samples and B 6; B is faster, so it does all the 8 it can."""
    plan = solve(free(10, option("A", 1, {1: 1.0}), option("B", 1, {2: 1.0})))
    assert shape(plan) == [("A", 1, 2, 1), ("B", 1, 4, 2)]


def test_devices_of_one_type_differ_as_little_as_they_must() -> None:
    plan = solve(free(11, option("A", 4, {1: 1.0})))
    assert shape(plan) == [("A", 3, 3, 1), ("A", 1, 2, 1)]


def test_a_single_device_does_not_synchronise() -> None:
    slow_link = Sync(num_devices=2, sync_seconds=10.0)
    plan = solve(free(8, option("A", 4, {4: 2.0}, sync=slow_link)))
    assert shape(plan) == [("A", 1, 2, 4)]
    assert plan.predicted.sync_seconds == 0


def test_a_type_is_left_out_when_its_update_costs_more_than_it_helps() -> None:
    fast = option("fast", 2, {4: 1.0})
    plan = solve(free(40, fast, option("slow", 1, {4: 2.0}, update_seconds=5.0)))
    assert shape(plan) == [("fast", 2, 5, 4)]


def test_fewer_devices_are_used_when_synchronisation_grows() -> None:
    link = Sync(num_devices=2, sync_seconds=0.1, latency_seconds=0.25, bytes_per_second=1e12)
    plan = solve(free(64, option("A", 64, {1: 0.25}, sync=link)))
    steps = [
        -(-64 // n) * 0.25 + (0.1 + 2 * (n - 2) * 0.25 if n > 1 else 0.0) for n in range(1, 65)
    ]
    assert plan.predicted.step_seconds == pytest.approx(min(steps), rel=1e-6)


def test_the_limits_of_size_are_solved_and_checked() -> None:
    """Eight types, 4,096 devices, a batch of 65,535 (odd: hard to add up), in every regime."""
    sizes = (1, 2, 3, 4, 6, 8, 12, 16)
    link = Sync(num_devices=2, sync_seconds=0.03, latency_seconds=2e-5, bytes_per_second=2e9)
    for sync in (None, link):
        devices = [
            option(f"T{i}", 512, {s: 0.002 * i + s / (200 * i) for s in sizes}, sync=sync)
            for i in range(1, 9)
        ]
        problem = free(65_535, *devices)
        assert check(solve(problem), problem) == []
        uniform = replace(problem, virtual_nodes=21_845)
        assert check(solve(uniform), uniform) == []


def test_a_time_limit_ends_in_feasible_with_a_bound() -> None:
    devices = [
        option(f"T{i}", 4, {s: 0.003 * i + s / (700 * i + 1) for s in (32, 48, 64, 96, 128)})
        for i in range(1, 5)
    ]
    problem = free(16_384, *devices)
    best = solve(problem).predicted.step_seconds
    for backend in ("cbc", "highs"):
        plan = batch_split_milp.solve(problem, backend, time_limit_seconds=0.4)
        assert check(plan, problem) == []
        assert plan.proof.lower_bound <= best * (1 + 1e-9) <= plan.proof.objective * (1 + 2e-9)
        if plan.predicted.step_seconds > best * (1 + 1e-9):
            assert plan.proof.termination == "feasible"
