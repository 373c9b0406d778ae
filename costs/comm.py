"""Communication: the exposed time of gradient synchronisation per step.

VirtualFlow 5.1.2 measures it as the distributed minus the single-device step time at batch
size 1. A link model carries that one measurement to other numbers of devices.
"""

from itertools import pairwise

from ..schema.problem import DeviceOption
from ..schema.profile import Sync


def ring_seconds(
    num_devices: int, weight_bytes: int, latency_seconds: float, bytes_per_second: float
) -> float:
    """Time of a ring all-reduce: 2(n-1) messages, 2(n-1)/n of the bytes over each link.

    Args:
        num_devices: Members of the ring, n.
        weight_bytes: Gradient bytes to reduce.
        latency_seconds: Fixed cost of one ring message.
        bytes_per_second: Speed of the slowest link of the ring.
    """
    hops = 2 * (num_devices - 1)
    return hops * latency_seconds + hops / num_devices * weight_bytes / bytes_per_second


def sync_seconds(option: DeviceOption, num_devices: int) -> float:
    """Predict the synchronisation time when ``num_devices`` devices take part.

    Nothing for one device, and nothing where the profile did not measure it. A time that could not
    be told from zero counts as its bound. Without a link
    model the measured time stands for every number of devices, unless the cluster's link alone
    would take longer. With one, the ring's time is anchored to the measurement, so that what
    the model does not know (software overhead, overlap) is kept. The anchor subtracts the
    measured link's ring and adds the ring over the slower of the two links; so a cluster with a
    slow network pays for it in full. Never falls as ``num_devices`` grows. Where the profile tells
    sizes of virtual nodes apart, this is the least of any; ``exposed_seconds`` comes on top.

    Args:
        option: Devices of one type, with the profile's ``sync``.
        num_devices: All devices in use, of every type.

    Returns:
        Seconds per step, at least 0.
    """
    sync = option.sync
    if num_devices < 2 or sync is None:
        return 0.0
    link = option.link_bytes_per_second
    if sync.latency_seconds is None or sync.bytes_per_second is None:
        wire = ring_seconds(num_devices, option.weight_bytes, 0.0, link) if link else 0.0
        return max(least_seconds(sync), wire)
    measured = ring_seconds(
        sync.num_devices, option.weight_bytes, sync.latency_seconds, sync.bytes_per_second
    )
    slowest = min(sync.bytes_per_second, link or sync.bytes_per_second)
    ring = ring_seconds(num_devices, option.weight_bytes, sync.latency_seconds, slowest)
    return max(0.0, least_seconds(sync) + ring - measured)


def least_seconds(sync: Sync) -> float:
    """What synchronisation adds to a step at the size of virtual nodes that hides most of it."""
    known = [point.counted_seconds for point in sync.by_batch_size]
    return min(known, default=sync.counted_seconds)


def exposed_seconds(sync: Sync | None, batch_size: int) -> float | None:
    """What synchronisation adds beyond ``least_seconds`` where virtual nodes are of this size.

    It is the device's own: who comes last waits for the sums of its last backward pass, and how
    much of them that pass hides depends on its length. So it is added to the device's passes, and
    the slowest sum of both decides. Linear between measured sizes, as at the nearest outside of
    them; None where sizes are not told apart.
    """
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
