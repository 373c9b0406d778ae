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
    json: JsonFlag = False,
) -> None:
    """Verify a plan, with code that shares nothing with the solvers.

    Without profiles only the plan's inner consistency is judged.

    \b
    hetflow check plan.json --profiles profiles --gpus 2xV100,8xP100
    """
    from ..checks.batch_split import check as faults_of
    from ..schema import files
    from ..schema.plan import SplitPlan
    from .problems import problem_for_plan

    found = files.read(plan, SplitPlan)
    problem = problem_for_plan(found, profiles, gpus, cluster, model)
    faults = faults_of(found, problem)
    if json:
        emit_json({"plan": str(plan), "valid": not faults, "faults": faults})
    elif not faults:
        emit(f"{plan}: valid ({found.proof.termination})")
    if faults:
        raise HetflowError(f"{plan}: {'; '.join(faults)}")
