"""Check a pipeline plan against the definitions: graph, links, memory and stage costs.

Everything is recomputed from the problem's layers and edges, independently of how solvers find
plans. The code is slow and simple on purpose.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import ceil, inf, isclose

from ...schema.errors import ProblemError
from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import Plan, Restrictions, Stage
from ...schema.schedule import HeldMoment, Operation
from . import definitions
from .methods import METHOD_JUDGES, prices_of
from .pipeline_bound import is_proved
from .plan import device_faults, differ, number_faults, question_faults, step_faults
from .proofs import Verdict
from .schedule import Lists, lists_of, run_seconds

_TOLERANCE = 1e-6


def check(plan: Plan, problem: PipelineProblem) -> Verdict:
    """List every fault of a plan for a problem.

    Returns:
        One line per fault, empty if the plan is valid; and how its bound is known.
    """
    faults = _header_faults(plan, problem) + _layer_faults(plan, problem)
    faults = faults or _device_faults(plan, problem) or _memory_faults(plan, problem)
    faults = faults or _schedule_faults(plan, problem) or [*_claim_faults(plan, problem)]
    bound, asked = plan.proof.lower_bound, plan.restrictions
    if faults or bound is None:
        return Verdict(faults)
    proved = is_proved(problem, bound, asked or Restrictions())
    return Verdict((), "recomputed" if proved else "stated")


def _header_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    pairs = [
        ("microbatch_size", plan.microbatch_size, problem.microbatch_size),
        ("microbatches", plan.num_microbatches, problem.num_microbatches),
        ("schedule", plan.schedule, problem.schedule),
        ("stage_cost", plan.stage_cost, problem.stage_cost),
        ("solved", plan.solved, problem.solved),
        ("objective", plan.objective, problem.minimises),
    ]
    if plan.link_bytes_per_second is not None:
        pairs.append(
            ("link_bytes_per_second", plan.link_bytes_per_second, problem.link_bytes_per_second)
        )
    faults = [
        f"{name} is {got}, the problem says {want}" for name, got, want in pairs if got != want
    ]
    faults += question_faults(plan, problem)
    asked, planned = problem.optimizer, plan.optimizer
    if planned is not None and differ(
        planned.state_bytes_per_weight_byte, asked.state_bytes_per_weight_byte, near=_TOLERANCE
    ):
        faults.append(f"memory is planned for {planned}, the problem says {asked}")
    if problem.recompute is not None and plan.recomputes != problem.recompute:
        faults.append(f"recompute is {plan.recomputes}, the problem says {problem.recompute}")
    if plan.solved == "nested":
        faults += METHOD_JUDGES.get("pipedream-nested").faults(plan, problem)
    counts = [stage.num_replicas for stage in plan.stages]
    if problem.most_devices is not None and plan.num_devices > problem.most_devices:
        faults.append(f"{plan.num_devices} devices, at most {problem.most_devices} are asked for")
    if problem.most_stages is not None and len(plan.stages) > problem.most_stages:
        faults.append(f"{len(plan.stages)} stages, at most {problem.most_stages} are asked for")
    too_many = problem.traits.is_double_buffered and sum(counts) > problem.most_workers
    if not all(map(problem.may_replicate, counts)) or too_many:
        faults.append(
            f"launch cannot run {problem.num_microbatches} microbatches of {problem.schedule} on "
            f"replicas {counts}"
        )
    if problem.num_stages not in (None, len(plan.stages)):
        faults.append(f"{len(plan.stages)} stages, the problem asks for {problem.num_stages}")
    return faults


def _layer_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    known = {layer.id for layer in problem.layers}
    faults = [
        f"layer {layer.id} is in no stage" for layer in problem.layers if layer.id not in stage_of
    ]
    faults += [f"layer {name} is not in the problem" for name in stage_of if name not in known]
    if faults:
        return faults
    listed = [name for stage in plan.stages for name in stage.layers]
    for source, target in problem.links:
        before, after = problem.layers[source].id, problem.layers[target].id
        if stage_of[before] > stage_of[after]:
            faults.append(f"{before} feeds {after}, which is in an earlier stage")
        elif listed.index(before) > listed.index(after):
            faults.append(f"{before} feeds {after}, which its stage lists before it")
    # Without a flush the stages of tied weights would update them separately.
    faults += [
        f"{layer.id} and {other} share weights in two stages, which {plan.schedule} updates apart"
        for layer in problem.layers
        for other in layer.shared_with
        if not plan.traits.flushes and stage_of[layer.id] != stage_of[other]
    ]
    return faults


def _device_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    there = {  # counted here: the pool's own number is what solvers go by
        pool.device_type: math.prod(level.num_components for level in pool.levels)
        for pool in problem.pools
    }
    faults = [*_chunk_faults(plan), *device_faults(plan, there)]
    taken: dict[tuple[str, int], int] = {}  # device -> its stage; the order of devices is free
    for index, stage in enumerate(plan.stages):
        name, own = stage.device_type, stage.first_device
        if name not in there:
            faults.append(f"stage {index}: no pool of {name}")
        elif max(stage.held) >= there[name]:
            last = there[name] - 1
            faults.append(f"{name}: device {max(stage.held)} is held, the last is {last}")
        if not problem.replication and stage.num_replicas > 1:
            faults.append(f"stage {index}: {stage.num_replicas} replicas, none are allowed")
        if plan.traits.is_chunked and any(
            (name, own) == (other.device_type, other.first_device) for other in plan.stages[:index]
        ):
            continue  # stages of one position, which hold the same devices
        twice = sorted(device for device in stage.held if (name, device) in taken)
        faults += [f"device {device} of {name} is given out twice" for device in twice]
        taken |= {(name, device): index for device in stage.held}
    for name, known in there.items():
        used = sum(other == name for other, _ in taken)
        if problem.workers == "exactly" and used < known:
            faults.append(f"{used} of {known} {name} are used, not all")
    return faults


def _chunk_faults(plan: Plan) -> list[str]:
    """List stages that do not share the devices that the schedule's placement gives them."""
    chunks, known = plan.num_model_chunks, plan.traits.placement
    if not plan.traits.is_chunked:
        return []
    p, rest = divmod(len(plan.stages), chunks)
    if rest or chunks < 2:
        return [f"{len(plan.stages)} stages are not equally many for each device"]
    faults = []
    for index, stage in enumerate(plan.stages[p:], p):
        place = index % p if known == "round-robin" else len(plan.stages) - 1 - index
        first = plan.stages[place]
        if (stage.device_type, stage.held) != (first.device_type, first.held):
            faults.append(f"stage {index} is not on the devices of stage {place}")
    held = [(stage.device_type, device) for stage in plan.stages[:p] for device in stage.held]
    if len(set(held)) < len(held):
        faults.append("positions of the pipeline share devices")
    return faults


def _memory_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    faults = []
    of_device: dict[tuple[str, int], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        of_device.setdefault((stage.device_type, stage.first_device), []).append(index)
    for held in of_device.values():
        pool = _pool(problem, plan.stages[held[0]])
        bare, needed = device_memory(plan, problem, held)
        needed += pool.workspace_bytes + (pool.base_memory_bytes or 0)
        if plan.stages[held[0]].num_replicas == 1 and not any(
            layer.shared_with for layer in problem.layers
        ):
            needed -= pool.compared_bytes  # no other worker holds its weights
        # Each of the device's stages states what all take; with the worker's own, if it is known.
        whole = bare if pool.base_memory_bytes is None else needed
        for index in held:
            stated = plan.stages[index].memory_bytes
            if abs(whole - (stated or 0)) > 1 + _TOLERANCE * whole:
                faults.append(f"stage {index}: memory_bytes is {stated}, it needs {whole:.0f}")
        # The published optimizer checks memory less strictly; its plans serve comparison only.
        if needed > (pool.memory_bytes or inf) + 1 and problem.stage_cost != "published":
            names = " + ".join(f"stage {index}" for index in held)
            faults.append(
                f"{names} needs {needed:.0f} bytes on a {pool.device_type} of "
                f"{pool.memory_bytes}: {needed - (pool.memory_bytes or 0):.0f} too many"
            )
    return faults


def _schedule_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    """Validate the schedule that the plan would run, and its in-flight and version counts."""
    try:
        faults = lists_of(plan).faults
    except ProblemError as error:
        # A plan that need not be launched may describe only the steady state.
        return [f"schedule: {error.message}"] if problem.launchable else []
    return [f"schedule: {fault}" for fault in faults]


def _claim_faults(plan: Plan, problem: PipelineProblem) -> Iterator[str]:
    stages = [timed_stage(plan, problem, index) for index in range(len(plan.stages))]
    counted = replace(plan, stages=tuple(stages))
    steady = 0.0 if plan.objective == "step_seconds" else seconds_per_input(plan, problem)
    fixed = definitions.step_overhead(problem, {stage.device_type for stage in plan.stages})
    step = problem.num_microbatches * steady
    if problem.traits.flushes:
        step = step_seconds(counted)
    step += fixed
    whole = replace(plan.predicted, step_seconds=step, fixed_seconds=fixed, load_seconds=None)
    counted = replace(counted, predicted=whole)
    parts = {name: 0.0 for name in PARTS} | {
        "fixed_seconds": fixed,
        "compute_seconds": step - fixed,
    }
    parts = parts_of(counted) or parts  # else the step must be compute and fixed cost only
    error, got = problem.step_error, plan.predicted
    low = None if error is None else max(0.0, got.step_seconds * (1 - error))
    high = None if error is None else got.step_seconds * (1 + error)
    objective = step if plan.objective == "step_seconds" else steady
    counted = replace(
        counted,
        predicted=replace(whole, **parts, step_seconds_low=low, step_seconds_high=high),
        proof=replace(plan.proof, objective=objective),
    )
    stated = {name: getattr(got, name) or 0.0 for name in PARTS}
    if any(getattr(got, name) is not None for name in PARTS):  # then the parts are the whole step
        plan = replace(plan, predicted=replace(got, **stated))
    yield from number_faults(plan, counted, _TOLERANCE)
    tolerance = plan.proof.tolerance
    if tolerance is not None and (error is None or tolerance > error):
        yield f"proof.tolerance is {tolerance}, the problem's steps are off by {error}"
    yield from step_faults(plan, _TOLERANCE)
    replicas = plan.position_replicas
    noam = -(-sum(replicas) // replicas[0])  # workers over input-stage replicas (2.4.2)
    if noam != plan.noam:
        yield f"noam is {plan.noam}, expected {noam}"


# The terms of a stage's cost, each by its definition.


def _pool(problem: PipelineProblem, stage: Stage) -> DevicePool:
    """Find the pool of a stage's device type."""
    return next(pool for pool in problem.pools if pool.device_type == stage.device_type)


def device_memory(plan: Plan, problem: PipelineProblem, held: Sequence[int]) -> tuple[float, float]:
    """Bytes on a device that holds some stages: without the pass that runs, and with it."""
    if len(held) == 1:
        return stage_memory(plan, problem, held[0])
    # One of the stages runs a pass, and all hold what they hold at that moment.
    lists, first = lists_of(plan), plan.stages[held[0]]
    pool, replicas = _pool(problem, first), first.num_replicas
    contents = {index: _contents(plan, problem, index) for index in held}

    def most(index: int, moment: HeldMoment) -> tuple[float, float]:
        each = [
            definitions.pass_bytes(
                problem, pool, own, lists.held[index][1], moment, replicas,
                recompute=plan.recomputes,
            )
            for own in contents[index]
        ]  # fmt: skip
        bare, whole = (max(float(one[side]) for one in each) for side in (0, 1))
        return bare, whole

    known = {(i, moment): most(i, moment) for i in held for moment in lists.moments[i]}
    # In an update there are two microbatches' samples.
    bare = whole = 2.0 * problem.sample_bytes + sum(
        max(definitions.update_bytes(problem, pool, own, lists.held[index][1]) for own in each)
        for index, each in contents.items()
    )
    for rank in lists.schedule.placement[held[0]]:
        for one in lists.together[rank]:
            # Of the model's own inputs also those of the next microbatch.
            samples = (one.in_flight + 1) * problem.sample_bytes
            rest = samples + sum(known[each][0] for each in one.held)
            running = next(known[each] for each in one.held if each[0] == one.running)
            bare, whole = max(bare, rest), max(whole, rest + running[1] - running[0])
    return bare, whole


def stage_memory(plan: Plan, problem: PipelineProblem, index: int) -> tuple[float, float]:
    """``device_memory`` of a stage that has its devices for itself."""
    stage, ((_, versions), moments) = plan.stages[index], _held(plan, problem, index)
    each = [
        definitions.replica_bytes(
            problem, _pool(problem, stage), own, versions, moments, stage.num_replicas,
            recompute=plan.recomputes,
        )
        for own in _contents(plan, problem, index)
    ]  # fmt: skip
    bare, whole = (max(float(one[side]) for one in each) for side in (0, 1))
    return bare, whole


def _contents(plan: Plan, problem: PipelineProblem, index: int) -> list[definitions.StageContents]:
    """What a stage consists of; and what it would, of which it counts as holding no less."""
    before = {name for stage in plan.stages[:index] for name in stage.layers}
    inside, layers = set(plan.stages[index].layers), problem.layers
    ends = [crossing_bytes(plan, problem, number) for number in (index, index + 1)]
    names = [each.id for each in layers if each.has_bytes]
    mine, start = [name for name in names if name in inside], sum(name in before for name in names)
    is_ordered = problem.solved == "flat" and names[: start + len(mine)] == [
        *(name for name in names if name in before), *mine
    ]  # fmt: skip
    found = [_contents_of(plan, problem, index, inside, ends, is_ordered=is_ordered)]
    if is_ordered:
        # In the layers' own order: at least what it took if it ended earlier.
        place = {each.id: number for number, each in enumerate(layers)}
        for number in range(1, len(mine)):
            last = place[mine[number - 1]]
            sent = {source for source, target in problem.links if source <= last < target}
            out = sum(layers[source].activation_bytes for source in sent)
            part = set(mine[:number])
            found.append(_contents_of(plan, problem, index, part, [ends[0], out], is_ordered=True))
    return found


def _contents_of(
    plan: Plan,
    problem: PipelineProblem,
    index: int,
    inside: set[str],
    ends: Sequence[float],
    *,
    is_ordered: bool,
) -> definitions.StageContents:
    """What a stage of these layers consists of, which receives and sends so many bytes.

    Of stages in the layers' own order it is known which layers save an output first.
    """
    pool = _pool(problem, plan.stages[index])
    chosen = [
        number
        for number, layer in enumerate(problem.layers)
        if layer.id in inside and layer.has_bytes
    ]
    mine = [problem.layers[number] for number in chosen]
    copied, shared = definitions.tied_bytes(problem.layers, inside)
    weights = [layer.weight_bytes + layer.padding_bytes for layer in mine]
    kept = [layer.kept_bytes for layer in mine]
    for maker, layer in enumerate(mine):
        for saver, size in layer.saved_later if is_ordered else ():
            if problem.layers[saver].has_bytes:
                kept[maker] -= size  # it is not kept before the layer that saves it
                if saver in chosen:
                    kept[chosen.index(saver)] += size
    busiest = definitions.microbatches_of_busiest(
        problem.num_microbatches, plan.stages[index].num_replicas
    )
    buffers = sum(
        layer.buffer_bytes + layer.buffer_bytes + busiest * layer.statistics_bytes for layer in mine
    )
    aside = [pool.layer_workspace_bytes[n] if pool.layer_workspace_bytes else 0 for n in chosen]
    whole, halved = sum(kept), sum(layer.halved_bytes for layer in mine)
    passed: Sequence[float] = kept
    if index == 0:
        halved = round(ends[1])  # its first half is empty: what came waits
    elif plan.traits.splits_backward:
        passed = [whole, *(0 for _ in kept)][: len(kept)]  # a graph is kept until its second half
    # A weight's later users in the stage leave gradients for the first, which holds it.
    left = [
        layer.shared_weight_bytes if inside.issuperset(layer.shared_with) else 0 for layer in mine
    ]
    behind = [own + layer.shared_weight_bytes for own, layer in zip(weights, mine, strict=True)]
    most, waiting = (
        (definitions.most_at_a_layer(passed, aside, summed, inf) or [0.0])[-1]
        for summed in (left, behind)
    )
    return definitions.StageContents(
        sum(weights) + copied, shared, whole, most, waiting, halved, ends[0], ends[1], buffers
    )


def _held(
    plan: Plan, problem: PipelineProblem, index: int
) -> tuple[tuple[int, int], Sequence[HeldMoment]]:
    """What one replica of a stage has in flight, its weight versions, and its fullest moments."""
    if plan.traits.is_uniform:
        lists = lists_of(plan)
        return lists.held[index], tuple(lists.moments[index])
    replicas = plan.stages[index].num_replicas
    workers = sum(entry.num_replicas for entry in plan.stages[index:])
    name, count = problem.schedule, problem.num_microbatches
    in_flight = definitions.in_flight(name, workers, replicas, count)
    moments = definitions.moments(name, in_flight, replicas, count)
    return (in_flight, definitions.weight_versions(name, in_flight)), moments


def crossing_bytes(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Bytes sent into or past stage ``index`` per microbatch."""
    # These are the outputs of all earlier layers that stage ``index`` or a later stage needs.
    before = {name for stage in plan.stages[:index] for name in stage.layers}
    prices = prices_of(problem)
    own = None if prices is None else prices.crossing_bytes(problem, before)
    if own is not None:
        return own
    senders = {
        source
        for source, target in problem.links
        if problem.layers[source].id in before and problem.layers[target].id not in before
    }
    return sum(problem.layers[source].activation_bytes for source in senders)


def timed_stage(plan: Plan, problem: PipelineProblem, index: int) -> Stage:
    """Return a stage with its numbers counted again from its layers, links and pool."""
    # All-reduces and updates are those of flat plans; None in nested ones, which do not count
    # them.
    stage = plan.stages[index]
    pool = _pool(problem, stage)
    names = set(stage.layers)
    own = definitions.own_seconds(problem, pool, len(plan.stages))[0]
    compute = sums(plan, problem, [index])[0]
    forward = own + _layer_sum(problem, names, pool.forward_seconds)
    weight_half = None
    if pool.input_gradient_seconds:  # the first stage's inputs are data: it has no input half
        ahead = _layer_sum(problem, names, pool.input_gradient_seconds) if index else 0.0
        weight_half = max(compute - forward - own - ahead, 0.0)
    (in_flight, versions), _ = _held(plan, problem, index)
    sent = 0.0
    if index + 1 < len(plan.stages):
        sent = _boundary_at(plan, problem, index + 1, _boundary_link(plan, problem, index + 1))
    flat = plan.solved == "flat"
    prices = prices_of(problem)
    price = _flat_price if prices is None else prices.of_stage
    return replace(
        stage,
        num_in_flight=in_flight,
        weight_versions=versions,
        seconds_per_input=price(plan, problem, index),
        compute_seconds=compute,
        forward_seconds=forward,
        weight_gradient_seconds=weight_half,
        output_seconds=sent,
        reduce_seconds=_reduce_seconds(plan, problem, index) if flat else None,
        update_seconds=_update_seconds(plan, problem, index) if flat else None,
        tied_seconds=_tied_seconds(problem, stage) if flat else None,
        pass_seconds=own,
        message_seconds=definitions.message_seconds(problem) if sent else 0.0,
        reduce_latency_seconds=pool.reduce_latency_seconds
        if definitions.counts_overheads(problem) and pool.reduce_bytes_per_second is not None
        else None,
    )


def _layer_sum(problem: PipelineProblem, names: set[str], seconds: Sequence[float]) -> float:
    """Seconds of some layers, from those of all."""
    return sum(s for layer, s in zip(problem.layers, seconds, strict=True) if layer.id in names)


def _flat_price(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Seconds per input of a stage and its boundaries, over the link between its own replicas."""
    ends = [cut for cut in (index, index + 1) if 0 < cut < len(plan.stages)]
    bandwidth = _span(plan, problem, index)
    boundaries = [_weighed_boundary(plan, problem, cut, bandwidth) for cut in ends]
    return max([_flat_stage(plan, problem, index), *boundaries])


def _tied_seconds(problem: PipelineProblem, stage: Stage) -> float | None:
    """Seconds of the all-reduce of tied weights; None if the model has none."""
    # Counted as a ring over the stage's replicas and one more member, at the slowest link.
    if not any(layer.shared_with for layer in problem.layers):
        return None
    _, split = definitions.tied_bytes(problem.layers, set(stage.layers))
    members = stage.num_replicas + 1
    return definitions.ring_seconds(split, members, definitions.slowest_link(problem))


def seconds_per_input(plan: Plan, problem: PipelineProblem) -> float:
    """Seconds per input of the slowest stage or boundary of a plan (thesis 2.4.1)."""
    prices = prices_of(problem)
    if prices is not None:
        return prices.objective(plan, problem)
    return max(price_with_boundary(plan, problem, index) for index in range(len(plan.stages)))


def price_with_boundary(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Seconds per input of a stage of a flat plan, or of the boundary before it if that is more."""
    own = _flat_stage(plan, problem, index)
    if not index:
        return own
    link = _boundary_link(plan, problem, index)
    return max(own, _weighed_boundary(plan, problem, index, link))


def sums(plan: Plan, problem: PipelineProblem, stages: list[int]) -> tuple[float, float]:
    """Sum the compute seconds and weight bytes of stages, on the first one's device type."""
    # The fixed cost of passes is counted for a single stage only; for several stages it is counted
    # at a lower level of nesting.
    names = {name for index in stages for name in plan.stages[index].layers}
    pool = _pool(problem, plan.stages[stages[0]])
    passes = 2 if plan.recomputes else 1
    chosen = [i for i, layer in enumerate(problem.layers) if layer.id in names]
    own = sum(definitions.own_seconds(problem, pool, len(plan.stages)))
    if pool.repeated_seconds and 0 not in stages:  # both halves compute some gradients
        own += _layer_sum(problem, names, pool.repeated_seconds)
    return (
        own + sum(passes * pool.forward_seconds[i] + pool.backward_seconds[i] for i in chosen),
        sum(problem.layers[i].weight_bytes for i in chosen),
    )


def _slowest_link(pool: DevicePool, devices: Iterable[int]) -> float:
    """Bytes per second of the slowest link between any two of the devices."""
    pairs = combinations(tuple(devices), 2)
    return min((definitions.link_between(pool.levels, *pair) for pair in pairs), default=inf)


def _span(plan: Plan, problem: PipelineProblem, index: int) -> float:
    stage = plan.stages[index]
    return _slowest_link(_pool(problem, stage), stage.held)


def _flat_stage(plan: Plan, problem: PipelineProblem, index: int) -> float:
    compute, weights = sums(plan, problem, [index])
    replicas = plan.stages[index].num_replicas
    if problem.stage_cost == "thesis":
        span = _span(plan, problem, index)
        return float(definitions.thesis_seconds(compute, weights, replicas, span))
    update, rings = (of(plan, problem, index) for of in (_update_seconds, _reduce_seconds))
    return float(definitions.stage_seconds(problem, compute, update, replicas, rings))


def _update_seconds(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Seconds of a stage's update: the model's, in proportion to the stage's weights."""
    total = sum(layer.weight_bytes for layer in problem.layers)
    share = sums(plan, problem, [index])[1] / max(total, 1)
    return _pool(problem, plan.stages[index]).update_seconds * share


def _reduce_seconds(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Seconds of one all-reduce of a stage's gradients over its replicas."""
    stage, weights = plan.stages[index], sums(plan, problem, [index])[1]
    link = _span(plan, problem, index)
    return definitions.reduce_seconds(
        problem, _pool(problem, stage), weights, stage.num_replicas, link
    )


def _boundary_link(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Bytes per second of the slowest link between stages ``index`` - 1 and ``index``."""
    # Every pair of their replicas counts.
    before, after = plan.stages[index - 1], plan.stages[index]
    prices = prices_of(problem)
    if prices is not None:
        return prices.link(problem, before, after)
    if before.device_type == after.device_type:
        return _slowest_link(_pool(problem, after), {*before.held, *after.held})
    spans = (_span(plan, problem, index - 1), _span(plan, problem, index))
    return min(*spans, problem.inter_bytes_per_second or 0.0)


def _weighed_boundary(
    plan: Plan, problem: PipelineProblem, index: int, bytes_per_second: float
) -> float:
    if not problem.count_boundaries:
        return 0.0
    seconds = _boundary_at(plan, problem, index, bytes_per_second)
    count = problem.num_microbatches
    flushes = problem.traits.flushes and problem.stage_cost == "ring"
    return seconds * (count - 1) / count if flushes else seconds


def _boundary_at(
    plan: Plan, problem: PipelineProblem, index: int, bytes_per_second: float
) -> float:
    """Seconds of a microbatch's messages over the boundary before stage ``index``."""
    return definitions.boundary_seconds(
        crossing_bytes(plan, problem, index),
        bytes_per_second,
        definitions.message_seconds(problem),
    )


# Time a pipeline's lists of operations, and split a step into parts: the judge's own way.
#
# Nothing is shared with the timers of ``planning/schedules/``, so an error in them is found.


PARTS = (
    "update_seconds",
    "sync_seconds",
    "transfer_seconds",
    "virtual_node_seconds",
    "compute_seconds",
    "fixed_seconds",
)


def step_seconds(plan: Plan, lists: Lists | None = None) -> float:
    """Seconds of a step with a flush, from the seconds of the plan's stages.

    Raises:
        ProblemError: The schedule does not support the plan's shape, or its lists have faults.
    """
    lists = lists or lists_of(plan)
    if lists.faults:
        raise ProblemError(f"schedule {plan.schedule}: {lists.faults[0]}")

    def seconds(operation: Operation) -> float:
        kind, stage = operation.kind, plan.stages[operation.stage]
        if kind == "send_gradient":
            return (plan.stages[operation.stage - 1].output_seconds or 0.0) / 2
        if kind == "send_activation":
            return (stage.output_seconds or 0.0) / 2
        return (stage.reduce_seconds or 0.0) if kind == "reduce" else _pass_seconds(stage, kind)

    return run_seconds(lists.schedule, lists.order, seconds)


def _pass_seconds(stage: Stage, kind: str) -> float:
    forward = stage.forward_seconds or 0.0
    if kind == "forward":
        return forward
    if kind == "update":
        return (stage.update_seconds or 0.0) + (stage.tied_seconds or 0.0)
    backward = (stage.compute_seconds or 0.0) - forward
    weight = stage.weight_gradient_seconds
    weight = backward / 2 if weight is None else weight  # not known: taken as equal
    return {"backward": backward, "backward_weight": weight}.get(kind, backward - weight)


def steady_seconds(plan: Plan) -> float:
    """Seconds of a step without a flush: all its inputs on the slowest stage or boundary."""
    count, slowest = plan.num_microbatches, 0.0
    for stage in plan.stages:
        updates, rounds = 1.0, float(ceil(count / stage.num_replicas))
        if plan.traits.updates_each_round:
            updates = rounds = count / stage.num_replicas
        busy = rounds * (stage.compute_seconds or 0.0) + updates * (stage.update_seconds or 0.0)
        rings = updates * (stage.reduce_seconds or 0.0)
        slowest = max(slowest, busy, rings, count * (stage.output_seconds or 0.0))
    return slowest


def parts_of(plan: Plan) -> dict[str, float] | None:
    """Split a step into parts: each is what the step gets shorter by without it, one by one.

    Updates are taken away first, then all-reduces, what messages cost beside bytes, their bytes,
    and what passes cost beside layers. Compute is the rest.

    Returns:
        ``PARTS`` -> seconds, which add up to the step. None if the stages do not determine it.
    """
    if any(stage.reduce_seconds is None or stage.update_seconds is None for stage in plan.stages):
        return None
    if any(stage.forward_seconds is None for stage in plan.stages) and plan.traits.flushes:
        return None
    fixed = plan.predicted.fixed_seconds or 0.0
    seconds: Callable[[Plan], float] = steady_seconds
    try:
        if plan.traits.flushes:
            seconds = partial(step_seconds, lists=lists_of(plan))
        left = seconds(plan)
    except ProblemError:
        return None  # a plan of the steady state only
    if not isclose(left + fixed, plan.predicted.step_seconds, rel_tol=1e-9, abs_tol=1e-15):
        return None
    bare, lost = plan, []
    for without in (_no_update, _no_reduction, _no_message_cost, _no_bytes, _bare(plan)):
        bare = replace(bare, stages=tuple(without(stage) for stage in bare.stages))
        shorter = min(left, seconds(bare))
        lost.append(left - shorter)
        left = shorter
    update, reduction, message, sent, passes = lost
    parts = (update, reduction, message + sent, passes, left, fixed)
    return dict(zip(PARTS, parts, strict=True))


def _no_update(stage: Stage) -> Stage:
    return replace(stage, update_seconds=0.0)


def _no_reduction(stage: Stage) -> Stage:
    return replace(stage, reduce_seconds=0.0, tied_seconds=None)


def _no_message_cost(stage: Stage) -> Stage:
    bytes_only = (stage.output_seconds or 0.0) - 2 * (stage.message_seconds or 0.0)
    return replace(stage, output_seconds=max(0.0, bytes_only))


def _no_bytes(stage: Stage) -> Stage:
    return replace(stage, output_seconds=0.0)


def _bare(plan: Plan) -> Callable[[Stage], Stage]:
    """Return what takes the cost of passes beside layers off a stage."""
    backwards = 2 if plan.traits.splits_backward else 1

    def without(stage: Stage) -> Stage:
        own = stage.pass_seconds or 0.0
        forward = max(0.0, (stage.forward_seconds or 0.0) - own)
        whole = max((stage.compute_seconds or 0.0) - own - backwards * own, forward)
        weight = stage.weight_gradient_seconds
        return replace(
            stage,
            forward_seconds=forward,
            compute_seconds=whole,
            weight_gradient_seconds=None if weight is None else max(0.0, weight - own),
        )

    return without
