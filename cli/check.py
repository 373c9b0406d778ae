"""``hetflow check``: judge a plan from the definitions."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import HetflowError
from .common import JsonFlag, emit, emit_json


def check(
    plan: Annotated[Path, typer.Argument(help="A plan file (hetflow.plan/1).")],
    profiles: Annotated[
        Path | None, typer.Option(help="Folder of profiles to judge the plan against.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="The pool, e.g. 2xV100,8xP100.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file instead of --gpus.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, where profiles hold several.")
    ] = None,
    link_bytes_per_second: Annotated[
        float | None, typer.Option(min=1.0, help="Pipeline: links that the pool does not state.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Verify a plan, with code that shares nothing with the solvers.

    Without profiles only the plan's inner consistency is judged.

    \b
    hetflow check plan.json --profiles profiles --gpus 2xV100,8xP100
    """
    from ..schema import files
    from .problems import faults_of_plan, read_pool

    found = files.read_plan(plan)
    pool = None if gpus is None and cluster is None else read_pool(gpus, cluster)
    faults = faults_of_plan(found, profiles, pool, model, link_bytes_per_second)
    if json:
        emit_json({"plan": str(plan), "valid": not faults, "faults": faults})
    elif not faults:
        emit(f"{plan}: valid ({found.proof.termination})")
    if faults:
        raise HetflowError(f"{plan}: {'; '.join(faults)}")
