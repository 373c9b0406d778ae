"""Communication: the exposed time of gradient synchronisation per step.

VirtualFlow 5.1.2 measures it as the distributed minus the single-device step time at batch
size 1. A link model carries that one measurement to other numbers of devices.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from ...schema.parallel import LinkCurve
from ...schema.problem import DeviceOption
from ...schema.profile import BatchPoint, Sync

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "point-to-point"]


class Wire(NamedTuple):
    """A link whose messages take a latency, and their bytes at one rate."""

    latency_seconds: float
    bytes_per_second: float


def collective_seconds(
    kind: Collective, num_bytes: float, num_members: int, link: Wire | LinkCurve
) -> float:
    """Time of a collective over the slowest link that its group crosses.

    The runtime calls one flat collective a group. gloo and NCCL run it as a ring over all members,
    so every hop waits for the slowest link, within servers and between them; nothing is summed
    inside a server first. Each of the n members sends 1/n of the bytes in every hop: n - 1 hops
    scatter sums, n - 1 gather them, and an all-reduce is both. A message is all bytes, once.

    Args:
        kind: Of collective.
        num_bytes: To reduce; gathered or scattered of all members together; of the message.
        num_members: n.
        link: The slowest link between two members.
    """
    if kind == "point-to-point":
        num_hops, num_shares = 1, 1
    else:
        num_hops = (2 if kind == "all-reduce" else 1) * (num_members - 1)
        num_shares = num_members
    if isinstance(link, LinkCurve):
        return num_hops * link.seconds(num_bytes / num_shares)
    per_link = num_hops * num_bytes / (num_shares * link.bytes_per_second)
    return per_link + num_hops * link.latency_seconds


def sync_seconds(option: DeviceOption, num_devices: int) -> float:
    """Predict the synchronisation time when ``num_devices`` devices take part.

    Nothing for one device, and nothing where the profile did not measure it. A time that could not
    be told from zero counts as its bound. Without a link
    model the measured time stands for every number of devices, unless the cluster's link alone
    would take longer. With one, the ring's time is anchored to the measurement, so that what
    the model does not know (software overhead, overlap) is kept. The anchor subtracts the
    measured link's ring and adds the ring over the slower of the two links; so a cluster with a
    slow network pays for it in full. Never falls as ``num_devices`` grows. Where the profile tells
    sizes of virtual nodes apart, this is the least of any; ``exposed_seconds`` comes on top. Where
    it tells when gradients come, this is the last bucket's ring, which nothing hides.

    ``num_devices`` are all in use, of every type.

    Returns:
        Seconds per step, at least 0.
    """
    sync = option.sync
    if num_devices < 2 or sync is None:
        return 0.0
    cap, size = option.link_bytes_per_second, option.weight_bytes
    slower = ring_wire(option)
    if slower is None or sync.latency_seconds is None or sync.bytes_per_second is None:
        if cap is None:
            return least_seconds(sync)
        late = option.link_latency_seconds
        wire = collective_seconds("all-reduce", size, num_devices, Wire(late, cap))
        return max(least_seconds(sync), wire)
    if hides(option):
        last = option.batch_curve[0].sums[-1]
        return float(_rings(last.num_bytes, last.num_sums, num_devices, slower))
    own = Wire(sync.latency_seconds, sync.bytes_per_second)
    measured = collective_seconds("all-reduce", size, sync.num_devices, own)
    ring = collective_seconds("all-reduce", size, num_devices, slower)
    return max(0.0, least_seconds(sync) + ring - measured)


def hides(option: DeviceOption) -> bool:
    """Whether the profile tells when gradients come, and so which sums a last pass hides."""
    return ring_wire(option) is not None and all(point.sums for point in option.batch_curve)


def ring_wire(option: DeviceOption) -> Wire | None:
    """The fitted link of a type's ring, no faster than the pool's; None without a link model."""
    sync, cap = option.sync, option.link_bytes_per_second
    if sync is None or sync.latency_seconds is None or sync.bytes_per_second is None:
        return None
    late = max(sync.latency_seconds, option.link_latency_seconds)
    return Wire(late, min(sync.bytes_per_second, cap or inf))


def slowest_wire(options: Iterable[DeviceOption]) -> Wire | None:
    """The link at which a ring over devices of all these types runs."""
    wires = [wire for wire in map(ring_wire, options) if wire is not None]
    return slowest(wires) if wires else None


def slowest(wires: Sequence[Wire]) -> Wire:
    """The longest latency and the least rate."""
    late = max(wire.latency_seconds for wire in wires)
    return Wire(late, min(wire.bytes_per_second for wire in wires))


def _rings(num_bytes: float, num_sums: int, num_devices: Any, wire: Wire) -> Any:
    late = Wire(num_sums * wire.latency_seconds, wire.bytes_per_second)
    return collective_seconds("all-reduce", num_bytes, num_devices, late)


def unhidden_seconds(point: BatchPoint, num_devices: Any, wire: Wire) -> Any:
    """What a step waits for sums after a last pass of this size, beyond the last sum.

    Sums run one after another, each when its gradients are there on all devices. A device's passes
    end at F_i, and a_ik is left of them when bucket k is there. R_k are the rings of bucket k and
    all behind it. Then all sums have ended at ``max_i (F_i + max_k (R_k - a_ik))``, so what is
    exposed is each device's own. ``num_devices`` may be an array.
    """
    last = point.sums[-1]
    least = most = _rings(last.num_bytes, last.num_sums, num_devices, wire)
    left = number = 0
    for one in reversed(point.sums):
        left, number = left + one.num_bytes, number + one.num_sums
        rings = _rings(left, number, num_devices, wire)
        most = np.maximum(most, rings - one.seconds_left)
    return most - least


def least_seconds(sync: Sync) -> float:
    """What synchronisation adds to a step at the size of virtual nodes that hides most of it."""
    known = [point.counted_seconds for point in sync.by_batch_size]
    return min(known, default=sync.counted_seconds)


def exposed_seconds(sync: Sync | None, batch_size: int) -> float | None:
    """What synchronisation adds beyond ``least_seconds`` where virtual nodes are of this size."""
    # It is the device's own: who comes last waits for the sums of its last backward pass, and how
    # much of them that pass hides depends on its length. So it is added to the device's passes,
    # and the slowest sum of both decides. Linear between measured sizes, as at the nearest outside
    # of them; None where sizes are not told apart.
    if sync is None or not sync.by_batch_size:
        return None
    points = sync.by_batch_size
    for low, high in pairwise(points):
        if low.batch_size < batch_size < high.batch_size:
            share = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
            more = high.counted_seconds - low.counted_seconds
            seconds = low.counted_seconds + share * more
            return max(0.0, seconds - least_seconds(sync))
    nearest = min(points, key=lambda point: abs(point.batch_size - batch_size))
    return nearest.counted_seconds - least_seconds(sync)
