"""``hetflow check``: judge a plan or an allocation from the definitions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..schema.errors import HetflowError
from . import completing
from .common import JsonFlag, asked_pool, asked_reserve, emit, emit_json, warn

if TYPE_CHECKING:
    from ..checks.proofs import Verdict
    from ..schema.jobs import Allocation as AllocationRecord


def check(
    plan: Annotated[Path, typer.Argument(help="A plan or an allocation file.")],
    profiles: Annotated[
        Path | None, typer.Option(help="Folder of profiles to check the plan against.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(autocompletion=completing.pools, help="The pool, e.g. 2xV100,8xP100."),
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="A file, or `nvidia-smi -L`.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, where profiles hold several.")
    ] = None,
    link_bytes_per_second: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Pipeline: links that the pool does not state [default: the plan's]."
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Plan: the optimizer that will train, such as adam [default: the plan's]."
        ),
    ] = None,
    state_bytes_per_weight_byte: Annotated[
        float | None,
        typer.Option(min=0.0, help="Plan, instead: what it keeps for each byte of weights."),
    ] = None,
    memory_reserve: Annotated[
        str | None,
        typer.Option(
            help="Plan: memory of each device that must stay free, e.g. 2GiB [default: the plan's]."
        ),
    ] = None,
    jobs: Annotated[Path | None, typer.Option(help="Allocation: the jobs it is for.")] = None,
    throughputs: Annotated[
        Path | None, typer.Option(help="Allocation: the throughputs it is for.")
    ] = None,
    space_sharing: Annotated[
        bool | None,
        typer.Option(
            "--space-sharing/--no-space-sharing",
            help="Allocation: made with space sharing [default: what it says].",
        ),
    ] = None,
    placement: Annotated[
        Literal["consolidated", "unconsolidated", "mixed"] | None,
        typer.Option(help="Allocation: made with this placement [default: what it says]."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, help="Allocation: made under this budget [default: what it says]."),
    ] = None,
    market: Annotated[
        list[Path] | None,
        typer.Option(help="Allocation: the market whose prices it was made at; may be repeated."),
    ] = None,
    at: Annotated[str | None, typer.Option(help="Allocation: the time of those prices.")] = None,
    json: JsonFlag = False,
) -> None:
    """Verify a plan or an allocation, with equations that share nothing with the solvers.

    A plan's proof holds a certificate, which is replayed. Where there is none, or the judge has no
    replay for that kind of plan, it says `unproved` instead of `optimal`.

    The judge has its own lists of each schedule's passes: those that would run must be the same.

    Plans and allocations say what they were made for (links, optimizer, placement, ...); a flag
    replaces what the file says. Without profiles only a split plan's inner consistency is judged.

    \b
    hetflow check plan.json --profiles profiles --gpus 2xV100,8xP100
    hetflow check allocation.json --jobs jobs.json --throughputs t.json --gpus 8xV100
    """
    from .. import check as faults_of
    from ..checks.proofs import Verdict
    from ..planning.inputs import pool_of
    from ..protocol.lower import obstacle_of
    from ..schema import files
    from ..schema.jobs import Allocation
    from ..schema.optimizer import asked_optimizer
    from ..schema.plans import claim_of

    found = files.read_any(plan)
    pool = None if gpus is None and cluster is None else asked_pool(gpus, cluster)
    obstacle = None
    if isinstance(found, Allocation):
        faults = faults_of(
            found,
            pool=pool,
            jobs=jobs,
            throughputs=throughputs,
            space_sharing=space_sharing,
            placement=placement,
            budget_dollars=budget,
            market=market or None,
            at=at,
        )
        termination = _termination(found)
    elif isinstance(found, files.Plan):
        faults = faults_of(
            found,
            profiles,
            pool,
            model=model,
            link_bytes_per_second=link_bytes_per_second,
            optimizer=asked_optimizer(optimizer, state_bytes_per_weight_byte),
            memory_reserve_bytes=asked_reserve(memory_reserve),
        )
        termination = claim_of(found, None if pool is None else pool_of(pool))
        if isinstance(faults, Verdict):
            termination = _proved(termination, faults)
        obstacle = obstacle_of(found)
    else:
        raise HetflowError(f"{plan}: a {found.schema} file holds nothing that can be checked")
    if json:
        answer = {"plan": str(plan), "valid": not faults, "faults": list(faults)}
        if isinstance(faults, Verdict):
            answer["bound"] = faults.bound
        emit_json(answer | {"cannot_launch": obstacle})
    elif not faults:
        emit(f"{plan}: valid ({termination})")
    if obstacle is not None:
        warn(f"{plan}: the plan cannot be launched: {obstacle}")
    if faults:
        raise HetflowError(f"{plan}: {'; '.join(faults)}")


def _proved(claim: str, verdict: "Verdict") -> str:
    """Say a plan's claim, and ``optimal`` only if the judge saw that the bound holds."""
    if not claim.startswith("optimal") or verdict.bound == "replayed":
        return claim
    if verdict.bound == "recomputed":
        return f"{claim}; the file holds no certificate, the judge found the bound by itself"
    return f"unproved: {claim!r} is what the file states, without a certificate to replay"


def _termination(allocation: "AllocationRecord") -> str:
    """What is proved of an allocation that is valid.

    Raises:
        ProblemError: It names a policy that there is not.
    """
    from ..checks.judges import judge_of
    from ..solvers.allocation import policy_named

    if judge_of(policy_named(allocation.policy).name) is not None:
        return str(allocation.certificate.termination)
    return f"the objective of {allocation.policy!r} is not judged: the checker does not know it"
