"""The SkyPilot engine on a module with the functions of SkyPilot 0.14 that it calls; no cloud."""

import subprocess
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hetflow.clusters.engines import skypilot
from hetflow.clusters.engines.protocol import ENGINES, FIRST_STEP, Fate, RentingEngine, Work
from hetflow.schema.cluster import Cluster, DeviceType, ServerGroup
from hetflow.schema.errors import BackendError, ProblemError


class JobStatus(Enum):
    """As SkyPilot's."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class ClusterDoesNotExist(ValueError):  # noqa: N818  # SkyPilot's name
    """As SkyPilot's."""


class ClusterNotUpError(Exception):
    """As SkyPilot's."""


@dataclass
class Task:
    """As SkyPilot's, as far as it is used."""

    name: str | None = None
    run: str = ""
    envs: dict[str, str] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)
    num_nodes: int = 1
    source: str | None = None

    @staticmethod
    def from_yaml(path: str) -> "Task":
        return Task(source=path)

    def update_envs(self, envs: dict[str, str]) -> "Task":
        self.envs |= envs
        return self

    def set_resources_override(self, override_params: dict[str, Any]) -> "Task":
        self.resources |= override_params
        return self


@dataclass
class Sky:
    """Requests answer at once; a cluster's launch is as a test says."""

    requests: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, JobStatus] = field(default_factory=dict)
    tasks: list[tuple[str, Task, dict[str, Any]]] = field(default_factory=list)
    called: list[tuple[str, str]] = field(default_factory=list)
    Task: type = Task
    exceptions: ClassVar[Any] = SimpleNamespace(
        ClusterDoesNotExist=ClusterDoesNotExist, ClusterNotUpError=ClusterNotUpError
    )

    def launch(self, task: Task, cluster_name: str | None = None, **given: Any) -> str:
        self.tasks.append((str(cluster_name), task, given))
        self.requests[f"r{len(self.tasks)}"] = "RUNNING"
        return f"r{len(self.tasks)}"

    def api_status(self, request_ids: list[str]) -> list[Any]:
        return [SimpleNamespace(status=self.requests[one]) for one in request_ids]

    def job_status(self, cluster_name: str, job_ids: list[int] | None = None) -> Any:
        return lambda: {1: self.jobs[cluster_name]}

    def get(self, request_id: Any) -> Any:
        try:
            return request_id()
        except KeyError as error:
            raise ClusterDoesNotExist(*error.args) from None

    def cancel(self, cluster_name: str, all: bool = False) -> str:  # noqa: A002  # SkyPilot's
        self.called.append(("cancel", cluster_name))
        self.jobs[cluster_name] = JobStatus.CANCELLED
        return "c"

    def down(self, cluster_name: str) -> str:
        self.called.append(("down", cluster_name))
        self.jobs.pop(cluster_name, None)
        return "d"


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> Sky:
    fake = Sky()
    monkeypatch.setitem(sys.modules, "sky", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(skypilot, "_LOOK_EVERY_SECONDS", -1.0)
    return fake


def started(sky: Sky, folder: Path) -> tuple[Any, str]:
    engine = ENGINES.get("skypilot")(Cluster.parse("2xV100"))
    folder.mkdir()
    work = Work(
        folder=folder, command=("/here/python", "-m", "hetflow", "launch", "a b.py"),
        directory=folder, devices=engine.devices(), environment={"A": "1"}, zone="us-east-1a",
        is_spot=True,
    )  # fmt: skip
    assert engine.fate(folder) == Fate("absent")
    engine.start(work)
    engine.start(work)  # was started
    ((cluster, task, given),) = sky.tasks
    assert given == {"down": True, "idle_minutes_to_autostop": 5}
    assert task.resources == {"use_spot": True, "zone": "us-east-1a", "accelerators": {"V100": 2}}
    assert task.run == "exec python3 -m hetflow launch 'a b.py'"
    assert task.envs == {"A": "1"}
    return engine, cluster


def test_a_lease_from_its_request_to_its_end(sky: Sky, tmp_path: Path) -> None:
    folder = tmp_path / "lease"
    engine, cluster = started(sky, folder)
    assert isinstance(engine, RentingEngine)
    assert engine.fate(folder) == Fate("waiting")
    sky.requests["r1"], sky.jobs[cluster] = "SUCCEEDED", JobStatus.INIT
    assert engine.fate(folder) == Fate("running")
    (folder / FIRST_STEP).parent.mkdir()
    (folder / FIRST_STEP).touch()
    sky.jobs[cluster] = JobStatus.RUNNING
    assert engine.fate(folder) == Fate("training")
    sky.jobs[cluster] = JobStatus.SUCCEEDED
    assert engine.fate(folder) == Fate("ended", 0)
    assert sky.called == [("down", cluster)]
    again = ENGINES.get("skypilot")(Cluster.parse("2xV100"))  # as after a kill
    assert again.fate(folder) == Fate("ended", 0)


@pytest.mark.parametrize(
    ("request_status", "job", "fate"),
    [
        ("FAILED", None, Fate("ended", None, has_begun=False)),
        ("SUCCEEDED", None, Fate("ended", None)),  # the cluster is gone
        ("SUCCEEDED", JobStatus.FAILED, Fate("ended", 1)),
    ],
)
def test_machines_that_never_came_or_went(
    sky: Sky, tmp_path: Path, request_status: str, job: JobStatus | None, fate: Fate
) -> None:
    engine, cluster = started(sky, tmp_path / "lease")
    sky.requests["r1"] = request_status
    if job is not None:
        sky.jobs[cluster] = job
    assert engine.fate(tmp_path / "lease") == fate
    assert sky.called == [("down", cluster)]


def test_a_stop_cancels_once_and_a_kill_gives_the_machine_back(sky: Sky, tmp_path: Path) -> None:
    engine, cluster = started(sky, tmp_path / "lease")
    sky.requests["r1"], sky.jobs[cluster] = "SUCCEEDED", JobStatus.RUNNING
    engine.stop(tmp_path / "lease")
    engine.stop(tmp_path / "lease")
    assert sky.called == [("cancel", cluster)]
    assert engine.fate(tmp_path / "lease") == Fate("ended", 143)
    sky.tasks.clear()
    engine, cluster = started(sky, tmp_path / "other")
    engine.kill(tmp_path / "other")
    assert engine.fate(tmp_path / "other") == Fate("ended")
    assert sky.called[-1] == ("down", cluster)


def test_a_task_of_ones_own_says_mounts_and_setup(
    sky: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(skypilot.TASK, "mounts.yaml")
    started(sky, tmp_path / "lease")
    assert sky.tasks[0][1].source == "mounts.yaml"


def test_machines_of_a_fleet_meet_on_the_first_one(sky: Sky, tmp_path: Path) -> None:
    """Each node runs the task's text; here a program that notes what it is given stands there."""
    machines = (ServerGroup(count=3, devices={"V100": 2}),)
    pool = Cluster(device_types={"V100": DeviceType()}, servers=machines)
    engine, folder = ENGINES.get("skypilot")(pool), tmp_path / "a lease"
    folder.mkdir()
    command = ("/here/python", "-m", "hetflow", "launch", "--output", f"{folder}/run", "p.json")
    two = engine.devices()[:4]
    engine.start(Work(folder=folder, command=command, directory=folder, devices=two))
    ((_, task, _),) = sky.tasks
    assert task.num_nodes == 2
    assert task.resources["accelerators"] == {"V100": 2}
    (tmp_path / "python3").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "python3").chmod(0o755)
    for rank, own in ((0, "run"), (1, "run-host1")):
        given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_RANK": str(rank),
                 "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}  # fmt: skip
        said = subprocess.run(
            ["bash", "-c", task.run], env=given, capture_output=True, text=True, check=True
        ).stdout
        assert said.split("\n") == [
            "-m", "hetflow", "launch", "--nnodes", "2", "--node-rank", str(rank),
            "--rdzv-endpoint", "10.0.0.1:29400", "--devices", "2xV100", "--output",
            f"{folder}/{own}", "p.json", "",
        ]  # fmt: skip


def test_what_cannot_be_rented_is_said(sky: Sky, tmp_path: Path, monkeypatch: Any) -> None:
    engine = ENGINES.get("skypilot")(Cluster.parse("1xV100,1xP100"))
    work = Work(folder=tmp_path, command=("p",), directory=tmp_path, devices=engine.devices())
    with pytest.raises(ProblemError, match="devices of one type, not of V100, P100"):
        engine.start(work)
    uneven = (ServerGroup(count=1, devices={"V100": 2}), ServerGroup(count=1, devices={"V100": 1}))
    engine = ENGINES.get("skypilot")(Cluster(device_types={"V100": DeviceType()}, servers=uneven))
    with pytest.raises(ProblemError, match=r"are alike, but have \[1, 2\] devices"):
        engine.start(replace(work, devices=engine.devices()))
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(BackendError, match="SkyPilot cannot be imported"):
        ENGINES.get("skypilot")(Cluster.parse("1xV100"))
