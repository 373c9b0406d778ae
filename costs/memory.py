"""Memory: which profiled batch sizes fit a device."""

from ..schema.profile import BatchPoint, Profile


def fitting_points(profile: Profile, memory_bytes: int) -> tuple[BatchPoint, ...]:
    """The points of a profile whose peak memory is at most ``memory_bytes``.

    The number of virtual nodes does not enter: VirtualFlow (6.6) keeps one gradient buffer
    whatever their number, and the profile's peak is that of a whole training step.

    Args:
        profile: One model on one device type.
        memory_bytes: Memory of the device to plan for.
    """
    return tuple(p for p in profile.batch_curve if p.peak_memory_bytes <= memory_bytes)
