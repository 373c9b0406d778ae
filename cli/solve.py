"""``hetflow solve``: from profiles and a pool to a proved plan."""

from collections.abc import Callable

import typer

from ..schema.requests.solve import PIPELINES, SPLITS, SolveRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit_file, note, price_text, shows_progress


def _solve(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Split a global batch, or cut a model into stages, over unlike devices, with proof.

    The plan goes to stdout as JSON, or to -o FILE; a person at a terminal sees a table too.
    Kinds of plans are compared where profiles hold layers; `hetflow solve split` and `hetflow solve
    pipeline` take one kind, and only its options.

    \b
    hetflow solve --profiles profiles --gpus 2xV100,8xP100 --batch-size 8192 -o plan.json
    """
    from .. import solve as find
    from ..planning.limits import SolveLimits
    from ..schema.files import check_outputs

    check_outputs(output, force=force)
    plan = find(**asked)
    emit_file(plan, output, force=force, json=json)
    if shows_progress():
        from ..formats.reports.tables import table_of

        note(table_of(plan))
        for name, price in (plan.provenance or {}).get("prices", {}).items():
            note(f"{name}: {price_text(price['dollars_per_hour'], price['machine'])}")
    if output is not None:
        note(f"plan written to {output}; next: hetflow launch {output} SCRIPT")
    if SolveLimits(asked.get("time_limit_seconds"), asked.get("gap")).is_missed(plan):
        raise typer.Exit(4)


def _of_kind(kind: str, planners: tuple[str, ...], words: str) -> Callable[..., None]:
    """``solve`` for one kind of plan: the options that its planners read."""
    return asks(SolveRequest, only=planners, doc=words, strategy=kind)(_solve)


solve = asks(SolveRequest)(_solve)
solve_split = _of_kind(
    "split",
    SPLITS,
    """Split a global batch over unlike devices, with proof.

    Each device takes so many virtual nodes of one profiled size (VirtualFlow 5.1).

    \b
    hetflow solve split --profiles profiles --gpus 2xV100,8xP100 --batch-size 8192 -o plan.json
    """,
)
solve_pipeline = _of_kind(
    "pipeline",
    PIPELINES,
    """Cut a model into stages over unlike devices, with proof.

    Profiles must hold layers (hetflow profile --layers).

    \b
    hetflow solve pipeline --profiles profiles --gpus 4xV100 --batch-size 256 --schedule auto
    """,
)
solve_parallel = _of_kind(
    "parallel",
    ("parallel",),
    """Plan pipeline, tensor and data parallelism together over unlike devices, with proof.

    Each stage has its layers, tensor-parallel degree, recomputation and replicas, which may be of
    two device types. Profiles must hold layers; degrees above 1 need tensor_layers.

    \b
    hetflow solve parallel --profiles profiles --gpus 4xA100,8xV100 --batch-size 256
    """,
)
