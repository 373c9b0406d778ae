"""``hetflow cluster replay``: a live cluster's jobs in the simulator, beside what happened.

Simulated jobs run at their predicted speed.
"""

import logging
from pathlib import Path
from typing import Any

from ..clusters.mechanisms import easyscale, elastic
from ..clusters.scheduler.history import JobHistory, LiveJob, history
from ..clusters.scheduler.store import ClusterStore
from ..clusters.simulator.cases import Case, run_case
from ..clusters.simulator.metrics import Simulation
from ..formats.importers.sacct import read_sacct
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.options import option, told
from ..schema.requests.cluster import ReplayRequest
from ..schema.simulation import JobOutcome
from ..schema.spelling import whole_number

_log = logging.getLogger("hetflow")


def replay(request: ReplayRequest, state: Path) -> tuple[dict[str, Any], Simulation]:
    """Simulate the jobs of a live cluster, or of a Slurm cluster's log, and compare.

    Args:
        request: How.
        state: Folder of the cluster's state.

    Returns:
        What happened beside what was simulated, as a JSON document; and the simulation.

    Raises:
        ProblemError: The policy cannot be simulated, or an option is for a log and there is none.
        FileError: There is no such cluster, or the log has faults.
    """
    if request.sacct is None:
        if request.gpus is not None or request.rates:
            raise ProblemError(
                told("{gpus} and {rates} are for a log"), hint=f"add {option('sacct', 'FILE')}"
            )
        live = history(ClusterStore.open(state))
    else:
        live = _history_of_log(Path(request.sacct), request)
    policy = request.policy or live.policy
    if policy == elastic.NAME or easyscale.VARIANTS.find(policy) is not None:
        raise ProblemError(
            f"jobs with a range of devices are not simulated under {policy}",
            hint=f"name another policy with {option('policy')}: each job then holds the most of "
            "its range",
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
    return _compared(live, {outcome.id: outcome for outcome in run.jobs}, policy), run


def _history_of_log(path: Path, request: ReplayRequest) -> JobHistory:
    """The jobs of ``sacct`` as a live cluster's; what a policy was to give them is not known."""
    log = read_sacct(path)
    jobs, throughputs = log.as_jobs(request.rates or {})
    pool = Cluster.parse(request.gpus).num_devices if request.gpus else log.num_devices
    if log.num_left_out:
        _log.info(f"{log.num_left_out} jobs left out: no GPU, or not over")
    return JobHistory(
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


def _compared(live: JobHistory, found: dict[str, JobOutcome], policy: str) -> dict[str, Any]:
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
