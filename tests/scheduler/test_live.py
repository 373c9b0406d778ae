"""A real cluster on this host: jobs that are moved, orphaned and adopted end with their bits."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hetflow.clusters.engines.local import LocalEngine
from hetflow.clusters.engines.protocol import OUTPUT
from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.mechanisms.seats import Seat
from hetflow.clusters.scheduler import leases, loop, sharing, view
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import submission, submit
from hetflow.schema.cluster import Cluster
from hetflow.tests import programs

from .conftest import write_workplace

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

torch.manual_seed(0)
x = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = hf.prepare(model, optimizer)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
for epoch in range(50):
    for batch in job.batches(loader):
        job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
    job.print(f"epoch {epoch}")
"""
# The same training, slowly until it is told otherwise: resizes need a job that still trains.
SLOW_AT_FIRST = SCRIPT.replace(
    "        job.backward",
    "        time.sleep(0.0 if os.path.exists('hurry') else 0.2)\n        job.backward",
).replace("import torch\n", "import os, time\nimport torch\n", 1)
START = ["cluster", "start", "--gpus", "1xcpu:fast,1xcpu:slow", "--round", "4", "--grace", "20"]
LIMIT_SECONDS = 400.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and profiles whose steps take 20 and 40 ms."""
    write_workplace(tmp_path, SCRIPT, monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the job that has the cluster for itself, and is never moved."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        write_workplace(folder, SCRIPT, patch)
        hetflow("solve", "split", "--profiles", "profiles", "--gpus", "1xcpu:fast", "--batch-size",
                "16", "--virtual-nodes", "4", "-o", "plan.json", folder=folder)  # fmt: skip
        hetflow("launch", "-o", "alone", "--determinism", "elastic", "plan.json", "train.py",
                folder=folder)  # fmt: skip
    digest: str = json.loads((folder / "alone" / "run.json").read_text())["parameters_digest"]
    return digest


def hetflow(*words: str, folder: Path) -> str:
    command = [sys.executable, "-m", "hetflow", *words]
    answer = programs.run(command, cwd=folder, timeout=LIMIT_SECONDS)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def start(folder: Path, *more: str) -> "programs.Program | subprocess.Popen[str]":
    with (folder / "scheduler.log").open("ab") as log:
        command = [sys.executable, "-m", "hetflow", *START, *more]
        return programs.start(command, cwd=folder, stdout=log, stderr=log)


def test_jobs_moved_and_orphaned_end_as_the_same_job_alone(folder: Path, alone: str) -> None:
    scheduler = start(folder)
    try:
        end = time.monotonic() + LIMIT_SECONDS
        until_it_schedules(folder)
        for weight in ("1", "2", "3"):
            hetflow("submit", "--name", f"job {weight}'s $(touch x)", "--profiles", "profiles",
                    "--batch-size", "16", "--steps", "200", "--virtual-nodes", "4", "--weight",
                    weight, "train.py", folder=folder)  # fmt: skip
        store, kills, has_killed_launch = ClusterStore.open(folder / "state"), 0, False
        while any(job.state != "done" for job in view.queue(store)):
            assert time.monotonic() < end, view.queue(store)
            assert not any(job.state == "held" for job in view.queue(store)), view.queue(store)
            time.sleep(0.3)
            moved = sum(job.leases + job.resizes for job in view.queue(store))
            has_killed_launch = has_killed_launch or kill_a_launch(store)
            if kills < 2 and moved > 3 * (kills + 1):
                kills += 1
                scheduler.send_signal(signal.SIGKILL)
                scheduler.wait()
                scheduler = start(folder)
        jobs = view.queue(store)
        assert kills
        assert has_killed_launch
        assert sum(job.leases for job in jobs) > len(jobs)  # some were preempted
        assert {job.digest for job in jobs} == {alone}
        assert all(job.device_seconds > 0.0 for job in jobs)  # their first steps were told
        measured = [job.measured for job in jobs if job.measured is not None]
        assert measured  # some turns were long enough
        assert all(one.error is not None and -0.9 < one.error < 9.0 for one in measured)
        assert "epoch 49" in hetflow("logs", "3", folder=folder)
        assert not (folder / "x").exists()
        hetflow("cluster", "stop", folder=folder)
        assert scheduler.wait(60) == 0
    finally:
        scheduler.kill()
        scheduler.wait()
    assert not left_over(folder)


def test_a_job_that_grows_and_shrinks_while_it_runs_ends_as_the_same_job_alone(
    folder: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decisions are the test's; plans, requests, workers and records are those of a cluster."""
    seats: list[Seat] = [((1, 0, 0),), ((1, 0, 0), (1, 0, 1)), ((0, 0, 0),)]
    turn, epochs = 0, dict[int, int]()
    monkeypatch.setattr(sharing, "next_round", lambda *given, **more: {"1": seats[turn]})
    (folder / "train.py").write_text(SLOW_AT_FIRST)
    store = ClusterStore.create(folder / "state")
    paths = {"script": str(folder / "train.py"), "profiles": str(folder / "profiles")}
    job = {"batch_size": 16, "steps": 200, "virtual_nodes": 4, **paths}
    submit(store, submission(job, base=folder, name="test"))
    engine = LocalEngine(Cluster.parse("1xcpu:fast,2xcpu:slow"))
    rules = RoundRules(round_seconds=1.0, reset_seconds=0.0)
    settings = ClusterSettings(rules=rules, grace_seconds=20)
    scheduler = loop.Scheduler(store, engine, settings)
    end = time.monotonic() + LIMIT_SECONDS
    log = store.lease_folder(1, 1) / OUTPUT
    while (row := view.queue(store)[0]).state != "done":
        scheduler.tick(time.time())
        time.sleep(0.05)
        assert time.monotonic() < end, row
        done = log.read_text().count("epoch") if log.is_file() else 0
        if row.resizing_to:  # a scheduler that comes in the middle adopts it
            scheduler = loop.Scheduler(store, engine, settings)
        elif row.resizes == turn and done > epochs.setdefault(turn, done):  # it trains there
            turn = min(turn + 1, 2)
            if row.resizes == 2:
                (folder / "hurry").touch()
    assert (row.leases, row.resizes) == (1, 2)
    assert row.digest == alone
    record = json.loads((log.parent / "run" / "run.json").read_text())
    types = [[worker["device_type"] for worker in one["workers"]] for one in record["generations"]]
    assert types == [["cpu:slow"], ["cpu:slow"] * 2, ["cpu:fast"]]
    assert [one["kind"] for one in record["generations"]] == ["start", "resize", "resize"]
    held = store.rows("SELECT devices FROM leases ORDER BY number")
    assert [json.loads(one["devices"]) for one in held] == [
        ["cpu:slow:0"], ["cpu:slow:0", "cpu:slow:1"], ["cpu:fast:0"],
    ]  # fmt: skip
    assert not left_over(folder)


@pytest.mark.parametrize(
    ("policy", "pool", "second"),
    [
        ("elastic", "2xcpu:slow", {"devices_at_most": 2}),
        ("easyscale", "1xcpu:fast,1xcpu:slow", {"devices": 1}),  # guaranteed; it gets the fast one
    ],
)
def test_a_job_that_shrinks_for_another_and_grows_again_ends_as_the_same_job_alone(
    folder: Path, alone: str, policy: str, pool: str, second: dict[str, int]
) -> None:
    """The decisions are those of the policy, as jobs come and end."""
    (folder / "train.py").write_text(
        SLOW_AT_FIRST.replace("'hurry'", "sys.argv[1]")
        .replace("import os", "import sys, os")
        .replace("else 0.2", "else 0.5")  # the other one trains from start to end meanwhile
    )
    store = ClusterStore.create(folder / "state")
    paths = {"script": str(folder / "train.py"), "profiles": str(folder / "profiles")}
    job = {"batch_size": 16, "steps": 200, "virtual_nodes": 4, **paths}

    def add(name: str, **devices: int) -> int:
        asked = {"name": name, "arguments": [str(folder / f"hurry-{name}")], **devices, **job}
        return submit(store, submission(asked, base=folder, name="test"))

    engine = LocalEngine(Cluster.parse(pool))
    rules = RoundRules(round_seconds=600.0, reset_seconds=0.0)
    settings = ClusterSettings(policy=policy, rules=rules, grace_seconds=20)
    scheduler = loop.Scheduler(store, engine, settings)
    end = time.monotonic() + LIMIT_SECONDS
    (folder / "hurry-second").touch()
    log = store.lease_folder(add("first", devices_at_most=2), 1) / OUTPUT
    while any(row.state != "done" for row in view.queue(store)):
        scheduler.tick(time.time())
        time.sleep(0.05)
        rows = {row.name: row for row in view.queue(store)}
        assert time.monotonic() < end, rows
        if len(rows) == 1 and log.is_file() and "epoch" in log.read_text():
            add("second", **second)
        if rows["first"].resizes == 2:
            (folder / "hurry-first").touch()
    assert {name: (row.leases, row.resizes, row.digest) for name, row in rows.items()} == {
        "first": (1, 2, alone), "second": (1, 0, alone)
    }  # fmt: skip
    held = store.rows("SELECT devices FROM leases ORDER BY job, number")
    devices = [json.loads(one["devices"]) for one in held]
    assert [len(names) for names in devices] == [2, 1, 2, 1]
    assert {*devices[1], *devices[3]} == {*devices[0]}  # each has one of the two meanwhile
    assert not left_over(folder)


def until_it_schedules(folder: Path) -> None:
    """Wait until a scheduler says that it takes jobs."""
    end = time.monotonic() + LIMIT_SECONDS
    while "devices on" not in (folder / "scheduler.log").read_text():
        time.sleep(0.05)
        assert time.monotonic() < end


def kill_a_launch(store: ClusterStore) -> bool:
    """SIGKILL a job's launch, where one trains; its job is tried again."""
    for lease in leases.open_leases(store):
        folder = leases.folder_of(store, lease)
        trains = (folder / OUTPUT).is_file() and "epoch" in (folder / OUTPUT).read_text()
        if lease.state == "running" and trains:
            with suppress(ProcessLookupError):
                os.kill(json.loads((folder / "started.json").read_text())["pid"], signal.SIGKILL)
                return True
    return False


def left_over(folder: Path) -> list[str]:
    """Processes that still run something of the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder / "state") in line and int(process.name) != os.getpid():
            found.append(line)
    return found
