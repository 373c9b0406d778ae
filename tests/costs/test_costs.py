"""The cost equations: values worked by hand, and the direction each must move in."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.planning.costs.comm import Wire, collective_seconds, exposed_seconds, sync_seconds
from hetflow.planning.costs.compute import point_at
from hetflow.planning.costs.memory import fitting_points
from hetflow.planning.costs.split import predict
from hetflow.schema.errors import ProblemError
from hetflow.schema.parallel import LinkCurve
from hetflow.schema.plan import ReplicaGroup
from hetflow.schema.problem import DeviceCosts, DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint, GradientSum, Sync, SyncPoint
from hetflow.tests.plan_parts import whole_group

CURVE = (
    BatchPoint(batch_size=8, step_seconds=1.0, peak_memory_bytes=101),
    BatchPoint(batch_size=12, step_seconds=1.2, peak_memory_bytes=150),
    BatchPoint(batch_size=16, step_seconds=2.0, peak_memory_bytes=200),
)


def option(name: str = "A", **fields: object) -> DeviceOption:
    base = {"num_devices": 4, "batch_curve": CURVE, "update_seconds": 0.5, "weight_bytes": 1_000}
    return DeviceOption(device_type=name, **{**base, **fields})


LINK = Sync(num_devices=2, sync_seconds=3.0, latency_seconds=0.25, bytes_per_second=500.0)


def test_a_ring_sends_two_rounds_of_messages_and_shares() -> None:
    link = Wire(0.25, 500.0)
    assert collective_seconds("all-reduce", 1_000, 4, link) == 6 * 0.25 + 6 / 4 * 2.0
    assert collective_seconds("all-reduce", 1_000, 1, link) == 0


def test_halves_of_an_all_reduce_and_messages_over_a_rate_or_a_curve() -> None:
    curve = LinkCurve(coefficients=(500.0,), latency_seconds=0.25)
    for link in (Wire(0.25, 500.0), curve):
        whole = collective_seconds("all-reduce", 1_000, 4, link)
        for half in ("reduce-scatter", "all-gather", "all-to-all"):
            assert collective_seconds(half, 1_000, 4, link) == pytest.approx(whole / 2)
        assert collective_seconds("point-to-point", 1_000, 2, link) == 0.25 + 2.0


def test_one_device_or_no_measurement_costs_nothing() -> None:
    assert sync_seconds(option(sync=LINK), 1) == 0
    assert sync_seconds(option(), 8) == 0


def test_a_measurement_without_a_link_model_is_constant() -> None:
    measured = option(sync=Sync(num_devices=2, sync_seconds=0.3))
    assert {sync_seconds(measured, n) for n in (2, 3, 100)} == {0.3}


def test_the_link_model_passes_through_the_measurement() -> None:
    assert sync_seconds(option(sync=LINK), 2) == pytest.approx(3.0)
    grown = 3.0 + (6 * 0.25 + 3.0) - (2 * 0.25 + 2.0)
    assert sync_seconds(option(sync=LINK), 4) == pytest.approx(grown)


def test_a_slow_network_is_paid_in_full() -> None:
    """The anchor takes off the measured link's ring, so the slower one is not hidden."""
    slow = option(sync=LINK, link_bytes_per_second=50.0)
    assert sync_seconds(slow, 2) == pytest.approx(3.0 + 20.0 - 2.0)
    fast = option(sync=LINK, link_bytes_per_second=5e9)
    assert sync_seconds(fast, 2) == pytest.approx(3.0)


def test_without_a_link_model_a_slow_network_is_a_floor() -> None:
    measured = option(sync=Sync(num_devices=2, sync_seconds=3.0), link_bytes_per_second=100.0)
    assert sync_seconds(measured, 2) == pytest.approx(10.0)
    assert sync_seconds(option(sync=measured.sync, link_bytes_per_second=1e6), 2) == 3.0


@given(
    st.builds(
        Sync,
        num_devices=st.integers(2, 8),
        sync_seconds=st.floats(0, 5),
        latency_seconds=st.floats(0, 1),
        bytes_per_second=st.floats(1, 1e6),
    ),
    st.integers(1, 64),
)
def test_more_devices_never_synchronise_faster(sync: Sync, number: int) -> None:
    one = option(sync=sync)
    assert 0 <= sync_seconds(one, number) <= sync_seconds(one, number + 1) * (1 + 1e-12) + 1e-15


BY_SIZE = Sync(
    num_devices=2,
    sync_seconds=0.3,
    by_batch_size=(
        SyncPoint(batch_size=8, sync_seconds=0.5),
        SyncPoint(batch_size=16, sync_seconds=0.3),
        SyncPoint(batch_size=24, sync_seconds=0.4),
    ),
)


def test_sizes_differ_in_what_their_passes_hide() -> None:
    told = [exposed_seconds(BY_SIZE, size) for size in (4, 8, 12, 16, 24, 99)]
    assert told == pytest.approx([0.2, 0.2, 0.1, 0.0, 0.1, 0.1])
    assert exposed_seconds(None, 8) is None
    assert exposed_seconds(replace(BY_SIZE, by_batch_size=()), 8) is None
    assert sync_seconds(option(sync=BY_SIZE), 2) == pytest.approx(0.3)


def test_the_slowest_device_is_that_whose_sums_come_last() -> None:
    """3 x 0.9 s and little hidden after two passes of 1.5 s that hide all of it."""
    curve = tuple(told(size, seconds) for size, seconds in ((8, 0.9), (16, 1.4)))
    problem = problem_of(option("A", batch_curve=curve, update_seconds=0.0, sync=BY_SIZE), batch=56)
    found = predict(problem, [group("A", 1, 3, 8), group("A", 1, 2, 16)])
    assert found.step_seconds == pytest.approx(3 * 0.9 + 0.5)
    assert found.sync_seconds == pytest.approx(0.5)
    assert found.compute_seconds == pytest.approx(2.7)
    (alone,) = [predict(problem, [group("A", 1, 7, 8)])]
    assert (alone.step_seconds, alone.sync_seconds) == (pytest.approx(6.3), 0.0)


@pytest.mark.parametrize(
    ("left", "seconds"),
    [
        (0.0, 3 * 0.5 + 1.0 + 2.0),  # nothing is hidden: a ring of 500 bytes, two of 1,000
        (1.0, 3 * 0.5 + 2.0),  # the first ring, but for its latency, ends with the pass
        (1.5, 2 * 0.5 + 2.0),  # all of it: the last ones begin when the pass ends
        (9.0, 2 * 0.5 + 2.0),
    ],
)
def test_a_last_pass_hides_the_sums_that_begin_in_it(left: float, seconds: float) -> None:
    sums = (
        GradientSum(num_bytes=500, seconds_left=left),
        GradientSum(num_bytes=1_000, num_sums=2, seconds_left=0.0),
    )
    curve = tuple(replace(told(size, 3.0), sums=sums) for size in (8, 12))
    fast = replace(LINK, latency_seconds=0.01, bytes_per_second=1e6)
    problem = problem_of(
        option("A", batch_curve=curve, sync=LINK),
        option("B", batch_curve=curve, sync=fast),
        batch=16,
    )
    found = predict(problem, [group("A", 1, 1, 8), group("B", 1, 1, 8)])
    assert found.sync_seconds == pytest.approx(seconds)  # B's, too, crosses A's link
    assert found.step_seconds == pytest.approx(3.0 + seconds + 0.5)
    assert predict(problem, [group("B", 1, 2, 8)]).sync_seconds == 0.0
    between = point_at(
        (curve[0], replace(curve[1], sums=(replace(sums[0], seconds_left=left + 4), sums[1]))), 9
    )
    assert between.sums[0].seconds_left == left + 1


def test_passes_are_linear_between_profiled_sizes() -> None:
    assert point_at(CURVE, 12).step_seconds == 1.2
    assert point_at(CURVE, 9).step_seconds == pytest.approx(1.05)
    assert point_at(CURVE, 15).step_seconds == pytest.approx(1.8)
    assert point_at(CURVE, 9).peak_memory_bytes == 114  # 113.25, rounded up


@pytest.mark.parametrize("size", [7, 17])
def test_nothing_is_assumed_outside_the_profile(size: int) -> None:
    with pytest.raises(ProblemError, match=f"{size} lies outside the profiled sizes 8 to 16"):
        point_at(CURVE, size)


def test_only_sizes_within_the_memory_fit() -> None:
    assert [p.batch_size for p in fitting_points(CURVE, 150)] == [8, 12]


def test_a_step_is_the_slowest_device_with_its_update_plus_sync() -> None:
    problem = SplitProblem(
        model="m",
        global_batch_size=64,
        devices=(option("A", sync=LINK), option("B", update_seconds=0.75)),
    )
    late = option("B", update_seconds=3.5, fixed_seconds=0.25)
    groups = [
        whole_group(
            device_type=name,
            num_devices=1,
            device_batch_size=passes * size,
            virtual_nodes=passes,
            virtual_node_batch_size=size,
        )
        for name, passes, size in (("A", 4, 12), ("B", 1, 16))
    ]
    found = predict(problem, groups)
    assert found.compute_seconds == pytest.approx(4.8)
    assert found.sync_seconds == pytest.approx(3.0)
    assert found.update_seconds == 0.5  # B's longer one ends beside A's passes
    assert found.step_seconds == pytest.approx(4.8 + 3.0 + 0.5)
    assert found.samples_per_second == pytest.approx(64 / 8.3)
    found = predict(replace(problem, devices=(problem.devices[0], late)), groups)
    told = (found.compute_seconds, found.update_seconds, found.fixed_seconds)
    assert told == (2.0, 3.5, 0.25)
    assert found.step_seconds == pytest.approx(2.0 + 3.5 + 0.25 + 3.0)
    with pytest.raises(ProblemError, match="no device of type 'B'"):
        predict(SplitProblem(model="m", global_batch_size=64, devices=(option("A"),)), groups)


def told(size: int, seconds: float, **parts: float) -> BatchPoint:
    return BatchPoint(batch_size=size, step_seconds=seconds, peak_memory_bytes=1, **parts)


def group(name: str, number: int, passes: int, size: int) -> ReplicaGroup:
    return whole_group(
        device_type=name,
        num_devices=number,
        device_batch_size=passes * size,
        virtual_nodes=passes,
        virtual_node_batch_size=size,
    )


PARTS = option(
    "A",
    batch_curve=(told(8, 1.0, load_seconds=0.2, virtual_node_seconds=0.1, step_seconds_error=0.1),),
    fixed_seconds=0.25,
    step_error=0.02,
    alone=DeviceCosts(
        batch_curve=(told(8, 0.6, step_seconds_error=0.0),), update_seconds=0.4, fixed_seconds=0.1
    ),
    sync=Sync(num_devices=2, sync_seconds=0.3),
)


def problem_of(*devices: DeviceOption, batch: int = 64) -> SplitProblem:
    return SplitProblem(model="m", global_batch_size=batch, devices=devices)


def test_the_parts_of_a_step_add_up() -> None:
    found = predict(problem_of(PARTS), [group("A", 2, 4, 8)])
    assert found.compute_seconds == pytest.approx(2.8)
    assert found.load_seconds == pytest.approx(0.8)
    assert found.virtual_node_seconds == pytest.approx(0.4)
    assert (found.fixed_seconds, found.sync_seconds, found.update_seconds) == (0.25, 0.3, 0.5)
    assert found.step_seconds == pytest.approx(2.8 + 0.8 + 0.4 + 0.25 + 0.3 + 0.5)


def test_one_device_in_all_takes_what_it_takes_alone() -> None:
    found = predict(problem_of(PARTS), [group("A", 1, 8, 8)])
    assert found.step_seconds == pytest.approx(8 * 0.6 + 0.4 + 0.1)
    assert found.load_seconds is None
    assert found.fixed_seconds == 0.1


def test_update_and_fixed_cost_are_of_the_type_where_their_sum_is_largest() -> None:
    other = option("B", update_seconds=0.6, batch_curve=(told(8, 0.5),))
    found = predict(problem_of(PARTS, other), [group("A", 1, 4, 8), group("B", 1, 4, 8)])
    assert (found.update_seconds, found.fixed_seconds) == (0.5, 0.25)


def test_the_interval_is_the_wider_of_passes_and_steps() -> None:
    """Passes: 10 % of 4 s; steps: 2 % of 5.05 s; then 20 %. They are not added."""
    found = predict(problem_of(PARTS), [group("A", 2, 4, 8)])
    assert found.step_seconds_high - found.step_seconds == pytest.approx(0.4)
    assert found.step_seconds - found.step_seconds_low == pytest.approx(0.4)
    rough = replace(PARTS, step_error=0.2)
    found = predict(problem_of(rough), [group("A", 2, 4, 8)])
    assert found.step_seconds_high == pytest.approx(1.2 * found.step_seconds)


def test_a_device_that_is_nearly_last_may_be_the_last() -> None:
    """B ends at 3.9 s, give or take a half; A at 4 s, exactly."""
    sure = option("A", batch_curve=(told(8, 1.0, step_seconds_error=0.0),))
    rough = option("B", batch_curve=(told(8, 1.3, step_seconds_error=0.5),))
    found = predict(problem_of(sure, rough), [group("A", 1, 4, 8), group("B", 1, 3, 8)])
    assert found.step_seconds_high - found.step_seconds == pytest.approx(1.5 * 3.9 - 4.0)


def test_a_spread_that_a_type_in_use_does_not_tell_is_unknown() -> None:
    plain = option("B", batch_curve=(told(8, 0.5),))
    groups = [group("A", 1, 4, 8), group("B", 1, 4, 8)]
    assert predict(problem_of(PARTS, plain), groups).step_seconds_high is None
    steps = replace(plain, step_error=0.01)
    found = predict(problem_of(PARTS, steps), groups)
    assert found.step_seconds_high == pytest.approx(1.02 * found.step_seconds)


def test_parts_between_sizes_are_linear_and_the_spread_is_the_wider() -> None:
    low = told(8, 1.0, load_seconds=0.25, virtual_node_seconds=0.75, step_seconds_error=0.01)
    high = told(16, 3.0, load_seconds=0.5, virtual_node_seconds=2.5, step_seconds_error=0.03)
    found = point_at((low, high), 11)
    assert found.load_seconds == pytest.approx(0.25 + 3 / 8 * 0.25)
    assert found.pass_seconds >= 0
    assert found.step_seconds_error == 0.03
    assert point_at((low, told(16, 3.0)), 12).load_seconds is None
