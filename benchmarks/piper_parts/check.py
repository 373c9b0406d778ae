"""Check a steady-state pipeline plan against Piper's definitions, sharing no solver code."""

from collections.abc import Iterator
from math import ceil, isclose

from piper_parts.problem import SteadyChoice, SteadyPlan, SteadyProblem

_NEAR = 1e-9


def check(plan: SteadyPlan, problem: SteadyProblem) -> list[str]:
    """List every fault of a plan; an empty list means that it is valid.

    Args:
        plan: The plan to check.
        problem: The problem that the plan claims to answer.

    Returns:
        One sentence per fault.
    """
    faults = list(_shape_faults(plan, problem))
    if faults:
        return faults
    return list(_count_faults(plan, problem))


def counted_seconds(plan: SteadyPlan, problem: SteadyProblem, number: int) -> float:
    """Seconds that a stage takes per sample: messages, all-reduce and compute.

    Each edge that crosses the stage's boundary costs its bytes twice, forward and back. The
    all-reduce of a batch sends 4 (d - 1) / d times the weight bytes, for d replicas, and is divided
    by the number of microbatches.
    """
    stage = plan.stages[number]
    replicas, own = stage.num_replicas, set(stage.layers)
    sent = 0.0
    for edge in problem.edges:
        if (edge.source in own) == (edge.target in own):
            continue
        sent += 2 * edge.sent_bytes / replicas
        for sync in edge.sync:
            if sync.tensor_parallel_size == stage.tensor_parallel_size:
                more = sync.source_bytes if edge.source in own else sync.target_bytes
                sent += 2 * more / replicas
    choices = _choices(plan, problem, number)
    for choice in choices:
        sent += 4 * (replicas - 1) * choice.weight_bytes / replicas / problem.num_microbatches
    compute = sum(choice.seconds for choice in choices) / replicas
    return sent / problem.bytes_per_second + compute


def counted_memory(plan: SteadyPlan, problem: SteadyProblem, number: int) -> float:
    """Bytes on one device of a stage.

    In flight are ceil(replicas of this and all later stages / replicas of this stage) microbatches.
    """
    later = sum(stage.num_replicas for stage in plan.stages[number:])
    in_flight = ceil(later / plan.stages[number].num_replicas)
    return sum(
        choice.in_flight_bytes * in_flight + choice.fixed_bytes
        for choice in _choices(plan, problem, number)
    )


def _choices(plan: SteadyPlan, problem: SteadyProblem, number: int) -> list[SteadyChoice]:
    stage, found = plan.stages[number], []
    for layer, name in zip(stage.layers, stage.choices, strict=True):
        for degree in problem.layers[layer].degrees:
            if degree.tensor_parallel_size == stage.tensor_parallel_size:
                found += [choice for choice in degree.choices if choice.name == name]
    return found


def _shape_faults(plan: SteadyPlan, problem: SteadyProblem) -> Iterator[str]:
    layers = sorted(layer for stage in plan.stages for layer in stage.layers)
    if layers != list(range(len(problem.layers))):
        yield "the stages do not hold all layers once"
        return
    stage_of = {layer: i for i, stage in enumerate(plan.stages) for layer in stage.layers}
    for edge in problem.edges:
        if stage_of[edge.source] > stage_of[edge.target]:
            yield f"layer {edge.target} comes before layer {edge.source}, whose output it needs"
    used = sum(stage.num_replicas * stage.tensor_parallel_size for stage in plan.stages)
    if used > problem.num_devices:
        yield f"{used} devices in use, there are {problem.num_devices}"
    replicas = sum(stage.num_replicas for stage in plan.stages)
    if replicas > problem.num_microbatches:
        yield f"{replicas} replicas in all; the batch has {problem.num_microbatches} microbatches"
    for number, stage in enumerate(plan.stages):
        if problem.num_microbatches % stage.num_replicas:
            yield (
                f"stage {number}: {stage.num_replicas} replicas do not divide "
                f"{problem.num_microbatches} microbatches"
            )
        if len(_choices(plan, problem, number)) != len(stage.layers):
            yield f"stage {number} takes a choice or a degree that a layer does not have"


def _count_faults(plan: SteadyPlan, problem: SteadyProblem) -> Iterator[str]:
    slowest = 0.0
    for number, stage in enumerate(plan.stages):
        seconds, needed = (f(plan, problem, number) for f in (counted_seconds, counted_memory))
        slowest = max(slowest, seconds)
        if not isclose(seconds, stage.sample_seconds, rel_tol=_NEAR, abs_tol=1e-15):
            yield f"stage {number} takes {stage.sample_seconds:.6g} s, counted {seconds:.6g}"
        if needed > problem.memory_bytes * (1 + _NEAR):
            yield f"stage {number} needs {needed:.0f} bytes of {problem.memory_bytes}"
        if abs(needed - stage.memory_bytes) > 1:
            yield f"stage {number} holds {stage.memory_bytes} bytes, counted {needed:.0f}"
    if not isclose(plan.sample_seconds, slowest, rel_tol=_NEAR, abs_tol=1e-15):
        yield f"sample_seconds is {plan.sample_seconds:.6g}, counted {slowest:.6g}"
    proof = plan.proof
    if not isclose(proof.objective, plan.sample_seconds, rel_tol=_NEAR, abs_tol=1e-15):
        yield f"the proof's objective is {proof.objective:.6g}, not the slowest stage"
    if proof.lower_bound is None:
        yield "the proof has no bound"
    elif proof.lower_bound > proof.objective * (1 + _NEAR):
        yield f"the bound {proof.lower_bound:.6g} is above the objective {proof.objective:.6g}"
