"""Costs of a split whose devices share a model's states (ZeRO 5; Cephalo; Poplar).

With ``optimizer`` a device keeps its share of the optimizer's state, with ``gradients`` also of the
gradients, with ``all`` also of the weights. The rest of its peak is as measured with whole states.
"""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import ceil

from ...schema.choices import Shard
from ...schema.layer_trace import unit_of
from ...schema.plan import Prediction, ReplicaGroup
from ...schema.problem import ShardedDevices, ShardedProblem
from ...schema.profile import BatchPoint, LayerGraph


def unit_bytes(
    layers: LayerGraph | None, weight_bytes: int, *, frozen: bool = True
) -> tuple[int, int, int]:
    """Of a model whose weights are gathered in units: most bytes whole at once, largest, number.

    The rest stays whole for a pass, and two repeated layers are whole at a time: one that runs and
    one ahead. Without layers the whole model is a unit.

    Args:
        layers: The model's layers; None if they are not known.
        weight_bytes: Of the whole model, with those that are not trained if they count.
        frozen: Whether weights that are not trained count.
    """
    sizes: Counter[str] = Counter()
    for node in layers.nodes if layers is not None else ():
        sizes[unit_of(node.id)] += node.weight_bytes
        sizes[unit_of(node.id)] += (node.frozen_weight_bytes or 0) if frozen else 0
    rest = sizes.pop("", 0) if sizes else weight_bytes
    repeated = sorted(size for size in sizes.values() if size)
    largest = max([rest, *repeated[-1:]])
    return min(weight_bytes, rest + sum(repeated[-2:])), largest, len(repeated) + bool(rest)


def in_rounds(shard: Shard) -> bool:
    """Whether devices exchange states in every pass, so that all make equally many passes."""
    return shard in ("gradients", "all")


def shared_ratio(problem: ShardedProblem, shard: Shard) -> Fraction:
    """Bytes of states that are shared, per byte of weights, of which some may be frozen."""
    trained = 1 - Fraction(problem.frozen_bytes, problem.weight_bytes)
    gradient = int(in_rounds(shard))
    state = Fraction(problem.optimizer.state_bytes_per_weight_byte)
    return trained * (gradient + state) + int(shard == "all")


def _held_bytes(problem: ShardedProblem, point: BatchPoint, shard: Shard) -> Fraction:
    """A device's peak memory in a pass of this size without a share of the states.

    Gradients that are shared are whole until they are reduced, and shared weights while their
    layers run: ``gathered_bytes`` of each.
    """
    weights = problem.weight_bytes
    held = point.peak_memory_bytes - shared_ratio(problem, shard) * weights
    if in_rounds(shard):
        trained = problem.gathered_trained_bytes
        trained = problem.gathered_bytes if trained is None else trained
        held += min(weights - problem.frozen_bytes, trained)
    if shard == "all":
        held += min(weights, problem.gathered_bytes)
    return held


def room_bytes(
    problem: ShardedProblem, kind: ShardedDevices, point: BatchPoint, shard: Shard
) -> int:
    """Bytes of states that fit beside a pass of this size; negative: so many are missing."""
    return int((kind.memory_bytes - _held_bytes(problem, point, shard)) // 1)


def most_share_bytes(
    problem: ShardedProblem, kind: ShardedDevices, point: BatchPoint, shard: Shard
) -> int | None:
    """The most bytes of weights of which a device can keep the states; None: it has no room."""
    room = kind.memory_bytes - _held_bytes(problem, point, shard)
    ratio = shared_ratio(problem, shard)
    if room < 0:
        return None
    return problem.weight_bytes if not ratio else min(problem.weight_bytes, int(room // ratio))


def peak_bytes(problem: ShardedProblem, point: BatchPoint, shard: Shard, share_bytes: int) -> int:
    """A device's peak memory with its share."""
    share = shared_ratio(problem, shard) * share_bytes
    return max(0, ceil(_held_bytes(problem, point, shard) + share))


def transfer_seconds(problem: ShardedProblem, num_bytes: int, num_units: int) -> float:
    """Time to gather, or to reduce, so many bytes of weights over all devices of the pool.

    Shares are unlike, so each owner sends its part to the others, or receives their sum: one
    pipelined broadcast, or reduction, for an owner. All parts together cross every link once.
    """
    if problem.bytes_per_second is None:
        return 0.0
    messages = num_units * problem.num_devices * problem.latency_seconds
    return messages + num_bytes / problem.bytes_per_second


def transfers(problem: ShardedProblem, shard: Shard) -> tuple[float, float, float]:
    """Seconds of transfers that passes hide, those that they do not, and those of an update.

    In each round: every weight is gathered in the forward pass and again in the backward pass, and
    every gradient reduced. The first gather and the last reduction hide behind nothing.
    """
    whole = transfer_seconds(problem, problem.weight_bytes, problem.num_units)
    trained = problem.weight_bytes - problem.frozen_bytes
    reduced = transfer_seconds(problem, trained, problem.num_units)
    edge = transfer_seconds(problem, problem.edge_bytes, 1)
    last = transfer_seconds(problem, min(trained, problem.edge_bytes), 1)
    if shard == "all":
        return 2 * whole + reduced, edge + last, 0.0
    return reduced, last, whole


def closing_seconds(problem: ShardedProblem) -> float:
    """What ends a step: the slowest update and fixed cost of all types, as if all were whole."""
    return max(kind.update_seconds + kind.fixed_seconds for kind in problem.devices)


def step_seconds(
    problem: ShardedProblem, shard: Shard, rounds: int, compute_seconds: float
) -> float:
    """A step whose slowest device computes ``compute_seconds`` in each of its rounds.

    Only plans whose devices exchange states in every pass have several rounds.
    """
    hidden, edges, update = transfers(problem, shard)
    passes = rounds * (max(compute_seconds, hidden) + edges)
    return passes + update + closing_seconds(problem)


def compute_limit(problem: ShardedProblem, shard: Shard, rounds: int, seconds: float) -> float:
    """The most seconds of compute in a round of a step of ``seconds``; 0 where there are none."""
    hidden, edges, update = transfers(problem, shard)
    left = (seconds - update - closing_seconds(problem)) / rounds - edges
    return left if left >= hidden else 0.0


def predict(problem: ShardedProblem, shard: Shard, groups: Iterable[ReplicaGroup]) -> Prediction:
    """Predict a step of groups that share states; see ``step_seconds``."""
    groups = tuple(groups)
    compute = max(group.virtual_nodes * (group.pass_seconds or 0.0) for group in groups)
    rounds = groups[0].virtual_nodes if in_rounds(shard) else 1
    step = step_seconds(problem, shard, rounds, compute / rounds)
    last = max(problem.devices, key=lambda kind: kind.update_seconds + kind.fixed_seconds)
    return Prediction(
        step_seconds=step,
        samples_per_second=problem.global_batch_size / step,
        compute_seconds=compute,
        sync_seconds=max(0.0, step - compute - closing_seconds(problem)),
        update_seconds=last.update_seconds,
        fixed_seconds=last.fixed_seconds or None,
    )
