"""Problems: what a solver is asked, typed. One class a solver."""

from .errors import ProblemError
from .optimizer import OptimizerState
from .profile import BatchPoint, Sync
from .records import Bytes, Count, Name, PositiveRate, Seconds, record


@record
class DeviceOption:
    """The devices of one type that a split may use.

    ``batch_curve`` holds only the sizes that fit: the builder has applied the memory limit.
    ``link_bytes_per_second`` caps the fitted link model (a cluster's slow network).
    """

    device_type: Name
    num_devices: Count
    batch_curve: tuple[BatchPoint, ...]
    update_seconds: Seconds
    weight_bytes: Bytes
    sync: Sync | None = None
    link_bytes_per_second: PositiveRate | None = None
    interpolated_sizes: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        sizes = [point.batch_size for point in self.batch_curve]
        if sizes != sorted(set(sizes)):
            raise ProblemError(f"{self.device_type}: batch sizes must be distinct and ascending")


@record
class SplitProblem:
    """Split a global batch over unlike devices (VirtualFlow 5.1.2).

    ``virtual_nodes`` None is the free regime: each used device takes one size of its curve and
    a whole number of virtual nodes. An integer N is the uniform regime: N virtual nodes of
    ``global_batch_size / N`` samples each. ``optimizer`` is the one whose state was counted where
    the memory limit was applied; None where nobody knows.
    """

    model: Name
    global_batch_size: Count
    devices: tuple[DeviceOption, ...]
    virtual_nodes: Count | None = None
    optimizer: OptimizerState | None = None

    def __post_init__(self) -> None:
        names = [option.device_type for option in self.devices]
        if not names:
            raise ProblemError("a split needs at least one device")
        if len(set(names)) != len(names):
            raise ProblemError("each device type may appear once")
        if self.virtual_nodes is not None and self.global_batch_size % self.virtual_nodes:
            raise ProblemError(
                f"{self.virtual_nodes} virtual nodes do not divide a global batch of "
                f"{self.global_batch_size}",
                hint="choose a number of virtual nodes that divides the batch",
            )
