"""``hetflow check``: judge a plan or an allocation from the definitions."""

from dataclasses import replace

from ..schema.errors import HetflowError
from ..schema.requests.solve import CheckRequest
from .asking import Asked, asks
from .common import JsonFlag, emit, emit_json, warn


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
    from ..planning.checks.judges import judge_of
    from ..planning.checks.proofs import Verdict
    from ..planning.inputs import pool_of
    from ..runtime.protocol.lower import obstacle_of
    from ..schema import files
    from ..schema.jobs import Allocation
    from ..schema.plan import Plan, claim_of
    from ..solvers.allocation import policy_named

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
    elif judge_of(policy_named(found.policy).name) is not None:
        proved = str(found.certificate.termination)
    else:
        proved = f"the objective of {found.policy!r} is not judged: the checker does not know it"
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
