"""Which way a launch is looked after, and which devices the workers of each generation get."""

from pathlib import Path
from typing import Any

import pytest

from hetflow.devices.cuda import CudaBackend
from hetflow.runtime.launcher.controller import supervision_of
from hetflow.runtime.launcher.generations import Generations, Repartitions
from hetflow.runtime.launcher.request import LaunchRequest
from hetflow.runtime.launcher.spawn import MeetingPoint, WorkerCommand, seat_workers
from hetflow.runtime.launcher.supervisor import Regroup
from hetflow.runtime.launcher.workers import Starter
from hetflow.runtime.protocol.environment import DEVICE
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import TargetError
from hetflow.schema.launch import LaunchConfig, Rendezvous
from hetflow.schema.options import OnFailure
from hetflow.schema.plan import Plan

from .test_dealing import gpu_of
from .test_hosts import plan_of

SPLIT = plan_of(("cpu:fast", 2, 4))
TWO_HOSTS = Rendezvous(num_nodes=2, node_rank=0, host="127.0.0.1", port=29400, devices=None)
SAVED = Path("saved")


def asked(plan: Plan, **options: Any) -> LaunchRequest:
    return LaunchRequest(
        plan=plan, config=lower(plan), script="train.py", folder=Path("run"), **options
    )


@pytest.mark.parametrize(
    ("options", "expected", "channel"),
    [
        ({}, Generations, "losses"),
        ({"on_failure": "replace"}, Generations, "device-losses"),
        ({"on_failure": "shrink"}, Generations, "device-losses"),
        ({"on_failure": "stop"}, Generations, "changes"),
        ({"rendezvous": TWO_HOSTS}, Regroup, None),
        ({"rendezvous": TWO_HOSTS, "checkpoint": SAVED}, Regroup, "heartbeats"),
        ({"rendezvous": TWO_HOSTS, "checkpoint": SAVED, "on_failure": "stop"}, Regroup, None),
    ],
)
def test_a_split_is_looked_after_by_hosts_and_policy(
    options: dict[str, Any], expected: type, channel: str | None
) -> None:
    supervision = supervision_of(asked(SPLIT, **options))
    supervision.hosts.leave()
    assert (supervision.supervisor, supervision.channel) == (expected, channel)


@pytest.mark.parametrize("on_failure", [None, "stop"])
def test_a_pipeline_on_one_host_changes_its_plan_as_a_whole(
    two_stages: Plan, on_failure: OnFailure | None
) -> None:
    request = asked(two_stages, on_failure=on_failure)
    supervision = supervision_of(request)
    supervision.hosts.leave()
    assert (supervision.supervisor, supervision.channel) == (Repartitions, "heartbeats")
    assert request.handover_folder == Path("run/handover")
    assert asked(two_stages, rendezvous=TWO_HOSTS).handover_folder is None
    assert asked(SPLIT).handover_folder is None


class Gpus:
    """A host with two GPUs whose workers have no processes."""

    def __init__(self, folder: Path) -> None:
        self.config = lower(plan_of(("V100", 2, 4)))
        self.commands: dict[str, WorkerCommand] = {}
        request = LaunchRequest(
            plan=plan_of(("V100", 2, 4)), config=self.config, script="t.py", folder=folder
        )
        meeting = MeetingPoint(address="127.0.0.1", port=1, interface="lo")
        self.starter = Starter(request, self, meeting, folder)  # type: ignore[arg-type]
        self.starter.first(seat_workers(self.config.workers, self.config), lambda: None)

    def wait_until_ready(self, commands: list[WorkerCommand], watch: object) -> None: ...

    def start(self, commands: list[WorkerCommand]) -> None:
        self.commands |= {command.name: command for command in commands}

    def lines(self) -> dict[str, WorkerCommand]:
        return self.commands

    def devices(self, *names: str) -> list[str]:
        """The GPU of each worker's own, by its number on the host."""
        found = []
        for name in names:
            environment = self.commands[name].environment
            own = int(environment[DEVICE].partition(":")[2])
            found.append(environment["CUDA_VISIBLE_DEVICES"].split(",")[own])
        return found


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(CudaBackend, "local_devices", lambda backend: (gpu_of("V100", 0, 1),))
    return Gpus(tmp_path)


def ranks(config: LaunchConfig, first: int) -> dict[str, int]:
    return {str(first + slot.rank): slot.rank for slot in config.workers}


def test_one_plan_after_another_takes_over_all_devices(gpus: Gpus) -> None:
    gpus.starter.start("follow", gpus.config, 1, ranks(gpus.config, 2))
    del gpus.commands["0"], gpus.commands["1"]
    assert gpus.devices("2", "3") == ["0", "1"]
    gpus.starter.start("follow", gpus.config, 2, ranks(gpus.config, 4))
    assert gpus.devices("4", "5") == ["0", "1"]
    assert gpus.commands["4"].environment["HETFLOW_FOLLOWS"] == "1"


def test_a_joining_worker_gets_a_device_that_nobody_holds(gpus: Gpus) -> None:
    with pytest.raises(TargetError, match="the plan needs 1 x V100, this machine has 2"):
        gpus.starter.start("join", gpus.config, 1, {"0": 0, "2": 1}, joining=["2"], restarted_at=0)
    del gpus.commands["0"]
    gpus.starter.start("join", gpus.config, 1, {"1": 0, "2": 1}, joining=["2"], restarted_at=0)
    assert gpus.devices("2") == ["0"]
    assert gpus.commands["2"].environment["HETFLOW_JOINS"] == "1"
    gpus.commands.clear()
    gpus.starter.start("restart", gpus.config, 2, ranks(gpus.config, 3))
    assert gpus.devices("3", "4") == ["0", "1"]
    assert gpus.commands["3"].environment["TORCHELASTIC_RESTART_COUNT"] == "2"
