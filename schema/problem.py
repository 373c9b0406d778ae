"""What every plan answers, and what a split's solvers see of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cluster import Cluster
from .errors import InfeasibleError, ProblemError
from .optimizer import OptimizerState
from .options import Activations, Shard, option
from .profile import BatchPoint, Profile, Sync, curves_of
from .records import Bytes, Count, Name, PositiveBytes, PositiveRate, Ratio, Seconds, record
from .spelling import did_you_mean


@dataclass(frozen=True, slots=True)
class Problem:
    """A model to train on a pool: all that plans of any kind are made from, and judged against.

    ``planning/*_problem.py`` make of it what the solvers of a kind of plan see.

    Attributes:
        profiles: Of one model, on the pool's device types and perhaps on others.
        pool: The devices.
        global_batch_size: Samples of a step, B.
        optimizer: The one that will train; None takes the profiles'.
        memory_reserve_bytes: Bytes of each device that must stay free, besides what a worker takes
            beside tensors.
        link_bytes_per_second: Bandwidth of links that the pool does not state; None takes the
            profiles' measurements.
    """

    profiles: Sequence[Profile]
    pool: Cluster
    global_batch_size: int
    optimizer: OptimizerState | None = None
    memory_reserve_bytes: int = 0
    link_bytes_per_second: float | None = None

    @property
    def used(self) -> list[Profile]:
        """The profile of each type of the pool, with the pool's memory.

        Raises:
            ProblemError: There is none of a type or several, or the profiles are of several models.
        """
        models = sorted({profile.model for profile in self.profiles})
        if not models:
            raise ProblemError("there are no profiles", hint="run `hetflow profile` first")
        if len(models) > 1:
            raise ProblemError(
                f"the profiles are of several models: {', '.join(models)}",
                hint=f"choose one, for example {option('model', models[0])}",
            )
        known: dict[str, Profile] = {}
        for profile in self.profiles:
            name = profile.device_type
            if name in known:
                raise ProblemError(
                    f"two profiles of {profile.model} on {name}; keep one of them",
                    hint="a card of the same name and other memory is profiled under a name of its "
                    f"own, such as {option('devices', f'{name}-32GB')}",
                )
            known[name] = profile
        for name in self.pool.num_devices:
            if name not in known:
                raise ProblemError(
                    f"no profile of device type {name!r}" + did_you_mean(name, known, before="; "),
                    hint=f"profiled types: {', '.join(sorted(known))}",
                )
        return [
            known[name]
            if (stated := self.pool.device_types[name].memory_bytes) is None
            else replace(known[name], device_memory_bytes=stated)
            for name in self.pool.num_devices
        ]


@record
class DeviceCosts:
    """Measured costs of a device in a split. ``batch_curve`` holds sizes in ascending order."""

    batch_curve: tuple[BatchPoint, ...]
    update_seconds: Seconds
    fixed_seconds: Seconds = 0.0
    interpolated_sizes: tuple[Count, ...] = ()


@record
class DeviceOption(DeviceCosts):
    """The devices of one type that a split may use.

    ``batch_curve`` holds only sizes that fit the memory. If a host has several devices, the costs
    were measured while other devices of the host trained too; ``alone`` then holds those of a
    device that is the only one of its host that trains. It is None if these are the same.
    ``link_bytes_per_second`` and ``link_latency_seconds`` are of the
    pool's slowest link, as far as it is known: the fitted ring is no faster. ``step_error`` is the
    relative error of steps computed from these terms; ``is_estimated`` says that nobody measured
    them.
    """

    device_type: Name
    num_devices: Count
    weight_bytes: Bytes
    sync: Sync | None = None
    link_bytes_per_second: PositiveRate | None = None
    link_latency_seconds: Seconds = 0.0
    alone: DeviceCosts | None = None
    step_error: Ratio | None = None
    is_estimated: bool = False

    def __post_init__(self) -> None:
        sizes = [point.batch_size for point in self.batch_curve]
        if sizes != sorted(set(sizes)):
            raise ProblemError(f"{self.device_type}: batch sizes must be distinct and ascending")

    def measured_with(self, num_devices: int) -> DeviceCosts:
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

    @property
    def num_devices(self) -> int:
        """Devices of all types."""
        return sum(option.num_devices for option in self.devices)

    def points(self, costs: DeviceCosts) -> list[BatchPoint]:
        """The points of a curve whose sizes the batch and its virtual nodes allow."""
        return self.allowed(costs.batch_curve)

    def allowed(self, curve: tuple[BatchPoint, ...]) -> list[BatchPoint]:
        """The points whose sizes the batch and its virtual nodes allow."""
        batch = self.global_batch_size
        only = self.virtual_nodes and batch // self.virtual_nodes
        return [p for p in curve if p.batch_size <= batch and only in (None, p.batch_size)]


@record
class ShardedDevices(DeviceOption):
    """Devices of one type that may share a model's states.

    ``batch_curve`` also holds sizes that do not fit with whole states: its peaks are those of a
    device that holds all of them. The other curves are the same with other ``Activations``.
    """

    memory_bytes: PositiveBytes
    recomputed_curve: tuple[BatchPoint, ...] = ()
    offloaded_curve: tuple[BatchPoint, ...] = ()

    @property
    def passes(self) -> list[tuple[Activations, BatchPoint]]:
        """All passes that are known: first those that keep all activations."""
        return [(how, point) for how, curve in curves_of(self).items() for point in curve]


@record
class ShardedProblem(SplitProblem):
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
        second_trained_bytes: Of the second largest layer, also of weights that are trained.
        edge_bytes: The largest unit: its first gather and last reduction hide behind nothing.
        num_units: Number of units.
        bytes_per_second: Of the pool's slowest link; None where it is not known.
        latency_seconds: Of one message.
    """

    devices: tuple[ShardedDevices, ...]
    optimizer: OptimizerState
    shards: tuple[Shard, ...]
    weight_bytes: PositiveBytes
    gathered_bytes: Bytes
    edge_bytes: Bytes
    num_units: Count
    bytes_per_second: PositiveRate | None = None
    latency_seconds: Seconds = 0.0
    frozen_bytes: Bytes = 0
    gathered_trained_bytes: Bytes | None = None
    second_trained_bytes: Bytes = 0

    def __post_init__(self) -> None:
        SplitProblem.__post_init__(self)
        if self.num_devices < 2:
            raise InfeasibleError("states are shared by two devices or more, and the pool has one")
