"""Check what any plan states beside its costs: its facts, its passes, its prices, its restrictions.

Nothing is shared with the solvers. What a plan states of its costs is judged by what its structure
makes of it (``Plan.kind``): batch_split.py, sharded_split.py, pipeline.py, parallel.py. What these
ask of every plan is here too: its question, its devices, its step and its proof.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from math import ceil, isclose
from typing import Any

from ...schema.parallel import ParallelProblem
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, Stage, passes_of
from ...schema.problem import ShardedProblem, SplitProblem
from .proofs import proof_faults

TOLERANCE = 1e-9

_OBJECTIVES = {
    "split": ("step_seconds", "waste"),
    "pipeline": ("step_seconds", "bottleneck"),
    "parallel": ("step_seconds",),
}
_STEP = "step_seconds samples_per_second dollars_per_hour dollars_per_million_samples"
_PARTS = "sync_seconds update_seconds"
_OF_ALL = (
    "schema model global_batch_size microbatch_size num_microbatches stages predicted proof "
    "objective optimizer cluster estimates reference_seconds reserves restrictions provenance "
)
_OF_CUTS = f"{_OF_ALL} schedule num_model_chunks link_bytes_per_second assumptions trace"
_OF_STAGES = "layers recompute replicas compute_seconds reduce_seconds update_seconds"
_OF_REPLICAS = "device_type num_replicas samples virtual_nodes virtual_node_batch_size"
_STATED = {
    "split": {
        "plan": f"{_OF_ALL} uniform_virtual_nodes est emulated sync_bounds alternatives blocks",
        "stage": "replicas shard copied_ratio",
        "replicas": f"{_OF_REPLICAS} pass_seconds interpolated measured_busy exposed_seconds "
        "state_share_bytes memory_bytes activations pinned_bytes",
        "predicted": f"{_STEP} {_PARTS} compute_seconds load_seconds virtual_node_seconds "
        "fixed_seconds step_seconds_low step_seconds_high",
    },
    "pipeline": {
        "plan": f"{_OF_CUTS} noam stage_cost solved workers",
        "stage": f"{_OF_STAGES} num_in_flight weight_versions seconds_per_input forward_seconds "
        "weight_gradient_seconds output_seconds tied_seconds pass_seconds message_seconds "
        "reduce_latency_seconds nesting",
        "replicas": f"{_OF_REPLICAS} first_device devices memory_bytes",
        "predicted": f"{_STEP} {_PARTS} compute_seconds load_seconds virtual_node_seconds "
        "fixed_seconds transfer_seconds step_seconds_low step_seconds_high",
    },
    "parallel": {
        "plan": f"{_OF_CUTS} sequence_parallel shard_optimizer shard_gradients alternatives "
        "with_more_devices",
        "stage": f"{_OF_STAGES} transfer_seconds shard gather_seconds",
        "replicas": f"{_OF_REPLICAS} tensor_parallel_size memory_bytes state_share_bytes "
        "first_device devices",
        "predicted": f"{_STEP} {_PARTS} bubble_fraction",
    },
}
"""Kind of plan -> the fields that its planner states; others are of another kind."""


def check(plan: Plan) -> list[str]:
    """List every fault of what a plan states beside its costs, as sentences."""
    return [
        *_foreign_facts(plan),
        *(
            f"{at}: {fault}"
            for at, stage in _all_stages(plan)
            for fault in _stage_faults(plan, stage)
        ),
        *_shared_device_faults(plan),
        *dollar_faults(plan),
        *(f"restrictions: {fault}" for fault in _broken(plan)),
    ]


def _foreign_facts(plan: Plan) -> Iterator[str]:
    kind = plan.kind
    if plan.objective not in _OBJECTIVES[kind]:
        yield f"objective is {plan.objective}, which no {kind} plan has"
    yield from _foreign(plan, "plan", kind, "")
    yield from _foreign(plan.predicted, "predicted", kind, "predicted.")
    for number, other in enumerate(plan.alternatives):
        where = f"alternatives[{number}]."
        if other.predicted is not None:
            yield from _foreign(other.predicted, "predicted", kind, f"{where}predicted.")
        passes = passes_of(other.groups).items()
        if kind == "split" and any(getattr(other, name) != number for name, number in passes):
            yield f"{where}microbatch_size or num_microbatches: not those of its groups"
        if kind == "split" and other.num_model_chunks != 1:
            yield f"{where}num_model_chunks: {kind} plans have no such fact"
        if (other.est is None) == (kind == "split") or (other.predicted is None) != (
            kind == "split"
        ):
            yield f"{where}est or predicted: not as in a {kind} plan"
    for where, stage in _all_stages(plan):
        yield from _foreign(stage, "stage", kind, f"{where}.")
        for place, group in enumerate(stage.replicas):
            yield from _foreign(group, "replicas", kind, f"{where}.replicas[{place}].")


def _foreign(part: Any, of: str, kind: str, where: str) -> Iterator[str]:
    stated = _STATED[kind][of].split()
    for field in fields(part):
        if field.default is MISSING or field.name in stated:
            continue
        if getattr(part, field.name) != field.default:
            yield f"{where}{field.name}: {kind} plans have no such fact"


def _all_stages(plan: Plan) -> Iterator[tuple[str, Stage]]:
    """The stages of a plan and of its alternatives, and where they stand in the file."""
    for before, stages in (
        ("", plan.stages),
        *((f"alternatives[{n}].", other.stages) for n, other in enumerate(plan.alternatives)),
    ):
        for number, stage in enumerate(stages):
            yield f"{before}stages[{number}]", stage


def _stage_faults(plan: Plan, stage: Stage) -> Iterator[str]:
    """List replicas of a stage whose passes are not those that the plan's kind gives them."""
    if plan.shard is None and stage.copied_ratio is not None:
        yield "copied_ratio is of replicas that share states"
    if plan.shard is None and plan.blocks is not None:
        yield "blocks are of replicas that share states"
    if not plan.layers:
        for group in stage.replicas:
            full = group.num_replicas * group.virtual_nodes * group.virtual_node_batch_size
            told = (group.state_share_bytes, group.activations, group.pinned_bytes)
            if plan.shard is None and told != (None, None, None):
                names = "state_share_bytes, activations and pinned_bytes"
                yield f"{names} are of replicas that share states"
            if group.samples != full:
                yield f"{group.samples} samples on {group.device_type}, its passes hold {full}"
    if plan.stage_cost is None:
        return
    if len(stage.replicas) > 1:
        yield "replicas of several kinds, which a pipeline does not mix"
    group = stage.replicas[0]
    passes = (ceil(plan.num_microbatches / group.num_replicas), plan.microbatch_size)
    if (group.virtual_nodes, group.virtual_node_batch_size) != passes:
        yield f"virtual nodes (number, size) are not {passes}"
    if stage.recompute == "selective" or stage.recompute != plan.stages[0].recompute:
        yield f"recompute is {stage.recompute}, which is not that of the first stage"


def _shared_device_faults(plan: Plan) -> Iterator[str]:
    """List what is wrong with the devices that a plan of three dimensions states."""
    # Those of pipelines are judged with their schedule.
    for before, one in (
        ("", plan),
        *((f"alternatives[{n}].", other) for n, other in enumerate(plan.alternatives)),
    ):
        each = [[(g.device_type, g.first_device, g.held) for g in s.replicas] for s in one.stages]
        firsts = {first for stage in each for _, first, _ in stage}
        if plan.kind != "parallel" or firsts == {None}:
            continue
        p = one.num_positions
        held = [(name, device) for stage in each[:p] for name, _, own in stage for device in own]
        if None in firsts:
            yield f"{before}stages: some groups state no first_device"
        if len(set(held)) < len(held):
            yield f"{before}stages: a device is given out twice"
        if any(stage != each[n % p] for n, stage in enumerate(each)):
            yield f"{before}stages: chunks of a position are not on its devices"


def differ(left: float, right: float, rounding: float = 0.0, near: float = TOLERANCE) -> bool:
    """Whether two numbers differ by more than both ``rounding`` and ``near`` of the larger one."""
    return abs(left - right) > max(near * max(abs(left), abs(right)), rounding)


def number_faults(
    plan: Plan, counted: Plan, near: float, rounding: float | None = None
) -> Iterator[str]:
    """List the numbers of a plan that are not as counted; what is not stated has no fault.

    ``counted`` is the same plan with its numbers counted by the judge. ``near`` is relative;
    ``rounding`` is absolute, of predicted seconds, and ``near`` of the step where it is None.
    """
    for number, (stage, other) in enumerate(zip(plan.stages, counted.stages, strict=True)):
        yield from unlike(stage, other, f"stage {number}: ", near, 1e-12)
        for group, one in zip(stage.replicas, other.replicas, strict=True):
            yield from unlike(group, one, f"stage {number}: {group.device_type}: ", near)
    if rounding is None:
        rounding = near * counted.predicted.step_seconds
    yield from unlike(plan.predicted, counted.predicted, "predicted.", near, rounding + 1e-15)
    claimed, objective = plan.proof.objective, counted.proof.objective
    if differ(claimed, objective, 1e-15, near):
        yield f"proof.objective is {claimed}, counted {objective}"


_KNOWN_OR_NOT = ("step_seconds_low", "step_seconds_high")  # and stated if they are known


def unlike(
    stated: Any, counted: Any, where: str, near: float, rounding: float = 1e-15
) -> Iterator[str]:
    """List the numbers of one record that differ from those of another, or are not known."""
    for field in fields(counted):
        got, want = getattr(stated, field.name), getattr(counted, field.name)
        if got is None and (want is None or field.name not in _KNOWN_OR_NOT):
            continue
        if not isinstance(got, int | float | None) or got == want:
            continue
        least = 1.0 if field.name == "memory_bytes" else rounding
        if got is None or want is None or differ(got, want, least, near):
            yield f"{where}{field.name} is {got}, counted {want}"


def question_faults(
    plan: Plan, problem: SplitProblem | ShardedProblem | PipelineProblem | ParallelProblem
) -> Iterator[str]:
    """List where a plan answers another question than the problem's."""
    if plan.model != problem.model:
        yield f"model is {plan.model!r}, the problem is of {problem.model!r}"
    if plan.global_batch_size != problem.global_batch_size:
        yield (
            f"global_batch_size is {plan.global_batch_size}, "
            f"the problem asks for {problem.global_batch_size}"
        )
    nodes = getattr(problem, "virtual_nodes", None)
    if nodes is not None and plan.num_virtual_nodes != nodes:
        yield f"the plan has {plan.num_virtual_nodes} virtual nodes, the problem asks for {nodes}"


def device_faults(plan: Plan, known: Mapping[str, int]) -> Iterator[str]:
    """List device types of which a plan uses more than there are, by type."""
    for name, number in _devices(plan).items():
        if name in known and number > known[name]:
            yield f"{number} devices of {name} are used, there are {known[name]}"


def rate_faults(plan: Plan, near: float) -> Iterator[str]:
    """List a predicted rate that is not the batch over the step, to a relative rounding."""
    got = plan.predicted
    done = got.samples_per_second * got.step_seconds
    if differ(done, plan.global_batch_size if got.step_seconds else 0.0, near=near):
        yield (
            f"predicted: {got.samples_per_second} samples/s in {got.step_seconds} s "
            f"is not the global batch of {plan.global_batch_size}"
        )


def step_faults(plan: Plan, near: float) -> Iterator[str]:
    """List what of a plan's step, its rate and its proof does not agree, to a relative rounding."""
    step, proof = plan.predicted.step_seconds, plan.proof
    yield from rate_faults(plan, near)
    if plan.objective == "step_seconds" and differ(proof.objective, step, near=near):
        yield f"proof: objective {proof.objective} s is not the predicted step time {step} s"
    yield from proof_faults(proof, near)


def dollar_faults(plan: Plan) -> Iterator[str]:
    """List what is wrong with a plan's dollars per hour and per million samples."""
    # They are counted from the prices of the pool that the plan states. A plan without dollars has
    # no fault; nor has a plan of an older version that states only dollars per hour.
    hourly = plan.predicted.dollars_per_hour
    per_million = plan.predicted.dollars_per_million_samples
    if hourly is None:
        if per_million is not None:
            yield "predicted: dollars_per_million_samples without dollars_per_hour"
        return
    counted = _hourly(plan)
    if counted is None:
        yield "predicted: dollars_per_hour, and the plan's cluster does not state every price"
    elif not isclose(hourly, counted, rel_tol=TOLERANCE):
        yield f"predicted.dollars_per_hour is {hourly}, the cluster's prices give {counted}"
    if per_million is not None:
        # What an hour costs is what its samples cost.
        paid = per_million * plan.predicted.samples_per_second * 3600 / 1e6
        if not isclose(paid, hourly, rel_tol=TOLERANCE):
            yield (
                f"predicted.dollars_per_million_samples is {per_million}: an hour's samples cost "
                f"{paid}, not dollars_per_hour {hourly}"
            )


def _hourly(plan: Plan) -> float | None:
    """Count the price of the devices in use; None if one is not known."""
    if plan.cluster is None:
        return None
    exact = {name: kind.dollars_per_hour for name, kind in plan.cluster.device_types.items()}
    prices = {name.lower(): price for name, price in exact.items()} | exact
    total = 0.0
    for name, number in _devices(plan).items():
        price = prices.get(name, prices.get(name.lower()))
        if price is None:
            return None
        total += number * price
    return total


def _devices(plan: Plan) -> Counter[str]:
    used: Counter[str] = Counter()
    seen = set()
    for number, stage in enumerate(plan.stages):  # several stages may be on the same devices
        chunk = number // (len(plan.stages) // plan.num_model_chunks)
        for group in stage.replicas:
            place = (group.device_type, group.first_device)
            if chunk > 0 if group.first_device is None else place in seen:
                continue
            seen.add(place)
            used[group.device_type] += group.tensor_parallel_size * group.num_replicas
    return used


def _broken(plan: Plan) -> Iterator[str]:
    asked = plan.restrictions
    if asked is None:
        return
    if asked.devices is not None:
        for name, used in plan.devices_by_type.items():
            if used > asked.devices.get(name, 0):
                yield f"{used} {name} are used, the pool has {asked.devices.get(name, 0)}"
        if plan.cluster is not None and plan.cluster.num_devices != asked.devices:
            yield "devices are not those of cluster"
    is_alone = bool(plan.layers) and all(stage.num_replicas == 1 for stage in plan.stages)
    if asked.shard not in (None, plan.shard) and not (is_alone and plan.shard is None):
        yield f"shard is {asked.shard}, the plan has {plan.shard}"
    counts = {
        "microbatch_size": plan.microbatch_size,
        "num_stages": len(plan.stages),
        "num_model_chunks": plan.num_model_chunks,
    }
    for name, stated in counts.items():
        limit = getattr(asked, name)
        if limit is not None and (stated != limit or not plan.layers):
            yield f"{name} is {limit}, the plan has {stated if plan.layers else None}"
    replicates = not plan.layers or any(stage.num_replicas > 1 for stage in plan.stages)
    if asked.replication is not None and (asked.replication or replicates):
        yield "replication is stated, and the plan has replicas or may have them"
    degrees = {group.tensor_parallel_size for stage in plan.stages for group in stage.replicas}
    if asked.tensor_parallel is not None and (asked.tensor_parallel or max(degrees) > 1):
        yield "tensor_parallel is stated, and the plan shares layers or may do so"
    recomputes = not plan.layers or any(stage.recompute != "none" for stage in plan.stages)
    if asked.recompute is not None and (asked.recompute or recomputes):
        yield "recompute is stated, and the plan recomputes or may do so"
