"""``hetflow solve`` (from profiles and a pool to a proved plan) and ``hetflow check``."""

from collections.abc import Callable
from dataclasses import replace

import typer

from ..schema.errors import HetflowError
from ..schema.requests.solve import PIPELINES, SPLITS, CheckRequest, SolveRequest
from .asking import Asked, asks
from .common import (
    ForceFlag,
    JsonFlag,
    OutputOption,
    emit,
    emit_file,
    emit_json,
    note,
    price_text,
    shows_progress,
    warn,
)


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


@asks(CheckRequest)
def check(asked: Asked, json: JsonFlag = False) -> None:
    """Verify a plan or an allocation, with equations that share nothing with the solvers.

    A plan's proof holds a certificate, which is replayed. Where there is none, or the judge has no
    replay for that kind of plan, it says `unproved` instead of `optimal`. So does `hetflow solve`.

    The judge has its own lists of each schedule's passes: those that would run must be the same.

    Plans and allocations say what they were made for (links, optimizer, placement, ...); a flag
    replaces what the file says. Without profiles only a split plan's inner consistency is judged.

    \b
    hetflow check plan.json --profiles profiles --gpus 2xV100,8xP100
    hetflow check allocation.json --jobs jobs.json --throughputs t.json --gpus 8xV100
    """
    from .. import check as faults_of
    from ..planning.checks.proofs import Verdict
    from ..planning.inputs import pool_of
    from ..runtime.protocol.lower import obstacle_of
    from ..schema import files
    from ..schema.jobs import Allocation
    from ..schema.plan import Plan, claim_of

    plan = asked["claim"]
    found = files.read_any(plan)
    if not isinstance(found, Allocation | Plan):
        raise HetflowError(f"{plan}: a {found.schema} file holds nothing that can be checked")
    faults = faults_of(**{**asked, "claim": found})
    obstacle = None
    if isinstance(found, Plan):
        pool = asked.get("pool")
        if isinstance(faults, Verdict):
            found = replace(found, proof=replace(found.proof, bound=faults.bound))
        devices, is_replayed = None if pool is None else pool_of(pool), "profiles" in asked
        proved = claim_of(found, devices, is_replayed=is_replayed)
        obstacle = obstacle_of(found)
    else:
        # Their rooms take longer to import than a plan's check.
        from ..planning.checks.judges import judge_of
        from ..solvers.allocation import policy_named

        proved = str(found.certificate.termination)
        if judge_of(policy_named(found.policy).name) is None:
            proved = (
                f"the objective of {found.policy!r} is not judged: the checker does not know it"
            )
    if json:
        answer = {"plan": str(plan), "valid": not faults, "faults": list(faults)}
        if isinstance(faults, Verdict):
            answer["bound"] = faults.bound
        emit_json(answer | {"cannot_launch": obstacle})
    elif not faults:
        emit(f"{plan}: valid ({proved})")
    if obstacle is not None:
        warn(f"{plan}: the plan cannot be launched: {obstacle}")
    if faults:
        raise HetflowError(f"{plan}: {'; '.join(faults)}")
