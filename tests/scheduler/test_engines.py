"""The scheduler on a real Slurm: jobs change node and type, and keep their bits.

``tests/engines/test_ray.py`` runs the same jobs on its Ray.
"""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from hetflow.clusters.scheduler import view
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.tests.engines import slurm_daemons

from .conftest import write_workplace
from .test_live import SCRIPT, hetflow, left_over, start, until_it_schedules

pytestmark = [pytest.mark.processes, pytest.mark.slow]
# So long that both jobs run beside each other, however late the second one is submitted.
STEPS = 400
LONG_SCRIPT = SCRIPT.replace("range(50)", f"range({STEPS // 4})")
LIMIT_SECONDS = 300.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and profiles whose steps take 20 and 40 ms."""
    write_workplace(tmp_path, LONG_SCRIPT, monkeypatch)
    return tmp_path


def said(store: ClusterStore) -> str:
    """What became of the jobs, and all that their launches wrote."""
    found = [f"{job.number} is {job.state}: {job.reason}" for job in view.queue(store)]
    for job in view.queue(store):
        found += [path.read_text() for _, path in view.outputs(store, job.number)]
    return "\n".join(found)


def run_two_jobs(folder: Path, engine: str) -> None:
    """Run two jobs, kill the scheduler while both run, and start it again until they are done."""
    scheduler = start(folder, "--round", "3", "--engine", engine)
    try:
        end = time.monotonic() + LIMIT_SECONDS
        until_it_schedules(folder)
        for weight in ("1", "2"):
            hetflow("submit", "--name", f"job {weight}'s $(touch x)", "--profiles", "profiles",
                    "--batch-size", "16", "--steps", str(STEPS), "--virtual-nodes", "4", "--weight",
                    weight, "train.py", folder=folder)  # fmt: skip
        store, is_killed = ClusterStore.open(folder / "state"), False
        while any(job.state != "done" for job in view.queue(store)):
            jobs = view.queue(store)
            assert time.monotonic() < end, said(store)
            assert not any(job.state == "held" for job in jobs), said(store)
            time.sleep(0.2)
            if not is_killed and all(job.state == "running" for job in jobs):
                is_killed = True
                scheduler.send_signal(signal.SIGKILL)
                scheduler.wait()
                scheduler = start(folder, "--round", "3", "--engine", engine)
        jobs = view.queue(store)
        assert is_killed
        assert len({job.digest for job in jobs}) == 1
        assert jobs[0].digest
        assert sum(job.leases for job in jobs) > len(jobs)  # one was moved
        hetflow("cluster", "stop", folder=folder)
        assert scheduler.wait(60) == 0
    finally:
        scheduler.kill()
        scheduler.wait()


def test_on_slurm_two_jobs_are_moved_and_adopted_and_none_is_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = slurm_daemons.why_not()
    if reason:
        pytest.skip(reason)
    (folder / "slurm").mkdir()
    with slurm_daemons.slurm_cluster(folder / "slurm") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        run_two_jobs(folder, "slurm")
        queue = ["squeue", "--noheader", "--states=all", "--format=%T"]
        states = subprocess.run(queue, capture_output=True, text=True, check=True).stdout.split()
        assert states.count("COMPLETED") >= 2
        assert not set(states) & {"PENDING", "RUNNING", "SUSPENDED"}
    assert not left_over(folder)
