"""Which of this machine's devices a plan means."""

import pytest

from hetflow.devices.backend import LocalDevice
from hetflow.devices.cuda import CudaBackend
from hetflow.devices.local import devices_of_types, own_type
from hetflow.runtime.launcher.devices import remarks, seat_workers
from hetflow.schema.errors import TargetError
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot


def gpus(device_type: str, *indices: int) -> LocalDevice:
    return LocalDevice(
        device_type=device_type,
        kind="cuda",
        name=f"NVIDIA {device_type}",
        torch_devices=tuple(f"cuda:{index}" for index in indices),
        memory_bytes=80 << 30,
        distinctions=("-sm80", "-108SM", "-80GB", "-SXM"),
    )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[LocalDevice]:
    """This machine's GPUs, for a test to fill."""
    found: list[LocalDevice] = []
    monkeypatch.setattr(CudaBackend, "local_devices", lambda backend: tuple(found))
    return found


def test_a_plan_made_before_names_told_gpus_apart_still_launches_and_a_warning_says_so(
    host: list[LocalDevice],
) -> None:
    host.append(gpus("H100PCIe", 0))
    nodes = (VirtualNode(index=0, batch_size=1),)
    slot = WorkerSlot(rank=0, device_type="H100", virtual_nodes=nodes)
    config = LaunchConfig(model="m", global_batch_size=1, workers=(slot,))
    (seat,) = seat_workers(config.workers, config)
    assert seat.device == "cuda:0"
    (said,) = remarks(config.workers, config, {})
    assert "the plan's H100 is taken to be this machine's H100PCIe" in said
    assert own_type(0, {"H100", "V100"}) == "H100"


def test_a_former_name_of_two_types_is_not_guessed(host: list[LocalDevice]) -> None:
    host += [gpus("A100-40GB", 0), gpus("A100-80GB", 1)]
    assert devices_of_types(["A100"]) == {}
    slot = WorkerSlot(
        rank=0, device_type="A100", virtual_nodes=(VirtualNode(index=0, batch_size=1),)
    )
    config = LaunchConfig(model="m", global_batch_size=1, workers=(slot,))
    with pytest.raises(TargetError, match="needs 1 x A100, this machine has 0"):
        seat_workers(config.workers, config)


def test_a_host_with_one_of_two_types_knows_the_name_that_tells_them_apart(
    host: list[LocalDevice],
) -> None:
    host.append(gpus("A100", 0))
    assert devices_of_types(["A100-80GB"])["A100-80GB"] is host[0]
    assert devices_of_types(["A100-40GB", "A100Ultra"]) == {}
    assert own_type(0, {"A100-40GB", "A100-80GB"}) == "A100-80GB"
    assert own_type(0, {"A100-40GB", "T4"}) is None
