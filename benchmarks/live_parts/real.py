"""Jobs that really train, under the live scheduler in this process and on the wall clock."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hetflow.clusters.scheduler.leases import RUN
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.serve import POLL_SECONDS
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.schema import files
from hetflow.schema.errors import HetflowError
from hetflow.schema.run import RunRecord
from hetflow.tests.scheduler.conftest import profile

UPDATE_SECONDS = 0.001
"""Of a profile whose update was not measured."""


@dataclass(frozen=True)
class Turn:
    """One launch on one device, from its start until the scheduler had seen its end."""

    device_type: str
    held_seconds: float
    steps: int
    step_seconds: float

    @property
    def lost_seconds(self) -> float:
        """What it held its device for beside its steps: start, save and end."""
        return self.held_seconds - self.steps * self.step_seconds


def write_profile(
    folder: Path,
    device_type: str,
    *,
    batch_size: int,
    pass_seconds: float,
    update_seconds: float = UPDATE_SECONDS,
) -> None:
    """Write a profile of an emulated device, whose passes of one size last so long."""
    document = profile(device_type, pass_seconds, 0.2)
    document["update_seconds"] = update_seconds
    document["batch_curve"] = [
        {"batch_size": batch_size, "step_seconds": pass_seconds, "peak_memory_bytes": 1 << 20}
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"{device_type.replace(':', '-')}.json").write_text(json.dumps(document))


def run_to_end(
    scheduler: Scheduler,
    store: ClusterStore,
    before: Callable[[float], None],
    *,
    num_jobs: int,
    limit_seconds: float,
) -> None:
    """Tick as ``hetflow cluster start`` does, until so many jobs are done.

    Args:
        scheduler: The scheduler.
        store: Its state.
        before: Called before each tick with its time.
        num_jobs: All jobs that come.
        limit_seconds: How long they may take together.

    Raises:
        RuntimeError: A job failed, or they took longer.
    """
    end = time.time() + limit_seconds
    with _ending(scheduler):
        while True:
            now = time.time()
            before(now)
            scheduler.tick(now)
            jobs = store.rows("SELECT number, state, reason FROM jobs")
            for job in jobs:
                if job["reason"]:
                    raise RuntimeError(f"job {job['number']} is {job['state']}: {job['reason']}")
            num_done = sum(job["state"] == "done" for job in jobs)
            if num_done == num_jobs:
                return
            if now > end:
                raise RuntimeError(f"{num_done} of {num_jobs} jobs done in {limit_seconds:.0f} s")
            time.sleep(POLL_SECONDS)


@contextmanager
def _ending(scheduler: Scheduler) -> Iterator[None]:
    """Let no launch outlive this process, also where that is asked to end."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("asked to end"))
    try:
        yield
    finally:
        while not scheduler.stop(time.time()):
            time.sleep(POLL_SECONDS)
        signal.signal(signal.SIGTERM, before)


def pauses_of(store: ClusterStore) -> list[float]:
    """Seconds that training paused in each resize of launches that are over."""
    found = []
    for row in store.rows("SELECT DISTINCT job, coalesce(launch, number) AS launch FROM leases"):
        with suppress(HetflowError):  # it was asked to leave before it trained
            path = store.lease_folder(row["job"], row["launch"]) / RUN / "run.json"
            found += [
                one.pause_seconds
                for one in files.read(path, RunRecord).generations
                if one.kind == "resize" and one.pause_seconds is not None
            ]
    return found


def turns_of(store: ClusterStore) -> list[Turn]:
    """All launches that trained long enough to be measured, and were not resized."""
    found = []
    for row in store.rows("SELECT * FROM leases WHERE state = 'over' AND started NOT NULL"):
        folder = store.lease_folder(row["job"], row["launch"] or row["number"])
        with suppress(HetflowError):  # it was asked to leave before it trained
            record = files.read(folder / RUN / "run.json", RunRecord)
            if record.measured_step_seconds is not None and not record.generations:
                kind = json.loads(row["devices"])[0].rpartition(":")[0]
                held = row["ended"] - row["started"]
                found.append(Turn(kind, held, record.num_steps, record.measured_step_seconds))
    return found
