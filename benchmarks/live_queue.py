"""What a live cluster's scheduler costs: 2,000 jobs in the queue, 200 devices that do nothing.

    python benchmarks/live_queue.py [--quick] [--policy NAME ...] [--json FILE]

CPU seconds of a round (the decision, its transitions in the state, and asking the engine), of a
tick between rounds, of the tick after a job has ended, of ``hetflow queue`` in a process of its
own, and of one answer of the dashboard; resident memory of the scheduler and the size of its state
while 10,000 jobs come, run and end. Processor time is measured, not the disk's: ``fsync`` does
nothing here.

Under ``elastic`` and EasyScale's policies half of the jobs have a range of devices, and a job's end
is followed by a decision at once. Under ``elastic`` all devices are of one type.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_parts.models import NUM_MODELS, TYPES, prepare

from hetflow.clusters.dashboard.snapshot import snapshot
from hetflow.clusters.engines.protocol import EngineDevice, Fate, Work
from hetflow.clusters.mechanisms import elastic
from hetflow.clusters.mechanisms.easyscale import VARIANTS
from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import FILE, ClusterStore
from hetflow.clusters.scheduler.submission import Submission, submit

ROUND_SECONDS = 360.0
POLICIES = ("las_weighted", "finish_time_fairness", "easyscale", "easyscale-taking", "elastic")
SERVER_SIZE = 4


@dataclass
class IdleEngine:
    """Devices that do nothing: a lease runs until somebody ends it."""

    each: int
    types: tuple[str, ...] = tuple(kind for kind, _ in TYPES)
    running: set[Path] = field(default_factory=set)
    ended: dict[Path, int] = field(default_factory=dict)
    name: str = "idle"

    def devices(self) -> tuple[EngineDevice, ...]:
        """All of them, four on a server."""
        return tuple(
            EngineDevice(f"{kind}:{i}", kind, f"{kind}-{i // SERVER_SIZE}")
            for kind in self.types
            for i in range(self.each)
        )

    def start(self, work: Work) -> None:
        """Let a lease run."""
        if work.folder not in self.ended:
            self.running.add(work.folder)

    def stop(self, folder: Path) -> None:
        """It saves and ends at once."""
        self.end(folder, 143)

    def kill(self, folder: Path) -> None:
        """End it."""
        self.end(folder, 137)

    def end(self, folder: Path, code: int) -> None:
        """End a lease with an exit code."""
        if folder in self.running:
            self.running.remove(folder)
            self.ended[folder] = code

    def fate(self, folder: Path) -> Fate:
        """Whether it runs."""
        if folder in self.running:
            return Fate("running")
        return Fate("ended", self.ended.pop(folder, 0))


def asked(folder: Path, number: int, *, grows: bool = False) -> Submission:
    """One of 24 kinds of jobs: 1, 2 or 4 devices, four models, two batch sizes.

    Every other one has a range up to that number of devices, where some grow.
    """
    most = (1, 1, 2, 4)[number // 8 % 4]
    return Submission(
        name=f"job {number}", script=str(folder / "train.py"), directory=str(folder),
        profiles=str(folder / f"model{number % NUM_MODELS}"), batch_size=(16, 32)[number // 4 % 2],
        steps=1e6, devices=most, virtual_nodes=4,
        devices_at_most=most if grows and number // 32 % 2 else None,
        priority_weight=float(1 + number % 3),
    )  # fmt: skip


def state(folder: Path) -> ClusterStore:
    """A new state, whose file is not waited for."""
    store = ClusterStore.create(folder)
    store.run("PRAGMA synchronous = OFF")
    return store


def cpu(act: Callable[[float], object], now: float) -> float:
    """CPU seconds of an act at a time."""
    start = time.process_time()
    act(now)
    return time.process_time() - start


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def one_answer(folder: Path, now: float) -> tuple[float, int]:
    """CPU seconds and bytes of all that the dashboard's page shows."""
    start = time.process_time()
    with closing(ClusterStore.read(folder)) as store, store.one_moment():
        text = json.dumps(snapshot(store, now=now, window_seconds=None).to_plain())
    return time.process_time() - start, len(text)


def a_full_queue(folder: Path, jobs: int, each: int, policy: str, rounds: int) -> dict[str, object]:
    """Fill the queue, let some rounds pass, and time each."""
    is_elastic = policy == elastic.NAME
    grows = is_elastic or VARIANTS.find(policy) is not None
    engine = IdleEngine(2 * each, (TYPES[0][0],)) if is_elastic else IdleEngine(each)
    store, now = state(folder / policy), time.time() + 1.0
    os.environ["HETFLOW_STATE"] = str(folder / policy)
    rules = RoundRules(round_seconds=ROUND_SECONDS, reset_seconds=0.0)
    scheduler = Scheduler(store, engine, ClusterSettings(policy=policy, rules=rules))
    for number in range(jobs):
        submit(store, asked(folder, number, grows=grows))
    first = cpu(scheduler.tick, now)
    each_round, between, moves, event = [], [], [], []
    for _ in range(rounds):
        before = len(engine.ended)
        now += ROUND_SECONDS
        each_round.append(cpu(scheduler.tick, now))
        between.append(cpu(scheduler.tick, now + 0.1))  # settles who was asked to leave
        moves.append(len(engine.running) - before)
        idle = cpu(scheduler.tick, now + 0.2)
        engine.end(min(engine.running), 0)
        event.append(cpu(scheduler.tick, now + 0.3))
    queue = []
    for _ in range(5):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "hetflow", "queue"], check=True, capture_output=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        queue.append(
            (end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime,
             time.monotonic() - began)
        )  # fmt: skip
    page_seconds, page_bytes = one_answer(folder / policy, now)
    return {
        "policy": policy,
        "jobs": jobs,
        "devices": len(engine.devices()),
        "running": len(engine.running),
        "admission_and_first_round_cpu_seconds": round(first, 3),
        "round_cpu_seconds": round(statistics.median(each_round), 3),
        "round_cpu_seconds_max": round(max(each_round), 3),
        "settling_cpu_seconds": round(statistics.median(between), 3),
        "end_of_a_job_cpu_seconds": round(statistics.median(event), 3),
        "idle_tick_cpu_seconds": round(idle, 4),
        "queue_cpu_seconds": round(min(one for one, _ in queue), 3),
        "queue_wall_seconds": round(min(one for _, one in queue), 3),
        "dashboard_cpu_seconds": round(page_seconds, 4),
        "dashboard_kib": round(page_bytes / 1024, 1),
    }


def many_jobs(folder: Path, jobs: int, each: int) -> dict[str, object]:
    """Jobs come and end, 500 at a time; memory after each tenth of them."""
    store, engine, now = state(folder / "many"), IdleEngine(each), time.time() + 1.0
    rules = RoundRules(round_seconds=ROUND_SECONDS, reset_seconds=0.0)
    scheduler = Scheduler(store, engine, ClusterSettings(rules=rules))
    memory, finished, submitted = [], 0, 0
    while finished < jobs:
        while submitted < min(jobs, finished + 500):
            submit(store, asked(folder, submitted))
            submitted += 1
        scheduler.tick(now)
        for lease in list(engine.running):
            engine.end(lease, 0)
        scheduler.tick(now + 0.1)
        now += ROUND_SECONDS
        [row] = store.rows("SELECT count(*) AS number FROM jobs WHERE state = 'done'")
        if row["number"] * 10 // jobs > finished * 10 // jobs:
            memory.append(resident_bytes())
        finished = row["number"]
    page_seconds, page_bytes = one_answer(folder / "many", now)
    return {
        "finished_jobs": finished,
        "resident_mib_by_tenth": [round(one / 2**20, 1) for one in memory],
        "state_mib": round((folder / "many" / FILE).stat().st_size / 2**20, 1),
        "dashboard_cpu_seconds": round(page_seconds, 4),
        "dashboard_kib": round(page_bytes / 1024, 1),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs and devices")
    parser.add_argument("--policy", action="append", help="instead of those in the document")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    jobs, each, many = (200, 10, 1000) if arguments.quick else (2000, 100, 10_000)
    found: dict[str, object] = {}
    os.fsync = lambda descriptor: None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        found["full_queue"] = [
            a_full_queue(folder, jobs, each, policy, rounds=5)
            for policy in arguments.policy or POLICIES
        ]
        if arguments.policy is None:
            found["many_jobs"] = many_jobs(folder, many, each)
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
