"""``hetflow cluster replay``: a live cluster's jobs in the simulator, beside what happened."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema.errors import ProblemError
from ..schema.requests.replay import ReplayRequest
from ..schema.spelling import whole_number
from .asking import Asked, asks
from .cluster import DEFAULT_STATE, StateOption
from .common import JsonFlag, emit, emit_json, note

if TYPE_CHECKING:
    from ..scheduler.history import History
    from ..schema.simulation import JobOutcome


@asks(ReplayRequest)
def replay(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Simulate the jobs of a live cluster, or of a Slurm cluster's log, and compare.

    Simulated jobs run at their predicted speed. What a job was to get is the sum of its shares, by
    the policy, over the time that it was there. Jobs that were cancelled or are held are
    left out.

    \b
    hetflow cluster replay
    hetflow cluster replay --policy fifo --restart-seconds 20 --resize-seconds 1
    hetflow cluster replay --sacct jobs.txt --policy las --rate v100=3.5 --rate k80=1
    """
    from ..mechanisms import easyscale, elastic
    from ..scheduler.history import history
    from ..scheduler.store import Store
    from ..simulator import Case, run_case
    from .allocate import warn_of_left_out

    request = ReplayRequest(**asked)
    if request.sacct is None:
        if request.gpus is not None or request.rates:
            raise ProblemError("--gpus and --rate are for a log", hint="add --sacct FILE")
        live = history(Store.open(state))
    else:
        live = _history_of_log(Path(request.sacct), request)
    policy = request.policy or live.policy
    if policy == elastic.NAME or easyscale.VARIANTS.find(policy) is not None:
        raise ProblemError(
            f"jobs with a range of devices are not simulated under {policy}",
            hint="name another policy with --policy: each job then holds the most of its range",
        )
    case = Case(
        throughputs=live.throughputs,
        num_devices=live.num_devices,
        dollars_per_hour=live.dollars_per_hour,
        entities=live.entities,
        policy=policy,
        round_seconds=live.round_seconds,
        reset_seconds=0.0,
        restart_seconds=request.restart_seconds,
        resize_seconds=request.resize_seconds,
        early_rounds=True,
    )
    run = run_case(case, [one.job for one in live.jobs])
    warn_of_left_out(run.left_out)
    document = _compared(live, {outcome.id: outcome for outcome in run.jobs}, case.policy)
    if json:
        emit_json(document)
    else:
        emit(_table(document))


def _history_of_log(path: Path, request: ReplayRequest) -> "History":
    """The jobs of ``sacct`` as a live cluster's; what a policy was to give them is not known."""
    from ..importers.sacct import read_sacct
    from ..scheduler.history import History, LiveJob
    from ..schema.cluster import Cluster

    log = read_sacct(path)
    jobs, throughputs = log.as_jobs(request.rates or {})
    pool = Cluster.parse(request.gpus).num_devices if request.gpus else log.num_devices
    if log.num_left_out:
        note(f"{log.num_left_out} jobs left out: no GPU, or not over")
    return History(
        jobs=tuple(
            LiveJob(
                name=one.name,
                job=job,
                completion_seconds=one.end_seconds - one.submit_seconds,
                device_seconds=one.num_devices * one.run_seconds,
                target_seconds=None,
                num_leases=one.num_starts,
                num_resizes=None,
            )
            for one, job in zip(log.jobs, jobs.jobs, strict=True)
        ),
        throughputs=throughputs,
        num_devices=pool,
        policy=request.policy or "fifo",
        round_seconds=request.round_seconds,
    )


def _compared(live: "History", found: "dict[str, JobOutcome]", policy: str) -> dict[str, Any]:
    """The document; what the pool cannot hold is not simulated, and left out of the averages."""
    jobs: list[dict[str, Any]] = [
        {
            "number": one.job.id if (number := whole_number(one.job.id)) is None else number,
            "name": one.name,
            "arrival_seconds": one.job.arrival_seconds,
            "completion_seconds": one.completion_seconds,
            "simulated_completion_seconds": outcome and outcome.completion_seconds,
            "device_seconds": one.device_seconds,
            "simulated_device_seconds": outcome and outcome.device_seconds,
            "target_device_seconds": one.target_seconds,
            "starts": one.num_leases,
            "resizes": one.num_resizes,
        }
        for one, outcome in ((one, found.get(one.job.id)) for one in live.jobs)
    ]
    ends_twice = ("completion_seconds", "simulated_completion_seconds")
    done = [row for row in jobs if all(row[name] is not None for name in ends_twice)]
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

    head = ("job", "name", "JCT", "simulated", "device-s", "simulated", "target", "starts",
            "resizes")  # fmt: skip
    rows = [
        (str(row["number"]), row["name"], _seconds(row["completion_seconds"]),
         _seconds(row["simulated_completion_seconds"]), _seconds(row["device_seconds"]),
         _seconds(row["simulated_device_seconds"]), _seconds(row["target_device_seconds"]),
         str(row["starts"]), "" if row["resizes"] is None else str(row["resizes"]))
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
