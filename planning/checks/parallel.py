"""Check a plan with pipeline, tensor and data parallelism against the definitions.

Nothing is shared with the solver or with costs. Every stage is summed layer by layer, every
message and all-reduce is recomputed, and the step follows from them (docs/parallel.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil

from ...schema.errors import ProblemError
from ...schema.layers import unit_of
from ...schema.parallel import (
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardTimes,
    parallel_schedule,
)
from ...schema.plan import ParallelCertificate, Plan, ReplicaGroup, Stage
from ...schema.schedule import PipelineShape
from . import definitions
from .parallel_bound import has_places, is_proved, tied_bytes
from .plan import (
    device_faults,
    dollar_faults,
    number_faults,
    question_faults,
    rate_faults,
    step_faults,
)
from .proofs import Verdict
from .schedule_lists import own_passes

_NEAR = 1e-9


def check(plan: Plan, problem: ParallelProblem) -> Verdict:
    """List every fault of a plan; an empty list means that it is valid.

    Returns:
        One sentence per fault; and how the bound is known.
    """
    faults = _plan_faults(plan, problem)
    faults = faults or [*_proof_faults(plan, problem), *_alternative_faults(plan, problem)]
    bound, stated = plan.proof.lower_bound, plan.proof.certificate
    if faults or bound is None:
        return Verdict(faults)
    priced = stated.priced if isinstance(stated, ParallelCertificate) else ()
    if not is_proved(problem, bound, priced):
        return Verdict()
    return Verdict((), "recomputed" if stated is None else "replayed")


def _plan_faults(plan: Plan, problem: ParallelProblem) -> list[str]:
    """List the faults of a plan, or of an alternative written as one, without its proof."""
    faults = [*_shape_faults(plan, problem), *_device_faults(plan, problem)]
    if faults:
        return faults  # costs need layers and degrees that were timed
    counted = _counted(plan, problem)
    return [*_memory_faults(plan, counted, problem), *number_faults(plan, counted, _NEAR, 0.0)]


def counted_step(plan: Plan, problem: ParallelProblem) -> float:
    """Seconds of a step of 1F1B, counted from the problem."""
    # Its passes and messages (``_passes_seconds``), then the slowest update and all-reduce.
    # Interleaved 1F1B with v chunks on each of p positions: v m + p - 1 passes of the slowest
    # chunk, and the messages of one microbatch there and back. Then follow the slowest update and
    # all-reduce of a position's chunks together. A message that takes longer than a third of a
    # chunk's passes counts for the rest of it in each of them.
    held = [_held_with(plan, number) for number in range(plan.num_positions)]
    update = max(sum(_update(plan, problem, number) for number in own) for own in held)
    reduce = max(sum(_reduce(plan, problem, number) for number in own) for own in held)
    return _passes_seconds(plan, problem) + update + reduce


def _stage_seconds(plan: Plan, problem: ParallelProblem, number: int) -> float:
    """Seconds of a microbatch's passes, and of messages that count in a stage."""
    waits = 0.0 if problem.hides_messages else _transfer(plan, problem, number)
    return _with_gathers(plan, problem, number) + waits


def _passes_seconds(plan: Plan, problem: ParallelProblem) -> float:
    """Seconds of all passes of a step, and of the messages that they wait for."""
    # All stages and messages once, for the first microbatch. Then m - 1 more follow, which takes
    # the longest of three: the passes of any stage; the messages of any link; round trips from a
    # stage. With k microbatches in flight there each k take one trip, and the rest pass its
    # slowest place. Or k take one, and each two others a trip to the next stage, which has k - 1
    # in flight. Messages that are not hidden are a part of their stages.
    m, stages = plan.num_rounds, range(len(plan.stages))
    each = [_stage_seconds(plan, problem, number) for number in stages]
    if not problem.hides_messages:
        # Equation 4.1 for unlike stages: one microbatch through all, and m - 1 more of the
        # slowest.
        return sum(each) + max(each) * (m - 1)
    links = [_link_seconds(plan, problem, number) for number in stages[:-1]]
    # A chunk's passes hide a message of up to a third of them, its forward pass.
    if plan.num_model_chunks > 1:
        longest = [max(pair) for pair in zip([0.0, *links], [*links, 0.0], strict=True)]
        waits = [max(t - c / 3, 0.0) for t, c in zip(longest, each, strict=True)]
        slowest = max(c + wait for c, wait in zip(each, waits, strict=True))
        return (plan.num_model_chunks * m + plan.num_positions - 1) * slowest + 2 * sum(links)
    more = [(m - 1) * seconds for seconds in (*each, *links)]
    for number in stages:
        # The first stage of the trip holds k; the last stages hold fewer.
        k = min(len(stages) - number, m)
        # One microbatch from this stage to the last and back.
        trip = sum(each[number:]) + 2 * sum(links[number:])
        left = (m - 1) % k
        more.append((m - 1 - left) / k * trip + left * max([*each[number:], *links[number:]]))
        # The next stage has k - 1 in flight, so each two of the others make a trip as far as that
        # stage.
        if m > k > 1:
            two = each[number] + each[number + 1] + 2 * links[number]
            others = m - 1 - k
            more.append(trip + others // 2 * two + others % 2 * each[number])
    return sum(each) + 2 * sum(links) + max(more)


def counted_memory(plan: Plan, problem: ParallelProblem, number: int) -> list[float]:
    """Bytes on one device of each replica group of a stage, in the groups' order.

    A stage holds at most as many microbatches in flight as there are stages from it on. Devices of
    interleaved plans hold several stages, which are counted together, pass by pass. The state of a
    sharded optimizer is shared out layer by layer: no replica has more than an equal share of all
    layers but the largest, and the largest. With a share that the plan states, it has up to
    (d - 1) / d of the largest layer more than that. A share of 0 is nothing. Where weights are
    shared, layers are cut. What is in no repeated layer is then whole beside the shares, and so are
    two repeated layers, as weights and as gradients.

    The backward pass that runs holds most at one of its layers, with this layer's workspace. An
    update has its own, and neither activations nor gradients that others update.
    """
    own = _held_with(plan, number)
    counted = []
    for group in plan.stages[number].replicas:
        sizes = next(
            s for s in problem.sizes if s.tensor_parallel_size == group.tensor_parallel_size
        )
        weights = [
            weight
            for each in own
            for weight in _of(plan.stages[each], sizes.weight_bytes, _start(plan, each))
        ]
        held = problem.bytes_per_weight_byte * sum(weights)
        updated, gathered = float(sum(weights)), 0.0
        if plan.shard == "all":
            updated *= _part(plan, problem, number, group)
            held *= _part(plan, problem, number, group)
            gathered = 2 * _gathered([plan.stages[each].layers for each in own], weights)
        elif plan.shared_states is not None and problem.optimizer is not None:
            largest, replicas = max(weights), plan.stages[number].num_replicas
            updated = (sum(weights) - largest) / replicas + largest
            stated = group.state_share_bytes
            if stated is not None:
                more = largest * (replicas - 1) / replicas
                updated = min(stated + more, sum(weights)) if stated else 0.0
            held -= problem.optimizer.state_bytes_per_weight_byte * (sum(weights) - updated)
        given = sum(weights) - updated if plan.shared_states == "gradients" else 0.0
        copies = sum(
            tied_bytes(problem.tied_to, sizes.tied_bytes, *_ends(plan, each))[0] for each in own
        )
        held += problem.bytes_per_weight_byte * copies
        update = problem.update_ratio * (updated + copies) - given
        counted.append(
            problem.reserved_bytes
            + held
            + max(update, gathered + _passing_bytes(plan, problem, own, group))
        )
    return counted


def _passing_bytes(
    plan: Plan, problem: ParallelProblem, own: Sequence[int], group: ReplicaGroup
) -> float:
    """Bytes of activations, messages and workspaces on a device of a group that holds stages."""
    size, degree = plan.microbatch_size, group.tensor_parallel_size
    sizes = next(s for s in problem.sizes if s.tensor_parallel_size == degree)
    aside = _times(plan, problem, group).workspace_bytes
    is_summed = plan.shard != "all" and plan.stages[own[0]].num_replicas > 1
    alone, kept = 0.0, {}
    for each in own:
        stage, (start, end) = plan.stages[each], _ends(plan, each)
        is_selective, core = stage.recompute == "selective", 0.0
        if is_selective:
            core = size * max(_of(stage, sizes.core_bytes, start))
        stashed = sizes.selective_bytes if is_selective else sizes.stashed_bytes
        of_layers = [size * bytes_of_one for bytes_of_one in stashed[start:end]]
        whole = sum(of_layers)
        beside = aside[start:end] if aside else (0,) * len(of_layers)
        summed = sizes.weight_bytes[start:end] if is_summed and aside else ()
        most = definitions.most_at_a_layer(of_layers, beside, summed, problem.waiting_bytes)[-1]
        received = float(problem.output_bytes[start - 1] * size if start else 0)
        sent = float(problem.output_bytes[end - 1] * size if end < len(problem.layers) else 0)
        is_full = stage.recompute == "full"
        kept[each] = received if is_full else whole
        own_alone = core + (most if is_full else most - whole)
        if aside:
            kept[each] += (0.0 if is_full else received) + (received + sent) / degree
            own_alone += (received + sent) / degree
            tied = tied_bytes(problem.tied_to, sizes.tied_bytes, start, end)[1]
            own_alone += min(tied, problem.waiting_bytes)
        alone = max(alone, own_alone)
    return alone + _most_in_flight(plan, kept)


def _ends(plan: Plan, number: int) -> tuple[int, int]:
    """The first layer of a stage, and the one behind its last."""
    start = _start(plan, number)
    return start, start + len(plan.stages[number].layers)


def _gathered(stages: Sequence[Sequence[str]], weights: Sequence[float]) -> float:
    """Bytes of weights of a device's stages that are whole at a time."""
    rest, repeated, left = 0.0, list[float](), iter(weights)
    for layers in stages:  # each gathers its own part of a layer that is cut
        units = _units(layers, list(islice(left, len(layers))))
        rest += units.pop("", 0.0)
        repeated += units.values()
    # While one unit is used the next one comes: two are whole at a time.
    return rest + sum(sorted(repeated)[-2:])


def _units(layers: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """Repeated layer -> bytes of its weights; the empty name has what is in none."""
    found: dict[str, float] = {}
    for name, size in zip(layers, weights, strict=True):
        if size:
            found[unit_of(name)] = found.get(unit_of(name), 0.0) + size
    return found


def _part(plan: Plan, problem: ParallelProblem, number: int, group: ReplicaGroup) -> float:
    """Which part of a stage's states, or weights, a replica keeps and updates."""
    stage = plan.stages[number]
    stated = {each.state_share_bytes for each in stage.replicas}
    if plan.shared_states is None:
        return 1.0
    if len(stated) == 1:  # equal, up to a byte
        return 1 / stage.num_replicas
    sizes = next(s for s in problem.sizes if s.tensor_parallel_size == group.tensor_parallel_size)
    whole = sum(_of(stage, sizes.weight_bytes, _start(plan, number)))
    return (group.state_share_bytes or 0) / max(whole, 1)


def _held_with(plan: Plan, number: int) -> list[int]:
    """The stages on the devices of a stage, itself included."""
    # Stage j stands on position j mod p.
    return list(range(number % plan.num_positions, len(plan.stages), plan.num_positions))


def _most_in_flight(plan: Plan, kept: dict[int, float]) -> float:
    """The most bytes of microbatches in flight that a device holds at once."""
    p = plan.num_positions
    if plan.num_model_chunks == 1:
        # Under 1F1B the stage with number n holds p - n microbatches, or all.
        ((number, each),) = kept.items()
        return min(p - number, plan.num_rounds) * each
    # Four groups show every state that more of them show.
    # The order repeats from one group of p microbatches to the next.
    shape = PipelineShape(
        pipeline_parallel_size=p,
        num_microbatches=min(plan.num_rounds, 4 * p),
        num_model_chunks=plan.num_model_chunks,
    )
    most = now = 0.0
    for kind, stage, _ in (own_passes(plan.schedule, shape) or ())[min(kept)]:
        # A backward pass gives back what its forward pass kept.
        now += kept[stage] if kind == "forward" else -kept[stage]
        most = max(most, now)
    return most


def _of(stage: Stage, table: tuple[float, ...] | tuple[int, ...], start: int) -> tuple[float, ...]:
    return tuple(table[start : start + len(stage.layers)])


def _shape_faults(plan: Plan, problem: ParallelProblem) -> Iterator[str]:
    yield from question_faults(plan, problem)
    names = [name for stage in plan.stages for name in stage.layers]
    if names != list(problem.layers):
        yield "the stages do not hold all layers once, in the model's order"
    chunks, most = plan.num_model_chunks, problem.most_stages
    if most is not None and len(plan.stages) > most:
        yield f"{len(plan.stages)} stages, at most {most} are asked for"
    if plan.schedule != parallel_schedule(is_chunked=chunks > 1):
        plain, chunked = (parallel_schedule(is_chunked=more) for more in (False, True))
        yield (
            f"schedule {plan.schedule} with {chunks} chunks is not judged: parallel plans are "
            f"{plain} with 1, or {chunked} with more"
        )
    if chunks not in problem.num_model_chunks:
        yield f"{chunks} chunks a device were not asked for"
    replicas = {stage.num_replicas for stage in plan.stages}
    if len(replicas) > 1:
        yield f"stages have {sorted(replicas)} replicas; all must have equally many"
        return
    rounds = ceil(plan.global_batch_size / (plan.microbatch_size * min(replicas)))
    # All replicas run equally many microbatches of one size; a batch may fill the last of them in
    # part.
    passes = {(g.virtual_nodes, g.virtual_node_batch_size) for s in plan.stages for g in s.replicas}
    if passes != {(rounds, plan.microbatch_size)}:
        yield (
            f"virtual nodes (number, size) are {sorted(passes)}; {min(replicas)} replicas with "
            f"microbatches of {plan.microbatch_size} need {rounds}"
        )
    if chunks > 1:
        yield from _interleaving_faults(plan, problem, min(replicas))
    own, may = plan.shared_states, problem.shards
    if own not in may and not (replicas == {1} and own is None):
        # A single replica shares nothing, whatever the problem asks for.
        asked = " or ".join(shard or "nothing" for shard in may)
        yield f"replicas share {own or 'nothing'}, the problem has them share {asked}"
    if {stage.shard for stage in plan.stages} not in ({None}, {"all"}):
        yield "stages share unlike states"
    if own == "all" and (plan.shard_optimizer or replicas == {1}):
        yield "weights are shared by several replicas, with all states"
    if own == "all" and plan.num_microbatches % min(replicas):
        yield f"{plan.num_microbatches} microbatches do not divide among replicas that meet in each"
    for number, stage in enumerate(plan.stages):
        degrees = sorted({group.tensor_parallel_size for group in stage.replicas})
        if own is not None and len(degrees) > 1:
            yield f"stage {number}: replicas of degrees {degrees} share no states"
        yield from (f"stage {number}: {fault}" for fault in _share_faults(plan, problem, number))
        if stage.recompute not in problem.recompute:
            yield f"stage {number} recomputes ({stage.recompute}), which was not asked for"


def _share_faults(plan: Plan, problem: ParallelProblem, number: int) -> Iterator[str]:
    """List what is wrong with the shares of states that a plan states of a stage."""
    stage = plan.stages[number]
    shares = [group.state_share_bytes for group in stage.replicas]
    if set(shares) == {None} and plan.shard is None:
        return
    is_chunk = plan.num_model_chunks > 1 and plan.shard is None
    if plan.shared_states is None or is_chunk or None in shares:
        yield (
            "state_share_bytes are of all replicas that share the state, of a stage a device or "
            "of its weights too"
        )
        return
    # Rounded up, shares hold all or more; less would lose some state.
    held = sum(g.num_replicas * (g.state_share_bytes or 0) for g in stage.replicas)
    for sizes in problem.sizes:
        if sizes.tensor_parallel_size == stage.replicas[0].tensor_parallel_size:
            whole = sum(_of(stage, sizes.weight_bytes, _start(plan, number)))
            if held < whole:
                yield f"the shares hold the states of {held} bytes of weights, of {whole}"


def _interleaving_faults(plan: Plan, problem: ParallelProblem, replicas: int) -> Iterator[str]:
    number, p = ceil(plan.global_batch_size / plan.microbatch_size), plan.num_positions
    if p < 2 or number % (replicas * p):
        yield (
            f"{number} microbatches do not interleave over {replicas} replicas of {p} positions; "
            "they must divide, and there must be 2 positions"
        )
    if problem.cost_rule != "hetflow":
        yield f"the cost rule {problem.cost_rule} does not count interleaved plans"


def _device_faults(plan: Plan, problem: ParallelProblem) -> Iterator[str]:
    pools = {pool.device_type: pool for pool in problem.pools}
    for number, stage in enumerate(plan.stages):
        for group in stage.replicas:
            pool = pools.get(group.device_type)
            if pool is None:
                yield f"stage {number}: the pool has no {group.device_type}"
                continue
            yield from _group_faults(plan, problem, number, group, pool)
    for pool in problem.pools:
        if not _has_places(plan, problem, pool):
            yield f"servers of {pool.device_type} do not hold what has to lie inside one"
    yield from device_faults(plan, {name: pool.num_devices for name, pool in pools.items()})


def _has_places(plan: Plan, problem: ParallelProblem, pool: ParallelPool) -> bool:
    """Whether each stage inside a server, and each group of others, finds one with room."""
    # Interleaved stages of a position share its devices, so each position is looked at once.
    wanted: list[int] = []
    for stage in plan.stages[: plan.num_positions]:
        for group in stage.replicas:
            if group.device_type == pool.device_type:
                together = group.num_replicas * group.tensor_parallel_size
                whole = pool.inside is not None and _lies_in_a_server(problem, stage)
                wanted += [together] if whole else [group.tensor_parallel_size] * group.num_replicas
    return has_places(wanted, pool)


def _group_faults(
    plan: Plan,
    problem: ParallelProblem,
    number: int,
    group: ReplicaGroup,
    pool: ParallelPool,
) -> Iterator[str]:
    degree, where = group.tensor_parallel_size, f"stage {number}: {group.device_type}"
    if pool.devices_per_server < degree:
        yield f"{where} has servers of {pool.devices_per_server}, which hold no group of {degree}"
    if all(sizes.tensor_parallel_size != degree for sizes in problem.sizes) or all(
        (t.tensor_parallel_size, t.microbatch_size) != (degree, plan.microbatch_size)
        for t in pool.times
    ):
        yield f"{where} was not timed at degree {degree}, microbatch {plan.microbatch_size}"


def _memory_faults(plan: Plan, counted: Plan, problem: ParallelProblem) -> Iterator[str]:
    room = {pool.device_type: pool.memory_bytes for pool in problem.pools}
    for number, (stage, own) in enumerate(zip(plan.stages, counted.stages, strict=True)):
        for group, other in zip(stage.replicas, own.replicas, strict=True):
            memory, needed = room[group.device_type], other.memory_bytes or 0
            if memory is not None and needed > memory * (1 + _NEAR):
                yield (
                    f"stage {number} needs {needed / 2**20:.1f} MiB on a {group.device_type}, "
                    f"which has {memory / 2**20:.1f} MiB"
                )
            if group.memory_bytes is None:
                yield f"stage {number}: memory_bytes is missing, counted {needed:.0f}"


def _counted(plan: Plan, problem: ParallelProblem) -> Plan:
    """The plan with every number counted again."""
    stages = tuple(
        replace(
            stage,
            compute_seconds=_compute(plan, problem, number),
            gather_seconds=None
            if plan.shard is None
            else _with_gathers(plan, problem, number) - _compute(plan, problem, number),
            transfer_seconds=_transfer(plan, problem, number),
            reduce_seconds=_reduce(plan, problem, number),
            update_seconds=_update(plan, problem, number),
            replicas=tuple(
                replace(group, memory_bytes=round(needed))
                for group, needed in zip(
                    stage.replicas, counted_memory(plan, problem, number), strict=True
                )
            ),
        )
        for number, stage in enumerate(plan.stages)
    )
    held = [_held_with(plan, number) for number in range(plan.num_positions)]
    predicted = replace(
        plan.predicted,
        step_seconds=counted_step(plan, problem),
        sync_seconds=max(sum(_reduce(plan, problem, number) for number in own) for own in held),
        update_seconds=max(sum(_update(plan, problem, number) for number in own) for own in held),
        bubble_fraction=_bubble(plan, problem),
    )
    return replace(plan, stages=stages, predicted=predicted)


def _bubble(plan: Plan, problem: ParallelProblem) -> float:
    """Time to fill and drain the pipeline, over the time of the slowest stage's passes."""
    # With equal chunks this is (p - 1) / (v m) (4.2.2), which interleaved plans state.
    if plan.num_model_chunks > 1:
        return (plan.num_positions - 1) / (plan.num_model_chunks * plan.num_rounds)
    stages = range(len(plan.stages))
    busy = plan.num_rounds * max(_stage_seconds(plan, problem, number) for number in stages)
    if not busy or len(plan.stages) == 1:
        return 0.0
    return max(0.0, (_passes_seconds(plan, problem) - busy) / busy)


def _proof_faults(plan: Plan, problem: ParallelProblem) -> Iterator[str]:
    stated = plan.proof.certificate
    if stated is not None and not isinstance(stated, ParallelCertificate):
        yield "proof.certificate: is not of plans of three dimensions"
    elif stated is not None:
        types = len(problem.pools)
        for number, node in enumerate(stated.priced):
            if len(node.device_prices) != types:
                yield f"proof.certificate: priced[{number}] does not price {types} types"
    if plan.proof.lower_bound is None:
        yield "proof: no lower_bound"
    if plan.proof.tolerance is not None:
        yield f"proof: tolerance {plan.proof.tolerance}, but nothing tells how accurate a step is"
    yield from step_faults(plan, _NEAR)


def _alternative_faults(plan: Plan, problem: ParallelProblem) -> Iterator[str]:
    """Judge each alternative as a plan, and that no other is better in every figure at once."""
    foretold = [other.predicted for other in plan.alternatives]
    steps = [0.0 if one is None else one.step_seconds for one in foretold]
    if None in foretold or steps != sorted(steps):
        yield "alternatives: the fastest must come first"
    figures = [_figures(plan)]
    for number, other in enumerate(plan.alternatives):
        try:
            as_plan = replace(
                plan,
                stages=other.stages,
                microbatch_size=other.microbatch_size,
                num_microbatches=other.num_microbatches,
                num_model_chunks=other.num_model_chunks,
                schedule=parallel_schedule(is_chunked=other.num_model_chunks > 1),
                predicted=other.predicted or plan.predicted,
                alternatives=(),
            )
        except ProblemError as error:
            yield f"alternatives[{number}]: {error.message}"
            continue
        faults = [*_plan_faults(as_plan, problem), *rate_faults(as_plan, _NEAR)]
        faults += dollar_faults(as_plan)
        yield from (f"alternatives[{number}]: {fault}" for fault in faults)
        mine = _figures(as_plan)
        if any(all(a <= b for a, b in zip(known, mine, strict=True)) for known in figures):
            yield f"alternatives[{number}]: another plan is as good in every figure"
        figures.append(mine)


def _figures(plan: Plan) -> tuple[float, ...]:
    """Seconds, devices, bytes of the fullest device, and dollars an hour where they are known."""
    got = plan.predicted
    return (
        got.step_seconds,
        plan.num_devices,
        max(stage.memory_bytes or 0 for stage in plan.stages),
        got.dollars_per_hour or 0.0,
    )


def _pool(problem: ParallelProblem, group: ReplicaGroup) -> ParallelPool:
    return next(pool for pool in problem.pools if pool.device_type == group.device_type)


def _times(plan: Plan, problem: ParallelProblem, group: ReplicaGroup) -> ShardTimes:
    wanted = (group.tensor_parallel_size, plan.microbatch_size)
    return next(
        times
        for times in _pool(problem, group).times
        if (times.tensor_parallel_size, times.microbatch_size) == wanted
    )


def _start(plan: Plan, number: int) -> int:
    return sum(len(stage.layers) for stage in plan.stages[:number])


def _compute(plan: Plan, problem: ParallelProblem, number: int) -> float:
    return max(sum(both) for both in _passes(plan, problem, number))


def _passes(plan: Plan, problem: ParallelProblem, number: int) -> list[tuple[float, float]]:
    """Seconds of the forward and the backward pass of a microbatch, on each kind of replica."""
    stage, start, found = plan.stages[number], _start(plan, number), []
    for group in stage.replicas:
        times = _times(plan, problem, group)
        forward = sum(_of(stage, times.forward_seconds, start))
        backward = sum(_of(stage, times.backward_seconds, start))
        if stage.recompute == "full":
            backward += forward
        if stage.recompute == "selective":
            backward += sum(_of(stage, times.core_seconds, start))
        found.append((forward, backward))
    return found


def _with_gathers(plan: Plan, problem: ParallelProblem, number: int) -> float:
    """Seconds of a microbatch's passes on a stage, and of what they wait for of shared weights."""
    # The forward pass gathers all repeated layers; the backward pass does so again, twice where it
    # recomputes them, and reduces their gradients. Nothing hides the gather of the first.
    if plan.shard is None:
        return _compute(plan, problem, number)
    _, layers = _shared_units(plan, problem, number)
    whole, again = _sent(plan, problem, number, layers), plan.stages[number].recompute == "full"
    first = _sent(plan, problem, number, sorted(layers)[-1:])
    return first + max(
        max(forward, whole) + max(backward, (3 if again else 2) * whole)
        for forward, backward in _passes(plan, problem, number)
    )


def _shared_units(
    plan: Plan, problem: ParallelProblem, number: int
) -> tuple[list[float], list[float]]:
    """Bytes of a stage that are in no repeated layer, if any, and of each repeated layer."""
    stage, degree = plan.stages[number], plan.stages[number].replicas[0].tensor_parallel_size
    sizes = next(s for s in problem.sizes if s.tensor_parallel_size == degree)
    units = _units(stage.layers, _of(stage, sizes.weight_bytes, _start(plan, number)))
    rest = [units.pop("")] if "" in units else []
    return rest, list(units.values())


def _sent(plan: Plan, problem: ParallelProblem, number: int, units: Sequence[float]) -> float:
    """Seconds in which the owners of some units send their parts of them, or get their sums."""
    # Each of the d owners of a unit begins a message, and all parts cross the slowest link once.
    owners = plan.stages[number].num_replicas
    return max(
        sum(owners * link.latency_seconds + unit / link.coefficients[0] for unit in units)
        for link in _ring_curves(plan, problem, number)
    )


def _update(plan: Plan, problem: ParallelProblem, number: int) -> float:
    stage, start = plan.stages[number], _start(plan, number)
    longest = 0.0
    for group in stage.replicas:
        table, part = (
            _times(plan, problem, group).update_seconds,
            _part(plan, problem, number, group),
        )
        whole = table[start] if problem.cost_rule == "sailor" else sum(_of(stage, table, start))
        longest = max(longest, part * whole)
    # Each replica updates its share; all shares together go round the ring of replicas once.
    sends = plan.shared_states in ("optimizer", "gradients")
    return longest + (_ring(plan, problem, number, rounds=1) if sends else 0.0)


def _transfer(plan: Plan, problem: ParallelProblem, number: int) -> float:
    """Seconds of a microbatch's messages: its output, and the gradient of its input."""
    # Sailor's rule counts some messages twice.
    size, last = plan.microbatch_size, len(plan.stages) - 1
    if last == 0:
        return 0.0
    output = gradient = 0.0
    if number < last:
        output = _link_seconds(plan, problem, number)
    if number > 0:
        start = _start(plan, number)
        own = start if problem.cost_rule == "sailor" else start - 1
        gradient = _message(plan, problem, (number - 1, number), problem.output_bytes[own] * size)
    if problem.cost_rule == "sailor":
        if number == last:
            return 2 * gradient
        if number == 0 and last >= 3:
            return 2 * output
    return output + gradient


def _link_seconds(plan: Plan, problem: ParallelProblem, number: int) -> float:
    """Seconds of a message from a stage to the next one."""
    sent = problem.output_bytes[_start(plan, number + 1) - 1] * plan.microbatch_size
    return _message(plan, problem, (number, number + 1), sent)


def _message(plan: Plan, problem: ParallelProblem, stages: tuple[int, int], size: float) -> float:
    """Seconds of a message between two stages, over the slowest link of their replicas."""
    # Without scatter/gather, each device of a tensor-parallel group sends a full copy. If
    # receiving blocks, the message also costs the receiving stage the same time.
    slowest = 0.0
    for number in stages:
        for group in plan.stages[number].replicas:
            degree = group.tensor_parallel_size
            sent = size if problem.boundary_rule != "whole" else size * degree
            for link in _pool(problem, group).links:
                if link.tensor_parallel_size == degree:
                    slowest = max(slowest, definitions.curve_seconds(link.curve, sent))
    for one in plan.stages[stages[0]].replicas:
        for other in plan.stages[stages[1]].replicas:
            copies = max(one.tensor_parallel_size, other.tensor_parallel_size)
            sent = size if problem.boundary_rule != "whole" else size * copies
            for curve in _curves_between(problem, {one.device_type, other.device_type}):
                slowest = max(slowest, definitions.curve_seconds(curve, sent))
    return slowest + slowest if problem.boundary_rule == "blocking" else slowest


def _lies_in_a_server(problem: ParallelProblem, stage: Stage) -> bool:
    """Whether all devices of a stage are of one kind, and equal parts of a server."""
    if len(stage.replicas) > 1:
        return False
    group = stage.replicas[0]
    width = _pool(problem, group).devices_per_server
    return width in range(0, width + 1, group.num_replicas * group.tensor_parallel_size)


def _curves_between(problem: ParallelProblem, types: set[str]) -> list[LinkCurve]:
    """The links between unlike types of a set, where the problem states any."""
    return [
        link.curve
        for link in problem.between
        if set(link.device_types) <= types and len(set(link.device_types)) == 2
    ]


def _reduce(plan: Plan, problem: ParallelProblem, number: int) -> float:
    """Seconds of a stage's sums: every byte goes round twice, or once where one replica gets it."""
    # Where weights are shared: the rest, gathered and reduced once a step, and the last reduction.
    # Of the chunks of a device the first one has the last pass of a step.
    if plan.shard is not None:
        rest, layers = _shared_units(plan, problem, number)
        last = sorted(layers)[-1:] if number < plan.num_positions else []
        return _sent(plan, problem, number, [*rest, *rest, *last])
    return _ring(plan, problem, number, rounds=1 if plan.shared_states == "gradients" else 2)


def _ring(plan: Plan, problem: ParallelProblem, number: int, *, rounds: int) -> float:
    """Seconds in which the gradients of replicas go round a ring, in buckets."""
    # These are shards if all have one degree. Else they are whole, and the ring is of all devices;
    # it is counted as if all replicas had the greatest degree.
    stage, start = plan.stages[number], _start(plan, number)
    replicas = sum(group.num_replicas for group in stage.replicas)
    if replicas == 1:
        return 0.0
    degrees = [group.tensor_parallel_size for group in stage.replicas]
    degree = min(degrees)
    if problem.cost_rule == "hetflow" and degree < max(degrees):
        degree, replicas = 1, replicas * max(degrees)
    wanted = 1 if problem.cost_rule == "sailor" else degree
    sizes = next(s for s in problem.sizes if s.tensor_parallel_size == wanted)
    left = float(sum(_of(stage, sizes.weight_bytes, start)))
    if problem.cost_rule == "sailor":
        left /= min(degree, 4)
    buckets = []
    while problem.bucket_bytes is not None and left > problem.bucket_bytes:
        buckets.append(float(problem.bucket_bytes))
        left -= problem.bucket_bytes
    buckets.append(left)
    return max(
        sum(
            rounds * (replicas - 1) * definitions.curve_seconds(curve, bucket / replicas)
            for bucket in buckets
        )
        for curve in _ring_curves(plan, problem, number)
    )


def _ring_curves(plan: Plan, problem: ParallelProblem, number: int) -> list[LinkCurve]:
    """The links that a stage's replicas cross."""
    stage = plan.stages[number]
    near = _pool(problem, stage.replicas[0]).inside
    if near is not None and _lies_in_a_server(problem, stage):
        return [near]
    curves = [
        next(x.curve for x in _pool(problem, group).links if x.tensor_parallel_size == 1)
        for group in stage.replicas
    ]
    return curves + _curves_between(problem, {group.device_type for group in stage.replicas})
