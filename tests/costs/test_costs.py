"""The cost equations: values worked by hand, and the direction each must move in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.costs.comm import ring_seconds, sync_seconds
from hetflow.costs.compute import point_at
from hetflow.costs.memory import fitting_points
from hetflow.costs.split import predict
from hetflow.schema.errors import ProblemError
from hetflow.schema.plan import DeviceGroup
from hetflow.schema.problem import DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint, Sync

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
    assert ring_seconds(4, 1_000, 0.25, 500.0) == pytest.approx(6 * 0.25 + 6 / 4 * 2.0)
    assert ring_seconds(1, 1_000, 0.25, 500.0) == 0


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


def test_a_step_is_the_slowest_device_plus_sync_plus_update() -> None:
    problem = SplitProblem(
        model="m",
        global_batch_size=64,
        devices=(option("A", sync=LINK), option("B", update_seconds=0.75)),
    )
    groups = [
        DeviceGroup(
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
    assert found.update_seconds == 0.75
    assert found.step_seconds == pytest.approx(4.8 + 3.0 + 0.75)
    assert found.samples_per_second == pytest.approx(64 / 8.55)
    with pytest.raises(ProblemError, match="no device of type 'B'"):
        predict(SplitProblem(model="m", global_batch_size=64, devices=(option("A"),)), groups)
