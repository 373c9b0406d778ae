"""Jobs, throughputs and allocations as plain tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...schema.jobs import Allocation, Jobs, Throughputs
from ...schema.simulation import SimulationRun
from .grid import grid, shown

_HOUR = 3600.0


def jobs_table(jobs: Jobs) -> str:
    """Each job: its devices, steps, arrival, weight, deadline and entity."""
    rows = [
        (job.id, job.model, job.scale_factor, f"{job.steps:g}", f"{job.arrival_seconds:g}",
         f"{job.priority_weight:g}", shown(job.slo_seconds, "g"),
         job.entity or "-")
        for job in jobs.jobs
    ]  # fmt: skip
    headers = ("job", "model", "devices", "steps", "arrival s", "weight", "slo s", "entity")
    return grid(headers, rows)


def throughputs_table(throughputs: Throughputs) -> str:
    """Steps per second of each model running alone, with a column per device type."""
    types = sorted({name for row in throughputs.models for name in row.steps_per_second})
    rows = [
        (row.model, row.scale_factor, *(f"{row.steps_per_second.get(t, 0.0):.4g}" for t in types))
        for row in throughputs.models
    ]
    return grid(("model", "devices", *types), rows)


def allocation_table(allocation: Allocation) -> str:
    """Each job's time fraction on each device type (Gavel's X), and its effective throughput."""
    types = sorted({name for shares in allocation.x.values() for name in shares})
    rows = [
        (
            job,
            *(f"{shares.get(name, 0.0):.3f}" for name in types),
            f"{allocation.throughputs.get(job, 0.0):.4g}",
        )
        for job, shares in allocation.x.items()
    ]
    proof = allocation.certificate
    gap = "unknown" if proof.gap is None else f"{proof.gap:.1e}"
    return "\n".join(
        [
            f"{allocation.policy} ({allocation.heterogeneity})",
            grid(("job", *types, "steps/s"), rows),
            f"objective {proof.objective:.6g}, {proof.termination}, gap {gap}: {proof.method}",
            *idle_lines(allocation),
            *(f"left out: {name}: {why}" for name, why in allocation.left_out.items()),
        ]
    )


def idle_lines(allocation: Allocation) -> list[str]:
    """One line for each type with idle devices, and why; none where the file does not say."""
    idle, usable = allocation.idle_devices, allocation.usable_idle_devices or {}
    if idle is None:
        return []
    if not any(idle.values()):
        return ["idle: none"]
    lines = [f"idle: {_devices(idle)}" + ("" if usable else ", which no job could use")]
    if usable:
        lines.append(f"jobs could use {_devices(usable)} of these: {allocation.idle_reason}")
    return lines


def _devices(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{number:.4g} {name}" for name, number in numbers.items())


def simulation_table(runs: Sequence[SimulationRun]) -> str:
    """One row per run: load, seed, completion times, makespan, utilisation, fairness, cost.

    For runs on a market, also how often jobs moved, and how often they lost their machines.
    """
    heads: tuple[str, ...] = (
        "policy", "load/h", "seed", "jobs", "avg JCT h", "p99 h", "wait h", "makespan h",
        "util %", "FTF", "cost $", "late",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [_simulation_row(run) for run in runs]
    if any(run.market_start is not None for run in runs):
        heads += ("moves", "taken away")
        counts = [(run.metrics.num_moves, run.metrics.num_preemptions) for run in runs]
        rows = [
            (*row, *(shown(count, "d") for count in both))
            for row, both in zip(rows, counts, strict=True)
        ]
    return grid(heads, rows)


def _simulation_row(run: SimulationRun) -> tuple[str, ...]:
    """The cells of one row; a run without jobs has no figures."""
    m = run.metrics
    name = run.policy or run.scheduler
    if run.space_sharing:
        name += " + pairs"
    head = (
        f"{name}{' (agnostic)' if run.heterogeneity == 'agnostic' else ''}",
        shown(run.jobs_per_hour, "g"),
        str(run.seed),
        str(m.num_jobs),
    )
    if not m.num_jobs:
        return (*head, *["-"] * 8)
    return (
        *head,
        f"{m.average_jct_seconds / _HOUR:.3f}",
        f"{m.p99_jct_seconds / _HOUR:.2f}",
        f"{m.average_queueing_seconds / _HOUR:.3f}",
        f"{m.makespan_seconds / _HOUR:.2f}",
        f"{100 * m.utilisation:.1f}",
        f"{m.average_finish_time_fairness:.3f}",
        shown(m.dollars, ".2f"),
        f"{m.num_slo_violations}/{m.num_slos}",
    )


def queue_table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """The rows of ``hetflow queue``, as its JSON has them."""
    head = ("job", "name", "state", "devices", "weight", "steps/s", "measured", "device-s",
            "leases", "resizes", "why")  # fmt: skip
    rows = [
        (str(row["number"]), row["name"], _state(row), _held(row), f"{row['priority_weight']:g}",
         f"{speed:.3g}" if (speed := row["predicted_steps_per_second"]) else "", _measured(row),
         f"{row['device_seconds']:.0f}", str(row["leases"]), str(row["resizes"]),
         row["reason"] or "")
        for row in jobs
    ]  # fmt: skip
    return grid(head, rows)


def _state(row: Mapping[str, Any]) -> str:
    return f"{row['state']} ({row['wanted']})" if row["wanted"] else str(row["state"])


def _held(row: Mapping[str, Any]) -> str:
    """What a job holds, and what it is about to change to while it runs."""
    held = ", ".join(row["devices"])
    return f"{held} -> {', '.join(row['resizing_to'])}" if row["resizing_to"] else held


def _measured(row: Mapping[str, Any]) -> str:
    """Steps a second, and how much more that is than was predicted for the same devices."""
    measured = row["measured"]
    if measured is None:
        return ""
    speed, predicted = measured["steps_per_second"], measured["predicted_steps_per_second"]
    return f"{speed:.3g}" + (f" ({100 * (speed / predicted - 1):+.1f} %)" if predicted else "")


def replay_table(document: Mapping[str, Any]) -> str:
    """Jobs as they ran beside the same jobs simulated; ``document`` is that of a replay."""
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


def _pair(document: Mapping[str, Any], name: str) -> str:
    live, simulated = document[name], document[f"simulated_{name}"]
    return f"{live:.1f} and {simulated:.1f} ({100 * (simulated / live - 1):+.1f} %)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
