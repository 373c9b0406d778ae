"""``hetflow cluster replay``: a live cluster's jobs in the simulator, beside what happened."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import completing
from .cluster import DEFAULT_STATE, StateOption
from .common import JsonFlag, emit, emit_json

if TYPE_CHECKING:
    from ..scheduler.history import History
    from ..schema.simulation import JobOutcome


def replay(
    policy: Annotated[
        str | None,
        typer.Option(autocompletion=completing.policies, help="Another policy than the live one."),
    ] = None,
    restart_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a job loses when it starts elsewhere.")
    ] = 0.0,
    state: StateOption = DEFAULT_STATE,
    json: JsonFlag = False,
) -> None:
    """Simulate the jobs of a live cluster as they came, and compare.

    Simulated jobs run at their predicted speed. What a job was to get is the sum of its shares, by
    the policy, over the time that it was there. Jobs that were cancelled or are held are
    left out.

    \b
    hetflow cluster replay
    hetflow cluster replay --policy fifo --restart-seconds 20
    """
    from ..scheduler.history import history
    from ..scheduler.store import Store
    from ..simulator import Case, run_case

    live = history(Store.open(state))
    case = Case(
        throughputs=live.throughputs,
        num_devices=live.num_devices,
        policy=policy or live.policy,
        round_seconds=live.round_seconds,
        reset_seconds=0.0,
        restart_seconds=restart_seconds,
    )
    run = run_case(case, [one.job for one in live.jobs])
    document = _compared(live, {outcome.id: outcome for outcome in run.jobs}, case.policy)
    if json:
        emit_json(document)
    else:
        emit(_table(document))


def _compared(live: "History", found: "dict[str, JobOutcome]", policy: str) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = [
        {
            "number": int(one.job.id),
            "name": one.name,
            "arrival_seconds": one.job.arrival_seconds,
            "completion_seconds": one.completion_seconds,
            "simulated_completion_seconds": found[one.job.id].completion_seconds,
            "device_seconds": one.device_seconds,
            "simulated_device_seconds": found[one.job.id].device_seconds,
            "target_device_seconds": one.target_seconds,
            "starts": one.num_leases,
        }
        for one in live.jobs
    ]
    done = [row for row in jobs if row["completion_seconds"] is not None]
    document: dict[str, Any] = {"policy": policy, "jobs": jobs, "num_done": len(done)}
    if done:
        for name in ("", "simulated_"):
            took = [row[f"{name}completion_seconds"] for row in done]
            ends = [row["arrival_seconds"] + one for row, one in zip(done, took, strict=True)]
            document[f"{name}average_jct_seconds"] = sum(took) / len(took)
            document[f"{name}makespan_seconds"] = max(ends)
    return document


def _table(document: dict[str, Any]) -> str:
    from ..reports.grid import grid

    head = ("job", "name", "JCT", "simulated", "device-s", "simulated", "target", "starts")
    rows = [
        (str(row["number"]), row["name"], _seconds(row["completion_seconds"]),
         _seconds(row["simulated_completion_seconds"]), _seconds(row["device_seconds"]),
         _seconds(row["simulated_device_seconds"]), _seconds(row["target_device_seconds"]),
         str(row["starts"]))
        for row in document["jobs"]
    ]  # fmt: skip
    lines = [grid(head, rows)]
    if document["num_done"]:
        lines.append(
            f"of {document['num_done']} jobs that are done, seconds, live and simulated "
            f"({document['policy']}): average JCT {_pair(document, 'average_jct_seconds')}, "
            f"makespan {_pair(document, 'makespan_seconds')}"
        )
    return "\n".join(lines)


def _pair(document: dict[str, Any], name: str) -> str:
    live, simulated = document[name], document[f"simulated_{name}"]
    return f"{live:.1f} and {simulated:.1f} ({100 * (simulated / live - 1):+.1f} %)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
