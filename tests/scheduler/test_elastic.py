"""Jobs that grow and shrink as others come and end: launches with real control folders."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.engines.protocol import EngineDevice
from hetflow.clusters.scheduler import view
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.plans import rates_of
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.submission import Submission, submission
from hetflow.schema.errors import HetflowError, InfeasibleError, ProblemError

from .conftest import FakeEngine
from .resizable import OneTypeEngine
from .test_loop import Asked, Cluster
from .test_replay import started
from .test_resizes import held, step


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneTypeEngine]:
    """Four devices of one type, and launches that can be resized."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    made = OneTypeEngine()
    yield made
    for launch in made.launches.values():
        launch.box.close()


def ranged(asked: Asked, name: str, most: int = 4, **given: object) -> Submission:
    """Eight virtual nodes, whose plans use 1, 2, 3, 4 or 8 devices: 5 are not faster than 4."""
    sizes = {"batch_size": 32, "virtual_nodes": 8}
    return asked(name, devices=most, devices_at_most=most, **{**sizes, **given})


@pytest.mark.parametrize("restarts", [False, True])
def test_jobs_share_by_weight_as_others_come_and_end(
    tmp_path: Path, engine: OneTypeEngine, asked: Asked, restarts: bool
) -> None:
    cluster = Cluster(tmp_path / "state", engine, "elastic")
    cluster.submit(ranged(asked, "a"))

    def settle() -> dict[int, int]:
        """Devices of each job, long before the round ends."""
        for _ in range(4):
            step(cluster, engine)
            if restarts:
                cluster.restart()
        return {job: len(names.split()) for job, names in held(cluster).items()}

    assert settle() == {1: 4}
    cluster.submit(ranged(asked, "b", priority_weight=3.0))
    assert settle() == {1: 1, 2: 3}
    cluster.submit(asked("fixed", devices=2))
    assert settle() == {1: 1, 2: 3}  # 2 weighs more than 3, and would lose devices to it
    engine.end(engine.jobs()[2], 0)
    assert settle() == {1: 2, 3: 2}
    engine.end(engine.jobs()[3], 1, "hetflow: worker 0 failed: boom\n")
    # It is tried again after 10 s. A scheduler that begins shares its devices out meanwhile.
    assert settle() == ({1: 4} if restarts else {1: 2})
    step(cluster, engine, 10.0)
    assert settle() == {1: 2, 3: 2}
    engine.end(engine.jobs()[3], 0)
    assert settle() == {1: 4}
    engine.end(engine.jobs()[1], 0)
    cluster.tick()
    assert cluster.states() == ["done"] * 3
    rows = {row.number: row for row in view.queue(cluster.store)}
    assert {job: (row.leases, row.resizes) for job, row in rows.items()} == {
        1: (1, 5 if restarts else 3), 2: (1, 0), 3: (2, 0)
    }  # fmt: skip
    for job in (1, 2):  # a move takes 0.2 s
        assert rows[job].device_seconds == pytest.approx(rows[job].target_seconds, abs=3.0)


def test_a_job_that_starts_is_stopped_when_it_has_to_shrink_and_nobody_is_while_the_server_rests(
    tmp_path: Path, engine: OneTypeEngine, asked: Asked
) -> None:
    engine.is_starting = True
    cluster = Cluster(tmp_path / "state", engine, "elastic")
    cluster.submit(ranged(asked, "a"))
    step(cluster, engine)
    cluster.submit(ranged(asked, "b"))
    for _ in range(3):
        step(cluster, engine)
    assert {job: len(names.split()) for job, names in held(cluster).items()} == {1: 2, 2: 2}
    assert {row.leases for row in view.queue(cluster.store)} == {1, 2}
    engine.fail_to_begin(engine.jobs()[2])
    for _ in range(8):
        step(cluster, engine, 1.0)
    assert list(engine.jobs()) == [1]
    step(cluster, engine, 5.0)
    assert sorted(engine.jobs()) == [1, 2]
    assert {row.leases for row in view.queue(cluster.store)} == {2}


def test_the_numbers_of_a_range_are_those_with_a_plan(tmp_path: Path, asked: Asked) -> None:
    job = ranged(asked, "a", 9, devices_at_least=2)
    rates = rates_of(job, {"cpu:fast": 6})
    assert [rate.scale_factor for rate in rates] == [2, 3, 4]
    with pytest.raises(InfeasibleError, match="5 are asked for, the cluster has 4"):
        rates_of(ranged(asked, "a", 9, devices_at_least=5), {"cpu:fast": 4})
    fake = FakeEngine(number=3)  # under another policy it has the most
    cluster = Cluster(tmp_path / "state", fake, "las")
    cluster.submit(job)
    cluster.tick()
    [work] = fake.running.values()
    assert len(work.devices) == 3
    cluster.restart()
    cluster.tick(10.0)
    assert list(fake.running.values()) == [work]


def test_fair_sharing_is_refused_where_types_differ(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="devices of one type, the cluster has cpu:fast, cpu:sl"):
        Cluster(tmp_path / "state", FakeEngine(), "elastic")


@dataclass
class _Apart(FakeEngine):
    """Four fast devices on each of two servers, on which nothing is resized."""

    def devices(self) -> tuple[EngineDevice, ...]:
        return tuple(
            EngineDevice(f"{place}/cpu:fast:{i}", "cpu:fast", place)
            for place in ("here", "there")
            for i in range(4)
        )

    def held(self) -> dict[int, list[str]]:
        return {job: [device.name for device in self.running[folder].devices]
                for job, folder in sorted(self.jobs().items())}  # fmt: skip


def test_each_of_several_servers_shares_its_devices_and_no_job_is_on_two(
    tmp_path: Path, asked: Asked
) -> None:
    engine = _Apart()
    cluster = Cluster(tmp_path / "state", engine, "elastic")

    def settle() -> dict[int, tuple[str, int]]:
        for _ in range(4):
            cluster.tick(0.1)
        found = {}
        for job, names in engine.held().items():
            [place] = {name.partition("/")[0] for name in names}
            found[job] = (place, len(names))
        return found

    cluster.submit(ranged(asked, "a", 8), asked("too large", devices=5))
    assert settle() == {1: ("here", 4)}
    assert "5 are asked for" in str(cluster.job(2)["reason"])
    assert "all devices of a job are on one server" in str(cluster.job(2)["reason"])
    cluster.submit(ranged(asked, "b"), ranged(asked, "c", priority_weight=3.0))
    assert settle() == {1: ("here", 2), 3: ("here", 2), 4: ("there", 4)}
    engine.fail_to_begin(engine.jobs()[4])  # that server rests
    assert settle() == {1: ("here", 1), 3: ("here", 1), 4: ("here", 2)}
    cluster.tick(12.0)
    assert settle() == {1: ("there", 4), 3: ("here", 1), 4: ("here", 3)}  # who gains most moves
    engine.end(engine.jobs()[3], 0)
    assert settle() == {1: ("there", 4), 4: ("here", 4)}
    for job in (1, 4):
        engine.end(engine.jobs()[job], 0)
    cluster.tick(0.1)
    assert cluster.states() == ["done", "held", "done", "done"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"devices_at_least": 2}, "say devices_at_most too"),
        ({"devices_at_least": 3, "devices_at_most": 2}, "is more than devices_at_most 2"),
        ({"devices": 2, "devices_at_most": 4}, "leave devices out"),
        ({"gpus": "2xa", "devices_at_most": 2}, "leave devices_at_most out"),
        ({"devices_at_most": "many"}, "devices_at_most"),
        ({"gpus": "1xa,1xb", "devices": 3}, "leave devices out"),
        ({"gpus": "2x(4xa)"}, "without servers"),
        ({"gpus": "0xa"}, "0xa"),
        ({"gpus": 4}, "gpus"),
    ],
)
def test_devices_that_make_no_sense_are_refused(
    tmp_path: Path, asked: Asked, values: dict[str, object], said: str
) -> None:
    job = asked("sane")
    sane = {"script": job.script, "profiles": job.profiles, "batch_size": 16, "steps": 10}
    with pytest.raises(HetflowError, match=said) as refused:
        submission({**sane, **values}, base=tmp_path, name="job")
    assert "\n" not in refused.value.message


def test_a_range_of_the_command_replaces_the_files_number(
    tmp_path: Path, engine: OneTypeEngine, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path / "state", engine, "elastic")
    started(cluster, "4xcpu:fast")
    job = asked("sane")
    (tmp_path / "job.toml").write_text(
        f'script = "{job.script}"\nprofiles = "{job.profiles}"\nbatch_size = 16\nsteps = 10\n'
        "devices = 2\nvirtual_nodes = 4\n"
    )
    for given in (["--devices-at-most", "3"], ["--devices-at-least=2", "--devices-at-most=4"], []):
        words = ["submit", "--state", str(cluster.folder), *given, str(tmp_path / "job.toml")]
        assert run(words) == 0
    rows = cluster.store.rows("SELECT submission FROM jobs ORDER BY number")
    keys = ("devices", "devices_at_least", "devices_at_most")
    assert [[json.loads(row["submission"]).get(key) for key in keys] for row in rows] == [
        [3, None, 3], [4, 2, 4], [2, None, None],
    ]  # fmt: skip
    cluster.tick()
    with cluster.store.transaction():
        cluster.store.set("started_with", cluster.store.get("started_with") | {"policy": "elastic"})
    assert run(["cluster", "replay", "--state", str(cluster.folder)]) == 2
    assert "name another policy" in capsys.readouterr().err
    assert run(["cluster", "replay", "--state", str(cluster.folder), "--policy", "fifo"]) == 0


def test_another_policy_goes_on_with_the_same_state(
    tmp_path: Path, engine: OneTypeEngine, asked: Asked
) -> None:
    cluster = Cluster(tmp_path / "state", engine, "las")
    cluster.submit(ranged(asked, "a"), ranged(asked, "b"))
    step(cluster, engine)
    for policy, wanted in (("elastic", [2, 2]), ("las", [4])):
        cluster.settings = ClusterSettings(
            policy=policy, rules=cluster.settings.rules, grace_seconds=5
        )
        cluster.scheduler = Scheduler(cluster.store, engine, cluster.settings)
        for seconds in (10.0, 0.1, 0.1, 0.1, 0.1):
            step(cluster, engine, seconds)
        assert [len(names.split()) for names in held(cluster).values()] == wanted
