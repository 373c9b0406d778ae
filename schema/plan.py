"""Plans: a solver's answer with its proof, and what a launcher needs to run it."""

from typing import Any, Literal

from .cluster import Cluster
from .device_memory import MemoryReserve
from .errors import ProblemError
from .estimate import Estimate
from .frames import Rows, Shown, fields_table, listed
from .optimizer import OptimizerState
from .records import (
    Count,
    Name,
    NonNegative,
    PerSecond,
    Positive,
    PositiveRate,
    PositiveSeconds,
    Ratio,
    Seconds,
    record,
    register_keys,
)
from .restrictions import Restrictions


@record
class RefutedSplits:
    """Splits that cannot do the batch in time: on so many devices, all of some of these types."""

    device_types: tuple[Name, ...]
    least_devices: Count
    most_devices: Count


@record
class SplitCertificate:
    """Why no split is faster than ``proof.lower_bound``, for a judge to replay.

    The sets of ``refuted`` hold every split on two or more devices between them. A split in one of
    them has a limit for its passes: the bound without what types and devices cost beside passes.
    Within it the devices do fewer samples than the batch, or cannot do exactly so many.
    """

    kind: Literal["refuted-splits"] = "refuted-splits"
    refuted: tuple[RefutedSplits, ...]


@record
class Proof:
    """How good a plan is, and how that is known.

    ``objective`` and ``lower_bound`` are in the objective's unit (seconds per step for splits);
    ``gap`` is (objective - lower_bound) / objective. Only a finished search is ``optimal``.
    ``tolerance`` is the relative accuracy of the measurements: plans within it of the best are
    considered equally good, and the simplest of them was taken, so the gap may be as wide. It is
    None if the accuracy is unknown, or if the plan with the least predicted time was requested.
    ``certificate`` shows a judge that ``lower_bound`` holds; without one it is only stated.
    """

    termination: Literal["optimal", "feasible"]
    objective: NonNegative
    lower_bound: NonNegative | None
    gap: NonNegative | None
    method: str
    tolerance: Ratio | None = None
    certificate: SplitCertificate | None = None


@record
class Prediction:
    """A plan's predicted step; the parts add up to ``step_seconds``.

    ``compute_seconds`` is the time of the slowest device's passes, ``load_seconds`` its wait for
    samples. ``virtual_node_seconds`` is the runtime's own work for its virtual nodes (in a
    pipeline, for its passes), and ``fixed_seconds`` that for the step. ``transfer_seconds`` is what
    messages between a pipeline's stages add. A part is None if the profile does not separate it; it
    is then included in ``compute_seconds``. ``step_seconds_low`` and ``step_seconds_high`` bound
    the step within the accuracy of the measurements; None if the accuracy is unknown.
    ``dollars_per_hour`` is of the devices in use; None unless the pool states every price.
    """

    step_seconds: Seconds
    samples_per_second: PerSecond
    compute_seconds: Seconds | None = None
    sync_seconds: Seconds | None = None
    update_seconds: Seconds | None = None
    load_seconds: Seconds | None = None
    virtual_node_seconds: Seconds | None = None
    fixed_seconds: Seconds | None = None
    transfer_seconds: Seconds | None = None
    step_seconds_low: Seconds | None = None
    step_seconds_high: Seconds | None = None
    dollars_per_hour: NonNegative | None = None
    dollars_per_million_samples: NonNegative | None = None


@record
class DeviceGroup:
    """Devices of one type that do the same work.

    Each device runs ``virtual_nodes`` (v_i) passes of ``virtual_node_batch_size`` (b_i / v_i)
    samples, one after another. ``pass_seconds`` is the whole t_i at that size. ``interpolated``
    means that it was interpolated between two measured sizes, ``measured_busy`` that other devices
    of the host trained during the measurement. ``exposed_seconds`` is the synchronisation time at
    that size beyond the least of all sizes; None if the profile has no times per size.
    """

    device_type: Name
    num_devices: Count
    device_batch_size: Count
    virtual_nodes: Count
    virtual_node_batch_size: Count
    pass_seconds: PositiveSeconds | None = None
    interpolated: bool = False
    measured_busy: bool = False
    exposed_seconds: Seconds | None = None

    def __post_init__(self) -> None:
        if self.virtual_nodes * self.virtual_node_batch_size != self.device_batch_size:
            raise ProblemError(
                f"device_batch_size must be virtual_nodes * virtual_node_batch_size = "
                f"{self.virtual_nodes * self.virtual_node_batch_size}, got {self.device_batch_size}"
            )


@record
class PassTime:
    """The time to which an emulated device stretches a forward + backward pass of a batch size."""

    batch_size: Count
    step_seconds: PositiveSeconds


@record
class EmulatedDevice:
    """An emulated device type of a plan, with the times to which its passes are stretched."""

    device_type: Name
    base_device_type: Name
    speed: Positive
    passes: tuple[PassTime, ...]


@record
class EstEstimate:
    """EasyScale's estimates for a plan (EasyScale 3.4, equations 1a-1d).

    ``capability`` is C_i, mini-batches per second of one device of each type;
    ``throughput`` and ``waste`` are in mini-batches per second.
    """

    max_p: Count
    num_ests: Count
    overload_factor: Positive
    waste: PerSecond
    throughput: PositiveRate
    capability: dict[str, PositiveRate]


@record
class Alternative:
    """Another configuration of a plan, with its estimates; listed by descending throughput."""

    groups: tuple[DeviceGroup, ...]
    est: EstEstimate


def plan_title(plan: Any) -> str:
    """Return a plan of any kind in one line: what trains where, and how long a step takes."""
    return (
        f"{plan.model}, batch {plan.global_batch_size} on {listed(plan.devices_by_type)}: "
        f"{plan.predicted.step_seconds:.4g} s a step, {plan.proof.termination}"
    )


@record
class SyncBound:
    """A type whose synchronisation could not be told from zero: the plan counts at most this."""

    device_type: Name
    at_most_seconds: Seconds

    def __str__(self) -> str:
        return (
            f"synchronisation of {self.device_type} could not be told from zero: plans count the "
            f"most that it can be, {self.at_most_seconds * 1e3:.3g} ms a step"
        )


@record
class SplitPlan(Shown):
    """A global batch split over devices (VirtualFlow 5.1).

    ``uniform_virtual_nodes`` is N if the request was for N equal virtual nodes. ``optimizer`` is
    the one whose state its memory counts; None if unknown. ``cluster`` is the pool that it was
    solved for, if this states more than the number of devices of each type. ``estimates`` are those
    of the types in use whose profiles were not measured. ``reserves`` is the memory that it leaves
    free of tensors on devices of the types in use; empty if there is none. ``sync_bounds`` are of
    the types in use whose synchronisation is counted by its bound. ``restrictions`` is what it was
    solved under, in every kind of plan; None if nothing restricts the proof.
    """

    schema: Literal["hetflow.plan/1"] = "hetflow.plan/1"
    kind: Literal["split"] = "split"
    model: Name
    global_batch_size: Count
    groups: tuple[DeviceGroup, ...]
    predicted: Prediction
    proof: Proof
    objective: Literal["step_seconds", "waste"] = "step_seconds"
    uniform_virtual_nodes: Count | None = None
    est: EstEstimate | None = None
    alternatives: tuple[Alternative, ...] = ()
    emulated: tuple[EmulatedDevice, ...] = ()
    optimizer: OptimizerState | None = None
    cluster: Cluster | None = None
    estimates: tuple[Estimate, ...] = ()
    reserves: tuple[MemoryReserve, ...] = ()
    sync_bounds: tuple[SyncBound, ...] = ()
    restrictions: Restrictions | None = None
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            raise ProblemError("groups must hold at least one device group")
        total = sum(group.num_devices * group.device_batch_size for group in self.groups)
        if total != self.global_batch_size:
            raise ProblemError(
                f"groups add up to {total} samples, not to global_batch_size "
                f"{self.global_batch_size}"
            )

    @property
    def title(self) -> str:
        """The model, its batch, the devices, and how long a step takes."""
        return plan_title(self)

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each group of devices."""
        return fields_table(self.groups, DeviceGroup)

    @property
    def devices_by_type(self) -> dict[str, int]:
        """Number of devices in use, by type."""
        used: dict[str, int] = {}
        for group in self.groups:
            used[group.device_type] = used.get(group.device_type, 0) + group.num_devices
        return used

    @property
    def num_devices(self) -> int:
        """Number of devices in use over all groups, which is the world size of a launch."""
        return sum(group.num_devices for group in self.groups)

    @property
    def num_virtual_nodes(self) -> int:
        """Number of virtual nodes over all devices."""
        return sum(group.num_devices * group.virtual_nodes for group in self.groups)


register_keys(
    RefutedSplits,
    SplitCertificate,
    Proof,
    Prediction,
    DeviceGroup,
    PassTime,
    EmulatedDevice,
    EstEstimate,
    Alternative,
    SyncBound,
    SplitPlan,
)
