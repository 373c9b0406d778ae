"""Which of this machine's devices a plan means."""

from dataclasses import replace
from pathlib import Path

import pytest

import hetflow
from hetflow.cli.main import run
from hetflow.devices.backend import LocalDevice
from hetflow.devices.cuda import CudaBackend
from hetflow.devices.local import devices_of_types, own_type, parse_requests
from hetflow.runtime.launcher.spawn import check_memory, inventory, remarks, seat_workers
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
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
    with pytest.raises(TargetError, match="types of that name: 1 x A100-40GB, 1 x A100-80GB"):
        seat_workers(config.workers, config)


def test_a_host_with_one_of_two_types_knows_the_name_that_tells_them_apart(
    host: list[LocalDevice],
) -> None:
    host.append(gpus("A100", 0))
    assert devices_of_types(["A100-80GB"])["A100-80GB"] is host[0]
    assert devices_of_types(["A100-40GB", "A100Ultra"]) == {}
    assert own_type(0, {"A100-40GB", "A100-80GB"}) == "A100-80GB"
    assert own_type(0, {"A100-40GB", "T4"}) is None


SMALL = replace(gpus("V100", 0), memory_bytes=16 << 30, distinctions=("-sm70", "-16GB"))
LARGE = replace(gpus("V100", 0, 1), memory_bytes=32 << 30, distinctions=("-sm70", "-32GB"))


def v100(device_type: str, memory_gib: int, largest: int) -> hetflow.Profile:
    """A profile whose passes of n samples take n GiB and a second."""
    points = [
        hetflow.BatchPoint(batch_size=size, step_seconds=1.0, peak_memory_bytes=size << 30)
        for size in (8, largest)
    ]
    return hetflow.Profile(
        model="m",
        device_type=device_type,
        device_memory_bytes=memory_gib << 30,
        weight_bytes=4,
        update_seconds=0.0,
        batch_curve=tuple(points),
    )


def test_a_split_for_a_larger_card_of_the_name_is_refused_on_each_host(
    host: list[LocalDevice],
) -> None:
    plan = hetflow.solve([v100("V100", 32, 24)], "2xV100", batch_size=48)
    config = lower(plan)
    host.append(LARGE)
    check_memory(config.workers, config)
    host[0] = SMALL
    with pytest.raises(TargetError, match="fills 25,769,803,776 bytes on each V100") as refused:
        check_memory(config.workers, config)
    assert "profile this one as the type V100-16GB" in str(refused.value.hint)
    slots = [replace(slot, device_type="V100-16GB") for slot in config.workers]
    with pytest.raises(TargetError, match="on each V100-16GB") as refused:
        check_memory(slots, replace(config, workers=tuple(slots)))
    assert "another card" not in str(refused.value.hint)  # it has that name


def test_a_copy_of_a_neighbours_share_must_fit_too(host: list[LocalDevice]) -> None:
    plan = hetflow.solve([v100("V100", 32, 16)], "2xV100", batch_size=32)
    groups = [
        replace(
            group, num_replicas=1, samples=16, state_share_bytes=share << 30, memory_bytes=8 << 30
        )
        for group in plan.groups
        for share in (1, 2)
    ]
    stage = replace(plan.stages[0], replicas=tuple(groups), shard="all", copied_ratio=4.0)
    plan = replace(plan, stages=(stage,))
    config = lower(plan)
    twice = replace(config, redundancy=1)
    host[:] = [replace(LARGE, memory_bytes=16 << 30)]
    check_memory(config.workers, twice)
    host[:] = [replace(LARGE, memory_bytes=(16 << 30) - 1)]
    check_memory(config.workers, config)
    with pytest.raises(TargetError, match="fills 17,179,869,184 bytes on each V100 with"):
        check_memory(config.workers, twice)


def test_two_memories_of_one_name_are_two_types(host: list[LocalDevice]) -> None:
    both = [v100("V100", 16, 12), v100("V100-32GB", 32, 24)]
    plan = hetflow.solve(both, "1xV100,2xV100-32GB", batch_size=60)
    config = lower(plan)
    host.append(SMALL)
    assert inventory(config) == {"V100": 1}
    slots = [slot for slot in config.workers if slot.device_type == "V100"]
    check_memory(slots, config)
    host[0] = LARGE
    assert inventory(config) == {"V100-32GB": 2}
    slots = [slot for slot in config.workers if slot.device_type != "V100"]
    check_memory(slots, config)
    assert [seat.device for seat in seat_workers(slots, config)] == ["cuda:0", "cuda:1"]
    (request,) = parse_requests(["V100-32GB"], host)
    assert (request.device_type, request.local) == ("V100-32GB", LARGE)
    with pytest.raises(hetflow.ProblemError, match="no such device"):
        parse_requests(["V100-16GB"], host)
    with pytest.raises(hetflow.ProblemError, match="two profiles of m on V100"):
        hetflow.solve([both[0], replace(both[1], device_type="V100")], "V100", batch_size=8)


def test_a_profile_of_another_memory_is_not_overwritten(
    host: list[LocalDevice], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host.append(LARGE)
    files.write(tmp_path / "mlp.V100.json", v100("V100", 16, 12))
    assert run(["profile", "zoo:mlp", "-o", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is of a V100 of 16.0 GiB, this one has 32.0\nhint: --device V100-32GB gives" in said
