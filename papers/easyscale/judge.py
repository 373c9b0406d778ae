"""Judge EasyScale's estimates of plans from equations 1a-1d (section 3.4).

Nothing is shared with the solver.
"""

from collections.abc import Iterator

from ...planning.checks import definitions
from ...planning.checks.methods import METHOD_JUDGES, MethodJudge
from ...planning.checks.plan import TOLERANCE, differ
from ...schema.plan import EstEstimate, Plan, ReplicaGroup
from ...schema.problem import SplitProblem


def faults_of(plan: Plan, problem: SplitProblem | None) -> Iterator[str]:
    """List the faults of EasyScale's estimates of a plan and of its alternatives (1a-1d)."""
    if plan.objective == "waste" and plan.est is None:
        yield "est: missing from a plan whose objective is waste"
    if plan.est is None:
        return
    if plan.objective == "waste" and differ(plan.proof.objective, plan.est.overload_factor):
        yield "proof: objective is not est.overload_factor, the seconds per mini-batch"
    ranked = [(plan.groups, plan.est)]
    for number, other in enumerate(plan.alternatives):
        if other.est is None:
            yield f"alternatives[{number}].est: missing"
            return
        ranked.append((other.groups, other.est))
    for index, (groups, est) in enumerate(ranked):
        where = "est" if index == 0 else f"alternatives[{index - 1}].est"
        if not groups:
            yield f"{where}: no groups"
            continue
        total = sum(group.num_devices * group.device_batch_size for group in groups)
        if total != plan.global_batch_size:
            yield f"{where}: its groups hold {total} samples, not {plan.global_batch_size}"
        yield from (f"{where}.{fault}" for fault in _estimate_faults(groups, est))
        yield from (f"{where}: {fault}" for fault in _capability_faults(groups, est, problem))
        if index and est.throughput > ranked[index - 1][1].throughput * (1 + TOLERANCE):
            yield f"{where}: a higher throughput than the entry before it"


def _estimate_faults(groups: tuple[ReplicaGroup, ...], est: EstEstimate) -> Iterator[str]:
    missing = {group.device_type for group in groups} - set(est.capability)
    if missing:
        yield f"capability: missing for {', '.join(sorted(missing))}"
        return
    ests: dict[str, int] = {}  # A_i
    numbers: dict[str, int] = {}  # N_i
    for group in groups:
        name = group.device_type
        ests[name] = max(ests.get(name, 0), group.virtual_nodes)
        numbers[name] = numbers.get(name, 0) + group.num_devices
    num_ests = sum(numbers[name] * ests[name] for name in ests)  # (1a)
    overload = max(ests[name] / est.capability[name] for name in ests)  # (1b)
    peak = sum(numbers[name] * est.capability[name] for name in ests)
    waste = (
        sum(numbers[name] * (est.capability[name] - ests[name] / overload) for name in ests)
        + (num_ests - est.max_p) / overload
    )  # (1c)
    if sum(group.num_devices * group.virtual_nodes for group in groups) != est.max_p:
        yield f"max_p: the groups do not hold {est.max_p} ESTs"
    if num_ests != est.num_ests or num_ests < est.max_p:
        yield f"num_ests: is {est.num_ests}, (1a) gives {num_ests} for max_p {est.max_p}"
    if differ(overload, est.overload_factor):
        yield f"overload_factor: is {est.overload_factor}, (1b) gives {overload}"
    if differ(waste, est.waste, TOLERANCE * peak):
        yield f"waste: is {est.waste}, (1c) gives {waste}"
    if differ(peak - waste, est.throughput, TOLERANCE * peak):
        yield f"throughput: is {est.throughput}, (1d) gives {peak - waste}"


def _capability_faults(
    groups: tuple[ReplicaGroup, ...], est: EstEstimate, problem: SplitProblem | None
) -> Iterator[str]:
    if problem is None or problem.virtual_nodes is None:
        return
    size = problem.global_batch_size // problem.virtual_nodes
    in_use = sum(group.num_devices for group in groups)
    for option in problem.devices:
        point = definitions.point(definitions.terms(option, in_use), size)
        claimed = est.capability.get(option.device_type)
        if claimed is not None and (point is None or differ(claimed, 1 / point.step_seconds)):
            yield f"capability of {option.device_type} is not 1 / t({size})"
        used = sum(g.num_devices for g in groups if g.device_type == option.device_type)
        if used > option.num_devices:
            yield f"{used} devices of {option.device_type}, there are {option.num_devices}"


METHOD_JUDGES.add("easyscale-waste", MethodJudge(faults=faults_of), __name__)
