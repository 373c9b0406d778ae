"""A second, independent version of the papers' equations, used only by the checkers.

Checkers import neither solvers nor costs, so an error in an equation there is caught by the
version here. The code is slow and simple on purpose; only the record classes are shared.
"""

from collections.abc import Collection, Sequence
from math import inf, log2
from typing import Any, NamedTuple

import numpy as np

from ...schema.parallel import LinkCurve
from ...schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from ...schema.problem import DeviceCosts, DeviceOption
from ...schema.profile import BatchPoint, GradientSum, Sync, SyncPoint
from ...schema.schedule import HeldMoment, traits


def ring_seconds(num_bytes: float, num_members: int, bytes_per_second: float) -> float:
    """Seconds of a ring all-reduce over n members, without latency."""
    # In each hop every member sends 1/n of the bytes to the next one. n - 1 hops form the sums,
    # and n - 1 more distribute them.
    share_seconds = num_bytes / num_members / bytes_per_second
    return (num_members - 1) * share_seconds + (num_members - 1) * share_seconds


class RingLink(NamedTuple):
    """The slowest link that a ring of gradients crosses."""

    latency_seconds: float
    bytes_per_second: float


def ring_link(options: Collection[DeviceOption]) -> RingLink | None:
    """The link of a ring over devices of these types; None if no rates were fitted."""
    late, rates = [0.0], list[float]()
    for option in options:
        measured = option.sync
        if measured is None or measured.bytes_per_second is None:
            continue
        late += [measured.latency_seconds or 0.0, option.link_latency_seconds]
        rates += [measured.bytes_per_second, option.link_bytes_per_second or inf]
    return RingLink(max(late), min(rates)) if rates else None


def tells_sums(option: DeviceOption) -> bool:
    """Whether the last pass of a step is known to hide sums: when they begin, and their links."""
    return ring_link([option]) is not None and all(one.sums for one in option.batch_curve)


def _sum_seconds(one: GradientSum, num_devices: int, link: RingLink) -> float:
    hops = num_devices - 1 + num_devices - 1
    ring = ring_seconds(one.num_bytes, num_devices, link.bytes_per_second)
    return hops * one.num_sums * link.latency_seconds + ring


def split_sync_seconds(option: DeviceOption, num_devices: int) -> float:
    """Exposed synchronisation seconds of a split over ``num_devices`` devices (VirtualFlow 5.1.2).

    The measured time on the measured number of devices. If link rates were fitted, the predicted
    ring time of these devices over this link is added, and that of the measured ring is
    subtracted. The result may be much smaller than the two ring times, so its rounding error is
    relative to them. Where a profile tells when sums begin, nothing hides the last one.
    """
    measured = option.sync
    if num_devices == 1 or measured is None:
        return 0.0
    own = ring_link([option])
    if own is not None and tells_sums(option):
        return _sum_seconds(option.batch_curve[0].sums[-1], num_devices, own)
    # What synchronisation adds at the size that hides it best; other sizes are counted apart.
    hidden_best = min(map(_sync_or_bound, measured.by_batch_size or [measured]))
    weights, cap = option.weight_bytes, option.link_bytes_per_second
    hops = num_devices - 1 + num_devices - 1
    if measured.bytes_per_second is None or measured.latency_seconds is None:
        wire = 0.0
        if cap is not None:
            wire = ring_seconds(weights, num_devices, cap) + hops * option.link_latency_seconds
        return wire if wire > hidden_best else hidden_best
    rate, hop = measured.bytes_per_second, measured.latency_seconds
    if cap is not None and cap < rate:
        rate = cap
    if option.link_latency_seconds > hop:
        hop = option.link_latency_seconds
    ring = hops * hop + ring_seconds(weights, num_devices, rate)
    # The difference of two rings stretches what was measured to other devices.
    seconds = hidden_best + ring - fitted_ring_seconds(option)
    return seconds if seconds > 0 else 0.0


def _sync_or_bound(measured: Sync | SyncPoint) -> float:
    """The measured seconds, or the most that they can be where zero was not excluded."""
    for seconds in (measured.sync_seconds, measured.at_most_seconds):
        if seconds is not None:
            return seconds
    raise AssertionError("a record has one of them")


def exposed_seconds(
    option: DeviceOption, num_devices: int, size: int, link: RingLink | None
) -> float | None:
    """Synchronisation seconds exposed at a batch size, beyond the least of all sizes.

    ``size`` is that of the device's last virtual node, in samples; ``link`` is the slowest of all
    types in use. Where a profile tells when sums begin they are played one after another, from then
    on and each behind the one before; what is exposed is beyond the last one alone.

    Returns:
        Otherwise a linear interpolation between the nearest measured sizes; None if synchronisation
        was not measured per size, or there is only one device.
    """
    if num_devices > 1 and link is not None and tells_sums(option):
        known_point = point(option, size)
        if known_point is None:
            raise AssertionError("judged before: the size is one of the curve")
        free = -inf  # 0 is when the pass ends
        for one in known_point.sums:
            free = max(free, -one.seconds_left) + _sum_seconds(one, num_devices, link)
        return free - _sum_seconds(known_point.sums[-1], num_devices, link)
    points = option.sync.by_batch_size if option.sync else ()
    known = {point.batch_size: _sync_or_bound(point) for point in points}
    if num_devices == 1 or not known:
        return None
    # Beyond the measured sizes the nearest one stands.
    below = max((s for s in known if s <= size), default=min(known))
    above = min((s for s in known if s >= size), default=max(known))
    near = 0.0 if above == below else (size - below) / (above - below)
    return (1 - near) * known[below] + near * known[above] - min(known.values())


def terms(option: DeviceOption, num_devices: int) -> DeviceCosts:
    """Select a type's measurements: those made alone if the plan has one device, else busy ones."""
    return option if num_devices > 1 or option.alone is None else option.alone


def point(costs: DeviceCosts, size: int) -> BatchPoint | None:
    """Return the measured point of a virtual node of ``size`` samples; None if there is none."""
    return next((entry for entry in costs.batch_curve if entry.batch_size == size), None)


def spread_seconds(
    step_seconds: float,
    passes: Sequence[tuple[float, float, float | None]],
    step_errors: Sequence[float | None],
) -> float | None:
    """Seconds by which a split's step may differ from its prediction; None if unknown.

    Args:
        step_seconds: The predicted step.
        passes: For each group: seconds of all its passes, what a device takes once beside them, and
            the relative half width of the passes' confidence interval.
        step_errors: For each group's type, the relative error of steps computed from their terms.
    """
    ways = []
    if None not in step_errors:
        known = [error or 0.0 for error in step_errors]
        each = [seconds + more for seconds, more, _ in passes]
        late = max(seconds * (1 + error) for seconds, error in zip(each, known, strict=True))
        ways.append(late - max(each) + (step_seconds - max(each)) * max(known))
    if all(error is not None for *_, error in passes):
        latest = max(seconds + more + seconds * (error or 0.0) for seconds, more, error in passes)
        ways.append(latest - max(seconds + more for seconds, more, _ in passes))
    return max(ways) if ways else None


def fitted_ring_seconds(option: DeviceOption) -> float:
    """Seconds of the measured ring by its fitted link rates; 0 if none were fitted."""
    measured = option.sync
    if measured is None or measured.bytes_per_second is None:
        return 0.0
    ring = ring_seconds(option.weight_bytes, measured.num_devices, measured.bytes_per_second)
    return 2 * (measured.num_devices - 1) * (measured.latency_seconds or 0.0) + ring


def link_between(levels: Sequence[TopologyLevel], one: int, other: int) -> float:
    """Bytes per second of the slowest link on the path between two devices of a pool."""
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
    """Seconds of one ring all-reduce of a stage's gradients."""
    # If all-reduces between devices of the type were measured, each hop has their latency and at
    # most their rate. The papers' stage costs use the link's bandwidth only.
    rate, latency = bytes_per_second, 0.0
    if problem.stage_cost == "ring" and pool.reduce_bytes_per_second is not None:
        latency = pool.reduce_latency_seconds
        if pool.reduce_bytes_per_second < rate:
            rate = pool.reduce_bytes_per_second
    num_hops = num_replicas - 1 + num_replicas - 1
    return ring_seconds(weight_bytes, num_replicas, rate) + num_hops * latency


def slowest_link(problem: PipelineProblem) -> float:
    """Bytes per second of the slowest hop of a ring over all devices of the problem.

    The minimum of all links and of all measured all-reduce rates.
    """
    rates = [level.bytes_per_second for pool in problem.pools for level in pool.levels]
    if problem.stage_cost == "ring":
        measured = (pool.reduce_bytes_per_second for pool in problem.pools)
        rates += [rate for rate in measured if rate is not None]
    if len(problem.pools) > 1 and problem.inter_bytes_per_second is not None:
        rates.append(problem.inter_bytes_per_second)
    return min(rates)


def microbatches_of_busiest(num_microbatches: int, num_replicas: int) -> int:
    """Microbatches of the first replica, which has the most: replicas take them in turn."""
    return len(range(0, num_microbatches, num_replicas))


def in_flight(
    schedule: str, workers_from_here: int, num_replicas: int, num_microbatches: int
) -> int:
    """Most microbatches in flight on one replica of a stage (thesis 2.4.2, 3.2.1)."""
    # 1F1B keeps one microbatch in flight for every worker from this stage on; the stage's replicas
    # take them in turn. GPipe starts all microbatches of a batch. A schedule that flushes has at
    # most one batch in flight.
    own = microbatches_of_busiest(num_microbatches, num_replicas)
    known = traits(schedule)
    if known.order == "forward-first":
        return own
    warm = microbatches_of_busiest(workers_from_here, num_replicas)
    return min(own, warm) if known.flushes else warm


def weight_versions(schedule: str, num_in_flight: int) -> int:
    """Number of weight versions that a replica keeps (thesis 2.4.3, 3.2.1)."""
    semantics = traits(schedule).weight_semantics
    if semantics == "stashing":
        return num_in_flight
    return 2 if semantics == "double-buffered" else 1


def most_at_a_layer(
    kept: Sequence[float], aside: Sequence[int], summed: Sequence[int], waiting: float
) -> list[float]:
    """The most that a backward pass holds at one of its layers, of stages that begin here.

    The layers behind have freed what they kept. Their first gradients of a step wait, all of them
    or as many as may.

    Args:
        kept: [layers] bytes that a microbatch keeps.
        aside: [layers] bytes of each layer's workspace.
        summed: [layers] bytes of gradients that wait for a sum; empty where none does.
        waiting: How many bytes of these may wait.

    Returns:
        [layers] of the stage that ends with each.
    """
    found, most, with_all, held, behind = [], 0.0, -inf, 0.0, 0
    # By where the stage ends: at a layer it holds what was kept until there, however it goes on.
    for own, beside, gradient in zip(kept, aside, summed or (0,) * len(kept), strict=True):
        held, behind = held + own, behind + gradient
        most, with_all = max(most, held + beside), max(with_all, held + beside - behind)
        found.append(min(most + waiting, with_all + behind))
    return found


class StageContents(NamedTuple):
    """Bytes of a stage, or of an array of stages."""

    weights: Any
    """With copies of tied ones."""
    shared: Any
    """Of weights that other stages use too."""
    kept: Any
    """That its layers keep for one microbatch's backward pass."""
    at_layer: Any
    """The most of one backward pass, at one of its layers, with what is kept until there."""
    with_waiting: Any
    """The same where gradients of the layers behind wait."""
    halved: Any
    """That wait of one microbatch between the halves of its backward pass."""
    received: Any
    sent: Any
    buffers: Any = 0.0
    """The model's, their copies, and those of microbatches."""


def moments(
    schedule: str, num_in_flight: int, num_replicas: int, num_microbatches: int
) -> list[HeldMoment]:
    """What a replica holds at its fullest, where its pipeline's replicas may be unequal."""
    # The outputs of what is in flight are on their way, and one gradient has come. Of its own
    # gradients those of one microbatch more are, as far as it has sent any.
    k, done = num_in_flight, num_in_flight + 1
    if traits(schedule).flushes:
        done = min(done, microbatches_of_busiest(num_microbatches, num_replicas) - k)
    if done > 0:
        return [HeldMoment(k, 0, k, k + 1, done)]
    found = [HeldMoment(k, 0, k, k + 1, 0, has_gradients=False)]
    if k > 1:  # the second backward pass
        found.append(HeldMoment(k - 1, 0, k - 1, k + 1, 1))
    return found


def replica_bytes(
    problem: PipelineProblem,
    pool: DevicePool,
    stage: StageContents,
    num_versions: int,
    held: Sequence[HeldMoment],
    num_replicas: int,
    *,
    recompute: bool,
) -> tuple[Any, Any]:
    """Bytes of memory of one replica of a stage, or of an array of stages.

    ``held`` is what it holds at the moments that may be the fullest.

    Returns:
        Without the pass that runs, and with it.
    """
    bare = update_bytes(problem, pool, stage, num_versions)
    bare = bare + problem.sample_bytes + problem.sample_bytes  # of the last, and the next step's
    whole = bare
    for moment in held:
        rest, most = pass_bytes(
            problem, pool, stage, num_versions, moment, num_replicas, recompute=recompute
        )
        samples = (moment.in_flight + 1) * problem.sample_bytes
        bare, whole = np.maximum(bare, rest + samples), np.maximum(whole, most + samples)
    return bare, whole


def update_bytes(
    problem: PipelineProblem, pool: DevicePool, stage: StageContents, num_versions: int
) -> Any:
    """What ``replica_bytes`` counts in an update, but samples: no activations."""
    beside = 1 + problem.optimizer.state_bytes_per_weight_byte + pool.update_bytes_per_weight_byte
    return (num_versions + beside) * stage.weights + stage.buffers


def pass_bytes(
    problem: PipelineProblem,
    pool: DevicePool,
    stage: StageContents,
    num_versions: int,
    moment: HeldMoment,
    num_replicas: int,
    *,
    recompute: bool,
) -> tuple[Any, Any]:
    """What ``replica_bytes`` counts at one moment, but samples."""
    weights = stage.weights
    rest = (num_versions + problem.optimizer.state_bytes_per_weight_byte) * weights
    rest = rest + stage.buffers
    kept = stage.kept * (1 if recompute else moment.in_flight)
    rest = rest + kept + moment.halved * stage.halved + moment.received * stage.received
    if pool.copies_messages:
        rest = rest + moment.returned * stage.received + moment.sent * stage.sent
    running, gradients = stage.at_layer, weights
    if num_replicas > 1:
        running = np.minimum(running + pool.waiting_bytes, stage.with_waiting)
    else:
        rest = rest + np.minimum(stage.shared, pool.waiting_bytes)
        if pool.copies_messages and not moment.has_gradients:
            running, gradients = stage.with_waiting, 0.0 * weights
    return rest + gradients, rest + gradients + running - stage.kept


def stage_seconds(
    problem: PipelineProblem,
    compute_seconds: float,
    update_seconds: float,
    num_replicas: int,
    all_reduce_seconds: float,
) -> float:
    """The default stage cost: seconds per input in the steady state (docs/pipeline.md)."""
    # The maximum of the busiest replica's compute and updates in a step, and of the step's
    # all-reduces, divided by the inputs of a step. With a flush, the first round of inputs is not
    # counted, because it belongs to the pipeline's startup. PipeDream never flushes: its inputs
    # are dealt evenly, and it updates after each round.
    count = problem.num_microbatches
    if problem.traits.updates_each_round:
        rounds = num_updates = count / num_replicas
    else:
        rounds = float(microbatches_of_busiest(count, num_replicas))
        rounds -= problem.traits.flushes
        num_updates = 1.0
    busy = rounds * compute_seconds + num_updates * update_seconds
    rings = num_updates * all_reduce_seconds
    # Arrays of stages go where numbers do, here and below.
    return np.maximum(busy, rings) / count  # type: ignore[no-any-return]


def thesis_seconds(
    compute_seconds: float, weight_bytes: float, num_replicas: int, bytes_per_second: float
) -> float:
    """The stage cost of the thesis's text (2.4.1), in seconds: max(C, 2(m-1) w / B) / m."""
    others = num_replicas - 1
    rings = 2 * others * weight_bytes / bytes_per_second
    return np.maximum(compute_seconds, rings) / num_replicas  # type: ignore[no-any-return]


def boundary_seconds(
    activation_bytes: float, bytes_per_second: float, message_seconds: float
) -> float:
    """Seconds to send an activation and return its gradient, with two messages' fixed cost."""
    one_way = message_seconds + activation_bytes / bytes_per_second
    return one_way + one_way


def counts_overheads(problem: PipelineProblem) -> bool:
    """Whether passes, messages and steps have a fixed cost; the papers' stage costs have none."""
    return problem.stage_cost == "ring"


def message_seconds(problem: PipelineProblem) -> float:
    """Fixed seconds of a message between two stages, whatever its size."""
    return problem.message_seconds if counts_overheads(problem) else 0.0


def own_seconds(problem: PipelineProblem, pool: DevicePool, num_stages: int) -> tuple[float, float]:
    """Fixed seconds of a stage's forward pass, and of its backward passes, for one microbatch.

    The runtime makes one backward pass, or two if the schedule splits it; recomputation is part of
    one of these. A plan with one stage and a schedule that flushes uses the cost measured for a
    single stage, if there is one.

    Returns:
        Seconds of the forward pass, and of all backward passes together.
    """
    if not counts_overheads(problem):
        return 0.0, 0.0
    halves = 2 if problem.traits.splits_backward else 1
    seconds = pool.pass_seconds
    if num_stages == 1 and problem.solved == "flat" and problem.traits.flushes:
        seconds = seconds if pool.lone_pass_seconds is None else pool.lone_pass_seconds
    return seconds, halves * seconds


def step_overhead(problem: PipelineProblem, device_types: Collection[str]) -> float:
    """Fixed seconds of a step besides passes, messages and updates, of the slowest type used."""
    if not counts_overheads(problem):
        return 0.0
    return max(pool.fixed_seconds for pool in problem.pools if pool.device_type in device_types)


class SharedWeights(NamedTuple):
    """Weights that several layers use: ids of layers that share others', of these, and bytes."""

    sharers: frozenset[str]
    holders: frozenset[str]
    num_bytes: int


def tied_weights(layers: Sequence[PipelineLayer]) -> list[SharedWeights]:
    """All weights of a model that several layers use."""
    users: dict[frozenset[str], set[str]] = {}
    sizes: dict[frozenset[str], int] = {}
    for layer in layers:
        if layer.shared_with:
            holders = frozenset(layer.shared_with)
            users.setdefault(holders, set()).add(layer.id)
            sizes[holders] = max(layer.shared_weight_bytes, sizes.get(holders, 0))
    return [SharedWeights(frozenset(users[holders]), holders, sizes[holders]) for holders in users]


def tied_bytes(layers: Sequence[PipelineLayer], inside: set[str]) -> tuple[int, int]:
    """Count the bytes of tied weights that a stage shares with other stages.

    Returns:
        Bytes of which the stage keeps a copy, because it uses weights that other stages hold; and
        bytes whose gradients a flush must add up over several stages.
    """
    copied = split = 0
    for sharers, holders, num_bytes in tied_weights(layers):
        if sharers & inside and holders - inside:
            copied += num_bytes
        everybody = sharers | holders
        if everybody & inside and everybody - inside:
            split += num_bytes
    return copied, split


def curve_seconds(curve: LinkCurve, message_bytes: float) -> float:
    """Seconds of a message: its latency, and its bytes over the rate that the curve has for them.

    The rate is a polynomial in log2 of the message's megabytes.
    """
    if message_bytes <= 0:
        return 0.0
    size = log2(message_bytes / 1e6)
    highest = len(curve.coefficients) - 1
    rate = sum(each * size ** (highest - n) for n, each in enumerate(curve.coefficients))
    return curve.latency_seconds + message_bytes / rate
