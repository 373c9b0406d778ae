"""What a decision sees of devices and of the jobs on them: a function of the open leases."""

from dataclasses import replace

from hetflow.clusters.engines.protocol import EngineDevice
from hetflow.clusters.scheduler.leases import Lease
from hetflow.clusters.scheduler.occupancy import Occupancy, Places, occupancy

# Two fast devices on each of two servers, and a slow one on the second.
DEVICES = [
    *(EngineDevice(f"{server}{i}", "fast", server, True) for server in "ab" for i in range(2)),
    EngineDevice("b2", "slow", "b", True),
]
PLACES = Places(DEVICES)


def lease(job: int, devices: str, state: str = "running", resizing_to: str = "") -> Lease:
    return Lease(
        job, 1, tuple(devices.split()), state, 0.0, None, None, 1, tuple(resizing_to.split()),
        began=0.0, trained=0.0,
    )  # fmt: skip


def seen(*leases: Lease, drained: str = "", resting: str = "", broken: str = "") -> Occupancy:
    devices = {one.name: replace(one, is_up=one.name not in broken.split()) for one in DEVICES}
    return occupancy(leases, PLACES, devices, drained=drained.split(), resting=resting.split())


def names(seats: dict[str, tuple[tuple[int, int, int], ...]]) -> dict[str, str]:
    return {job: " ".join(PLACES.names(seat)) for job, seat in seats.items()}


def test_devices_have_places_by_type_and_server() -> None:
    assert PLACES.num_devices == {"fast": 4, "slow": 1}
    assert (PLACES.num_servers, PLACES.largest) == (2, {"fast": 2, "slow": 1})
    assert PLACES.servers == PLACES.sizes == ((2, 2), (1,))
    assert PLACES.layout.servers == ((0, 1), (1,))
    assert PLACES.seat(["b2", "b0", "a1"]) == ((0, 0, 1), (0, 1, 0), (1, 0, 0))
    assert Places(DEVICES[2:]).servers is None  # one server


def test_a_lease_that_is_resized_holds_what_it_goes_over_to() -> None:
    found = seen(
        lease(1, "a0", resizing_to="a1"), lease(1, "a0", "planned"),  # decided since it was asked
        lease(2, "b0", "stopping"), lease(2, "b1", "planned"), lease(3, "b2", "starting"),
    )  # fmt: skip
    assert names(found.held) == {"1": "a1", "2": "b1", "3": "b2"}
    assert names(found.decided) == {"1": "a0", "2": "b1", "3": "b2"}
    assert found.kept == {}
    assert found.down == []


def test_what_is_broken_or_drained_or_rests_is_down_and_only_jobs_that_rest_stay() -> None:
    jobs = (lease(1, "a0"), lease(2, "a1", "stopping"), lease(3, "b0 b1"))
    assert names(seen(*jobs, resting="a").kept) == {"1": "a0"}
    assert PLACES.names(seen(*jobs, resting="a").down) == ["a0", "a1"]
    assert PLACES.names(seen(drained="slow", broken="a1").down) == ["a1", "b2"]
    assert names(seen(*jobs, resting="a b", broken="b1").kept) == {"1": "a0"}
    assert names(seen(*jobs, resting="a b", drained="b").kept) == {"1": "a0"}
    assert names(seen(*jobs, resting="a b", drained="fast").kept) == {}
