"""The live scheduler beside the simulator, on the same jobs: as Gavel's table 5.3, on a stub.

    python benchmarks/live_against_simulated.py [--quick] [--json FILE]

The live loop with its state, plans, leases and transitions runs on a clock of its own, on devices
that only count steps: each start costs some seconds, as a real one does, and then steps are made
at the predicted speed. A job that moves stops and starts. A static trace (all jobs at once) and a
continuous one (Poisson arrivals). The last row takes LAS's centre on both sides, which is unique;
of several vertices each side takes the one that it comes to first. ``live_jobs.py`` does the same
with jobs that train, and ``hetflow cluster replay`` computes the same of a real cluster.
"""

import argparse
import json
import os
import random
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_parts.compare import POLICY, Compared, begin, compared, line_of
from live_parts.models import NUM_MODELS, TYPES, prepare

from hetflow.clusters.engines.protocol import EngineDevice, Fate, Work
from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.scheduler import sharing
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import Submission, submit
from hetflow.schema.cluster import Cluster
from hetflow.schema.files import read_plan

EACH = 4
TICK_SECONDS = 1.0
START = 1_000_000.0


@dataclass
class CountingEngine:
    """Devices that make steps at the predicted speed; a start costs ``start_seconds``."""

    start_seconds: float
    now: float = START
    left: dict[str, float] = field(default_factory=dict)
    """Steps of each job."""
    running: dict[Path, tuple[float, float]] = field(default_factory=dict)
    """When the first step begins, and steps a second."""
    ended: dict[Path, int] = field(default_factory=dict)
    name: str = "counting"

    def devices(self) -> tuple[EngineDevice, ...]:
        """All of them, on one server."""
        return tuple(
            EngineDevice(f"{kind}:{i}", kind, "here") for kind, _ in TYPES for i in range(EACH)
        )

    def start(self, work: Work) -> None:
        """Begin after the time that a start costs."""
        if work.folder not in self.running and work.folder not in self.ended:
            rate = 1.0 / read_plan(work.folder / "plan.json").predicted.step_seconds
            self.running[work.folder] = (self.now + self.start_seconds, rate)

    def stop(self, folder: Path) -> None:
        """Save and end at once."""
        self._end(folder, 143)

    def kill(self, folder: Path) -> None:
        """As ``stop``; nobody is deaf here."""
        self._end(folder, 137)

    def fate(self, folder: Path) -> Fate:
        """Whether it runs."""
        return Fate("running") if folder in self.running else Fate("ended", self.ended[folder])

    def advance(self, now: float) -> None:
        """Make the steps up to a time."""
        for folder, (begins, rate) in list(self.running.items()):
            job = folder.parent.parent.name
            self.left[job] -= max(0.0, now - max(begins, self.now)) * rate
            if self.left[job] <= 0.0:
                self._end(folder, 0)
        self.now = now

    def _end(self, folder: Path, code: int) -> None:
        if self.running.pop(folder, None) is not None:
            self.ended[folder] = code


def trace(folder: Path, jobs: int, mean_gap: float) -> list[tuple[float, Submission]]:
    """Jobs and when they arrive; all at once where the gap is 0."""
    draws, arrival, found = random.Random(0), START, []
    for number in range(jobs):
        found.append(
            (arrival, Submission(
                name=f"job {number}", script=str(folder / "train.py"), directory=str(folder),
                profiles=str(folder / f"model{number % NUM_MODELS}"), batch_size=16,
                virtual_nodes=4, steps=float(draws.randrange(1_000, 10_000)),
                devices=draws.choice((1, 1, 1, 2)), priority_weight=float(draws.choice((1, 1, 2))),
            ))
        )  # fmt: skip
        arrival += draws.expovariate(1.0 / mean_gap) if mean_gap else 0.0
    return found


def live(folder: Path, jobs: list[tuple[float, Submission]], engine: CountingEngine,
         round_seconds: float) -> ClusterStore:  # fmt: skip
    """Run them through the live scheduler; its state at the end."""
    pool = Cluster.parse(",".join(f"{EACH}x{kind}" for kind, _ in TYPES))
    store = begin(folder, pool, engine.name, round_seconds)
    store.run("PRAGMA synchronous = OFF")
    rules = RoundRules(round_seconds=round_seconds, reset_seconds=0.0)
    scheduler = Scheduler(store, engine, ClusterSettings(policy=POLICY, rules=rules))
    waiting, now = list(jobs), START
    while waiting or engine.running or _are_open(store):
        while waiting and waiting[0][0] <= now:
            arrival, asked = waiting.pop(0)
            number = submit(store, asked)
            engine.left[str(number)] = asked.steps
            store.run("UPDATE jobs SET submitted = ? WHERE number = ?", arrival, number)
        scheduler.tick(now)
        scheduler.tick(now)  # who was asked to leave has
        now += TICK_SECONDS
        engine.advance(now)
    return store


def _are_open(store: ClusterStore) -> bool:
    return bool(store.rows("SELECT 1 FROM jobs WHERE state != 'done' LIMIT 1"))


def run(
    name: str,
    jobs: int,
    mean_gap: float,
    start_seconds: float,
    optimum: Literal["vertex", "centre"] = "vertex",
) -> Compared:
    """One trace, live and simulated."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        engine = CountingEngine(start_seconds)
        store = live(folder / "state", trace(folder, jobs, mean_gap), engine, 60.0)
        row, _ = compared(name, store, 60.0, start_seconds, start_seconds, optimum)
        store.close()
    return row


def main() -> None:
    """Compare, and print a line a trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer jobs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    os.fsync = lambda descriptor: None  # the clock is not the machine's
    jobs, rows = 8 if arguments.quick else 24, []
    for name, gap in (("static", 0.0), ("continuous", 60.0)):
        for start_seconds in (0.0, 5.0):
            rows.append(run(name, jobs, gap, start_seconds))
            print(line_of(rows[-1]), flush=True)
    with mock.patch.object(sharing, "allocator_named", partial(allocator_named, warm=False)):
        rows.append(run("continuous, centre", jobs, 60.0, 5.0, "centre"))
    print(line_of(rows[-1]), flush=True)
    if arguments.json is not None:
        document = {"rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
