"""Memory: which profiled batch sizes fit a device, and what is left free of tensors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from ...schema.cluster import Cluster
from ...schema.layers import PassMoment
from ...schema.profile import BatchPoint, LayerGraph, MemoryReserve, Profile, changed_curves
from ...schema.records import MOST_BYTES

COMPARED_BYTES = 1 << 17
"""What a worker keeps on its device to compare its parameters with others'."""

NUMBERS_BYTES, LOSS_BYTES = 1 << 13, 1 << 9
"""What norms, flags and other numbers of a step take on a worker; and the loss of a microbatch.

Allocators of GPUs round each up to 512 bytes.
"""

TESTED_SAMPLES = 16
"""Of a microbatch, on which a loss is tested."""

WAITING_BYTES = 25 << 20
"""First gradients of a step that wait on a GPU until they are written to a buffer together."""


def fitting_points(batch_curve: Sequence[BatchPoint], memory_bytes: int) -> tuple[BatchPoint, ...]:
    """The points of a curve whose peak memory is at most ``memory_bytes``.

    The number of virtual nodes does not enter: VirtualFlow (6.6) keeps one gradient buffer
    whatever their number, and the profile's peak is that of a whole training step.
    """
    return tuple(p for p in batch_curve if p.peak_memory_bytes <= memory_bytes)


def most_pinned_bytes(profile: Profile, pool: Cluster) -> int | None:
    """Host memory in which a device's offloaded activations may wait; None if it is not known.

    The devices of a server share it equally, whichever of them need it.
    """
    parts = [
        memory // sum(server.devices.values())
        for server in pool.servers
        if profile.device_type in server.devices
        and (memory := server.host_memory_bytes or profile.host_memory_bytes) is not None
    ]
    return min(parts, default=None)


def fewest_missing(fits: Callable[[int], bool], memory_bytes: Iterable[int]) -> int | None:
    """The fewest bytes that every device would need more, so that something fits.

    Args:
        fits: Whether it does with so many more; with more still it does too.
        memory_bytes: Of the devices as they are.

    Returns:
        0 where it fits as it is; None where no memory helps.
    """
    low, high, most = -1, 0, MOST_BYTES - max(memory_bytes, default=0)
    if not fits(most):
        return None
    while not fits(high):
        # Doubled until it fits, then halved: ``low`` never fits, ``high`` always does.
        low, high = high, min(2 * high or 1, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def most_of(moments: Iterable[PassMoment]) -> tuple[PassMoment, ...]:
    """The moments at which a device may hold most: of shares of gradients from none to all."""
    # Weights count or not. What is held is linear in the share, so these are two upper envelopes.
    every, kept = list(moments), list[PassMoment]()
    for counts in (0, 1):

        def held(one: PassMoment, counts: int = counts) -> int:
            return one.taken_bytes + one.gradient_bytes + counts * one.weight_bytes

        now = max(every, key=lambda one: (held(one), one.summed_bytes), default=None)
        while now is not None:
            kept.append(now)
            above = [
                (Fraction(held(now) - held(one), one.summed_bytes - now.summed_bytes), number)
                for number, one in enumerate(every)
                if one.summed_bytes > now.summed_bytes
            ]
            share, number = min(above, default=(Fraction(1), 0))
            now = every[number] if share < 1 else None
    return tuple(dict.fromkeys(kept))


def reserve_of(
    profile: Profile, asked_bytes: int, *, num_devices: int, channels_per_peer: int = 0
) -> MemoryReserve:
    """What a worker takes beside tensors in the worst of all plans for a pool.

    The papers count tensors only. A worker among others has one communicator of all its replicas.
    A pipeline's worker has a channel or more to each worker of the stages before and after its own:
    at most all others. Fragmentation is the most over all profiled sizes.

    Args:
        profile: Of the worker's device type.
        asked_bytes: What the user asked to leave free besides.
        num_devices: Of the whole pool.
        channels_per_peer: Of a pipeline: most channels between two workers.
    """
    beside, peers = profile.beside_tensors, num_devices - 1
    parts = [] if beside is None or not peers else [beside.group_bytes]
    if beside is not None and peers and channels_per_peer:
        parts.append(_times(_channel_bytes(profile), channels_per_peer * peers))
    known = [part for part in parts if part is not None]
    fragments = [p.fragmentation_bytes for p in profile.batch_curve]
    return MemoryReserve(
        device_type=profile.device_type,
        context_bytes=None if beside is None else beside.context_bytes,
        communicator_bytes=sum(known) if known else None,
        fragmentation_bytes=max((f for f in fragments if f is not None), default=None),
        asked_bytes=asked_bytes,
    )


def workspaces(graph: LayerGraph) -> dict[str, int]:
    """Layer -> the most temporary bytes of its passes, where that was measured.

    The gradients of its output and inputs are there in its backward pass too; and of outputs that
    layers behind it have read past it, such as a residual's. The workspace holds
    the gradients of its weights, which autograd makes before it adds them to others; of a weight
    that later layers use, that of theirs and the sum of both.

    When a loss is tested, there are the last layer's output and two copies of the samples. Of
    ``TESTED_SAMPLES`` there are the output and what the loss makes of it, taken twice as large.
    They are repeated to as many as a larger microbatch has.
    """
    made = {node.id: node.activation_bytes for node in graph.nodes}
    beside, held = dict(made), dict.fromkeys(made, 0)
    place, last = {name: n for n, name in enumerate(made)}, dict[str, int]()
    for source, target in graph.edges:
        beside[target] += made[source]
        last[source] = max(last.get(source, 0), place[target])
    for source, end in last.items():
        for node in graph.nodes[place[source] + 1 : end]:
            beside[node.id] += made[source]
    for node in graph.nodes:
        for holder in node.shared_with:
            held[holder] = max(held[holder], node.shared_weight_bytes or 0)
    inner, size = {source for source, _ in graph.edges}, graph.microbatch_size
    rows = 3 * size
    if size > TESTED_SAMPLES:  # those that are repeated stay beside all
        rows = (3 * ceil(size / TESTED_SAMPLES) + 1) * TESTED_SAMPLES
    samples = 2 * (graph.sample_bytes or 0)
    tested = {name: samples + made[name] + ceil(made[name] * rows / size) for name in made}
    return {
        node.id: max(
            node.workspace_bytes + beside[node.id] + held[node.id],
            0 if node.id in inner else tested[node.id],
        )
        for node in graph.nodes
        if node.workspace_bytes is not None
    }


def writes_at_once(profile: Profile) -> bool:
    """Whether first gradients of a step wait for nothing: on a host's processors.

    There the profile states what an update takes beside passes. A base alone says nothing:
    estimates of GPUs have one too.
    """
    return profile.update_workspace_bytes is not None


def exchange_bytes(profile: Profile) -> int:
    """What a worker of a pipeline or parallel plan takes beside its stages and their passes."""
    # Both measurements hold what the allocator keeps in fragments: a split's worker beside its
    # messages, and a rehearsed pipeline's. So the larger counts.
    fragments = None if profile.pipeline is None else profile.pipeline.fragmentation_bytes
    return max(profile.group_workspace_bytes or 0, fragments or 0)


def _channel_bytes(profile: Profile) -> int | None:
    """Of a channel to another worker, of the type's own or another: the most that was measured."""
    links = [profile.links, *(link.links for link in profile.links_to)]
    known = [link.channel_bytes for link in links if link is not None]
    return max((found for found in known if found is not None), default=None)


def _times(part: int | None, number: int) -> int | None:
    return None if part is None else part * number


def with_reserve(profile: Profile, reserve: MemoryReserve) -> Profile:
    """Return a profile whose peaks, and whose base memory, hold a reserve too."""
    # Of a batch curve each size has its own fragmentation. On one device alone there are no
    # communicators: if devices that train together were measured apart, only their peaks hold
    # them.
    if not reserve.total_bytes:
        return profile
    apart = (reserve.context_bytes or 0) + reserve.asked_bytes
    among = apart + (reserve.communicator_bytes or 0)
    alone = among if profile.busy is None else apart
    return replace(
        profile,
        **changed_curves(
            profile, lambda how, curve: _raised(curve, alone if how == "kept" else among)
        ),
        busy=profile.busy
        and replace(profile.busy, batch_curve=_raised(profile.busy.batch_curve, among)),
        base_memory_bytes=(profile.base_memory_bytes or 0) + reserve.total_bytes,
    )


def _raised(curve: tuple[BatchPoint, ...], more_bytes: int) -> tuple[BatchPoint, ...]:
    return tuple(
        replace(
            point,
            peak_memory_bytes=point.peak_memory_bytes
            + more_bytes
            + (point.fragmentation_bytes or 0),
        )
        for point in curve
    )
