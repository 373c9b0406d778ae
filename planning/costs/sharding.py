"""Costs of a split whose devices share a model's states (ZeRO 5; Cephalo; Poplar).

With ``optimizer`` a device keeps its share of the optimizer's state, with ``gradients`` also of the
gradients, with ``all`` also of the weights. The rest of its peak is as measured with whole states.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from typing import Any

from ...schema.layers import unit_of
from ...schema.options import Shard
from ...schema.plan import Prediction, ReplicaGroup
from ...schema.problem import ShardedDevices, ShardedProblem
from ...schema.profile import BatchPoint, LayerGraph


def unit_bytes(
    layers: LayerGraph | None,
    weight_bytes: int,
    *,
    frozen: bool = True,
    blocks: Sequence[str] = (),
) -> tuple[int, int, int, int]:
    """Most bytes of a model that are whole at once, its largest unit, and how many there are.

    The rest stays whole for a pass, and two blocks are whole at a time: one that runs and one
    ahead; the last number is the smaller one of these. Without layers the whole model is a unit.

    Args:
        layers: The model's layers; None if they are not known.
        weight_bytes: Of the whole model, with those that are not trained if they count.
        frozen: Whether weights that are not trained count.
        blocks: The modules that are units; empty for the repeated layers.
    """
    sizes: Counter[str] = Counter()
    for node in layers.nodes if layers is not None else ():
        unit = _block_of(node.id, blocks) if blocks else unit_of(node.id)
        sizes[unit] += node.weight_bytes
        sizes[unit] += (node.frozen_weight_bytes or 0) if frozen else 0
    rest = sizes.pop("", 0) if sizes else weight_bytes
    repeated = sorted(size for size in sizes.values() if size)
    largest = max([rest, *repeated[-1:]])
    second = 0 if len(repeated) < 2 else repeated[-2]
    most = min(weight_bytes, rest + sum(repeated[-2:]))
    return most, largest, len(repeated) + bool(rest), second


def _block_of(layer: str, blocks: Sequence[str]) -> str:
    """The block that a layer is in, whose name has ``_`` for each dot of its module's."""
    path = f"{layer}_".replace(".", "_")
    inside = [name for name in blocks if path.startswith(f"{name}_".replace(".", "_"))]
    return max(inside, key=len, default="")


def in_rounds(shard: Shard) -> bool:
    """Whether devices exchange states in every pass, so that all make equally many passes."""
    return shard in ("gradients", "all")


def shared_ratio(problem: ShardedProblem, shard: Shard) -> Fraction:
    """Bytes of states that are shared, per byte of weights, of which some may be frozen."""
    trained = 1 - Fraction(problem.frozen_bytes, problem.weight_bytes)
    gradient = int(in_rounds(shard))
    state = Fraction(problem.optimizer.state_bytes_per_weight_byte)
    return trained * (gradient + state) + int(shard == "all")


Line = tuple[Fraction, Fraction]
"""Bytes without a share of the states, and more bytes per byte of weights in a share."""


def _moments(problem: ShardedProblem, point: BatchPoint) -> Iterator[tuple[int, int, int, int]]:
    """What a ``PassMoment`` holds, for each time of a pass at which a device may hold most.

    Where a profile has none, one is counted that is worse than all. A first pass and the gradients
    that come in it take most as a convex function of the share: at most as linear between none and
    all. With all of them the profile's pass holds one of the two layers too.
    """
    weights, trained = problem.weight_bytes, problem.weight_bytes - problem.frozen_bytes
    known = point.pass_bytes is not None and point.update_bytes is not None
    if known and point.moments:
        for one in point.moments:
            yield one.taken_bytes, one.weight_bytes, one.gradient_bytes, one.summed_bytes
        return
    gradient = problem.gathered_trained_bytes
    gradient = min(trained, problem.gathered_bytes if gradient is None else gradient)
    taken, summed = point.pass_bytes or 0 if known else 0, trained
    if known and point.first_pass_bytes is not None:
        summed = max(0, point.first_pass_bytes - taken) - problem.second_trained_bytes
    yield taken, min(weights, problem.gathered_bytes), gradient, summed


def _phases(
    problem: ShardedProblem, point: BatchPoint, shard: Shard, rounds: int | None
) -> Iterator[list[Line]]:
    """What a device holds at most in each phase of a step: the least of some lines.

    Between phases it holds its share. A pass adds gradients that are shared until they are reduced,
    and shared weights while their layers run. In the first pass of a step its sums of gradients
    come while activations go. The profile's moments say how much of each is there at once. An
    update's workspace is in proportion to what it updates, up to that of all. Masters, which the
    state counts, take the place of shared weights; sums of gradients are then twice as wide.
    Without parts of a step in the profile its peak counts as a pass's.
    """
    weights = problem.weight_bytes
    trained = 1 - Fraction(problem.frozen_bytes, weights)
    ratio = shared_ratio(problem, shard)
    width = 2 if problem.optimizer.masters else 1  # of gradients that are summed
    pass_bytes, update_bytes = point.pass_bytes or 0, point.update_bytes or 0
    known = point.pass_bytes is not None and point.update_bytes is not None
    between = point.peak_memory_bytes - ratio * weights
    between -= max(pass_bytes, update_bytes, point.buffered_pass_bytes or 0) if known else 0
    # Profiles count the weights' own bytes beside masters, and gradients as wide as these.
    ratio -= 0 if shard == "gradients" else trained * (width - 1)
    if not in_rounds(shard):
        yield [(between + (pass_bytes if known else 0), ratio)]
    for taken, weight, gradient, summed in _moments(problem, point) if in_rounds(shard) else ():
        start = between + taken + gradient + (weight if shard == "all" else 0)
        come = Fraction(summed, weights) if rounds == 1 else trained
        yield [(start, max(Fraction(0), ratio - width * (trained - come)))]
    if not known:
        return
    if not in_rounds(shard):  # whole gradients go when they are reduced, a unit at a time
        edge = min(weights - problem.frozen_bytes, problem.edge_bytes)
        yield [(between, ratio + Fraction(width * edge, weights))]
        between, ratio = between - trained * weights, ratio + width * trained
        if width > 1:  # the last whole gradients, when all other sums are there
            yield [(between + edge, ratio)]
    lines = [(between + width * update_bytes, ratio)]
    workspace = problem.optimizer.workspace_bytes_per_weight_byte
    if workspace is not None:
        lines.append((between, ratio + width * trained * Fraction(workspace)))
    yield lines


def most_share_bytes(
    problem: ShardedProblem,
    kind: ShardedDevices,
    point: BatchPoint,
    shard: Shard,
    rounds: int | None,
) -> int | None:
    """The most bytes of weights of which a device can keep the states; None: it has no room."""
    most: Fraction | int = problem.weight_bytes
    for lines in _phases(problem, point, shard, rounds):
        rooms = [(kind.memory_bytes - start, slope) for start, slope in lines]
        fitting = [room / slope if slope else most for room, slope in rooms if room >= 0]
        if not fitting:
            return None
        most = min(most, max(fitting))
    return int(most)


def peak_bytes(
    problem: ShardedProblem, point: BatchPoint, shard: Shard, rounds: int | None, share_bytes: int
) -> int:
    """A device's peak memory with its share, in a step of so many rounds."""
    phases = _phases(problem, point, shard, rounds)
    most = max(min(start + slope * share_bytes for start, slope in lines) for lines in phases)
    return max(0, ceil(most))


def copied_ratio(problem: ShardedProblem, shard: Shard) -> float:
    """The most memory that a further share takes in any phase of a step, per byte of weights."""
    trained = 1 - problem.frozen_bytes / problem.weight_bytes
    workspace = problem.optimizer.workspace_bytes_per_weight_byte or 0.0
    workspace *= 2 if problem.optimizer.masters else 1
    gradient = int(not in_rounds(shard))
    return float(shared_ratio(problem, shard)) + trained * (gradient + workspace)


def transfer_seconds(problem: ShardedProblem, num_bytes: int, num_units: int) -> float:
    """Time to gather, or to reduce, so many bytes of weights over all devices of the pool.

    Shares are unlike, so each owner sends its part to the others, or receives their sum: one
    pipelined broadcast, or reduction, for an owner.
    """
    if problem.bytes_per_second is None:
        return 0.0
    link = problem.latency_seconds, problem.bytes_per_second
    return float(owners_seconds(num_bytes, num_units, problem.num_devices, *link))


def owners_seconds(
    num_bytes: Any, num_units: Any, num_owners: int, latency: float, bytes_per_second: float
) -> Any:
    """Time in which each owner of a part of some units sends it to the others, or gets its sum.

    Numbers, or arrays of them. All parts of a unit together cross every link once.
    """
    return num_units * num_owners * latency + num_bytes / bytes_per_second


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


def end_seconds(problem: ShardedProblem, kind: ShardedDevices, share_bytes: int) -> float:
    """What ends a step on a device: the update of its share, and the fixed cost."""
    return kind.fixed_seconds + kind.update_seconds * share_bytes / problem.weight_bytes


def most_updated_bytes(problem: ShardedProblem, kind: ShardedDevices, seconds: float) -> int | None:
    """The largest share with which a step ends in so many seconds; None: none does."""
    left = seconds - kind.fixed_seconds
    if left < 0:
        return None
    whole, each = problem.weight_bytes, kind.update_seconds
    return whole if left >= each else int(left / each * whole)


def step_seconds(
    problem: ShardedProblem, shard: Shard, rounds: int, compute_seconds: float, end_seconds: float
) -> float:
    """A step whose slowest device computes ``compute_seconds`` in each of its rounds.

    Only plans whose devices exchange states in every pass have several rounds. All devices meet
    before updates, so the longest end counts, whichever device has the longest passes.
    """
    hidden, edges, update = transfers(problem, shard)
    passes = rounds * (max(compute_seconds, hidden) + edges)
    return passes + update + end_seconds


def predict(problem: ShardedProblem, shard: Shard, groups: Iterable[ReplicaGroup]) -> Prediction:
    """Predict a step of groups that share states; see ``step_seconds``."""
    groups = tuple(groups)
    kinds = {kind.device_type: kind for kind in problem.devices}
    compute = max(group.virtual_nodes * (group.pass_seconds or 0.0) for group in groups)
    rounds = groups[0].virtual_nodes if in_rounds(shard) else 1
    shares = [(kinds[group.device_type], group.state_share_bytes or 0) for group in groups]
    end, fixed = max((end_seconds(problem, *one), one[0].fixed_seconds) for one in shares)
    step = step_seconds(problem, shard, rounds, compute / rounds, end)
    return Prediction(
        step_seconds=step,
        samples_per_second=problem.global_batch_size / step,
        compute_seconds=compute,
        sync_seconds=max(0.0, step - compute - end),
        update_seconds=end - fixed,
        fixed_seconds=fixed or None,
    )
