"""The papers' equations once more, for the judges alone.

Judges import neither solvers nor costs, so that an error in an equation there is caught by this
second version of it. Slow and plain on purpose; nothing is shared but the records.
"""

from collections.abc import Collection, Sequence

from ..schema.pipeline import (
    DevicePool,
    PipelineLayer,
    PipelineProblem,
    TopologyLevel,
)
from ..schema.problem import AloneDevice, DeviceOption
from ..schema.profile import BatchPoint, Sync
from ..schema.schedule_traits import traits


def ring_seconds(num_bytes: float, num_members: int, bytes_per_second: float) -> float:
    """An all-reduce by a ring, without latency.

    Each member passes on a share of 1/n in every hop: n - 1 hops gather the sums, as many more
    spread them. All links are busy in each hop.
    """
    share_seconds = num_bytes / num_members / bytes_per_second
    return (num_members - 1) * share_seconds + (num_members - 1) * share_seconds


def split_sync_seconds(option: DeviceOption, num_devices: int) -> float:
    """Exposed synchronisation of a split over so many devices of all types (VirtualFlow 5.1.2).

    What was measured, on the devices that it was measured with; where links were fitted, plus how
    much longer the ring of these devices over this link takes than the ring that was measured:
    a difference of two rings, so what rounding leaves is in proportion to them, and not to it.
    """
    measured = option.sync
    if num_devices == 1 or measured is None:
        return 0.0
    hidden_best = _least_sync_seconds(measured)
    weights, cap = option.weight_bytes, option.link_bytes_per_second
    if measured.bytes_per_second is None or measured.latency_seconds is None:
        wire = ring_seconds(weights, num_devices, cap) if cap is not None else 0.0
        return wire if wire > hidden_best else hidden_best
    rate = measured.bytes_per_second
    if cap is not None and cap < rate:
        rate = cap
    ring = _hop_seconds(option, num_devices) + ring_seconds(weights, num_devices, rate)
    seconds = hidden_best + ring - fitted_ring_seconds(option)
    return seconds if seconds > 0 else 0.0


def _least_sync_seconds(sync: Sync) -> float:
    """Where sizes are told apart, what is exposed at the size that hides most."""
    return min([point.sync_seconds for point in sync.by_batch_size] or [sync.sync_seconds])


def exposed_seconds(option: DeviceOption, num_devices: int, size: int) -> float | None:
    """What a device's last virtual node leaves exposed beyond the least of any size.

    None where sizes are not told apart. What was measured at the sizes around it, each counting
    for as much as it is near.
    """
    known = {p.batch_size: p.sync_seconds for p in option.sync.by_batch_size} if option.sync else {}
    if num_devices == 1 or not known:
        return None
    below = max((s for s in known if s <= size), default=min(known))
    above = min((s for s in known if s >= size), default=max(known))
    near = 0.0 if above == below else (size - below) / (above - below)
    return (1 - near) * known[below] + near * known[above] - min(known.values())


def terms(option: DeviceOption, num_devices: int) -> DeviceOption | AloneDevice:
    """What holds for a device in a plan on so many: measured alone if it is the only one."""
    return option if num_devices > 1 or option.alone is None else option.alone


def point(costs: DeviceOption | AloneDevice, size: int) -> BatchPoint | None:
    """What was measured of a virtual node of that size; None where nothing was."""
    return next((entry for entry in costs.batch_curve if entry.batch_size == size), None)


def spread_seconds(
    step_seconds: float,
    passes: Sequence[tuple[float, float, float | None]],
    step_errors: Sequence[float | None],
) -> float | None:
    """How far a split's step may be from its prediction, either way; None if unknown.

    Args:
        step_seconds: The prediction.
        passes: Of each group all passes' seconds, what synchronisation exposes at their size, and
            the half width of the passes' interval, relative.
        step_errors: Of each group's type, how far steps were from their terms, relative.
    """
    ways = []
    if None not in step_errors:
        ways.append(step_seconds * max(error or 0.0 for error in step_errors))
    if all(error is not None for *_, error in passes):
        latest = max(seconds + more + seconds * (error or 0.0) for seconds, more, error in passes)
        ways.append(latest - max(seconds + more for seconds, more, _ in passes))
    return max(ways) if ways else None


def fitted_ring_seconds(option: DeviceOption) -> float:
    """The ring that was measured, by the links that were fitted; 0 where none were."""
    measured = option.sync
    if measured is None or measured.bytes_per_second is None:
        return 0.0
    ring = ring_seconds(option.weight_bytes, measured.num_devices, measured.bytes_per_second)
    return _hop_seconds(option, measured.num_devices) + ring


def _hop_seconds(option: DeviceOption, num_members: int) -> float:
    """Latency of a ring's hops, there and back."""
    latency = option.sync.latency_seconds if option.sync is not None else None
    return 2 * (num_members - 1) * (latency or 0.0)


def link_between(levels: Sequence[TopologyLevel], one: int, other: int) -> float:
    """Bytes per second of the slowest link on the way between two devices of a pool."""
    slowest, width = float("inf"), 1
    for level in levels:
        if one // width == other // width:
            break
        slowest = min(slowest, level.bytes_per_second)
        width *= level.num_components
    return slowest


def reduce_seconds(
    problem: PipelineProblem,
    pool: DevicePool,
    weight_bytes: float,
    num_replicas: int,
    bytes_per_second: float,
) -> float:
    """One all-reduce of a stage's gradients, hop by hop of its ring.

    Where all-reduces between devices of the type were measured, no hop is faster than theirs, and
    each begins with their latency. The papers' prices know the link alone.
    """
    rate, latency = bytes_per_second, 0.0
    if problem.stage_cost == "ring" and pool.reduce_bytes_per_second is not None:
        latency = pool.reduce_latency_seconds
        if pool.reduce_bytes_per_second < rate:
            rate = pool.reduce_bytes_per_second
    num_hops = num_replicas - 1 + num_replicas - 1
    return ring_seconds(weight_bytes, num_replicas, rate) + num_hops * latency


def slowest_link(problem: PipelineProblem) -> float:
    """Bytes per second of the slowest hop of a ring over all devices of the problem.

    The slowest link that any two of them have, or the slowest all-reduce that was measured.
    """
    rates = [level.bytes_per_second for pool in problem.pools for level in pool.levels]
    if problem.stage_cost == "ring":
        measured = (pool.reduce_bytes_per_second for pool in problem.pools)
        rates += [rate for rate in measured if rate is not None]
    if len(problem.pools) > 1 and problem.inter_bytes_per_second is not None:
        rates.append(problem.inter_bytes_per_second)
    return min(rates)


def microbatches_of_busiest(num_microbatches: int, num_replicas: int) -> int:
    """Microbatches of a batch that the first replica gets: they are dealt out in turn."""
    return len(range(0, num_microbatches, num_replicas))


def in_flight(
    schedule: str, workers_from_here: int, num_replicas: int, num_microbatches: int
) -> int:
    """Microbatches that a replica has begun and not ended, at most (2.4.2, 3.2.1).

    1F1B keeps a microbatch for every worker from this stage on, dealt to the stage's replicas in
    turn. GPipe begins all of a batch. Where a schedule flushes there are no more than a batch's.
    """
    own = microbatches_of_busiest(num_microbatches, num_replicas)
    known = traits(schedule)
    if known.order == "forward-first":
        return own
    warm = microbatches_of_busiest(workers_from_here, num_replicas)
    return min(own, warm) if known.flushes else warm


def weight_versions(schedule: str, num_in_flight: int) -> int:
    """Versions of its weights that a replica keeps (2.4.3, 3.2.1)."""
    semantics = traits(schedule).weight_semantics
    if semantics == "stashing":
        return num_in_flight
    return 2 if semantics == "double-buffered" else 1


def replica_bytes(
    weight_bytes: float,
    kept_bytes: float,
    input_bytes: float,
    held: tuple[int, int],
    state_bytes_per_weight_byte: float,
    *,
    recompute: bool,
) -> float:
    """Memory of one replica of a stage, part by part.

    Args:
        weight_bytes: Its weights, copies of tied ones included.
        kept_bytes: What its layers keep of one microbatch.
        input_bytes: What it receives of one microbatch.
        held: Microbatches in flight, and weight versions.
        state_bytes_per_weight_byte: Of the optimizer.
        recompute: Whether only inputs wait for the backward pass.
    """
    num_in_flight, versions = held
    all_versions = versions * weight_bytes
    gradients = weight_bytes
    state = state_bytes_per_weight_byte * weight_bytes
    inputs = num_in_flight * input_bytes
    activations = kept_bytes if recompute else num_in_flight * kept_bytes
    return all_versions + gradients + state + inputs + activations


def stage_seconds(
    problem: PipelineProblem,
    compute_seconds: float,
    update_seconds: float,
    num_replicas: int,
    all_reduce_seconds: float,
) -> float:
    """The default price: seconds per input of a stage in the steady state (docs/pipeline.md).

    Compute and updates of the busiest replica, or the rings of a step where those take longer,
    over the step's inputs. A schedule that flushes has the first round in the pipeline's filling;
    PipeDream's endless stream deals evenly and updates after each round.
    """
    count = problem.num_microbatches
    if problem.traits.updates_each_round:
        rounds = num_updates = count / num_replicas
    else:
        rounds = float(microbatches_of_busiest(count, num_replicas))
        rounds -= problem.traits.flushes
        num_updates = 1.0
    busy = rounds * compute_seconds + num_updates * update_seconds
    rings = num_updates * all_reduce_seconds
    return max(busy, rings) / count


def thesis_seconds(
    compute_seconds: float, weight_bytes: float, num_replicas: int, bytes_per_second: float
) -> float:
    """The text's price (2.4.1): max(C, 2(m-1) w / B) / m."""
    others = num_replicas - 1
    return max(compute_seconds, 2 * others * weight_bytes / bytes_per_second) / num_replicas


def published_seconds(
    compute_seconds: float,
    weight_bytes: float,
    num_replicas: int,
    bytes_per_second: float,
    devices_below: int,
) -> float:
    """The released optimizer's price: (C + 4(m-1) w / (B m) / g) / m."""
    per_link = 4 * (num_replicas - 1) * weight_bytes / (bytes_per_second * num_replicas)
    return (compute_seconds + per_link / devices_below) / num_replicas


def nested_ring_seconds(
    compute_seconds: float,
    weight_bytes: float,
    num_replicas: int,
    bytes_per_second: float,
    devices_below: int,
) -> float:
    """A ring over a level's components, each of which sends for its devices below together."""
    ring = ring_seconds(weight_bytes, num_replicas, bytes_per_second)
    return max(compute_seconds, ring / devices_below) / num_replicas


def boundary_seconds(
    activation_bytes: float, bytes_per_second: float, message_seconds: float
) -> float:
    """An activation there and its gradient back, two messages beyond their bytes."""
    one_way = message_seconds + activation_bytes / bytes_per_second
    return one_way + one_way


def counts_overheads(problem: PipelineProblem) -> bool:
    """Whether passes, messages and steps cost something themselves: not in the papers' prices."""
    return problem.stage_cost == "ring"


def message_seconds(problem: PipelineProblem) -> float:
    """What a message between two stages costs beyond its bytes."""
    return problem.message_seconds if counts_overheads(problem) else 0.0


def own_seconds(problem: PipelineProblem, pool: DevicePool, num_stages: int) -> tuple[float, float]:
    """What a microbatch's forward pass, and its backward passes, cost a stage beyond its layers.

    The runtime makes one backward pass, or two where the schedule splits it; what is computed
    again is done inside one of these. Where a single stage was measured, which has no messages, and
    the schedule flushes, a plan of one stage has its own cost.
    """
    if not counts_overheads(problem):
        return 0.0, 0.0
    halves = 2 if problem.traits.splits_backward else 1
    seconds = pool.pass_seconds
    if num_stages == 1 and problem.solved == "flat" and problem.traits.flushes:
        seconds = seconds if pool.lone_pass_seconds is None else pool.lone_pass_seconds
    return seconds, halves * seconds


def step_overhead(problem: PipelineProblem, device_types: Collection[str]) -> float:
    """What a step costs beside its passes, messages and updates: that of the slowest type used."""
    if not counts_overheads(problem):
        return 0.0
    return max(pool.fixed_seconds for pool in problem.pools if pool.device_type in device_types)


def tied_bytes(layers: Sequence[PipelineLayer], inside: set[str]) -> tuple[int, int]:
    """Bytes of tied weights that a stage of these layers has beside its own.

    Returns:
        Of which it keeps a copy, as it uses but does not hold them all; and of which some users
        are in other stages, so that a flush sums their gradients.
    """
    users: dict[frozenset[str], set[str]] = {}
    sizes: dict[frozenset[str], int] = {}
    for layer in layers:
        if layer.shared_with:
            holders = frozenset(layer.shared_with)
            users.setdefault(holders, set()).add(layer.id)
            sizes[holders] = max(layer.shared_weight_bytes, sizes.get(holders, 0))
    copied = split = 0
    for holders, sharers in users.items():
        if sharers & inside and holders - inside:
            copied += sizes[holders]
        everybody = sharers | holders
        if everybody & inside and everybody - inside:
            split += sizes[holders]
    return copied, split
