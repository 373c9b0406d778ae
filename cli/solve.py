"""``hetflow solve``: from profiles and a pool to a proved plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..schema.errors import BackendError
from .common import ForceFlag, JsonFlag, emit_file, note, warn

if TYPE_CHECKING:
    from ..schema.plan import SplitPlan
    from ..schema.problem import SplitProblem

Method = Literal["exact", "cbc", "highs"]


def solve(
    profiles: Annotated[Path, typer.Option(help="Folder of profiles (hetflow profile -o).")],
    batch_size: Annotated[int, typer.Option(min=1, help="Global batch size B.")],
    gpus: Annotated[
        str | None, typer.Option(help="The pool: 2xV100,8xP100, V100:2:16GB, 4x(4xV100).")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file instead of --gpus.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, where profiles hold several.")
    ] = None,
    strategy: Annotated[
        Literal["auto", "split"], typer.Option(help="Kind of plan; auto takes the best known.")
    ] = "auto",
    objective: Annotated[
        Literal["step_seconds", "waste"],
        typer.Option(help="step_seconds (VirtualFlow 5.1) or waste (EasyScale 3.4)."),
    ] = "step_seconds",
    virtual_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Use N equal virtual nodes of B/N samples (maxP for waste)."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="With --objective waste: keep the K best configurations.")
    ] = 1,
    interpolate: Annotated[
        bool,
        typer.Option("--interpolate", help="Allow sizes between profiled ones; marked as such."),
    ] = False,
    method: Annotated[
        Method, typer.Option(help="The fast exact method, or the MILP through CBC or HiGHS.")
    ] = "exact",
    time_limit: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the MILP; exit 4 if it runs out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Split a global batch over unlike devices; the plan carries its proof.

    The plan goes to stdout as JSON, or to -o FILE; a person at a terminal sees a table too.

    \b
    hetflow solve --profiles profiles --gpus 2xV100,8xP100 --batch-size 8192 -o plan.json
    """
    from ..checks.batch_split import check
    from ..schema.files import check_writable
    from ..solvers.problems import split_problem
    from .problems import read_model_profiles, read_pool
    from .solving import solve_split, with_origin

    if output is not None:
        check_writable(output, force=force)
    found = read_model_profiles(profiles, model)
    pool = read_pool(gpus, cluster)
    problem = split_problem(found, pool, batch_size, virtual_nodes, interpolate)
    for warning in _warnings(problem):
        warn(warning)
    plan = with_origin(
        solve_split(problem, objective, method, top, time_limit), found, gpus or str(cluster)
    )
    faults = check(plan, problem)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    if output is not None:
        emit_file(plan, output, force=force)
    if output is None or json:
        emit_file(plan, None, force=False)
    _tell(plan, output)
    if plan.proof.termination != "optimal":
        raise typer.Exit(4)


def _warnings(problem: "SplitProblem") -> list[str]:
    unsynced = [option.device_type for option in problem.devices if option.sync is None]
    many = sum(option.num_devices for option in problem.devices) > 1
    if unsynced and many:
        return [
            f"no measured sync_seconds for {', '.join(unsynced)}: communication counts as free; "
            "profile with two devices to measure it"
        ]
    return []


def _tell(plan: "SplitPlan", output: Path | None) -> None:
    from ..reports.tables import plan_table

    note(plan_table(plan))
    if output is not None:
        note(f"plan written to {output}; next: hetflow launch {output} SCRIPT")
