"""Profile: one model measured on one device type."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from .errors import ProblemError
from .frames import Rows, Shown, fields_table
from .layers import LayerTrace, PassMoment
from .optimizer import OptimizerState
from .options import Activations, Precision
from .records import (
    Bytes,
    Count,
    Fraction,
    MeasuredSeconds,
    Name,
    Positive,
    PositiveBytes,
    PositiveMeasuredSeconds,
    PositiveRate,
    Ratio,
    record,
)


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


@record
class Estimate:
    """How a profile, or a part of a plan, was estimated.

    Args:
        device_type: The device type that the estimate is for.
        spec: The row of the device table whose peak figures were used.
        source: The source of those figures.
        precision: The assumed precision of products of 32-bit matrices; None is torch's default
            (convolutions in TF32 if the device has it, everything else in float32).
        step_error: Relative error. Nine in ten estimates were within this fraction of the measured
            time, on devices that the efficiencies were not fitted to
            (benchmarks/device_estimates.py).
        ratio_error: The same of how many times as long as on another type a pass takes; None in
            files of earlier versions.
        carried_from: The type whose measured profile was scaled to this one; None if nothing was
            measured.
    """

    device_type: Name
    spec: Name
    source: str
    precision: Precision | None = None
    step_error: Ratio
    ratio_error: Ratio | None = None
    carried_from: Name | None = None

    def __str__(self) -> str:
        origin = "" if self.carried_from is None else f", carried from {self.carried_from}"
        return (
            f"{self.device_type} estimated, not measured (figures of {self.spec}{origin}; "
            f"9 in 10 held-out estimates were within {self.step_error:.0%})"
        )


ENDED_EARLY = ("a pass would exceed the time limit", "the time budget is spent")
"""Why measuring may end before a larger batch size is tried (``provenance.curve_stopped``)."""
SHORTEST_PASS_SECONDS = 1e-12  # a shorter time is a mistake, and its rate overflows


@record
class MessageTime:
    """The measured ``seconds`` of an all-reduce of ``num_bytes`` over all devices."""

    num_bytes: Count
    seconds: MeasuredSeconds


@record
class LinkPoint:
    """Seconds to send ``num_bytes`` from one device to another, back, and both at once."""

    num_bytes: Count
    there_seconds: MeasuredSeconds
    back_seconds: MeasuredSeconds
    both_seconds: MeasuredSeconds


@record
class Links:
    """The link between two devices, measured by sending messages from one to the other.

    ``latency_seconds`` and ``bytes_per_second`` are fitted to messages that go both ways at once,
    as they do in a pipeline that is full; ``points`` are the medians behind the fit.
    ``channel_bytes`` is the device memory that one channel of a pipeline takes at each end, for the
    buffers of its communicator; None on a CPU, or if it was not measured.
    """

    latency_seconds: MeasuredSeconds
    bytes_per_second: PositiveRate
    points: tuple[LinkPoint, ...]
    channel_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        sizes = [point.num_bytes for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ProblemError("points must be sorted by num_bytes, each size once")


@record
class TypeLink:
    """The link from the profile's device type to another type on the same host."""

    device_type: Name
    links: Links


@record
class PipelineCosts:
    """What a pipeline's step costs beyond its layers and the bytes on its links.

    Args:
        pass_seconds: Cost of one forward or one backward pass of a stage, beyond its layers.
        lone_pass_seconds: The same for a stage that holds all layers and so has no messages; what
            ``pass_seconds`` is more lies between timed passes. None: as much.
        message_seconds: Fixed cost of one message between two stages, which occupies the link.
        fixed_seconds: Cost of a whole step: starting it, its sums, the request for the next batch.
        step_error: Relative error of steps computed from these terms.
        reduce_latency_seconds: Latency of one message of the ring all-reduce between a stage's
            replicas, as far as workers wait for it at the end of a step.
        reduce_bytes_per_second: Rate of that ring's links. This and the latency are None if no
            stage with replicas was measured.
        fragmentation_bytes: The most free memory that the allocator of a worker still held at a
            step's end, beyond what a step takes for a while; None on a GPU, whose allocator tells
            it for each batch size, and where it was not measured.
    """

    pass_seconds: MeasuredSeconds
    message_seconds: MeasuredSeconds
    fixed_seconds: MeasuredSeconds
    step_error: Ratio | None = None
    reduce_latency_seconds: MeasuredSeconds | None = None
    reduce_bytes_per_second: PositiveRate | None = None
    lone_pass_seconds: MeasuredSeconds | None = None
    fragmentation_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        if (self.lone_pass_seconds or 0.0) > self.pass_seconds:
            raise ProblemError(
                f"lone_pass_seconds is {self.lone_pass_seconds}, more than pass_seconds"
            )
        if (self.reduce_latency_seconds is None) != (self.reduce_bytes_per_second is None):
            raise ProblemError(
                "reduce_latency_seconds and reduce_bytes_per_second come together or not at all"
            )


@record
class GradientSum:
    """Gradients that are summed over the devices while a pass goes on.

    ``num_sums`` collectives carry ``num_bytes``; when they may begin, the backward pass has
    ``seconds_left`` to go.
    """

    num_bytes: Bytes
    num_sums: Count = 1
    seconds_left: MeasuredSeconds


@record
class BatchPoint:
    """One virtual node of a batch size: its forward + backward pass in the training loop.

    ``step_seconds`` is t_i(b) of VirtualFlow 5.1.2: the time that one more virtual node of this
    size adds to a step, without optimizer update and communication. Two parts of it are
    ``load_seconds``, the wait for its samples, and ``virtual_node_seconds``, the runtime's own work
    per virtual node; None if the file (older, or of another tool) does not separate them.
    ``step_seconds_error`` is half the width of the median's 95 % confidence interval, relative to
    the median. ``peak_memory_bytes`` is the device's peak over a whole training step.
    ``fragmentation_bytes`` is what the allocator held of the device at its own peak beyond that;
    None if it was not measured (on a CPU, whose peak is that of the whole process).

    What the parts of a step take and give back, as far as known: ``pass_bytes`` beside gradients
    that are there, ``buffered_pass_bytes`` in the first pass of hetflow's step, whose gradients
    wait before they are written to where they are summed, and ``update_bytes``. A step's peak holds
    the largest of these. ``moments`` are the times of a pass at which devices that share states may
    hold most. Older files have ``first_pass_bytes`` in their place: of a pass where gradients are
    not there, with those that come. ``pinned_bytes`` of the host's memory hold activations that are
    offloaded; None where none are. ``sums`` are the gradients' sums that begin in a step's last
    pass, in their order, where that is known.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30)
        >>> point.batch_size / point.step_seconds
        80.0
    """

    batch_size: Count
    step_seconds: PositiveMeasuredSeconds
    peak_memory_bytes: Bytes
    load_seconds: MeasuredSeconds | None = None
    virtual_node_seconds: MeasuredSeconds | None = None
    step_seconds_error: Ratio | None = None
    fragmentation_bytes: Bytes | None = None
    pass_bytes: Bytes | None = None
    first_pass_bytes: Bytes | None = None
    buffered_pass_bytes: Bytes | None = None
    update_bytes: Bytes | None = None
    pinned_bytes: Bytes | None = None
    moments: tuple[PassMoment, ...] = ()
    sums: tuple[GradientSum, ...] = ()

    def __post_init__(self) -> None:
        if self.step_seconds < SHORTEST_PASS_SECONDS:
            raise ProblemError(
                f"step_seconds: must be at least {SHORTEST_PASS_SECONDS:g}, got {self.step_seconds}"
            )
        if self.pass_seconds < 0:
            raise ProblemError(
                "load_seconds and virtual_node_seconds are parts of step_seconds, and more than it"
            )

    @property
    def pass_seconds(self) -> float:
        """Seconds of the model's own forward + backward pass, without loading and runtime work."""
        return self.step_seconds - (self.load_seconds or 0.0) - (self.virtual_node_seconds or 0.0)


CURVES: dict[Activations, str] = {
    "kept": "batch_curve",
    "recomputed": "recomputed_curve",
    "offloaded": "offloaded_curve",
}
"""Where a record of a device's passes has them, by what becomes of repeated layers' activations."""


def curves_of(held: Any) -> dict[Activations, tuple[BatchPoint, ...]]:
    """All curves of such a record, a ``Profile`` say."""
    return {how: getattr(held, name) for how, name in CURVES.items()}


def changed_curves(
    held: Any, change: Callable[[Activations, tuple[BatchPoint, ...]], tuple[BatchPoint, ...]]
) -> dict[str, Any]:
    """The fields of all curves, each as ``change`` makes it, for ``dataclasses.replace``."""
    return {CURVES[how]: change(how, curve) for how, curve in curves_of(held).items()}


@record
class BusyHost:
    """Measurements of a device while ``num_devices`` devices of its host train at once.

    They share memory bandwidth, host cores, PCIe and power, so everything may take longer.
    """

    num_devices: Count
    batch_curve: tuple[BatchPoint, ...]
    update_seconds: MeasuredSeconds
    fixed_seconds: MeasuredSeconds = 0.0

    def __post_init__(self) -> None:
        if self.num_devices < 2:
            raise ProblemError(f"num_devices must be >= 2, got {self.num_devices}")
        _check_curve(self.batch_curve)


@record
class LayerCore:
    """What selective recomputation changes in a layer, for a microbatch of the stated size.

    Args:
        forward_seconds: The forward pass of the attention cores that begin in the layer, which the
            backward pass repeats.
        made_bytes: What such a repetition makes again, until the core's backward pass has ended.
        stashed_bytes: What is kept of the layer, in place of its ``stashed_bytes``.
    """

    forward_seconds: MeasuredSeconds
    made_bytes: Bytes
    stashed_bytes: Bytes


@record
class LayerNode:
    """One layer: T_l, a_l and w_l of thesis 2.4.1, per microbatch of the stated size.

    Args:
        activation_bytes: Outputs of the layer that later layers need.
        weight_bytes: Parameters that no earlier layer holds; summed over layers, the model's.
        frozen_weight_bytes: The same of parameters that are not trained, which no other number
            counts; None if there are none, or if an older file does not tell.
        stashed_bytes: What autograd keeps for the backward pass, without parameters and the
            layer's inputs. The layer's output is included if any layer saves it.
        workspace_bytes: Most temporary memory of a pass, beyond inputs, outputs and what is kept.
        shared_with: Earlier layers whose parameters this layer uses too.
        shared_weight_bytes: Bytes of those parameters.
        core: What changes if attention cores are recomputed; None if nothing does.
        input_gradient_share: The half of the backward pass that computes the inputs' gradients
            alone, as zero-bubble schedules run it, over ``backward_seconds``; None if not known.
        repeated_share: What the other half, of the weights' gradients, computes a second time.
        halved_bytes: Gradients that wait between the two halves; None if not known.
        saved_later: Of ``stashed_bytes``, outputs that this layer does not save, by the first layer
            that does. A stage that ends before that one does not keep them.
        padding_bytes: What the allocator adds to ``weight_bytes``, as it rounds each weight up.
        buffer_bytes: Buffers, each rounded up.
        statistics_bytes: Of these, buffers that passes change, so that each microbatch has its own.
    """

    id: Name
    op: str
    forward_seconds: MeasuredSeconds
    backward_seconds: MeasuredSeconds
    activation_bytes: Bytes
    weight_bytes: Bytes
    stashed_bytes: Bytes | None = None
    workspace_bytes: Bytes | None = None
    shared_with: tuple[Name, ...] = ()
    shared_weight_bytes: Bytes | None = None
    core: LayerCore | None = None
    frozen_weight_bytes: Bytes | None = None
    input_gradient_share: Fraction | None = None
    repeated_share: Ratio | None = None
    halved_bytes: Bytes | None = None
    saved_later: dict[Name, Bytes] | None = None
    padding_bytes: Bytes | None = None
    buffer_bytes: Bytes | None = None
    statistics_bytes: Bytes | None = None


@record
class LayerGraph:
    """Layers and the tensors that flow between them, at one microbatch size.

    ``trace`` is how the layers were found; None, as in older files, is torch.fx. ``sample_bytes``
    are those of a microbatch as the loader gives it; None if not known.
    """

    microbatch_size: Count
    nodes: tuple[LayerNode, ...]
    edges: tuple[tuple[str, str], ...]
    trace: LayerTrace | None = None
    sample_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        if len(set(ids)) != len(ids):
            raise ProblemError("layer ids must be unique")
        known = set(ids)
        for source, target in self.edges:
            if source not in known or target not in known:
                raise ProblemError(f"edge {source} -> {target} names an unknown layer")
        for node in self.nodes:
            later = node.saved_later or {}
            if not later.keys() <= known - {node.id}:
                raise ProblemError(f"saved_later of {node.id} names an unknown layer, or itself")
            if sum(later.values()) > (node.stashed_bytes or 0):
                raise ProblemError(f"saved_later of {node.id} is more than its stashed_bytes")


@record
class TensorLayers:
    """The layers as one device of a tensor-parallel group runs them, within one server.

    Times include the group's communication. Weights and stashed activations are those of one
    device; ``activation_bytes`` is the output of the whole group.
    """

    tensor_parallel_size: Count
    layers: LayerGraph

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 2:
            raise ProblemError(
                f"tensor_parallel_size must be >= 2, got {self.tensor_parallel_size}; degree 1 is "
                "layers itself"
            )


@record
class SyncPoint:
    """Seconds that synchronisation adds to a step whose last virtual node has a batch size.

    ``at_most_seconds`` as in ``Sync``.
    """

    batch_size: Count
    sync_seconds: MeasuredSeconds | None = None
    at_most_seconds: MeasuredSeconds | None = None

    def __post_init__(self) -> None:
        _check_bound(self)

    @property
    def counted_seconds(self) -> float:
        """What plans count: the seconds, or their bound where they are unknown."""
        return _counted(self)


def _check_bound(sync: "SyncPoint | Sync") -> None:
    if (sync.sync_seconds is None) == (sync.at_most_seconds is None):
        raise ProblemError(
            "give either sync_seconds, or at_most_seconds where it could not be told from zero"
        )


def _counted(sync: "SyncPoint | Sync") -> float:
    known = sync.at_most_seconds if sync.sync_seconds is None else sync.sync_seconds
    assert known is not None  # one of them is given: _check_bound
    return known


@record
class Sync:
    """Gradient synchronisation, measured as VirtualFlow 5.1.2 does.

    ``sync_seconds`` is the distributed minus the single-device step time on ``num_devices``
    devices: at batch size 1, or the median over sizes if a whole training loop was timed. It is
    None where the measurement could not tell it from zero; ``at_most_seconds`` is then the upper
    end of the 95 % interval, and plans count that.
    ``by_batch_size`` has the times of several sizes if the measurements can separate them; a longer
    backward pass hides more of the synchronisation. Plans then use these times. The optional ring
    model (``latency_seconds`` per ring message, ``bytes_per_second`` per ring link, fitted to
    ``messages``) predicts other numbers of devices; see planning/costs/comm.py. Its rate is not
    that of a link, which is measured separately (``Links``).
    """

    num_devices: Count
    sync_seconds: MeasuredSeconds | None = None
    at_most_seconds: MeasuredSeconds | None = None
    latency_seconds: MeasuredSeconds | None = None
    bytes_per_second: PositiveRate | None = None
    messages: tuple[MessageTime, ...] = ()
    by_batch_size: tuple[SyncPoint, ...] = ()

    def __post_init__(self) -> None:
        if self.num_devices < 2:
            raise ProblemError(f"num_devices must be >= 2 to synchronise, got {self.num_devices}")
        _check_bound(self)
        sizes = [point.batch_size for point in self.by_batch_size]
        if sizes != sorted(set(sizes)):
            raise ProblemError(f"by_batch_size must be sorted, each size once, got {sizes}")
        if (self.latency_seconds is None) != (self.bytes_per_second is None):
            raise ProblemError("latency_seconds and bytes_per_second come together or not at all")

    @property
    def counted_seconds(self) -> float:
        """What plans count: the seconds, or their bound where they are unknown."""
        return _counted(self)

    @property
    def bound_seconds(self) -> float | None:
        """The largest bound that plans count; None where all that they count was measured."""
        counted = self.by_batch_size or (self,)
        bounds = [entry.at_most_seconds for entry in counted if entry.at_most_seconds is not None]
        return max(bounds, default=None)


@record
class Emulation:
    """How a device type is emulated: real arithmetic, with each pass stretched to a fixed time.

    ``speed`` is the fraction of the real device's speed. The times to which passes are stretched
    are those of the profile's ``batch_curve``.
    """

    speed: Positive
    base_device_type: Name = "cpu"

    def __post_init__(self) -> None:
        if self.speed > 1:
            raise ProblemError(f"speed must be <= 1 (a device cannot run faster), got {self.speed}")


@record
class Profile(Shown):
    """The measurements of one model on one device type.

    Times are medians; their spread is in ``provenance``. ``step_error`` is the relative error of
    steps computed from these terms. ``fixed_seconds`` is the cost of a step besides virtual nodes,
    update and synchronisation: starting it, cold caches in its first pass, its sums, and the
    request for the next batch. ``busy`` has the measurements made while the host's other devices
    trained too.

    ``recomputed_curve`` is ``batch_curve`` with repeated layers recomputed in backward passes,
    ``offloaded_curve`` with their activations on the host meanwhile; empty if not asked for.

    ``weight_bytes`` is also the number of gradient bytes to synchronise. ``frozen_weight_bytes``
    are those that are not trained (None: none, or not known). ``more_layers`` are the layers at
    further microbatch sizes, ``tensor_layers`` those at further tensor-parallel degrees, and
    ``sequence_layers`` the same with sequence parallelism.
    ``optimizer`` is the one that ``update_seconds`` and ``peak_memory_bytes`` were measured with;
    None if the file (older, or of another tool) does not state it. ``out_of_memory_batch_size`` is
    the smallest profiled size that did not fit; None if all fitted.

    ``base_memory_bytes`` is what a worker holds before the model exists; 0 if peak memory does not
    count it (on a GPU). ``update_workspace_bytes`` is the temporary memory of an optimizer update,
    if the allocator does not reuse memory freed by the passes for it (on a CPU).
    ``group_workspace_bytes`` is what a worker holds in addition while it communicates with others:
    partial sums, messages in transit, and threads. The peaks in ``busy`` include it.
    ``beside_tensors`` is device memory that no peak counts; None where peaks count the whole
    process (on a CPU), or if it was not measured.

    ``links`` is the link between two devices of the type, ``links_to`` those to devices of other
    types on the same host.

    ``blocks`` are the modules that are gathered together where devices share states: those that
    were listed, or the repeated layers; None if there are none, or if they are not known.

    ``host_memory_bytes`` is the free memory of the host that had the device, in which activations
    may wait that are offloaded; None if not known.

    ``reference_seconds`` is a fixed product of matrices, which tells how fast the device was.

    ``estimate`` is how the profile was computed if it was not measured; its ``step_error`` is then
    that of the method.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30)
        >>> profile = hetflow.Profile(
        ...     model="m", device_type="V100", device_memory_bytes=16 << 30,
        ...     weight_bytes=4, update_seconds=0.0, batch_curve=(point,),
        ... )
        >>> profile.title
        'm on V100, batches 8 to 8'
    """

    schema: Literal["hetflow.profile/1"] = "hetflow.profile/1"
    model: Name
    device_type: Name
    device_memory_bytes: PositiveBytes
    weight_bytes: Bytes
    update_seconds: MeasuredSeconds
    batch_curve: tuple[BatchPoint, ...]
    recomputed_curve: tuple[BatchPoint, ...] = ()
    offloaded_curve: tuple[BatchPoint, ...] = ()
    layers: LayerGraph | None = None
    more_layers: tuple[LayerGraph, ...] = ()
    tensor_layers: tuple[TensorLayers, ...] = ()
    sequence_layers: tuple[TensorLayers, ...] = ()
    sync: Sync | None = None
    emulation: Emulation | None = None
    out_of_memory_batch_size: Count | None = None
    optimizer: OptimizerState | None = None
    fixed_seconds: MeasuredSeconds | None = None
    step_error: Ratio | None = None
    busy: BusyHost | None = None
    links: Links | None = None
    links_to: tuple[TypeLink, ...] = ()
    pipeline: PipelineCosts | None = None
    base_memory_bytes: Bytes | None = None
    update_workspace_bytes: Bytes | None = None
    group_workspace_bytes: Bytes | None = None
    beside_tensors: BesideTensors | None = None
    estimate: Estimate | None = None
    frozen_weight_bytes: Bytes | None = None
    reference_seconds: MeasuredSeconds | None = None
    host_memory_bytes: PositiveBytes | None = None
    blocks: tuple[Name, ...] | None = None
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for how, curve in curves_of(self).items():
            if curve or how == "kept":
                _check_curve(curve)
        self._check_layers()
        others = [link.device_type for link in self.links_to]
        if len(set(others)) != len(others) or self.device_type in others:
            raise ProblemError("links_to holds other device types than the profile's, each once")

    @property
    def title(self) -> str:
        """The model, the device type, and the sizes that were measured."""
        sizes = [point.batch_size for point in self.batch_curve]
        layers = "" if self.layers is None else f", {len(self.layers.nodes)} layers"
        return f"{self.model} on {self.device_type}, batches {sizes[0]} to {sizes[-1]}{layers}"

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each batch size."""
        return fields_table(self.batch_curve, BatchPoint, but=("moments",))

    def _check_layers(self) -> None:
        tables = self.layer_tables
        if self.more_layers and self.layers is None:
            raise ProblemError("more_layers adds to layers, which is missing")
        for table in self.more_layers:
            if [node.id for node in table.nodes] != [node.id for node in tables[0].nodes]:
                raise ProblemError(
                    f"more_layers at {table.microbatch_size} lists other layers than layers does"
                )
        if len({table.microbatch_size for table in tables}) != len(tables):
            raise ProblemError("layers and more_layers hold a microbatch size twice")
        self._check_tensor_layers()

    def _check_tensor_layers(self) -> None:
        both = (("tensor_layers", self.tensor_layers), ("sequence_layers", self.sequence_layers))
        for name, tables in both:
            if tables and self.layers is None:
                raise ProblemError(f"{name} adds to layers, which is missing")
            seen = set()
            for table in tables:
                key = table.tensor_parallel_size, table.layers.microbatch_size
                if self.layers is not None and [n.id for n in table.layers.nodes] != [
                    n.id for n in self.layers.nodes
                ]:
                    raise ProblemError(
                        f"{name} at degree {key[0]} lists other layers than layers does"
                    )
                if key in seen:
                    raise ProblemError(f"{name} holds degree {key[0]} at microbatch {key[1]} twice")
                seen.add(key)

    @property
    def only_batch_size(self) -> int | None:
        """The one batch size that was measured, where measuring ended before it tried a second."""
        # None if there are several sizes, or if the user stated this one, or if a second one was
        # too large for the memory.
        stopped = (self.provenance or {}).get("curve_stopped")
        if len(self.batch_curve) > 1 or stopped not in ENDED_EARLY:
            return None
        return self.batch_curve[0].batch_size

    @property
    def layer_tables(self) -> tuple[LayerGraph, ...]:
        """The layers at every profiled microbatch size, ``layers`` first."""
        return () if self.layers is None else (self.layers, *self.more_layers)


def _check_curve(batch_curve: tuple[BatchPoint, ...]) -> None:
    sizes = [point.batch_size for point in batch_curve]
    if not sizes:
        raise ProblemError("batch_curve must hold at least one batch size")
    for before, after in zip(sizes, sizes[1:], strict=False):
        if before == after:
            raise ProblemError(f"batch_curve: duplicate batch_size {after}")
        if before > after:
            raise ProblemError(
                f"batch_curve must be sorted by batch_size; {after} follows {before}"
            )
