"""Slots to hosts and to devices, and which failure is the cause."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.devices.backend import LocalDevice
from hetflow.devices.cuda import CudaBackend
from hetflow.runtime.launcher import spawn
from hetflow.runtime.launcher.failures import Failure, first_cause
from hetflow.runtime.launcher.mapping import assigned_slots, deal_slots, host_groups
from hetflow.runtime.launcher.request import LaunchRequest
from hetflow.runtime.launcher.spawn import MeetingPoint, commands_of
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import LaunchError, ProblemError, TargetError
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from hetflow.schema.plan import EmulatedDevice, PassTime
from hetflow.tests.exporters.launch_cases import plan_of
from hetflow.tests.profiles import examples


def config_of(*types: str, emulated: tuple[EmulatedDevice, ...] = ()) -> LaunchConfig:
    return LaunchConfig(
        model="m",
        global_batch_size=len(types),
        workers=tuple(
            WorkerSlot(
                rank=rank,
                device_type=name,
                virtual_nodes=(VirtualNode(index=rank, batch_size=1),),
            )
            for rank, name in enumerate(types)
        ),
        emulated=emulated,
    )


def emulated(name: str, speed: float) -> EmulatedDevice:
    return EmulatedDevice(
        device_type=name,
        base_device_type="cpu",
        speed=speed,
        passes=(PassTime(batch_size=1, step_seconds=0.1),),
    )


def test_slots_go_to_the_hosts_that_have_the_type() -> None:
    config = config_of("V100", "P100", "P100", "V100")
    assert deal_slots(config, [{"P100": 2}, {"V100": 2}]) == [[1, 2], [0, 3]]
    assert deal_slots(config, [{"P100": 1, "V100": 1}, {"V100": 4, "P100": 1}]) == [[0, 1], [2, 3]]


def on(config: LaunchConfig, *planned: int) -> LaunchConfig:
    """The same slots on planned devices."""
    slots = zip(config.workers, planned, strict=True)
    return replace(config, workers=tuple(replace(slot, device=device) for slot, device in slots))


def test_slots_go_to_the_hosts_of_their_planned_devices() -> None:
    # Stage 0 on servers' devices 2 and 3, stage 1 on 4 to 6, stage 2 on device 0.
    config = on(config_of(*["V100"] * 6), 2, 3, 4, 5, 6, 0)
    assert deal_slots(config, [{"V100": 4}, {"V100": 4}]) == [[0, 1, 5], [2, 3, 4]]
    # Hosts that leave the idle devices out: the order of the devices still holds.
    assert deal_slots(config, [{"V100": 3}, {"V100": 3}]) == [[0, 1, 5], [2, 3, 4]]
    # Types are counted apart.
    mixed = on(config_of("P100", "V100", "P100"), 1, 0, 0)
    assert deal_slots(mixed, [{"P100": 1}, {"P100": 1, "V100": 1}]) == [[2], [0, 1]]


def test_emulated_types_may_be_offered_by_their_base() -> None:
    config = config_of("cpu:x", "cpu:x", emulated=(emulated("cpu:x", 0.5),))
    assert deal_slots(config, [{"cpu": 1}, {"cpu:x": 1}]) == [[0], [1]]


def test_a_shortage_or_an_idle_host_is_named() -> None:
    with pytest.raises(LaunchError, match="needs 2 x P100, the 2 hosts have 1"):
        deal_slots(config_of("P100", "P100"), [{"P100": 1}, {"V100": 1}])
    with pytest.raises(LaunchError, match="no work for node 1"):
        deal_slots(config_of("P100"), [{"P100": 1}, {"V100": 1}])


def gpu_of(device_type: str, *indices: int) -> LocalDevice:
    return LocalDevice(
        device_type=device_type,
        kind="cuda",
        name=device_type,
        torch_devices=tuple(f"cuda:{index}" for index in indices),
        memory_bytes=16 << 30,
    )


def test_each_cuda_worker_gets_a_device_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (gpu_of("P100", 0, 2), gpu_of("V100", 1))
    monkeypatch.setattr(CudaBackend, "local_devices", lambda backend: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,GPU-7")
    config = config_of("P100", "V100", "P100", "cpu")
    seats = spawn.seat_workers(config.workers, config)
    assert [seat.device for seat in seats] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    seen = [view.environment({}).get("CUDA_VISIBLE_DEVICES") for view in spawn.views(seats)]
    assert seen == ["4,6,GPU-7"] * 3 + [None]
    alone = [spawn.view_alone(seat) for seat in seats]
    assert [view.environment({}).get("CUDA_VISIBLE_DEVICES") for view in alone] == [
        "4", "6", "GPU-7", None,
    ]  # fmt: skip
    short = config_of("V100", "V100")
    with pytest.raises(TargetError, match="needs 2 x V100, this machine has 1"):
        spawn.seat_workers(short.workers, short)


def test_crowded_emulation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    roomy = config_of("cpu:x", "cpu:x", emulated=(emulated("cpu:x", 1.0),))
    assert spawn.crowding(roomy.workers, roomy) is None
    crowded = config_of("cpu:x", "cpu:x", "cpu:x", emulated=(emulated("cpu:x", 1.0),))
    assert "3 cores' worth" in (spawn.crowding(crowded.workers, crowded) or "")


def test_the_cause_is_no_echo_and_comes_first() -> None:
    echo = Failure(exit_code=1, error="reset", rank=0, at_seconds=1.0, lost_peer=True)
    late = Failure(exit_code=1, error="late", rank=1, at_seconds=3.0)
    first = Failure(exit_code=1, error="first", rank=2, at_seconds=2.0)
    assert first_cause([echo, late, first]) is first
    assert first_cause([echo]) is echo
    # NCCL aborts those who waited for the failed one: they die without a word.
    aborted = Failure(exit_code=128 + signal.SIGABRT, error="", rank=3)
    own_exchange = Failure(exit_code=1, error="reset", rank=4, at_seconds=1.5, may_be_echo=True)
    assert first_cause([aborted, own_exchange, echo, late, first]) is first
    assert first_cause([echo, own_exchange]) is own_exchange
    assert first_cause([echo, aborted]) is aborted
    killed = Failure(exit_code=128 + signal.SIGKILL, error="", rank=5)
    assert first_cause([aborted, own_exchange, first, killed]) is killed
    assert Failure.from_text(first.to_text()) == first


def environments(config: LaunchConfig, seats: list[spawn.Seat]) -> list[dict[str, str]]:
    request = LaunchRequest(
        plan=plan_of(("cpu", 1, 1)), config=config, script="train.py", folder=Path("run")
    )
    meeting = MeetingPoint(address="localhost", port=1, interface=None)
    commands = commands_of(request, seats, meeting)
    return [command.environment for command in commands]


def test_local_rank_names_the_workers_own_gpu_as_under_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripts for several GPUs say ``torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))``."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = (gpu_of("P100", 3, 5), gpu_of("V100", 4))
    monkeypatch.setattr(CudaBackend, "local_devices", lambda backend: gpus)
    config = config_of("P100", "cpu", "V100", "P100")
    seats = spawn.seat_workers(config.workers, config)
    found = environments(config, seats)
    assert sorted(int(env["LOCAL_RANK"]) for env in found) == [0, 1, 2, 3]
    for seat, env in zip(seats, found, strict=True):
        if seat.kind == "cpu":
            assert "CUDA_VISIBLE_DEVICES" not in env
            continue
        visible = env["CUDA_VISIBLE_DEVICES"].split(",")
        assert f"cuda:{visible[int(env['LOCAL_RANK'])]}" == seat.device
        assert env["HETFLOW_DEVICE"] == f"cuda:{env['LOCAL_RANK']}"


TYPES = ("V100", "P100")
HOSTS = st.lists(
    st.dictionaries(st.sampled_from(TYPES), st.integers(1, 3), min_size=1), min_size=1, max_size=4
)


@settings(max_examples=examples(40))
@given(hosts=HOSTS, data=st.data())
def test_a_deployment_asks_for_the_devices_to_which_the_launch_deals_its_slots(
    hosts: list[dict[str, int]], data: st.DataObject
) -> None:
    has = {name: sum(host.get(name, 0) for host in hosts) for name in TYPES}
    planned = [(name, device) for name in TYPES for device in range(has[name])]
    used = data.draw(st.permutations(planned))[: data.draw(st.integers(1, len(planned)))]
    config = config_of(*(name for name, _ in used))
    if data.draw(st.booleans()):
        config = on(config, *(device for _, device in used))
    pool = ",".join(
        f"1x({','.join(f'{number}x{name}' for name, number in host.items())})" for host in hosts
    )
    groups = host_groups(config, plan_of(("V100", 1, 1)), Cluster.parse(pool))
    asked = [dict(group.devices) for group in groups for _ in range(group.num_hosts)]
    ranks, lacking = assigned_slots(config, hosts)
    assert lacking is None
    assert deal_slots(config, asked) == [mine for mine in ranks if mine]
    assert sum(sum(host.values()) for host in asked) == len(used)


def test_hosts_of_a_deployment_without_a_described_pool_are_one_for_each_type() -> None:
    config = config_of("V100", "P100", "P100")
    groups = host_groups(config, plan_of(("V100", 1, 1)), None)
    assert [(one.num_hosts, dict(one.devices)) for one in groups] == [
        (1, {"V100": 1}),
        (1, {"P100": 2}),
    ]
    described = replace(plan_of(("V100", 1, 1)), cluster=Cluster.parse("1x(1xV100),2x(1xP100)"))
    found = host_groups(config, described, None)
    assert [(one.num_hosts, one.offered) for one in found] == [(1, "1xV100"), (2, "1xP100")]
    with pytest.raises(ProblemError, match="needs 2 x P100, the 1 hosts have 1"):
        host_groups(config, described, Cluster.parse("1x(1xV100,1xP100)"))
