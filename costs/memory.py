"""Memory: which profiled batch sizes fit a device."""

from collections.abc import Sequence

from ..schema.profile import BatchPoint


def fitting_points(batch_curve: Sequence[BatchPoint], memory_bytes: int) -> tuple[BatchPoint, ...]:
    """The points of a curve whose peak memory is at most ``memory_bytes``.

    The number of virtual nodes does not enter: VirtualFlow (6.6) keeps one gradient buffer
    whatever their number, and the profile's peak is that of a whole training step.

    Args:
        batch_curve: Of one model on one device type.
        memory_bytes: Memory of the device to plan for.
    """
    return tuple(p for p in batch_curve if p.peak_memory_bytes <= memory_bytes)
