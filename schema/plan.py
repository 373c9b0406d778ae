"""Plans: what a solver answers, with its proof; and what a launcher needs to run it."""

from typing import Any, Literal

from .cluster import Cluster
from .errors import ProblemError
from .estimate import Estimate
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


@record
class Proof:
    """How good a plan is, and how that is known.

    ``objective`` and ``lower_bound`` are in the objective's unit (seconds per step for splits);
    ``gap`` is (objective - lower_bound) / objective. Only a finished search says ``optimal``.
    ``tolerance`` is how far apart, relative to the best, plans may be that the measurements cannot
    tell from it: of those the simplest was taken, so the gap may be as wide. None where the spread
    of the measurements is unknown, or the fastest on paper was asked for.
    """

    termination: Literal["optimal", "feasible"]
    objective: NonNegative
    lower_bound: NonNegative | None
    gap: NonNegative | None
    method: str
    tolerance: Ratio | None = None


@record
class Prediction:
    """What a plan is expected to reach; the parts add up to ``step_seconds``.

    ``compute_seconds`` is the passes of the slowest device, ``load_seconds`` its waiting for
    samples, ``virtual_node_seconds`` what the runtime does for its virtual nodes (a pipeline's
    passes) and ``fixed_seconds`` for the step, ``transfer_seconds`` what a pipeline's messages
    between stages add; None where the profile does not tell them apart (they are in
    ``compute_seconds`` then). ``step_seconds_low`` and ``step_seconds_high`` bound what the
    measurements allow, None where their spread is unknown.
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


@record
class DeviceGroup:
    """Devices of one type that do the same work.

    Each runs ``virtual_nodes`` (v_i) passes of ``virtual_node_batch_size`` (b_i / v_i) samples,
    one after another. ``pass_seconds`` is t_i at that size, all of it; ``interpolated`` says that
    it was not measured but lies between two measured sizes, ``measured_busy`` that it was measured
    while other devices of the host trained too. ``exposed_seconds`` is what synchronisation adds at
    that size beyond the least of any size, None where the profile does not tell sizes apart.
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
    """How long an emulated device holds one forward + backward pass of a batch size."""

    batch_size: Count
    step_seconds: PositiveSeconds


@record
class EmulatedDevice:
    """An emulated device type of a plan: what the runtime needs to stretch its passes."""

    device_type: Name
    base_device_type: Name
    speed: Positive
    passes: tuple[PassTime, ...]


@record
class EstEstimate:
    """EasyScale's view of a plan (3.4, equations 1a-1d).

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
    """Another configuration from the plan database, best estimated throughput first."""

    groups: tuple[DeviceGroup, ...]
    est: EstEstimate


@record
class SplitPlan:
    """A global batch split over devices (VirtualFlow 5.1).

    ``uniform_virtual_nodes`` is N where the plan was asked for N equal virtual nodes;
    ``optimizer`` is the one whose state its memory counts, None where nobody knows. ``cluster`` is
    the pool that it was solved for, where that says more than a number of devices of each type.
    ``estimates`` are of the types in use whose profiles were computed, not measured.
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
    def num_devices(self) -> int:
        """Devices in use over all groups: the world size of a launch."""
        return sum(group.num_devices for group in self.groups)

    @property
    def num_virtual_nodes(self) -> int:
        """Virtual nodes over all devices."""
        return sum(group.num_devices * group.virtual_nodes for group in self.groups)


register_keys(
    Proof, Prediction, DeviceGroup, PassTime, EmulatedDevice, EstEstimate, Alternative, SplitPlan
)
