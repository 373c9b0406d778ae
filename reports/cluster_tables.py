"""Jobs, throughputs and allocations as plain tables."""

from ..schema.jobs import Allocation, Jobs, Throughputs
from .grid import grid


def table_of(record: Jobs | Throughputs | Allocation) -> str:
    """The table of whatever a file of the cluster's side held."""
    if isinstance(record, Jobs):
        return jobs_table(record)
    if isinstance(record, Throughputs):
        return throughputs_table(record)
    return allocation_table(record)


def jobs_table(jobs: Jobs) -> str:
    """One row a job."""
    rows = [
        (
            job.id,
            job.model,
            job.scale_factor,
            f"{job.steps:g}",
            f"{job.arrival_seconds:g}",
            f"{job.priority_weight:g}",
            "-" if job.slo_seconds is None else f"{job.slo_seconds:g}",
            job.entity or "-",
        )
        for job in jobs.jobs
    ]
    headers = ("job", "model", "devices", "steps", "arrival s", "weight", "slo s", "entity")
    return grid(headers, rows)


def throughputs_table(throughputs: Throughputs) -> str:
    """Steps per second of each model alone, a column a device type."""
    types = sorted({name for row in throughputs.models for name in row.steps_per_second})
    rows = [
        (row.model, row.scale_factor, *(f"{row.steps_per_second.get(t, 0.0):.4g}" for t in types))
        for row in throughputs.models
    ]
    return grid(("model", "devices", *types), rows)


def allocation_table(allocation: Allocation) -> str:
    """Each job's time fractions, a column a device type, and its effective throughput."""
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
        ]
    )
