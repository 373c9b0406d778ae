"""``hetflow throughputs`` and ``allocate``: share device types among jobs, with a proof."""

from collections.abc import Mapping

import typer

from ..schema.requests.allocate import AllocateRequest, ThroughputsRequest
from .asking import Asked, asks
from .common import (
    ForceFlag,
    JsonFlag,
    OutputOption,
    emit_file,
    note,
    price_text,
    progress_line,
    warn,
)

_MOST_NAMED = 10  # jobs on stderr; the answer names all


@asks(AllocateRequest)
def allocate(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Share a pool among jobs as a policy asks; the allocation carries its proof.

    It goes to stdout as JSON, or to -o FILE. Jobs that fit nowhere in the pool are left out, and
    named; devices that stand idle are named too.

    \b
    hetflow allocate jobs.json --throughputs t.json --gpus 8xV100,8xP100 --policy makespan
    """
    from .. import allocate as share
    from ..api.files import priced_pool
    from ..formats.reports.cluster_tables import idle_lines
    from ..planning.inputs import pool_of
    from ..schema.files import check_outputs
    from ..solvers.allocation import policy_named

    check_outputs(output, force=force)
    with progress_line() as tell:
        tell("sharing the pool among the jobs")
        allocation = share(**asked)
    warn_of_left_out(allocation.left_out)
    emit_file(allocation, output, force=force, json=json)
    if asked.get("market"):
        _, prices = priced_pool(pool_of(asked["pool"]), asked["market"], asked.get("at"))
        for name, price in prices.items():
            note(f"{name}: {price_text(price.dollars_per_hour, price.title)}")
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
    if allocation.certificate.termination != "optimal":
        raise typer.Exit(4)


def warn_of_left_out(left_out: Mapping[str, str]) -> None:
    """Name jobs that fit nowhere on stderr, with why [job id -> why]."""
    for name, reason in list(left_out.items())[:_MOST_NAMED]:
        warn(f"job {name!r} is left out: {reason}")
    if len(left_out) > _MOST_NAMED:
        warn(f"{len(left_out)} jobs are left out in all; the answer names each")


@asks(ThroughputsRequest)
def throughputs(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Turn profiles into the throughputs that allocate and simulate need.

    A job keeps its batch whatever it runs on: a rate is one over the step that `hetflow solve`
    predicts for that batch on so many devices of the type.

    \b
    hetflow throughputs profiles --batch-size 256 --scale-factors 1,2,4 -o throughputs.json
    """
    from .. import throughputs as rates_of
    from ..schema import files

    files.check_outputs(output, force=force)
    table = rates_of(**asked)
    emit_file(table, output, force=force, json=json)
    if output is not None:
        rows = len(table.models)
        note(f"{rows} rows written to {output}; next: hetflow allocate JOBS --throughputs")
