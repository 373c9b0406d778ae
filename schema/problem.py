"""Problems of the batch split solvers."""

from .errors import ProblemError
from .optimizer import OptimizerState
from .profile import BatchPoint, Sync
from .records import Bytes, Count, Name, PositiveRate, Ratio, Seconds, record


@record
class AloneDevice:
    """Measured costs of a device that is the only one of its host that trains."""

    batch_curve: tuple[BatchPoint, ...]
    update_seconds: Seconds
    fixed_seconds: Seconds = 0.0
    interpolated_sizes: tuple[Count, ...] = ()


@record
class DeviceOption:
    """The devices of one type that a split may use.

    ``batch_curve`` holds only sizes that fit the memory. If a host has several devices,
    ``batch_curve``, ``update_seconds`` and ``fixed_seconds`` were measured while other devices of
    the host trained too; ``alone`` then holds the measurements of a device that trains alone. It is
    None if these are the same. ``link_bytes_per_second`` and ``link_latency_seconds`` are of the
    pool's slowest link, as far as it is known: the fitted ring is no faster. ``step_error`` is the
    relative error of steps computed from these terms.
    """

    device_type: Name
    num_devices: Count
    batch_curve: tuple[BatchPoint, ...]
    update_seconds: Seconds
    weight_bytes: Bytes
    sync: Sync | None = None
    link_bytes_per_second: PositiveRate | None = None
    link_latency_seconds: Seconds = 0.0
    interpolated_sizes: tuple[Count, ...] = ()
    fixed_seconds: Seconds = 0.0
    alone: AloneDevice | None = None
    step_error: Ratio | None = None

    def __post_init__(self) -> None:
        sizes = [point.batch_size for point in self.batch_curve]
        if sizes != sorted(set(sizes)):
            raise ProblemError(f"{self.device_type}: batch sizes must be distinct and ascending")

    def measured_with(self, num_devices: int) -> "DeviceOption | AloneDevice":
        """Select the measurements for a plan on ``num_devices`` devices in total."""
        return self.alone if num_devices == 1 and self.alone is not None else self


@record
class SplitProblem:
    """Split a global batch over unlike devices (VirtualFlow 5.1.2).

    With ``virtual_nodes`` None (the free regime), each used device takes one size of its curve and
    an integer number of virtual nodes. With an integer N (the uniform regime), there are N virtual
    nodes of ``global_batch_size / N`` samples each. ``optimizer`` is the one whose state was
    counted for the memory limit; None if unknown.
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

    @property
    def batch_sizes(self) -> list[int]:
        """Every batch size at which some type was profiled, alone or busy, ascending."""
        curves = [option.batch_curve for option in self.devices]
        curves += [option.alone.batch_curve for option in self.devices if option.alone is not None]
        return sorted({point.batch_size for curve in curves for point in curve})
