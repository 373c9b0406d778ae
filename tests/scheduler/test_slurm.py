"""The scheduler on a real Slurm of fake nodes: jobs change node and type, and keep their bits."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetflow.scheduler import view
from hetflow.scheduler.store import Store
from hetflow.tests import programs
from hetflow.tests.engines.slurm_daemons import slurm_cluster, why_not

from .conftest import profile
from .test_live import SCRIPT, hetflow, left_over, until_it_schedules

pytestmark = [pytest.mark.processes, pytest.mark.slow]
START = ["cluster", "start", "--engine", "slurm", "--gpus", "1xcpu:fast,1xcpu:slow", "--round",
         "3", "--grace", "20"]  # fmt: skip
# So long that both jobs run beside each other, however late the second one is submitted.
STEPS = 400
LONG_SCRIPT = SCRIPT.replace("range(50)", f"range({STEPS // 4})")
LIMIT_SECONDS = 300.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "scheduler.log").open("ab") as log:
        command = [sys.executable, "-m", "hetflow", *START]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def test_two_jobs_are_moved_and_adopted_and_none_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded())
    monkeypatch.setenv("HETFLOW_STATE", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(LONG_SCRIPT)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "slurm").mkdir()
    for name, seconds, speed in (("cpu:fast", 0.005, 0.2), ("cpu:slow", 0.01, 0.1)):
        path = tmp_path / "profiles" / f"{name.replace(':', '-')}.json"
        path.write_text(json.dumps(profile(name, seconds, speed)))
    with slurm_cluster(tmp_path / "slurm") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        scheduler = start(tmp_path)
        try:
            end = time.monotonic() + LIMIT_SECONDS
            until_it_schedules(tmp_path)
            for weight in ("1", "2"):
                hetflow("submit", "--name", f"job {weight}'s $(touch x)", "--profiles",
                        "profiles", "--batch-size", "16", "--steps", str(STEPS), "--virtual-nodes",
                        "4", "--weight", weight, "train.py", folder=tmp_path)  # fmt: skip
            store, is_killed = Store.open(tmp_path / "state"), False
            while any(job.state != "done" for job in view.queue(store)):
                jobs = view.queue(store)
                assert time.monotonic() < end, jobs
                assert not any(job.state == "held" for job in jobs), jobs
                time.sleep(0.2)
                if not is_killed and all(job.state == "running" for job in jobs):
                    is_killed = True
                    scheduler.send_signal(signal.SIGKILL)
                    scheduler.wait()
                    scheduler = start(tmp_path)
            jobs = view.queue(store)
            assert is_killed
            assert len({job.digest for job in jobs}) == 1
            assert jobs[0].digest
            assert sum(job.leases for job in jobs) > len(jobs)  # one was moved
            queue = ["squeue", "--noheader", "--states=all", "--format=%T"]
            states = subprocess.run(queue, capture_output=True, text=True, check=True)
            assert states.stdout.split().count("COMPLETED") >= len(jobs)
            hetflow("cluster", "stop", folder=tmp_path)
            assert scheduler.wait(60) == 0
            live = subprocess.run(queue[:2] + queue[3:], capture_output=True, text=True, check=True)
            assert set(live.stdout.split()) <= {"COMPLETING"}
        finally:
            scheduler.kill()
            scheduler.wait()
    assert not left_over(tmp_path)
