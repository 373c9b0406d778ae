"""Plans: a solver's answer with its proof, and what a launcher needs to run it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from .cluster import Cluster
from .errors import ProblemError
from .frames import Rows, Shown, fields_table, listed
from .layers import LayerTrace
from .optimizer import OptimizerState
from .options import Activations, Shard, StageCost, option
from .parallel import Recompute
from .pipeline import Solved, WorkerCount, check_microbatches
from .profile import Estimate, MemoryReserve
from .records import (
    Bytes,
    Count,
    Index,
    Name,
    NonNegative,
    PerSecond,
    Positive,
    PositiveRate,
    PositiveSeconds,
    Ratio,
    Seconds,
    record,
)
from .schedule import DEFAULT_SCHEDULE, ScheduleTraits, traits

Known = Literal["replayed", "recomputed", "stated"]
"""How a judge knows a plan's bound. ``replayed``: the plan's certificate was replayed, and shows
it; ``recomputed``: there is none, and the judge found it by itself; ``stated``: neither."""
MAX_REPLICAS = 1 << 16
"""Of one stage: a schedule lists every pass of every replica."""


@record
class Restrictions:
    """What the user asked of a plan, so that faster plans may exist without it.

    A plan states its schedule, objective and equal virtual nodes elsewhere. None and an empty dict
    restrict nothing.

    Args:
        devices: Device type -> devices of the pool, if the plan leaves some of them idle and does
            not state the pool as ``cluster``.
        microbatch_size: Samples of a microbatch.
        num_stages: Exact number of stages.
        num_model_chunks: Stages on each device.
        replication: False: no stage has replicas.
        recompute: False: no stage recomputes activations.
        shard: What devices were to share of the states.
        tensor_parallel: False: no devices share the layers of a stage.
    """

    devices: dict[Name, Count] | None = None
    microbatch_size: Count | None = None
    num_stages: Count | None = None
    num_model_chunks: Count | None = None
    replication: bool | None = None
    recompute: bool | None = None
    shard: Shard | None = None
    tensor_parallel: bool | None = None

    def __str__(self) -> str:
        parts = [
            (self.num_stages, f"{self.num_stages} stages"),
            (self.num_model_chunks, f"{self.num_model_chunks} stages on a device"),
            (self.microbatch_size, f"microbatches of {self.microbatch_size}"),
            (self.replication is False, "no replicas"),
            (self.recompute is False, "no recomputation"),
            (self.shard, f"shared states ({self.shard})"),
            (self.tensor_parallel is False, "no tensor parallelism"),
        ]
        return ", ".join(text for said, text in parts if said)


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
class RefutedShares:
    """Plans that share ``shard`` and take the bound or longer; ``rounds`` as in their passes.

    Each device takes some samples and has room for some bytes of weights. ``bytes_per_sample`` is a
    price of samples: at it no devices together are worth the batch and all weights. None: there is
    no such price, and a judge takes the sums of samples.

    The record is of plans whose devices compute for less than ``below_seconds`` in a round (None:
    all), and not less than the record before it.
    """

    shard: Shard
    rounds: Count | None = None
    bytes_per_sample: float | None = None
    below_seconds: Seconds | None = None


@record
class SharesCertificate:
    """Why no plan that shares states is faster than ``proof.lower_bound``, by kinds of plans."""

    kind: Literal["refuted-shares"] = "refuted-shares"
    refuted: tuple[RefutedShares, ...]


@record
class PricedPlans:
    """Parallel plans by the times of their stages, and what a device of each type is priced at.

    ``least_stage_seconds`` < slowest stage <= ``most_stage_seconds``, and no stage's update and
    all-reduce take longer than ``most_exchange_seconds``. ``device_prices`` [types of the pool] are
    seconds for each device of a replica. With these, covering the layers by stages takes at least
    the bound, as the judge counts it. ``shard`` is what replicas of a stage share.
    """

    microbatch_size: Count
    num_replicas: Count
    least_stage_seconds: Seconds
    most_stage_seconds: Seconds
    most_exchange_seconds: Seconds
    device_prices: tuple[Seconds, ...]
    shard: Shard | None = None


@record
class ParallelCertificate:
    """Why no plan of three dimensions is faster than ``proof.lower_bound``.

    The nodes that a search left closed or open. They say how to divide the work and hold no number
    that a judge believes: any prices show something true. ``shards`` is what plans were free to
    share; empty: what the plan does.
    """

    kind: Literal["priced-stages"] = "priced-stages"
    priced: tuple[PricedPlans, ...]
    shards: tuple[Shard | None, ...] = ()


@record
class Proof:
    """How good a plan is, and how that is known.

    ``objective`` and ``lower_bound`` are in the objective's unit (seconds per step for splits);
    ``gap`` is (objective - lower_bound) / objective. Only a finished search is ``optimal``.
    ``tolerance`` is the relative accuracy of the measurements: plans within it of the best are
    considered equally good, and the simplest of them was taken, so the gap may be as wide. It is
    None if the accuracy is unknown, or if the plan with the least predicted time was requested.
    ``certificate`` shows a judge that ``lower_bound`` holds, and ``bound`` is how the judge of
    ``hetflow solve`` knew it; None: none was asked.
    ``space`` is a sentence that describes the plans that were searched; None: all of the problem's.
    """

    termination: Literal["optimal", "feasible"]
    objective: NonNegative
    lower_bound: NonNegative | None
    gap: NonNegative | None
    method: str
    tolerance: Ratio | None = None
    certificate: SplitCertificate | SharesCertificate | ParallelCertificate | None = None
    space: str | None = None
    bound: Known | None = None

    @property
    def status(self) -> Literal["optimal", "unproved", "feasible"]:
        """``termination``, but only what a judge has seen to hold is ``optimal``."""
        is_shown = self.bound in ("replayed", "recomputed")
        return "unproved" if self.termination == "optimal" and not is_shown else self.termination


@record
class Prediction:
    """A plan's predicted step; the parts add up to ``step_seconds``.

    ``compute_seconds`` is the time of the slowest device's passes, ``load_seconds`` its wait for
    samples. ``virtual_node_seconds`` is the runtime's own work for its virtual nodes (in a
    pipeline, for its passes), and ``fixed_seconds`` that for the step. ``transfer_seconds`` is what
    messages between a pipeline's stages add. A part is None if the profile does not separate it; it
    is then included in ``compute_seconds``. ``bubble_fraction`` is the time to fill and drain a
    pipeline over that of its slowest stage's passes. ``step_seconds_low`` and
    ``step_seconds_high`` bound the step within the accuracy of the measurements; None if the
    accuracy is unknown.
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
    bubble_fraction: NonNegative | None = None
    step_seconds_low: Seconds | None = None
    step_seconds_high: Seconds | None = None
    dollars_per_hour: NonNegative | None = None
    dollars_per_million_samples: NonNegative | None = None

    def at(self, dollars_per_hour: float | None) -> "Prediction":
        """Add what the devices cost per hour, and so per million samples; None adds nothing."""
        rate = self.samples_per_second
        if dollars_per_hour is None:
            return self
        each = dollars_per_million_samples(dollars_per_hour, rate) if rate > 0 else None
        return replace(self, dollars_per_hour=dollars_per_hour, dollars_per_million_samples=each)


def dollars_per_million_samples(dollars_per_hour: float, samples_per_second: float) -> float:
    """Return the price of a million samples of a training on devices of a price per hour."""
    return dollars_per_hour / 3600 / samples_per_second * 1e6


@record
class ReplicaGroup:
    """Equal replicas of a stage: ``num_replicas`` groups of ``tensor_parallel_size`` devices.

    Each replica runs ``virtual_nodes`` (v_i) passes of ``virtual_node_batch_size`` (b_i / v_i)
    samples, one after another. In pipelines these are microbatches, of which a replica may have one
    less, and the last one may be smaller. Together they do ``samples`` of the global batch.

    Devices: ``first_device`` is an index among the pool's devices of the type, in the order of the
    topology; ``devices`` lists them all if they are not consecutive. None leaves the choice to the
    launch. ``memory_bytes`` is what each device holds. In a split it is the peak of a pass, with
    what a worker takes beside tensors and what was to stay free. In a pipeline it is the worker's
    predicted peak, if the profile states what a worker holds before the model exists. Stages on
    the same device each state what all of them take.

    Measured for whole models: ``pass_seconds`` is the whole t_i at that size. ``interpolated``
    means that it was interpolated between two measured sizes, ``measured_busy`` that other devices
    of the host trained during the measurement. ``exposed_seconds`` is the synchronisation time at
    that size beyond the least of all sizes; None if the profile has no times per size.

    Where replicas share states, ``state_share_bytes`` are the most bytes of weights of which each
    keeps the states; in a stage of a pipeline, which deals layers whole, the share that these are
    to come near. None: equal shares. ``activations`` are those of a split's repeated layers; None
    keeps them. ``pinned_bytes`` of its host's memory hold each device's, where they are offloaded.
    """

    device_type: Name
    tensor_parallel_size: Count = 1
    num_replicas: Count
    samples: Count
    virtual_nodes: Count
    virtual_node_batch_size: Count
    first_device: Index | None = None
    devices: tuple[Index, ...] = ()
    memory_bytes: Bytes | None = None
    pass_seconds: PositiveSeconds | None = None
    interpolated: bool = False
    measured_busy: bool = False
    exposed_seconds: Seconds | None = None
    state_share_bytes: Bytes | None = None
    activations: Activations | None = None
    pinned_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        most = self.num_replicas * self.device_batch_size
        if self.samples > most:
            raise ProblemError(
                f"{self.samples} samples on {self.num_replicas} replicas of {self.device_type}, "
                f"which take at most {most} in {self.virtual_nodes} microbatches of "
                f"{self.virtual_node_batch_size}"
            )
        if not self.devices:
            return
        if sorted(set(self.devices)) != list(self.devices) or len(self.devices) != (
            self.num_devices
        ):
            raise ProblemError(
                f"devices must be {self.num_devices} different ones, ascending, one a replica; "
                f"got {list(self.devices)}"
            )
        if self.devices[0] != self.first_device:
            raise ProblemError(
                f"first_device is {self.first_device}, devices begin with {self.devices[0]}"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices of all replicas in the group."""
        return self.tensor_parallel_size * self.num_replicas

    @property
    def device_batch_size(self) -> int:
        """b_i, the most samples of a step on one replica."""
        return self.virtual_nodes * self.virtual_node_batch_size

    @property
    def held(self) -> tuple[int, ...]:
        """Indices of the devices, ascending; as if from 0 if the launch chooses them."""
        first = self.first_device or 0
        return self.devices or tuple(range(first, first + self.num_devices))


def device_group(
    *,
    device_type: str,
    num_devices: int,
    virtual_nodes: int,
    virtual_node_batch_size: int,
    **marks: Any,
) -> ReplicaGroup:
    """Return devices that each train the whole model on an equal share of the batch."""
    return ReplicaGroup(
        device_type=device_type,
        num_replicas=num_devices,
        samples=num_devices * virtual_nodes * virtual_node_batch_size,
        virtual_nodes=virtual_nodes,
        virtual_node_batch_size=virtual_node_batch_size,
        **marks,
    )


@record
class NestedBlock:
    """A stage's place at one level of a nested plan: its block, and the block's replicas."""

    index: Index
    num_replicas: Count


@record
class Stage:
    """A stage of the model and the devices that run it; one entry per kind of replica.

    ``layers`` is empty if the stage is the whole model and its layers are not known. ``shard`` is
    what the replicas share of the states: the optimizer's, also gradients, or all, weights too;
    None: each has all. ``copied_ratio`` is then the memory of a further share, a neighbour's copy,
    per byte of weights; None in older files.
    ``num_in_flight`` and ``weight_versions`` are per replica. ``nesting`` is ordered from the
    highest level down, and is empty in flat plans.

    Times: ``seconds_per_input`` is the stage's part of the objective. ``compute_seconds`` is the
    forward + backward time of a microbatch on the slowest replica, with recomputation if planned;
    ``forward_seconds`` is its forward part, ``weight_gradient_seconds`` that of the backward pass's
    second half where a schedule splits it (None: half of it). ``gather_seconds`` is what gathers
    and reductions of shared weights add to both. ``output_seconds`` is the time to send a
    microbatch's output and to receive its gradient, ``transfer_seconds`` that of all
    messages that the stage waits for. These include fixed costs: ``pass_seconds`` for each forward
    and each backward pass, and ``message_seconds`` for each message; None if not counted.
    ``reduce_seconds`` is one all-reduce of the stage's gradients, including
    ``reduce_latency_seconds`` per message of its ring (None if all-reduces were not measured).
    ``tied_seconds`` is the all-reduce of weights tied to other stages. ``update_seconds`` is one
    update of its weights; if the optimizer is sharded, with the exchange of what each replica has
    updated.
    """

    layers: tuple[Name, ...] = ()
    recompute: Recompute = "none"
    shard: Shard | None = None
    copied_ratio: Ratio | None = None
    replicas: tuple[ReplicaGroup, ...]
    num_in_flight: Count | None = None
    weight_versions: Count | None = None
    seconds_per_input: Seconds | None = None
    compute_seconds: Seconds | None = None
    forward_seconds: Seconds | None = None
    weight_gradient_seconds: Seconds | None = None
    gather_seconds: Seconds | None = None
    output_seconds: Seconds | None = None
    transfer_seconds: Seconds | None = None
    reduce_seconds: Seconds | None = None
    update_seconds: Seconds | None = None
    tied_seconds: Seconds | None = None
    pass_seconds: Seconds | None = None
    message_seconds: Seconds | None = None
    reduce_latency_seconds: Seconds | None = None
    nesting: tuple[NestedBlock, ...] = ()

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ProblemError("a stage must have at least one group of replicas")

    @property
    def num_replicas(self) -> int:
        """Number of replicas, of all types together."""
        return sum(group.num_replicas for group in self.replicas)

    @property
    def samples(self) -> int:
        """Samples of the batch that all replicas take together."""
        return sum(group.samples for group in self.replicas)

    @property
    def device_type(self) -> str:
        """The device type of the first replicas; of all, where the planner mixes none."""
        return self.replicas[0].device_type

    @property
    def first_device(self) -> int:
        """Index of the first replicas' first device."""
        return self.held[0]

    @property
    def held(self) -> tuple[int, ...]:
        """Indices of the devices of the first replicas, ascending."""
        return self.replicas[0].held

    @property
    def memory_bytes(self) -> int | None:
        """Bytes on the fullest device; None if they are not known of all replicas."""
        known = [group.memory_bytes for group in self.replicas if group.memory_bytes is not None]
        return max(known) if len(known) == len(self.replicas) else None

    @property
    def shape(self) -> list[tuple[str, int, int, int]]:
        """What stages on the same devices have alike: the replicas and their samples."""
        return [
            (g.device_type, g.tensor_parallel_size, g.num_replicas, g.samples)
            for g in self.replicas
        ]


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


class _Staged:
    """What follows from stages: of a plan, and of another that it is compared with."""

    __slots__ = ()
    stages: tuple[Stage, ...]
    num_model_chunks: int

    @property
    def groups(self) -> tuple[ReplicaGroup, ...]:
        """The replicas of the first stage: in a split, all devices."""
        return self.stages[0].replicas

    @property
    def num_positions(self) -> int:
        """Positions of the pipeline, p: devices of one replica that pass microbatches on."""
        return len(self.stages) // self.num_model_chunks

    @property
    def num_rounds(self) -> int:
        """The most microbatches that a replica runs in a step."""
        return max(group.virtual_nodes for stage in self.stages for group in stage.replicas)

    @property
    def devices_by_type(self) -> dict[str, int]:
        """Device type -> number of devices in use."""
        used: dict[str, int] = {}
        held = set()
        for number, stage in enumerate(self.stages):
            for group in stage.replicas:
                # Both directions of a pipeline, and all chunks of a device, are on the same ones.
                where = (group.device_type, group.first_device)
                is_further = number >= self.num_positions
                if is_further if group.first_device is None else where in held:
                    continue
                held.add(where)
                used[group.device_type] = used.get(group.device_type, 0) + group.num_devices
        return used

    @property
    def num_devices(self) -> int:
        """Number of devices in use over all stages, which is the world size of a launch."""
        return sum(self.devices_by_type.values())


@record
class Alternative(_Staged):
    """Another plan of the same question: slower, but better in something.

    EasyScale's are listed by descending throughput, with its estimates. Others are points of the
    Pareto table: no other is better in time, memory and devices at once.
    """

    stages: tuple[Stage, ...]
    microbatch_size: Count
    num_microbatches: Count
    num_model_chunks: Count = 1
    predicted: Prediction | None = None
    est: EstEstimate | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            raise ProblemError("an alternative must hold at least one stage")


@record
class Gain:
    """Seconds per step of the best plan found with ``num_devices`` more devices of a type."""

    device_type: Name
    num_devices: Count
    step_seconds: Seconds


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


_OF_CHAINS = (
    "num_in_flight", "weight_versions", "seconds_per_input", "compute_seconds", "output_seconds",
    "memory_bytes",
)  # fmt: skip


@record
class Plan(Shown, _Staged):
    """A model cut into stages, each on replicas of groups of devices.

    A global batch split over devices is a plan of one stage, which holds the whole model
    (VirtualFlow 5.1); a pipeline is one whose groups are single devices (PipeDream, thesis 2.4);
    else devices of a group share layers (thesis chapter 4). ``kind`` says which it is.

    ``microbatch_size`` are the samples of a pass, of the largest one where replicas' differ, and
    ``num_microbatches`` all passes of a step through the model; the last may be smaller. With
    ``num_model_chunks`` v above 1, devices hold v stages: if interleaved, stages s, s + p, ... of
    v p stages (4.2.2). Each states the same replicas; what their memory says is in
    ``ReplicaGroup``.

    ``optimizer`` is the one whose state the memory counts; None if unknown. ``cluster`` is the pool
    that the plan was solved for, if this states more than the number of devices of each type.
    ``reference_seconds`` says how fast each type in use was when it was profiled, by a fixed
    product of matrices; a launch measures it again. ``estimates`` are those of the types in use
    whose profiles were not measured. ``reserves`` is the memory that it leaves free of tensors on
    devices of the types in use; empty if there is none. ``restrictions`` is what it was solved
    under; None if nothing restricts the proof.
    ``trace`` is how the layers were found, so that a launch finds the same ones; None is torch.fx.
    ``blocks`` are the modules that are gathered together where devices share states, as the memory
    counts them; None where all weights count as whole, or are.
    ``assumptions`` are sentences on values that were not measured directly.
    ``link_bytes_per_second`` is the bandwidth given for links that the pool does not state.

    Objective: seconds per step; ``bottleneck`` is the seconds per microbatch of the slowest stage
    or boundary, ``waste`` EasyScale's. Facts of some methods only:

    - Splits: ``uniform_virtual_nodes`` is N if the request was for N equal virtual nodes.
      ``sync_bounds`` are of the types in use whose synchronisation is counted by its bound.
    - Pipelines: ``stage_cost``, ``solved`` and ``workers`` are the problem's. ``noam`` is
      NUM_OPT_ACTIVE_MINIBATCHES per input-stage replica (thesis 2.4.2).
    - Tensor-parallel groups: with ``sequence_parallel`` the devices of a group share the tokens
      between the layers that they share. With ``shard_optimizer`` each replica of a stage keeps and
      updates a share of the optimizer's state; with ``shard_gradients`` only that one gets the
      sums of these gradients. ``with_more_devices`` is what these would bring.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30)
        >>> v100 = hetflow.Profile(
        ...     model="m", device_type="V100", device_memory_bytes=16 << 30,
        ...     weight_bytes=4, update_seconds=0.0, batch_curve=(point,),
        ... )
        >>> plan = hetflow.solve([v100], "V100", batch_size=16)
        >>> plan.kind, plan.predicted.step_seconds
        ('split', 0.2)
    """

    schema: Literal["hetflow.plan/2"] = "hetflow.plan/2"
    model: Name
    global_batch_size: Count
    microbatch_size: Count
    num_microbatches: Count
    schedule: Name = DEFAULT_SCHEDULE
    num_model_chunks: Count = 1
    stages: tuple[Stage, ...]
    predicted: Prediction
    proof: Proof
    objective: Literal["step_seconds", "bottleneck", "waste"] = "step_seconds"
    uniform_virtual_nodes: Count | None = None
    est: EstEstimate | None = None
    emulated: tuple[EmulatedDevice, ...] = ()
    sync_bounds: tuple[SyncBound, ...] = ()
    noam: Count | None = None
    stage_cost: StageCost | None = None
    solved: Solved | None = None
    workers: WorkerCount | None = None
    sequence_parallel: bool | None = None
    shard_optimizer: bool | None = None
    shard_gradients: bool | None = None
    link_bytes_per_second: NonNegative | None = None
    alternatives: tuple[Alternative, ...] = ()
    with_more_devices: tuple[Gain, ...] = ()
    optimizer: OptimizerState | None = None
    cluster: Cluster | None = None
    assumptions: tuple[str, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    reference_seconds: dict[Name, Seconds] | None = None
    reserves: tuple[MemoryReserve, ...] = ()
    trace: LayerTrace | None = None
    restrictions: Restrictions | None = None
    blocks: tuple[Name, ...] | None = None
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            raise ProblemError("a plan must hold at least one stage")
        if not all(stage.layers for stage in self.stages) and len(self.stages) > 1:
            raise ProblemError("each of several stages must hold at least one layer")
        if len(set(self.layers)) != len(self.layers):
            twice = next(name for name in self.layers if self.layers.count(name) > 1)
            raise ProblemError(f"layer {twice!r} is in two stages")
        for number, stage in enumerate(self.stages):
            self._check_stage(number, stage)
        self._check_passes()
        if self.layers:
            traits(self.schedule)  # raises for an unknown schedule
        if self.stage_cost is not None:
            check_microbatches(self.num_microbatches)
        if self.num_model_chunks > 1:
            self._check_chunks()

    def _check_stage(self, number: int, stage: Stage) -> None:
        if stage.samples != self.global_batch_size:
            raise ProblemError(
                f"stages[{number}]: its replicas take {stage.samples} samples, not the global "
                f"batch of {self.global_batch_size}"
            )
        if self.stage_cost is not None and stage.num_replicas > MAX_REPLICAS:
            raise ProblemError(f"a stage has {stage.num_replicas} replicas; at most {MAX_REPLICAS}")
        missing = [name for name in _OF_CHAINS if getattr(stage, name) is None]
        if self.stage_cost is not None and missing:
            raise ProblemError(f"stages[{number}]: a pipeline's states its {', '.join(missing)}")

    def _check_passes(self) -> None:
        largest = max(g.virtual_node_batch_size for stage in self.stages for g in stage.replicas)
        number = self.num_virtual_nodes
        if self.layers:
            number = -(-self.global_batch_size // self.microbatch_size)
        if (self.microbatch_size, self.num_microbatches) != (largest, number):
            raise ProblemError(
                f"{self.num_microbatches} microbatches of {self.microbatch_size} are not the "
                f"global batch of {self.global_batch_size}, which is {number} of up to {largest}"
            )

    def _check_chunks(self) -> None:
        if len(self.stages) % self.num_model_chunks:
            raise ProblemError(
                f"{len(self.stages)} stages do not divide into {self.num_model_chunks} chunks a "
                "device"
            )
        if self.traits.placement != "round-robin":
            return
        for number, stage in enumerate(self.stages):
            place = number % self.num_positions
            if stage.shape != self.stages[place].shape:
                raise ProblemError(
                    f"stages[{number}] must have the replicas of stages[{place}], whose devices "
                    "hold both"
                )

    @property
    def kind(self) -> Literal["split", "pipeline", "parallel"]:
        """What the structure makes of it, and so which of the planners' costs it is judged by."""
        # One stage over a whole model is a split. A plan of single devices whose stages were
        # priced as a chain's (``stage_cost``) is a pipeline.
        if not self.layers:
            return "split"
        return "parallel" if self.stage_cost is None else "pipeline"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of all stages in order; none of a split."""
        return tuple(name for stage in self.stages for name in stage.layers)

    @property
    def shard(self) -> Shard | None:
        """What the replicas of the first stage share of its states."""
        return self.stages[0].shard

    @property
    def shared_states(self) -> Shard | None:
        """What the replicas of each stage share, in whichever of the fields it is stated."""
        if self.shard is not None:
            return self.shard
        if self.shard_gradients:
            return "gradients"
        return "optimizer" if self.shard_optimizer else None

    @property
    def traits(self) -> ScheduleTraits:
        """What the schedule does: whether it flushes, keeps old weights, and so on."""
        return traits(self.schedule)

    @property
    def title(self) -> str:
        """The model, its batch, the devices, and how long a step takes."""
        return (
            f"{self.model}, batch {self.global_batch_size} on {listed(self.devices_by_type)}: "
            f"{self.predicted.step_seconds:.4g} s a step, {self.proof.status}"
        )

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each stage's replicas of one kind.

        Columns that no row fills are left out.
        """
        stage_columns, stages = fields_table(self.stages, Stage, but=["replicas"])
        columns, _ = fields_table((), ReplicaGroup)
        rows = [
            {"stage": number, **stage, **replicas}
            for number, stage in enumerate(stages)
            for replicas in fields_table(self.stages[number].replicas, ReplicaGroup)[1]
        ]
        names = ["stage", *stage_columns, *columns]
        return [name for name in names if any(row[name] not in (None, ()) for row in rows)], rows

    @property
    def recomputes(self) -> bool:
        """Whether a stage recomputes all activations."""
        return any(stage.recompute == "full" for stage in self.stages)

    @property
    def num_virtual_nodes(self) -> int:
        """Number of passes over all replicas of the first stage; in a split, of virtual nodes."""
        return sum(group.num_replicas * group.virtual_nodes for group in self.groups)

    @property
    def position_replicas(self) -> list[int]:
        """[positions] replicas of each position, which holds ``num_model_chunks`` stages."""
        return [stage.num_replicas for stage in self.stages[: self.num_positions]]

    @property
    def config(self) -> str:
        """Replicas of each stage in the thesis's notation: ``2-1-1``."""
        return "-".join(str(stage.num_replicas) for stage in self.stages)


def split_plan(
    *,
    groups: Sequence[ReplicaGroup],
    shard: Shard | None = None,
    copied_ratio: float | None = None,
    **facts: Any,
) -> Plan:
    """Return a plan of one stage, the whole model, whose replicas are these.

    Raises:
        ProblemError: They do not add up to the batch.
    """
    stage = Stage(replicas=tuple(groups), shard=shard, copied_ratio=copied_ratio)
    return Plan(stages=(stage,), **passes_of(groups), **facts)


def passes_of(groups: Sequence[ReplicaGroup]) -> dict[str, Any]:
    """Return the size of a split's largest pass, and the number of all passes, by field."""
    return {
        "microbatch_size": max((group.virtual_node_batch_size for group in groups), default=1),
        "num_microbatches": sum(g.num_replicas * g.virtual_nodes for g in groups) or 1,
    }


def devices_for(plan: Plan) -> dict[str, int]:
    """Return device type -> devices of the pool that a plan was solved for."""
    if plan.cluster is not None:
        return plan.cluster.num_devices
    stated = None if plan.restrictions is None else plan.restrictions.devices
    return dict(stated or plan.devices_by_type)


def claim_of(plan: Plan, pool: Cluster | None = None, *, is_replayed: bool = True) -> str:
    """Return what is proved, and among which plans: ``optimal among plans with 2 stages``.

    Only what a judge has seen to hold is called optimal; else the text begins with ``unproved``.

    Args:
        plan: A plan.
        pool: The pool that the plan is judged for; None is the one that it was solved for.
        is_replayed: Whether the judge had the profiles, by which it replays a certificate.
    """
    known, among, proof = devices_for(plan), str(plan.restrictions or ""), plan.proof
    if proof.status == "unproved" and proof.certificate is not None and not is_replayed:
        return f"optimal if its certificate holds, which {option('profiles')} replays"
    text = str(proof.termination)
    if among:
        text += f" among plans with {among}"
    more = {} if pool is None else pool.num_devices
    if any(number > known.get(name, 0) for name, number in more.items()):
        own = {name: known[name] for name in more if name in known}
        text += f"{',' if among else ' among plans'} on {listed(own)} of {listed(more)}"
    if proof.status == "unproved":
        text = f"unproved: {text!r} is what the solver says, " + (
            "without a certificate to replay"
            if proof.certificate is None
            else "and its certificate does not show it"
        )
    elif proof.status == "optimal" and proof.bound == "recomputed":
        text += "; the judge found the bound by itself"
    return text
