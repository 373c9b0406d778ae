"""Real jobs under the live scheduler, beside the simulation of the same jobs: Gavel's table 5.3.

    python benchmarks/live_jobs.py [--quick] [--trace static|continuous] [--json FILE]

Twenty small jobs train on 2 + 2 emulated devices of this machine, each turn a ``hetflow launch``
under the engine ``local``. Time is scaled: a round takes 15 or 20 s, a job one or a few rounds. A
static trace (all jobs at once) and a continuous one (Poisson arrivals). Workers are forked from a
preloaded process, but the launch itself imports torch, 2 CPU seconds a turn; rounds are so long
that two cores are not always busy, and ``busy_cores`` says how many were.

What the simulator knows beside the profiles is measured before each trace, by other jobs that run
as those of the trace do. A warm-up trace of the same kind, drawn from another seed, gives what a
start costs and the update of a step. Jobs whose device type is drained give what a resize costs.
``lost_seconds`` are what the trace's own turns cost, which the simulator does not know.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_parts.compare import POLICY, JobRow, begin, compared, line_of
from live_parts.real import UPDATE_SECONDS, pauses_of, run_to_end, turns_of, write_profile
from truth_parts.load import Load

import hetflow.examples
from hetflow.clusters.engines.local import LocalEngine
from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.scheduler import view
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import Submission, submit
from hetflow.runtime import preload
from hetflow.schema.cluster import Cluster


@dataclass(frozen=True)
class Trace:
    """Mean seconds between arrivals, epochs of a job (least, and one more than most), rounds.

    ``warm_up_jobs`` come before it; more of them where not all start at once.
    """

    mean_gap_seconds: float
    epochs: tuple[int, int]
    round_seconds: float
    warm_up_jobs: int = 6


SCRIPT = Path(hetflow.examples.__file__).parent / "live_cluster" / "train.py"
PASS_SECONDS = {"cpu:fast": 0.05, "cpu:slow": 0.08}
"""Of 32 points, of which a core computes some milliseconds."""
EACH = 2
BATCH_SIZE, VIRTUAL_NODES, EPOCH_STEPS = 128, 4, 8
TRACES = {
    "static": Trace(0.0, (5, 13), 20.0),
    "continuous": Trace(5.0, (3, 9), 15.0, 8),
}
QUICK = Trace(0.0, (3, 7), 15.0)
WARM_UP_SEED = 1
RESIZE_EPOCHS, RESIZE_ROUND_SECONDS = 6, 9.0
"""Of the jobs that are resized: they train when the first round ends, and not yet long."""
LIMIT_SECONDS = 300.0


def job(folder: Path, number: int, epochs: int, weight: float = 1.0) -> Submission:
    """A job that trains so many epochs."""
    return Submission(
        name=f"job {number}", script=str(SCRIPT), arguments=(str(epochs),), directory=str(folder),
        profiles=str(folder / "profiles"), batch_size=BATCH_SIZE, virtual_nodes=VIRTUAL_NODES,
        steps=float(EPOCH_STEPS * epochs), priority_weight=weight,
    )  # fmt: skip


def drawn(folder: Path, jobs: int, kind: Trace, seed: int) -> list[tuple[float, Submission]]:
    """Jobs and when they arrive, in seconds; all at once where the gap is 0."""
    gap = kind.mean_gap_seconds
    draws, arrival, found = random.Random(seed), 0.0, []
    for number in range(jobs):
        epochs, weight = draws.randrange(*kind.epochs), float(draws.choice((1, 1, 2)))
        found.append((arrival, job(folder, number, epochs, weight)))
        arrival += draws.expovariate(1.0 / gap) if gap else 0.0
    return found


def live(
    folder: Path,
    jobs: Sequence[tuple[float, Submission]],
    round_seconds: float,
    beside: Callable[[ClusterStore], None] = lambda store: None,
) -> ClusterStore:
    """Run them; the state at their end. ``beside`` is called before each tick."""
    pool = Cluster.parse(",".join(f"{EACH}x{kind}" for kind in PASS_SECONDS))
    store = begin(folder, pool, LocalEngine.name, round_seconds)
    rules = RoundRules(round_seconds=round_seconds, reset_seconds=0.0)
    scheduler = Scheduler(store, LocalEngine(pool), ClusterSettings(policy=POLICY, rules=rules))
    waiting, start = list(jobs), time.time()

    def arrive(now: float) -> None:
        while waiting and start + waiting[0][0] <= now:
            arrival, asked = waiting.pop(0)
            number = submit(store, asked)
            store.run("UPDATE jobs SET submitted = ? WHERE number = ?", start + arrival, number)
        beside(store)

    run_to_end(scheduler, store, arrive, num_jobs=len(jobs), limit_seconds=LIMIT_SECONDS)
    return store


def write_profiles(folder: Path, update_seconds: dict[str, float]) -> None:
    """Write the profiles that the jobs of a folder are planned by."""
    folder.mkdir()
    for kind, seconds in PASS_SECONDS.items():
        write_profile(
            folder / "profiles", kind, batch_size=BATCH_SIZE // VIRTUAL_NODES,
            pass_seconds=seconds, update_seconds=update_seconds.get(kind, UPDATE_SECONDS),
        )  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What the simulator knows beside the profiles; ``update_seconds`` of a step by type."""

    start_seconds: float
    resize_seconds: float
    update_seconds: dict[str, float]


def resize_seconds(folder: Path) -> float:
    """Seconds that a job pauses when it is resized, by jobs whose device type is drained."""
    write_profiles(folder, {})
    first = next(iter(PASS_SECONDS))  # the fastest, where they begin

    def drain(store: ClusterStore) -> None:
        if store.get("drainable") and not store.get("drained"):
            if store.rows("SELECT 1 FROM leases WHERE state = 'running' LIMIT 1"):
                view.drain(store, first, undo=False)

    jobs = [(0.0, job(folder, number, RESIZE_EPOCHS)) for number in range(EACH)]
    store = live(folder / "state", jobs, RESIZE_ROUND_SECONDS, drain)
    pauses = pauses_of(store)
    store.close()
    if not pauses:
        raise RuntimeError("no job was resized, so what that costs is not known")
    return statistics.mean(pauses)


def measured_costs(folder: Path, kind: Trace) -> Costs:
    """What a start, a resize and an update cost, by jobs that are not of the trace."""
    folder.mkdir()
    resize = resize_seconds(folder / "resizes")  # the first launches, which wait for imports
    place = folder / "warm-up"
    write_profiles(place, {})
    jobs = drawn(place, kind.warm_up_jobs, kind, WARM_UP_SEED)
    store = live(place / "state", jobs, kind.round_seconds)
    turns = turns_of(store)
    store.close()
    if not turns:
        raise RuntimeError("no turn of the warm-up was undisturbed, so a start's cost is not known")
    found: dict[str, list[float]] = {}
    for turn in turns:
        compute = VIRTUAL_NODES * PASS_SECONDS[turn.device_type]
        found.setdefault(turn.device_type, []).append(max(0.0, turn.step_seconds - compute))
    anywhere = statistics.mean(update for updates in found.values() for update in updates)
    updates = {kind: statistics.mean(found.get(kind, [anywhere])) for kind in PASS_SECONDS}
    return Costs(statistics.mean(turn.lost_seconds for turn in turns), resize, updates)


def run(folder: Path, name: str, jobs: int, kind: Trace) -> dict[str, object]:
    """One trace, live and simulated; what is written of it."""
    costs = measured_costs(folder / f"{name}-costs", kind)
    write_profiles(folder / name, costs.update_seconds)
    with Load() as load:
        jobs_of_trace = drawn(folder / name, jobs, kind, 0)
        store = live(folder / name / "state", jobs_of_trace, kind.round_seconds)
    row, each = compared(name, store, kind.round_seconds, costs.start_seconds, costs.resize_seconds)
    turns = turns_of(store)
    store.close()
    lost = statistics.mean(turn.lost_seconds for turn in turns) if turns else float("nan")
    busy = load.figures["own_cores"] + (load.figures["others_cores"] or 0.0)
    print(line_of(row))
    print(
        f"{sum(one.starts for one in each)} starts and {sum(one.resizes for one in each)} resizes; "
        f"a turn lost {lost:.1f} s; {busy:.2f} of {os.cpu_count()} cores busy"
    )
    print(table_of(each), flush=True)
    return asdict(row) | {
        "update_seconds": costs.update_seconds,
        "turns": len(turns),
        "lost_seconds": lost if turns else None,
        "busy_cores": busy,
        "cores": os.cpu_count(),
        "each": [asdict(one) for one in each],
    }


def table_of(rows: Sequence[JobRow]) -> str:
    """The jobs, received time beside its target."""
    lines = ["job     weight  arrival  JCT, simulated  device-s, simulated, target  starts resizes"]
    lines += [
        f"{one.name:7} {one.priority_weight:6.0f} {one.arrival_seconds:8.1f} "
        f"{one.live_jct_seconds:7.1f} {one.simulated_jct_seconds:7.1f} "
        f"{one.device_seconds:10.1f} {one.simulated_device_seconds:9.1f} "
        f"{one.target_device_seconds:7.1f} {one.starts:7} {one.resizes:7}"
        for one in rows
    ]
    return "\n".join(lines)


def write(path: Path, row: dict[str, object]) -> None:
    """Write a trace's figures; those of another one in the file stay."""
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [one for one in before if one["trace"] != row["trace"]] + [row]
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Compare, and print a trace's figures and its jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few jobs, at once, in short rounds")
    parser.add_argument("--trace", choices=list(TRACES), help="only this one")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    jobs, traces = (6, {"static": QUICK}) if arguments.quick else (20, TRACES)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with preload.serving(folder / "preload") as path:
            os.environ[preload.VARIABLE] = str(path)
            for name, kind in traces.items():
                if arguments.trace not in (None, name):
                    continue
                row = run(folder, name, jobs, kind)
                if arguments.json is not None:
                    write(arguments.json, row)


if __name__ == "__main__":
    main()
