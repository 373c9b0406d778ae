"""Memory of a device beside the tensors that torch's allocator counts."""

from collections.abc import Sequence

from .records import Bytes, Name, record


@record
class BesideTensors:
    """Device memory of a worker that its allocator neither holds nor counts, as measured.

    Args:
        context_bytes: What a worker that trains alone takes: the driver's context, loaded kernels
            and libraries. What other programs held of the device meanwhile is in it.
        group_bytes: What it takes besides once it has synchronised with others: the buffers of a
            communicator. None if that was not measured.
    """

    context_bytes: Bytes
    group_bytes: Bytes | None = None


@record
class MemoryReserve:
    """Memory that a plan leaves free of tensors on each device of a type.

    Args:
        device_type: The type.
        context_bytes: For context and libraries; None if the profile did not measure it.
        communicator_bytes: For communicators; None if the profile did not measure them.
        fragmentation_bytes: For what the allocator holds without using it; None as above.
        asked_bytes: What the user asked to leave free besides.
    """

    device_type: Name
    context_bytes: Bytes | None = None
    communicator_bytes: Bytes | None = None
    fragmentation_bytes: Bytes | None = None
    asked_bytes: Bytes = 0

    @property
    def total_bytes(self) -> int:
        """All of it; what was not measured counts as nothing."""
        measured = (self.context_bytes, self.communicator_bytes, self.fragmentation_bytes)
        return sum(part or 0 for part in measured) + self.asked_bytes

    def __str__(self) -> str:
        parts = [
            f"{name} {value / 2**20:.0f} MiB"
            for name, value in (
                ("context", self.context_bytes),
                ("communicators", self.communicator_bytes),
                ("fragmentation", self.fragmentation_bytes),
                ("asked for", self.asked_bytes or None),
            )
            if value is not None
        ]
        return (
            f"{self.device_type}: {self.total_bytes / 2**20:.0f} MiB of a device are left free of "
            f"tensors ({', '.join(parts)})"
        )


def asked_bytes(reserves: Sequence[MemoryReserve]) -> int:
    """Bytes of each device that the user asked a plan to leave free; all types have the same."""
    return max((reserve.asked_bytes for reserve in reserves), default=0)
