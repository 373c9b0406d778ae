"""The link fit: recovers what made its data, and resists what disturbs it."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetflow.costs.comm import ring_seconds
from hetflow.profilers.devices import DeviceRequest, LocalDevice
from hetflow.profilers.links import MESSAGE_BYTES, SyncOptions, fit_link, measure_sync
from hetflow.profilers.targets import parse

LATENCY = st.floats(1e-6, 1e-2)
BANDWIDTH = st.floats(1e7, 1e11)


def times(num_devices: int, latency: float, bandwidth: float) -> list[float]:
    return [ring_seconds(num_devices, size, latency, bandwidth) for size in MESSAGE_BYTES]


@settings(deadline=None, derandomize=True)
@given(st.integers(2, 16), LATENCY, BANDWIDTH)
def test_the_fit_recovers_the_ring(num_devices: int, latency: float, bandwidth: float) -> None:
    seconds = times(num_devices, latency, bandwidth)
    assume(seconds[-1] > 1.1 * seconds[0])  # else the bandwidth cannot be told
    fit = fit_link(num_devices, MESSAGE_BYTES, seconds)
    assert fit is not None
    assert fit.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert fit.bytes_per_second == pytest.approx(bandwidth, rel=1e-3)
    assert fit.error < 1e-3


@pytest.mark.parametrize("disturbed", [0, 3, 7])
def test_one_disturbed_size_does_not_tilt_the_fit(disturbed: int) -> None:
    seconds = times(2, 2e-4, 1e9)
    seconds[disturbed] *= 4
    fit = fit_link(2, MESSAGE_BYTES, seconds)
    assert fit is not None
    assert fit.latency_seconds == pytest.approx(2e-4, rel=0.05)
    assert fit.bytes_per_second == pytest.approx(1e9, rel=0.05)


def test_times_that_do_not_grow_give_no_bandwidth() -> None:
    assert fit_link(2, MESSAGE_BYTES, [1e-3] * len(MESSAGE_BYTES)) is None


def test_nothing_is_negative_where_small_messages_are_fast() -> None:
    fit = fit_link(2, (1000, 2000, 3000), (1e-4, 1e-3, 2e-3))
    assert fit is not None
    assert fit.latency_seconds >= 0
    assert fit.bytes_per_second > 0


def test_one_gpu_alone_skips_synchronisation_and_says_why() -> None:
    gpu = LocalDevice(
        device_type="V100", name="V100", torch_devices=("cuda:0",), memory_bytes=1 << 34
    )
    request = DeviceRequest(device_type="V100", local=gpu, torch_device="cuda:0")
    sync, provenance = measure_sync(parse("zoo:mlp"), request, SyncOptions())
    assert sync is None
    assert provenance == {"skipped": "2 V100 devices are needed, 1 here"}
