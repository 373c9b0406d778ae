"""``hetflow allocate``: who runs where, for what part of the time, with a proof."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..schema.errors import BackendError
from .common import ForceFlag, JsonFlag, emit_file, note, warn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schema.cluster import Cluster
    from ..schema.jobs import Allocation, AllocationProblem

_MOST_NAMED = 10  # jobs on stderr; the answer names all


def allocate(
    jobs: Annotated[Path, typer.Argument(help="Jobs: hetflow.jobs/1, .csv, or a Gavel .trace.")],
    throughputs: Annotated[
        Path, typer.Option(help="Throughputs (hetflow.throughputs/1, .csv, or Gavel's table).")
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="las, las_weighted, las_water_filling, hierarchical, makespan, makespan_budget, "
            "finish_time_fairness, fifo, static_priority, sjf, max_throughput, "
            "max_normalised_throughput, min_cost, min_cost_slo, min_cost_ratio, "
            "min_cost_ratio_slo, min_cost_per_job or min_dollars_slo."
        ),
    ] = "las",
    gpus: Annotated[str | None, typer.Option(help="The pool, e.g. 36xv100,36xp100.")] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file instead of --gpus; holds prices.")
    ] = None,
    space_sharing: Annotated[
        bool, typer.Option("--space-sharing", help="Let pairs of jobs share devices.")
    ] = False,
    agnostic: Annotated[
        bool, typer.Option("--agnostic", help="Ignore what device types differ in.")
    ] = False,
    placement: Annotated[
        Literal["consolidated", "unconsolidated", "mixed"],
        typer.Option(
            help="Which throughputs of jobs with several devices count; mixed: both, with "
            "servers as in 9x(4xv100) as many consolidated as these can hold."
        ),
    ] = "consolidated",
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Dollars, for makespan_budget.")
    ] = None,
    fill: Annotated[
        bool,
        typer.Option(
            "--fill/--no-fill",
            help="Share out what a max-min policy's optimum leaves idle, lexicographically, or "
            "keep to the bare optimum of the thesis.",
        ),
    ] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Share a pool among jobs as a policy asks; the allocation carries its proof.

    It goes to stdout as JSON, or to -o FILE. Jobs that fit nowhere in the pool are left out, and
    named; devices that stand idle are named too.

    \b
    hetflow allocate jobs.json --throughputs t.json --gpus 8xV100,8xP100 --policy makespan
    """
    from ..checks.allocation import check
    from ..planning.judging import read_pool
    from ..schema.files import check_writable
    from ..solvers.allocation import allocate as solve

    if output is not None:
        check_writable(output, force=force)
    problem = read_problem(
        jobs,
        throughputs,
        read_pool(gpus, cluster),
        heterogeneity="agnostic" if agnostic else "aware",
        space_sharing=space_sharing,
        placement=placement,
        budget_dollars=budget,
    )
    allocation = replace(
        solve(problem, policy, fills=fill),
        space_sharing=space_sharing,
        placement=placement,
        budget_dollars=budget,
    )
    faults = check(allocation, problem)
    if faults:
        raise BackendError(f"the solver's own allocation fails its check: {'; '.join(faults[:3])}")
    warn_of_left_out(allocation.left_out)
    emit_file(allocation, output, force=force, json=json)
    _tell(allocation, output)
    if allocation.certificate.termination != "optimal":
        raise typer.Exit(4)


def warn_of_left_out(left_out: "Mapping[str, str]") -> None:
    """Name jobs that fit nowhere on stderr, with why [job id -> why]."""
    for name, reason in list(left_out.items())[:_MOST_NAMED]:
        warn(f"job {name!r} is left out: {reason}")
    if len(left_out) > _MOST_NAMED:
        warn(f"{len(left_out)} jobs are left out in all; the answer names each")


def read_problem(
    jobs: Path, throughputs: Path, pool: "Cluster", *, space_sharing: bool, **choices: Any
) -> "AllocationProblem":
    """The allocation problem of two files and a pool.

    Args:
        jobs: Jobs, also as a CSV or a Gavel trace.
        throughputs: Throughputs, also as a CSV or Gavel's table.
        pool: The devices, with prices where policies need them.
        space_sharing: Whether pairs of jobs may share devices.
        choices: Other fields of ``AllocationProblem``.

    Raises:
        HetflowError: A file that cannot be read, or jobs that do not fit the pool.
    """
    from ..importers.jobs_files import read_jobs, read_throughputs, spelled_as
    from ..schema.jobs import AllocationProblem, consolidated_devices

    table = read_throughputs(throughputs, pairs=space_sharing)
    pool = spelled_as(pool, table)
    together: dict[str, int] = {}
    if choices.get("placement") == "mixed" and pool.sizes is not None:
        limits = consolidated_devices(table, pool.sizes)
        together = dict(zip(pool.num_devices, limits, strict=True))
    prices = {n: t.dollars_per_hour for n, t in pool.device_types.items() if t.dollars_per_hour}
    return AllocationProblem(
        jobs=read_jobs(jobs),
        throughputs=table,
        num_devices=pool.num_devices,
        dollars_per_hour=prices,
        space_sharing=space_sharing,
        consolidated_devices=together,
        **choices,
    )


def _tell(allocation: "Allocation", output: Path | None) -> None:
    from ..reports.cluster_tables import idle_lines
    from ..solvers.allocation import policy_named

    certificate, policy = allocation.certificate, policy_named(allocation.policy)
    gap = "unknown" if certificate.gap is None else f"{certificate.gap:.1e}"
    note(
        f"{policy.title}: {certificate.objective:.6g} {policy.unit} "
        f"({certificate.termination}, gap {gap}; {certificate.method})"
    )
    for line in idle_lines(allocation):
        note(line)
    if output is not None:
        note(f"allocation written to {output}")
