"""Jobs that ran on a live cluster, beside the simulation of the same jobs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetflow.clusters.scheduler.history import history
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.simulator.cases import Case, run_case
from hetflow.schema.cluster import Cluster
from hetflow.schema.files import to_json

POLICY = "las_weighted"


@dataclass(frozen=True)
class Compared:
    """One trace, live and simulated; deficits are device-seconds below the target, and mean."""

    trace: str
    jobs: int
    round_seconds: float
    start_seconds: float
    resize_seconds: float
    live_jct_seconds: float
    simulated_jct_seconds: float
    live_makespan_seconds: float
    simulated_makespan_seconds: float
    mean_deficit: float
    mean_device_seconds: float


@dataclass(frozen=True)
class JobRow:
    """One job of a trace; ``target_device_seconds`` are those that the policy's shares gave it."""

    name: str
    arrival_seconds: float
    priority_weight: float
    steps: float
    live_jct_seconds: float
    simulated_jct_seconds: float
    device_seconds: float
    simulated_device_seconds: float
    target_device_seconds: float
    starts: int
    resizes: int


def begin(folder: Path, pool: Cluster, engine: str, round_seconds: float) -> ClusterStore:
    """A cluster's new state, with what ``hetflow cluster start`` notes there."""
    store = ClusterStore.create(folder)
    with store.transaction():
        told = {"pool": to_json(pool), "engine": engine, "policy": POLICY}
        store.set("started_with", told | {"round_seconds": round_seconds, "grace_seconds": 30})
    return store


def compared(
    name: str,
    store: ClusterStore,
    round_seconds: float,
    start_seconds: float,
    resize_seconds: float,
    optimum: Literal["vertex", "centre"] = "vertex",
) -> tuple[Compared, list[JobRow]]:
    """Simulate the jobs of a state, all done, and put them beside.

    Args:
        name: The trace's.
        store: The state.
        round_seconds: Of the rounds.
        start_seconds: What the simulator counts for a start, and for a stop with another start.
        resize_seconds: What it counts for a move of a running job.
        optimum: Which of LAS's optima the simulator takes.
    """
    done = history(store)
    case = Case(
        throughputs=done.throughputs, num_devices=done.num_devices, policy=POLICY,
        round_seconds=round_seconds, reset_seconds=0.0, restart_seconds=start_seconds,
        resize_seconds=resize_seconds, early_rounds=True, optimum=optimum,
    )  # fmt: skip
    run = run_case(case, [one.job for one in done.jobs])
    simulated = {one.id: one for one in run.jobs}
    rows = [
        JobRow(
            name=one.name,
            arrival_seconds=one.job.arrival_seconds,
            priority_weight=one.job.priority_weight,
            steps=one.job.steps,
            live_jct_seconds=one.completion_seconds or 0.0,
            simulated_jct_seconds=simulated[one.job.id].completion_seconds,
            device_seconds=one.device_seconds,
            simulated_device_seconds=simulated[one.job.id].device_seconds,
            target_device_seconds=one.target_seconds or 0.0,
            starts=one.num_leases,
            resizes=one.num_resizes or 0,
        )
        for one in done.jobs
    ]
    number = len(rows)
    deficits = [max(0.0, row.target_device_seconds - row.device_seconds) for row in rows]
    found = Compared(
        trace=name,
        jobs=number,
        round_seconds=round_seconds,
        start_seconds=start_seconds,
        resize_seconds=resize_seconds,
        live_jct_seconds=sum(row.live_jct_seconds for row in rows) / number,
        simulated_jct_seconds=sum(row.simulated_jct_seconds for row in rows) / number,
        live_makespan_seconds=max(row.arrival_seconds + row.live_jct_seconds for row in rows),
        simulated_makespan_seconds=max(one.finish_seconds for one in run.jobs),
        mean_deficit=sum(deficits) / number,
        mean_device_seconds=sum(row.device_seconds for row in rows) / number,
    )
    return found, rows


def line_of(row: Compared) -> str:
    """One trace as a line."""
    jct = row.simulated_jct_seconds / row.live_jct_seconds - 1
    makespan = row.simulated_makespan_seconds / row.live_makespan_seconds - 1
    return (
        f"{row.trace:10} {row.jobs} jobs, a start {row.start_seconds:.2f} s, a resize "
        f"{row.resize_seconds:.2f} s: "
        f"JCT {row.live_jct_seconds:.1f} s live, {row.simulated_jct_seconds:.1f} simulated "
        f"({100 * jct:+.2f} %); makespan {row.live_makespan_seconds:.0f}, "
        f"{row.simulated_makespan_seconds:.0f} ({100 * makespan:+.2f} %); "
        f"short of the target by {row.mean_deficit:.0f} of {row.mean_device_seconds:.0f} device-s"
    )
