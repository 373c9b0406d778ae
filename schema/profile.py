"""Profile: one model measured on one device type."""

from typing import Any, Literal

from .errors import ProblemError
from .estimate import Estimate
from .layer_trace import LayerTrace
from .optimizer import OptimizerState
from .records import (
    Bytes,
    Count,
    MeasuredSeconds,
    Name,
    Positive,
    PositiveBytes,
    PositiveMeasuredSeconds,
    PositiveRate,
    Ratio,
    record,
    register_keys,
)
from .step_costs import Links, MessageTime, PipelineCosts

SHORTEST_PASS_SECONDS = 1e-12  # shorter is a mistake, and its rate overflows


@record
class BatchPoint:
    """One virtual node of a batch size: forward + backward in the loop that trains.

    ``step_seconds`` is t_i(b) of VirtualFlow 5.1.2: what one more virtual node of this size adds
    to a step, without the optimizer update and without communication. ``load_seconds`` and
    ``virtual_node_seconds`` are parts of it: waiting for its samples, and what the runtime does
    for a virtual node of any size; None where the file, an older or a foreign one, does not tell
    them apart. ``step_seconds_error`` is half the width of its median's 95 % confidence interval,
    relative to it. ``peak_memory_bytes`` is the device's peak over a whole training step.
    """

    batch_size: Count
    step_seconds: PositiveMeasuredSeconds
    peak_memory_bytes: Bytes
    load_seconds: MeasuredSeconds | None = None
    virtual_node_seconds: MeasuredSeconds | None = None
    step_seconds_error: Ratio | None = None

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
        """The model's own forward + backward, without loading and the runtime's part."""
        return self.step_seconds - (self.load_seconds or 0.0) - (self.virtual_node_seconds or 0.0)


@record
class BusyHost:
    """The same device while ``num_devices`` of its host train at once.

    Memory bandwidth, host cores, PCIe and power are shared, so everything may take longer.
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
class LayerNode:
    """One layer: T_l, a_l and w_l of thesis 2.4.1, per microbatch of the stated size.

    Args:
        activation_bytes: What the layer makes and later layers need.
        weight_bytes: Parameters that no earlier layer holds, so that layers sum to the model.
        stashed_bytes: What autograd keeps from forward to backward, parameters and the layer's
            inputs apart; a layer's output counts here where any layer saves it.
        workspace_bytes: Most temporary memory of a pass beyond inputs, outputs and what is kept.
        shared_with: Earlier layers whose parameters this one uses too.
        shared_weight_bytes: The bytes of those parameters.
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


@record
class LayerGraph:
    """Layers and the tensors that flow between them, at one microbatch size.

    ``trace`` says how the layers were found; None, as in older files, is torch.fx.
    """

    microbatch_size: Count
    nodes: tuple[LayerNode, ...]
    edges: tuple[tuple[str, str], ...]
    trace: LayerTrace | None = None

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        if len(set(ids)) != len(ids):
            raise ProblemError("layer ids must be unique")
        known = set(ids)
        for source, target in self.edges:
            if source not in known or target not in known:
                raise ProblemError(f"edge {source} -> {target} names an unknown layer")


@record
class TensorLayers:
    """The layers as one device of a tensor-parallel group runs them, in one server.

    Times hold the group's own communication; weights and what is stashed are one device's share,
    ``activation_bytes`` what the whole group makes.
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
    """What synchronisation adds to a step whose last virtual node has ``batch_size`` samples."""

    batch_size: Count
    sync_seconds: MeasuredSeconds


@record
class Sync:
    """Gradient synchronisation, measured as VirtualFlow 5.1.2 does.

    ``sync_seconds`` is the distributed minus the single-device step time on ``num_devices``
    devices: at batch size 1, or the median over sizes where a whole loop was timed.
    ``by_batch_size`` tells it size by size, where measurements tell sizes apart: more of it hides
    behind a longer backward pass. Plans go by that then (``least_seconds``, ``exposed_seconds``).
    The optional ring model (``latency_seconds`` per ring message,
    ``bytes_per_second`` per ring link, fitted to ``messages``) predicts other device counts; see
    costs/comm.py. It is no link's rate: those are measured apart (``Links``).
    """

    num_devices: Count
    sync_seconds: MeasuredSeconds
    latency_seconds: MeasuredSeconds | None = None
    bytes_per_second: PositiveRate | None = None
    messages: tuple[MessageTime, ...] = ()
    by_batch_size: tuple[SyncPoint, ...] = ()

    def __post_init__(self) -> None:
        if self.num_devices < 2:
            raise ProblemError(f"num_devices must be >= 2 to synchronise, got {self.num_devices}")
        sizes = [point.batch_size for point in self.by_batch_size]
        if sizes != sorted(set(sizes)):
            raise ProblemError(f"by_batch_size must be sorted, each size once, got {sizes}")
        if (self.latency_seconds is None) != (self.bytes_per_second is None):
            raise ProblemError("latency_seconds and bytes_per_second come together or not at all")


@record
class Emulation:
    """The device type is emulated: real arithmetic, each pass stretched to a fixed time.

    ``speed`` is the stated fraction of the real device's speed. The times to hold are the
    profile's own ``batch_curve``.
    """

    speed: Positive
    base_device_type: Name = "cpu"

    def __post_init__(self) -> None:
        if self.speed > 1:
            raise ProblemError(f"speed must be <= 1 (a device cannot run faster), got {self.speed}")


@record
class Profile:
    """One model on one device type. Times are medians; their spread is in provenance.

    ``out_of_memory_batch_size`` is the smallest profiled size that did not fit, where one was
    found. ``weight_bytes`` is also the number of gradient bytes to synchronise. ``more_layers``
    are the layers of ``layers`` at further microbatch sizes, ``tensor_layers`` those at further
    tensor-parallel degrees. ``optimizer`` is what
    ``update_seconds`` and ``peak_memory_bytes`` were measured with; None where the file, an older
    or a foreign one, does not say.

    ``fixed_seconds`` is what a step costs beside its virtual nodes, the update and
    synchronisation: opening it, its first pass's cold caches, its sums, asking for the next
    batch. ``step_error`` is how far steps put together from these terms are from measured ones,
    relative. ``busy`` is the same with the host's devices at work; ``base_memory_bytes`` what a
    worker holds before there is a model, 0 where the peaks do not count it (on a GPU).
    ``update_workspace_bytes`` is what the optimizer needs for a while in an update, where the
    allocator does not give it the room that passes have left (on a CPU).
    ``group_workspace_bytes`` is what a worker holds besides while it exchanges with others: sums
    and messages under way, threads and their memory. The peaks of ``busy`` hold it.
    ``estimate`` says how the profile was computed where nobody measured it; its ``step_error`` is
    then that of the method.
    """

    schema: Literal["hetflow.profile/1"] = "hetflow.profile/1"
    model: Name
    device_type: Name
    device_memory_bytes: PositiveBytes
    weight_bytes: Bytes
    update_seconds: MeasuredSeconds
    batch_curve: tuple[BatchPoint, ...]
    layers: LayerGraph | None = None
    more_layers: tuple[LayerGraph, ...] = ()
    tensor_layers: tuple[TensorLayers, ...] = ()
    sync: Sync | None = None
    emulation: Emulation | None = None
    out_of_memory_batch_size: Count | None = None
    optimizer: OptimizerState | None = None
    fixed_seconds: MeasuredSeconds | None = None
    step_error: Ratio | None = None
    busy: BusyHost | None = None
    links: Links | None = None
    pipeline: PipelineCosts | None = None
    base_memory_bytes: Bytes | None = None
    update_workspace_bytes: Bytes | None = None
    group_workspace_bytes: Bytes | None = None
    estimate: Estimate | None = None
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_curve(self.batch_curve)
        self._check_layers()

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
        if self.tensor_layers and self.layers is None:
            raise ProblemError("tensor_layers adds to layers, which is missing")
        seen = set()
        for table in self.tensor_layers:
            key = table.tensor_parallel_size, table.layers.microbatch_size
            if self.layers is not None and [n.id for n in table.layers.nodes] != [
                n.id for n in self.layers.nodes
            ]:
                raise ProblemError(
                    f"tensor_layers at degree {key[0]} lists other layers than layers does"
                )
            if key in seen:
                raise ProblemError(
                    f"tensor_layers holds degree {key[0]} at microbatch {key[1]} twice"
                )
            seen.add(key)

    @property
    def layer_tables(self) -> tuple[LayerGraph, ...]:
        """The layers at every profiled microbatch size, the first one asked for in front."""
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


register_keys(
    BatchPoint, BusyHost, LayerNode, LayerGraph, TensorLayers, SyncPoint, Sync, Emulation, Profile
)  # fmt: skip
