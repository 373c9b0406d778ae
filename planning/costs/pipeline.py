"""What a pipeline stage costs: time, links and memory (thesis 2.4, 3.2, 3.3.3).

A stage holds C seconds of forward + backward per microbatch and w bytes of weights on m
replicas. Three prices for it, all in seconds per input:

``thesis``
    The text, 2.4.1: T = max(C, 2(m-1) w / B) / m. A ring all-reduce moves 2(m-1)/m w bytes over
    each link. So the text charges m times too much for its own sentence on weight synchronisation
    ("each worker sends (m-1)/m |w|"). Kept as written.
``published``
    The released optimizer: (C + 4(m-1) w / (B m) / g) / m, where g (the previous level's
    devices) divides only in a pipeline's first block; a boundary costs 2a / (B m) on both
    sides of a block. For comparison with it digit by digit (papers/pipedream/), not for planning.
``ring``
    The default: compute overlapped with a ring all-reduce at the speed of the slowest link the
    replicas span, per update and not per input where gradients are accumulated. On the
    published profiles it is the one formula that chooses table 2.2's configurations for VGG-16
    on Cluster-A and for ResNet-50 (examples/pipedream_table_2_2).

A boundary of a bytes costs 2a / B per input (activation and gradient) in the first and the last.

Beside layers and bytes, ``ring`` counts what was measured of the runtime's own work: of every pass,
of every message, of every step (``Overheads``). The papers' two prices know none of it.
"""

from collections.abc import Collection, Sequence
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from ...schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from ...schema.schedule import HeldMoment, traits
from .comm import Wire, collective_seconds


class AllReduce(Wire):
    """A ring between devices of a type: what was measured of it, nothing and infinity if not."""

    def rate(self, bytes_per_second: float) -> float:
        """Of a ring whose slowest link carries so much."""
        return min(bytes_per_second, self.bytes_per_second)

    def start_seconds(self, num_replicas: int) -> float:
        """What one all-reduce costs beside its bytes: a latency for each of 2(m-1) hops."""
        return self.seconds(0.0, num_replicas, inf)

    def seconds(self, weight_bytes: float, num_replicas: int, bytes_per_second: float) -> float:
        """One all-reduce of a stage's gradients."""
        link = Wire(self.latency_seconds, self.rate(bytes_per_second))
        return collective_seconds("all-reduce", weight_bytes, num_replicas, link)


def all_reduce(problem: PipelineProblem, pool: DevicePool) -> AllReduce:
    """The all-reduces of a pool's replicas; the papers' prices know rings over links only."""
    if problem.stage_cost != "ring" or pool.reduce_bytes_per_second is None:
        return AllReduce(0.0, inf)
    return AllReduce(pool.reduce_latency_seconds, pool.reduce_bytes_per_second)


class Overheads(NamedTuple):
    """What a step costs beside its layers, bytes, reductions and updates, in seconds."""

    forward_seconds: tuple[float, ...]
    """[pools] of a forward pass of a stage."""
    backward_seconds: tuple[float, ...]
    """[pools] of its backward pass, both halves where the schedule splits it."""
    message_seconds: float
    """Of one message to another stage."""

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """[pools] of all passes of a microbatch through a stage."""
        return tuple(
            forward + backward
            for forward, backward in zip(self.forward_seconds, self.backward_seconds, strict=True)
        )


def overheads(problem: PipelineProblem) -> Overheads:
    """What the prices of a problem count beside layers and bytes."""
    # The executor makes one forward and one backward pass of a microbatch, or a forward pass and
    # two halves of a backward pass. What is recomputed is inside a backward pass: its layers' time
    # counts again, but no further pass of the runtime's.
    if problem.stage_cost != "ring":
        nothing = (0.0,) * len(problem.pools)
        return Overheads(nothing, nothing, 0.0)
    halves = 2 if problem.traits.splits_backward else 1
    forward = tuple(pool.pass_seconds for pool in problem.pools)
    return Overheads(
        forward, tuple(halves * seconds for seconds in forward), problem.message_seconds
    )


def fixed_seconds(problem: PipelineProblem, device_types: Collection[str]) -> float:
    """What a step on devices of these types costs beside passes, messages and updates."""
    # All of them begin and end a step together, so the slowest type's counts, once.
    if problem.stage_cost != "ring":
        return 0.0
    return max(pool.fixed_seconds for pool in problem.pools if pool.device_type in device_types)


class TiedWeights(NamedTuple):
    """Weights that several layers use: positions of those that hold them, and of the others."""

    holders: frozenset[int]
    sharers: frozenset[int]
    weight_bytes: int


def tied_weights(layers: Sequence[PipelineLayer]) -> tuple[TiedWeights, ...]:
    """The tied weights of a model, one entry for each set of holders."""
    position = {layer.id: index for index, layer in enumerate(layers)}
    found: dict[frozenset[int], tuple[set[int], int]] = {}
    for index, layer in enumerate(layers):
        if layer.shared_with:
            holders = frozenset(position[name] for name in layer.shared_with)
            sharers, size = found.get(holders, (set(), 0))
            found[holders] = (sharers | {index}, max(size, layer.shared_weight_bytes))
    return tuple(
        TiedWeights(holders, frozenset(sharers), size) for holders, (sharers, size) in found.items()
    )


def tied_seconds(weight_bytes: float, num_replicas: int, bytes_per_second: float) -> float:
    """One all-reduce of a stage's weights that other stages hold too, at a flush."""
    # A ring over the stage's replicas and at least one more, at the slowest link there is. What it
    # costs beside its bytes is not counted.
    link = Wire(0.0, bytes_per_second)
    return collective_seconds("all-reduce", weight_bytes, num_replicas + 1, link)


def slowest_of_all(problem: PipelineProblem) -> float:
    """Bytes per second of the slowest all-reduce of all pools: over links, or as measured."""
    # A problem that leaves out pools of another states the other's.
    if problem.tied_bytes_per_second is not None:
        return problem.tied_bytes_per_second
    rates = [
        all_reduce(problem, pool).rate(slowest_links(pool.levels)[-1]) for pool in problem.pools
    ]
    if len(problem.pools) > 1 and problem.inter_bytes_per_second is not None:
        rates.append(problem.inter_bytes_per_second)
    return min(rates)


def rounds(schedule: str, num_replicas: int, num_microbatches: int) -> float:
    """Microbatches that the busiest replica of a stage adds to a step."""
    # ceil(M / m), as replicas take microbatches in turn. A flushing schedule's first round is the
    # filling of the pipeline, which all partitions share. PipeDream's stream never ends, so its
    # replicas share evenly: M / m.
    known = traits(schedule)
    if known.updates_each_round:
        return num_microbatches / num_replicas
    return ceil(num_microbatches / num_replicas) - (1 if known.flushes else 0)


def updates(schedule: str, num_replicas: int, num_microbatches: int) -> float:
    """Optimizer updates of a stage in a step of M microbatches: PipeDream makes one a round."""
    return num_microbatches / num_replicas if traits(schedule).updates_each_round else 1.0


def boundary_seconds(
    activation_bytes: float, bytes_per_second: float, message_seconds: float = 0.0
) -> float:
    """Send a microbatch's activations and receive their gradients: 2 a / B (thesis 2.4.1).

    ``message_seconds`` is what each of the two costs beyond its bytes.
    """
    link = Wire(message_seconds, bytes_per_second)
    return 2 * collective_seconds("point-to-point", activation_bytes, 2, link)


def num_in_flight(
    schedule: str, workers_from_here: int, num_replicas: int, num_microbatches: int
) -> int:
    """Microbatches whose activations a replica keeps at once."""
    # 1F1B-RR: ceil(workers from this stage on / replicas of this stage), which is NOAM for the
    # first stage (thesis 2.4.2); never more than the replica gets in a step where the schedule
    # flushes. GPipe: all that it gets (3.2.1).
    known, share = traits(schedule), ceil(num_microbatches / num_replicas)
    if known.order == "forward-first":
        return share
    warm = ceil(workers_from_here / num_replicas)
    return min(warm, share) if known.flushes else warm


def weight_versions(schedule: str, in_flight: int) -> int:
    """Versions of the weights a replica keeps."""
    # Weight stashing: one for each input in flight (2.4.3). 2BW: two (3.2.1), also on one stage,
    # whose gradients are of the version before the newest there too. Flushing schedules: one.
    known = traits(schedule)
    if known.weight_semantics == "stashing":
        return in_flight
    return 2 if known.is_double_buffered else 1


def kept_per_weight_byte(versions: int, state_bytes_per_weight_byte: float) -> float:
    """Bytes that a replica keeps for each byte of its stage's weights.

    They are the versions, one copy of the gradients, and the optimizer's state. The runtime adds
    up gradients in place, under every schedule; the state is there once for all versions.
    """
    return versions + 1 + state_bytes_per_weight_byte


def held_moments(
    schedule: str, in_flight: int, num_replicas: int, num_microbatches: int
) -> tuple[HeldMoment, ...]:
    """When a replica may hold most, of a schedule whose replicas need not be equally many.

    Messages are kept until the other end is known to have them: of outputs as many as microbatches
    are in flight, of gradients one more. Before the replica's first backward pass none was sent.
    """
    k, share = in_flight, ceil(num_microbatches / num_replicas)
    more = min(share - k, k + 1) if traits(schedule).flushes else k + 1
    if more:
        return (HeldMoment(k, received=k, sent=k + 1, returned=more),)
    first = HeldMoment(k, received=k, sent=k + 1, has_gradients=False)
    return (first, HeldMoment(k - 1, received=k - 1, sent=k + 1, returned=1))[: min(k, 2)]


class StageHeld(NamedTuple):
    """What a replica of a stage holds under its schedule."""

    in_flight: int
    versions: int
    moments: tuple[HeldMoment, ...]


class StageParts(NamedTuple):
    """Bytes of a stage, or of many in arrays: what its memory is made of."""

    weight: Any
    """With copies of weights that other stages hold."""
    tied: Any
    """Of weights that other stages use too."""
    kept: Any
    """Of a microbatch, for its backward pass."""
    passing: Any
    """The most beyond ``kept`` in a backward pass, at one of its layers."""
    waiting: Any
    """The same with the gradients of the layers behind."""
    halved: Any
    """Of a microbatch between the halves of its backward pass."""
    received: Any
    sent: Any
    buffers: Any = 0.0
    """With copies, and what each microbatch has of its own."""


def replica_bytes(
    problem: PipelineProblem,
    pool: DevicePool,
    num_replicas: int,
    held: StageHeld,
    parts: StageParts,
    *,
    recompute: bool,
) -> Any:
    """Memory of one replica of stages, with what passes or an update take for a while.

    Weight versions, gradients, the optimizer's state; in passes also what microbatches in flight
    keep, of one alone with recomputation (thesis 2.4.3, 3.2.1, 3.3.3). Gradients of a step's first
    pass wait, at most ``waiting_bytes``: of all weights where replicas add them up, else of tied
    ones. Where there are no other replicas, that pass begins without gradients.
    """
    # In an update samples are there of the last microbatch, and of the next step's first one.
    found = update_bytes(problem, pool, held.versions, parts) + 2 * problem.sample_bytes
    for moment in held.moments:
        passing = pass_bytes(
            problem, pool, num_replicas, held.versions, moment, parts, recompute=recompute
        )
        # Of the model's own inputs also those of the next microbatch.
        found = np.maximum(found, passing + (moment.in_flight + 1) * problem.sample_bytes)
    return found


def update_bytes(
    problem: PipelineProblem, pool: DevicePool, versions: int, parts: StageParts
) -> Any:
    """Memory of one replica of stages while the optimizer updates them, but for samples."""
    standing = kept_per_weight_byte(versions, problem.optimizer.state_bytes_per_weight_byte)
    return (standing + pool.update_bytes_per_weight_byte) * parts.weight + parts.buffers


def pass_bytes(
    problem: PipelineProblem,
    pool: DevicePool,
    num_replicas: int,
    versions: int,
    moment: HeldMoment,
    parts: StageParts,
    *,
    recompute: bool,
) -> Any:
    """Memory of one replica of stages in a pass, but for samples; ``moment`` may be of arrays."""
    weight, wait = parts.weight, pool.waiting_bytes
    standing = kept_per_weight_byte(versions, problem.optimizer.state_bytes_per_weight_byte)
    copies, is_summed = int(pool.copies_messages), num_replicas > 1
    running, weights = parts.passing, standing * weight + parts.buffers
    if is_summed:
        running = np.minimum(running + wait, parts.waiting)
    elif copies and not np.all(moment.has_gradients):
        has = np.asarray(moment.has_gradients, bool)
        running = np.where(has, running, parts.waiting)
        weights = weights - np.where(has, 0.0, weight)
    num_kept = 1 if recompute else moment.in_flight
    passing = weights + num_kept * parts.kept + running + moment.halved * parts.halved
    passing = passing + (moment.received + copies * moment.returned) * parts.received
    passing = passing + copies * moment.sent * parts.sent
    return passing if is_summed else passing + np.minimum(parts.tied, wait)


def last_readers(problem: PipelineProblem) -> dict[int, int]:
    """Positions of layers that others read -> that of the last reader."""
    last: dict[int, int] = {}
    for source, target in problem.links:
        last[source] = max(last.get(source, 0), target)
    return last


def worker_bytes(
    problem: PipelineProblem, pool: DevicePool, num_replicas: int, passing_bytes: float
) -> float:
    """Memory of a worker besides its stages, once a device: base, workspaces, the pass that runs.

    0 where the base was not measured: then a plan's bytes are those of its stages alone.
    """
    if pool.base_memory_bytes is None:
        return 0
    found = pool.base_memory_bytes + pool.workspace_bytes + passing_bytes
    # Searches set aside what compares workers on every device.
    compares = num_replicas > 1 or any(layer.shared_with for layer in problem.layers)
    return found if compares else found - pool.compared_bytes


def noam(replicas: Sequence[int]) -> int:
    """NUM_OPT_ACTIVE_MINIBATCHES: ceil(workers / replicas of the input stage) (2.4.2)."""
    return ceil(sum(replicas) / replicas[0])


def slowest_links(levels: Sequence[TopologyLevel]) -> tuple[float, ...]:
    """Bandwidth of a path that climbs to each level: the slowest link on the way, level 1 up."""
    slowest, found = float("inf"), []
    for level in levels:
        slowest = min(slowest, level.bytes_per_second)
        found.append(slowest)
    return tuple(found)


def shared_level(levels: Sequence[TopologyLevel], one: int, other: int) -> int:
    """Level of the smallest component that holds two devices; 0 for one and the same."""
    level = 0
    for index, part in enumerate(levels):
        if one == other:
            return level
        one, other = one // part.num_components, other // part.num_components
        level = index + 1
    return level
