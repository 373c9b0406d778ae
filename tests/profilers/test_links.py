"""Links and rings: fits recover what made their data, and resist what disturbs it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetflow.devices.backend import DeviceRequest, LocalDevice
from hetflow.devices.cpu import cpu_device
from hetflow.planning.costs.comm import Wire, collective_seconds
from hetflow.profilers.exchange import all_reduce_sizes
from hetflow.profilers.links import (
    MESSAGE_BYTES,
    SyncOptions,
    _summary,
    fit_ring,
    links_of,
    measure_links,
    measure_sync,
    message_sizes,
    reversed_link,
)
from hetflow.profilers.targets import parse
from hetflow.schema.profile import Links, TypeLink

LATENCY = st.floats(1e-6, 1e-2)
BANDWIDTH = st.floats(1e7, 1e11)


def times(num_devices: int, latency: float, bandwidth: float) -> list[float]:
    return [
        collective_seconds("all-reduce", size, num_devices, Wire(latency, bandwidth))
        for size in MESSAGE_BYTES
    ]


@given(st.integers(2, 16), LATENCY, BANDWIDTH)
def test_the_fit_recovers_the_ring(num_devices: int, latency: float, bandwidth: float) -> None:
    seconds = times(num_devices, latency, bandwidth)
    assume(seconds[-1] > 1.1 * seconds[0])  # else the bandwidth cannot be told
    fit = fit_ring(num_devices, MESSAGE_BYTES, seconds)
    assert fit is not None
    assert fit.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert fit.bytes_per_second == pytest.approx(bandwidth, rel=1e-3)
    assert fit.error < 1e-3


@pytest.mark.parametrize("disturbed", [0, 3, 7])
def test_one_disturbed_size_does_not_tilt_the_fit(disturbed: int) -> None:
    seconds = times(2, 2e-4, 1e9)
    seconds[disturbed] *= 4
    fit = fit_ring(2, MESSAGE_BYTES, seconds)
    assert fit is not None
    assert fit.latency_seconds == pytest.approx(2e-4, rel=0.05)
    assert fit.bytes_per_second == pytest.approx(1e9, rel=0.05)


def test_times_that_do_not_grow_give_no_bandwidth() -> None:
    assert fit_ring(2, MESSAGE_BYTES, [1e-3] * len(MESSAGE_BYTES)) is None


def test_a_ring_that_could_not_be_fitted_is_said() -> None:
    request = DeviceRequest(device_type="cpu", local=cpu_device(), torch_device="cpu")
    message = {"num_bytes": 1024, "seconds": [1e-3] * 6}
    answer = {
        "single": [0.01],
        "distributed": [0.02],
        "messages": [message, {**message, "num_bytes": 4096}],
    }
    sync, provenance = _summary(request, SyncOptions(), [answer, answer])
    assert (sync.latency_seconds, sync.bytes_per_second) == (None, None)
    assert "did not take longer" in provenance["messages"]["no_ring"]
    answer["messages"][1]["seconds"] = [1e-2] * 6
    sync, provenance = _summary(request, SyncOptions(), [answer, answer])
    assert sync.bytes_per_second is not None
    assert "no_ring" not in provenance["messages"]


@pytest.mark.parametrize(
    ("single", "distributed", "known", "at_most"),
    [
        ([0.010, 0.012], [0.015, 0.016], 0.0045, None),
        ([0.010, 0.012], [0.011, 0.013], None, 0.003),
        ([0.013, 0.014], [0.010, 0.012], None, 0.004),  # all of it below zero: noise alone
    ],
)
def test_a_difference_within_the_noise_is_unknown_and_bounded(
    single: list[float], distributed: list[float], known: float | None, at_most: float | None
) -> None:
    request = DeviceRequest(device_type="cpu", local=cpu_device(), torch_device="cpu")
    answer = {"single": single, "distributed": distributed, "messages": []}
    sync, _ = _summary(request, SyncOptions(), [answer, answer])
    assert (sync.sync_seconds, sync.at_most_seconds) == (
        pytest.approx(known) if known else None,
        pytest.approx(at_most) if at_most else None,
    )


def test_nothing_is_negative_where_small_messages_are_fast() -> None:
    fit = fit_ring(2, (1000, 2000, 3000), (1e-4, 1e-3, 2e-3))
    assert fit is not None
    assert fit.latency_seconds >= 0
    assert fit.bytes_per_second > 0


def test_one_gpu_alone_skips_synchronisation_and_says_why() -> None:
    gpu = LocalDevice(
        device_type="V100",
        kind="cuda",
        name="V100",
        torch_devices=("cuda:0",),
        memory_bytes=1 << 34,
    )
    request = DeviceRequest(device_type="V100", local=gpu, torch_device="cuda:0")
    sync, provenance = measure_sync(parse("zoo:mlp"), request, SyncOptions())
    assert sync is None
    assert provenance == {"skipped": "2 V100 devices are needed, 1 here"}
    links, provenance = measure_links(request)
    assert links is None
    assert provenance == {"skipped": "2 V100 devices are needed, 1 here"}


def worker(scale: float, latency: float, rate: float) -> dict[str, list[list[float]]]:
    """What a worker says whose messages take so long; both at once take ``scale`` times that."""
    alone = [[latency + size / rate] * 9 for size in MESSAGE_BYTES]
    both = [[scale * seconds for seconds in samples] for samples in alone]
    return {"there": alone, "back": alone, "both": both}


@given(LATENCY, BANDWIDTH, st.floats(1, 4))
def test_a_link_is_what_it_does_when_messages_cross(
    latency: float, bandwidth: float, scale: float
) -> None:
    assume(MESSAGE_BYTES[-1] / bandwidth > 0.1 * latency)
    said = worker(scale, latency, bandwidth)
    links, provenance = links_of(MESSAGE_BYTES, said, said)
    assert links is not None
    assert links.latency_seconds == pytest.approx(scale * latency, rel=1e-3)
    assert links.bytes_per_second == pytest.approx(bandwidth / scale, rel=1e-3)
    assert [point.num_bytes for point in links.points] == list(MESSAGE_BYTES)
    assert links.points[0].there_seconds == pytest.approx(latency + 1024 / bandwidth)
    assert provenance["fit_error"] < 1e-3


def test_a_link_whose_messages_do_not_grow_is_not_measured() -> None:
    said = worker(1.0, 1e-3, 1e15)
    links, provenance = links_of(MESSAGE_BYTES, said, said)
    assert links is None
    assert "did not take longer" in provenance["skipped"]


def test_the_slower_of_two_messages_that_cross_counts() -> None:
    fast, slow = worker(1.0, 1e-4, 1e9), worker(2.0, 1e-4, 1e9)
    links, _ = links_of(MESSAGE_BYTES, fast, slow)
    assert links is not None
    assert links.bytes_per_second == pytest.approx(5e8, rel=1e-3)


def test_sizes_are_denser_where_activations_lie() -> None:
    assert message_sizes() == MESSAGE_BYTES
    sizes = message_sizes((100_000, 700_000))
    assert set(MESSAGE_BYTES) < set(sizes)
    assert {1 << 15, 1 << 17, 1 << 19, 1 << 21} == set(sizes) - set(MESSAGE_BYTES)
    assert list(sizes) == sorted(sizes)


def test_sizes_reach_what_is_sent() -> None:
    sizes = message_sizes((1000, 200 << 20))
    assert sizes[-2:] == (64 << 20, 200 << 20)
    assert list(sizes) == sorted(set(sizes))
    assert message_sizes((1 << 26,))[-1] == 1 << 26


def test_the_other_type_sees_the_link_the_other_way() -> None:
    fast, slow = worker(1.0, 1e-4, 1e9), worker(2.0, 1e-4, 1e9)
    fast["back"] = [[3 * seconds for seconds in samples] for samples in fast["back"]]
    links, _ = links_of(MESSAGE_BYTES, {**fast, "channel_bytes": 5}, {**slow, "channel_bytes": 7})
    assert links is not None
    assert links.channel_bytes == 7
    there = TypeLink(device_type="P100", links=links)
    back = reversed_link(there, "V100")
    assert back.device_type == "V100"
    for point, again in zip(links.points, back.links.points, strict=True):
        assert point.back_seconds == pytest.approx(3 * point.there_seconds)
        assert (again.there_seconds, again.back_seconds) == (
            point.back_seconds,
            point.there_seconds,
        )
    assert reversed_link(back, "P100") == there


@pytest.mark.parametrize("weight_bytes", [0, 288, 228_000, 46_000_004])
def test_all_reduces_end_at_the_model(weight_bytes: int) -> None:
    sizes = all_reduce_sizes(weight_bytes)
    assert sizes[0] == 1 << 10
    assert sizes[-1] == max(1 << 16, weight_bytes // 4 * 4)
    assert list(sizes) == sorted(set(sizes))


@pytest.mark.slow
@pytest.mark.measures
def test_two_real_processes_send_messages_of_every_size() -> None:
    cpu = cpu_device()
    request = DeviceRequest(device_type="cpu", local=cpu, torch_device="cpu")
    for _ in range(3):  # what a busy machine disturbs for seconds is measured again
        links, provenance = measure_links(request, (100_000,))
        if links is not None and _are_the_fits_own(links):
            break
    assert links is not None, provenance
    assert [point.num_bytes for point in links.points] == list(message_sizes((100_000,)))
    assert _are_the_fits_own(links), links
    assert provenance["repeats"] >= 9


def _are_the_fits_own(links: Links) -> bool:
    """Whether large messages take longer than small ones, and about as long as the fit says."""
    longest = links.points[-1]
    told = links.latency_seconds + longest.num_bytes / links.bytes_per_second
    return (
        min(longest.there_seconds, longest.back_seconds) > links.points[0].both_seconds / 2
        and longest.both_seconds / 4 < told < 4 * longest.both_seconds
    )
