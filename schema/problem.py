"""Problems of the batch split solvers."""

from .choices import Shard
from .errors import InfeasibleError, ProblemError
from .optimizer import OptimizerState
from .profile import BatchPoint, Sync
from .records import Bytes, Count, Name, PositiveBytes, PositiveRate, Ratio, Seconds, record


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
        _check_virtual_nodes(self)

    @property
    def batch_sizes(self) -> list[int]:
        """Every batch size at which some type was profiled, alone or busy, ascending."""
        curves = [option.batch_curve for option in self.devices]
        curves += [option.alone.batch_curve for option in self.devices if option.alone is not None]
        return sorted({point.batch_size for curve in curves for point in curve})


@record
class ShardedDevices:
    """The devices of one type that may share a model's states.

    ``batch_curve`` also holds sizes that do not fit with whole states: its peaks are those of a
    device that holds all of them.
    """

    device_type: Name
    num_devices: Count
    memory_bytes: PositiveBytes
    batch_curve: tuple[BatchPoint, ...]
    update_seconds: Seconds
    fixed_seconds: Seconds = 0.0
    interpolated_sizes: tuple[Count, ...] = ()
    measured_busy: bool = False


@record
class ShardedProblem:
    """Split a batch by speed and a model's states by memory (Cephalo, Poplar).

    A device keeps a share of the states that its plan's ``shard`` names. Weights are gathered, and
    gradients reduced to their owners, in units: each repeated layer is one, and the rest is one.

    Args:
        weight_bytes: Of the whole model, trained or not.
        frozen_bytes: Of the weights that are not trained: they have neither gradients nor state.
        optimizer: Its state is counted in proportion to the weights.
        shards: What may be shared.
        gathered_bytes: The most weights that a device holds whole at a time, if it shares weights:
            what is no repeated layer, and two of the largest layers.
        gathered_trained_bytes: The same of weights that are trained, for gradients; None: as many.
        edge_bytes: The largest unit: its first gather and last reduction hide behind nothing.
        num_units: Number of units.
        bytes_per_second: Of the pool's slowest link; None where it is not known.
        latency_seconds: Of one message.
        virtual_nodes: N, if the batch is cut into N equal virtual nodes; None for unlike ones.
    """

    model: Name
    global_batch_size: Count
    devices: tuple[ShardedDevices, ...]
    optimizer: OptimizerState
    shards: tuple[Shard, ...]
    weight_bytes: PositiveBytes
    gathered_bytes: Bytes
    edge_bytes: Bytes
    num_units: Count
    bytes_per_second: PositiveRate | None = None
    latency_seconds: Seconds = 0.0
    virtual_nodes: Count | None = None
    frozen_bytes: Bytes = 0
    gathered_trained_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        if self.num_devices < 2:
            raise InfeasibleError("states are shared by two devices or more, and the pool has one")
        _check_virtual_nodes(self)

    @property
    def batch_sizes(self) -> list[int]:
        """Every batch size at which some type was profiled, ascending."""
        return sorted({point.batch_size for kind in self.devices for point in kind.batch_curve})

    @property
    def num_devices(self) -> int:
        """Devices of all types."""
        return sum(kind.num_devices for kind in self.devices)

    def points(self, kind: ShardedDevices) -> list[BatchPoint]:
        """The points of a type's curve that the batch and its virtual nodes allow."""
        batch = self.global_batch_size
        only = self.virtual_nodes and batch // self.virtual_nodes
        return [
            p for p in kind.batch_curve if p.batch_size <= batch and only in (None, p.batch_size)
        ]


def _check_virtual_nodes(problem: SplitProblem | ShardedProblem) -> None:
    """Refuse a number of virtual nodes that does not divide the batch."""
    if problem.virtual_nodes is not None and problem.global_batch_size % problem.virtual_nodes:
        raise ProblemError(
            f"{problem.virtual_nodes} virtual nodes do not divide a global batch of "
            f"{problem.global_batch_size}",
            hint="choose a number of virtual nodes that divides the batch",
        )
