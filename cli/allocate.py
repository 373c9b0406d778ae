"""``hetflow allocate``: share device types among jobs, by parts of the time, with a proof."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import completing
from .common import ForceFlag, JsonFlag, asked_pool, emit_file, note, price_text, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..planning.inputs import Pool
    from ..schema.jobs import Allocation

_MOST_NAMED = 10  # jobs on stderr; the answer names all


def allocate(
    jobs: Annotated[Path, typer.Argument(help="Jobs: hetflow.jobs/1, .csv, or a Gavel .trace.")],
    throughputs: Annotated[
        Path, typer.Option(help="Throughputs (hetflow.throughputs/1, .csv, or Gavel's table).")
    ],
    policy: Annotated[
        str,
        typer.Option(
            autocompletion=completing.policies,
            help="las, las_weighted, las_water_filling, hierarchical, makespan, makespan_budget, "
            "finish_time_fairness, fifo, static_priority, sjf, max_throughput, "
            "max_normalised_throughput, min_cost, min_cost_slo, min_cost_ratio, "
            "min_cost_ratio_slo, min_cost_per_job, min_cost_per_job_slo, min_dollars_slo "
            "or a plug-in's.",
        ),
    ] = "las",
    gpus: Annotated[str | None, typer.Option(help="The pool, e.g. 36xv100,36xp100.")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Instead: a cluster file with prices, or `nvidia-smi -L`."),
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
    market: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prices of the pool's devices: hetflow.market/1; the cheapest counts; may be "
            "repeated."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="When, as 2020-03-07T00:00:00Z; else the market's last prices."),
    ] = None,
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
    from .. import allocate as share
    from ..schema.files import check_writable

    if output is not None:
        check_writable(output, force=force)
    allocation = share(
        jobs,
        throughputs,
        asked_pool(gpus, cluster),
        policy=policy,
        space_sharing=space_sharing,
        agnostic=agnostic,
        placement=placement,
        budget_dollars=budget,
        fill=fill,
        market=market or None,
        at=at,
    )
    warn_of_left_out(allocation.left_out)
    emit_file(allocation, output, force=force, json=json)
    for line in _prices(asked_pool(gpus, cluster), market, at):
        note(line)
    _tell(allocation, output)
    if allocation.certificate.termination != "optimal":
        raise typer.Exit(4)


def _prices(pool: "Pool", market: list[Path] | None, at: str | None) -> "Iterator[str]":
    """Where each price of the pool comes from."""
    from ..planning.inputs import pool_of
    from ..planning.market_prices import markets_of, priced_pool

    if market:
        for name, price in priced_pool(pool_of(pool), markets_of(market), at)[1].items():
            yield f"{name}: {price_text(price.dollars_per_hour, price.title)}"


def warn_of_left_out(left_out: "Mapping[str, str]") -> None:
    """Name jobs that fit nowhere on stderr, with why [job id -> why]."""
    for name, reason in list(left_out.items())[:_MOST_NAMED]:
        warn(f"job {name!r} is left out: {reason}")
    if len(left_out) > _MOST_NAMED:
        warn(f"{len(left_out)} jobs are left out in all; the answer names each")


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
