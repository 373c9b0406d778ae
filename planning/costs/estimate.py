"""Estimate a profile from operator counts and a device's peak figures, without the device.

Each pass, the update, each layer, peak memory, links and synchronisation are estimated. What only a
run can show (waiting for samples, the runtime's own costs) stays unknown.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.layers import (
    CoreCounts,
    LayerCounts,
    LayerTable,
    ModelCounts,
    Operator,
    PassCounts,
)
from ...schema.options import Precision, option
from ...schema.profile import (
    CURVES,
    BatchPoint,
    Estimate,
    GradientSum,
    LayerCore,
    LayerGraph,
    LayerNode,
    Links,
    Profile,
    Sync,
    TensorLayers,
)
from .comm import Wire, collective_seconds
from .device_table import DeviceSpec
from .efficiency import ESTIMATED_ERROR, FITTED, RATIO_ERROR
from .roofline import Efficiency, seconds_of
from .tensor_layers import ShardedLayer, degrees_of, sequence_layers, sharded_layers

RESERVE_BYTES = 2**30
"""Taken for the context, libraries' workspaces, communication buffers and fragmentation."""
LINK_LATENCY_SECONDS = 1e-5  # of one message; Calculon's systems take 10 to 20 us
SYNC_DEVICES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """The time of operators on a device.

    Args:
        spec: Peak figures.
        efficiency: What share of them training reaches.
        precision: How products of 32-bit tensors are computed; None as torch does by default.
    """

    spec: DeviceSpec
    efficiency: Efficiency = FITTED
    precision: Precision | None = None

    def seconds(self, operators: Sequence[Operator]) -> float:
        """Of operators one after another."""
        return seconds_of(operators, self.spec, self.efficiency, self.precision)

    def pass_seconds(self, counts: PassCounts) -> float:
        """Of a forward and a backward pass; copies to the host and back are beside them."""
        copied = counts.offloaded_bytes / (self.spec.host_bytes_per_second * self.efficiency.link)
        return sum(max(self.seconds(one), copied) for one in (counts.forward, counts.backward))

    @property
    def link_bytes_per_second(self) -> float:
        """What a link of the device is expected to carry one way."""
        return self.spec.link_bytes_per_second * self.efficiency.link


def estimated_profile(counts: ModelCounts, estimator: Estimator, *, model: str) -> Profile:
    """Estimate a profile.

    Raises:
        InfeasibleError: Not even the smallest batch fits, and there are no layers for a pipeline.
    """
    spec = estimator.spec
    points = [_point(counts, found, estimator) for found in counts.passes]
    fitting = [point for point in points if point.peak_memory_bytes <= spec.memory_bytes]
    states = (2 + counts.optimizer.state_bytes_per_weight_byte) * counts.weight_bytes
    states += counts.frozen_weight_bytes or 0

    def shared_of(curve: list[BatchPoint]) -> tuple[BatchPoint, ...]:
        return tuple(p for p in curve if p.peak_memory_bytes - states <= spec.memory_bytes)

    others: dict[str, Any] = {
        CURVES[how]: shared_of([_point(counts, found, estimator) for found in passes])
        for how, passes in counts.others.items()
    }
    shared = shared_of(points)
    if not shared and not counts.tables:
        raise InfeasibleError(
            f"{model} does not fit a {spec.name}: a batch of {points[0].batch_size} needs "
            f"{points[0].peak_memory_bytes} of its {spec.memory_bytes} bytes",
            hint=f"try a smaller batch ({option('batch_sizes')}), or {option('layers')} "
            "for a pipeline",
        )
    tables = tuple(_graph(table, estimator) for table in counts.tables)
    degrees = degrees_of(counts.tensor_divisor)
    error = ESTIMATED_ERROR.of(counts.passes[0].forward)
    return Profile(
        model=model,
        device_type=spec.device_type,
        device_memory_bytes=spec.memory_bytes,
        weight_bytes=counts.weight_bytes,
        frozen_weight_bytes=counts.frozen_weight_bytes,
        blocks=counts.blocks,
        update_seconds=estimator.seconds(counts.update),
        batch_curve=shared or tuple(points[:1]),  # with less of the states they may fit
        **others,
        layers=tables[0] if tables else None,
        more_layers=tables[1:],
        tensor_layers=tuple(
            TensorLayers(
                tensor_parallel_size=t,
                layers=_tensor_graph(table, estimator, t, sharded_layers(table, t)),
            )
            for t in degrees
            for table in counts.tables
        ),
        sequence_layers=tuple(
            TensorLayers(tensor_parallel_size=t, layers=_tensor_graph(table, estimator, t, shares))
            for t in degrees
            for table in counts.tables
            if (shares := sequence_layers(table, t)) is not None
        ),
        sync=_sync(counts.weight_bytes, estimator),
        links=_links(estimator),
        out_of_memory_batch_size=next(
            (point.batch_size for point in points if point not in fitting), None
        ),
        optimizer=counts.optimizer,
        step_error=error,
        base_memory_bytes=RESERVE_BYTES,
        estimate=Estimate(
            device_type=spec.device_type,
            spec=spec.name,
            source=spec.source,
            precision=estimator.precision,
            step_error=error,
            ratio_error=RATIO_ERROR.of(counts.passes[0].forward),
        ),
        provenance={
            "estimated": "computed from operator counts and a data sheet; nothing was measured",
            "spec": spec.name,
            "source": spec.source,
            "torch": counts.torch,
            "num_parameters": counts.num_parameters,
            "reserve_bytes": RESERVE_BYTES,
            "sync": "a ring over the device's link; a step's last pass hides what it can of it",
            **_how_shared(counts),
        },
    )


def _how_shared(counts: ModelCounts) -> dict[str, str]:
    """Where there are layers: how those of tensor-parallel degrees were found, or why none."""
    if not counts.tables:
        return {}
    if counts.no_tensor_reason is not None:
        return {"tensor_layers": f"none: {counts.no_tensor_reason}"}
    how = "whole layers' counts split as Megatron-LM does, all-reduces over the device's link"
    return {"tensor_layers": f"{how}; degrees divide {counts.tensor_divisor} heads"}


def _point(counts: ModelCounts, found: PassCounts, estimator: Estimator) -> BatchPoint:
    """A pass, and the most of a step's memory: in the pass or in the update."""
    standing = counts.standing_bytes + found.batch_bytes + RESERVE_BYTES
    return BatchPoint(
        batch_size=found.batch_size,
        step_seconds=estimator.pass_seconds(found),
        peak_memory_bytes=standing + max(found.peak_bytes, counts.update_workspace_bytes),
        pass_bytes=found.peak_bytes,
        update_bytes=counts.update_workspace_bytes,
        pinned_bytes=found.pinned_bytes,
        moments=found.moments,
        sums=tuple(
            GradientSum(
                num_bytes=one.num_bytes,
                num_sums=one.num_sums,
                seconds_left=estimator.seconds(one.after),
            )
            for one in found.sums
        ),
    )


def _graph(table: LayerTable, estimator: Estimator) -> LayerGraph:
    """Layers, forward and backward apart scaled so that they sum to the pass with its loss."""
    there, back = _scales(table, estimator)
    return _layer_graph(
        table,
        (
            _halved(
                _node(
                    layer,
                    there * estimator.seconds(layer.forward),
                    back * estimator.seconds(layer.backward),
                    _core(layer.core, there, estimator),
                ),
                layer,
                estimator,
                back,
            )
            for layer in table.layers
        ),
    )


def _halved(node: LayerNode, layer: LayerCounts, estimator: Estimator, scale: float) -> LayerNode:
    """A layer as one device runs it whole, with the halves of its backward pass if counted."""
    # What the model's pass has beyond its layers' (``scale``) is the loss's, and sums of gradients
    # from several layers: both are in the first half.
    alone = estimator.seconds(layer.backward)
    node = replace(
        node,
        saved_later=layer.saved_later,
        padding_bytes=layer.padding_bytes,
        buffer_bytes=layer.buffer_bytes,
        statistics_bytes=layer.statistics_bytes,
    )
    if layer.backward_halves is None:
        return node
    if not alone:
        return replace(node, input_gradient_share=0.0)
    first, second = map(estimator.seconds, layer.backward_halves)
    repeated = max(0.0, min(first, alone) + second - alone)
    of_weights = (second - repeated) / (scale * alone)
    return replace(
        node,
        input_gradient_share=min(1.0, max(0.0, 1.0 - of_weights)),
        repeated_share=repeated / (scale * alone),
    )


def _tensor_graph(
    table: LayerTable, estimator: Estimator, degree: int, shares: Sequence[ShardedLayer]
) -> LayerGraph:
    """The layers of one device of a group, each with its all-reduces over the device's own link."""
    # Computing is scaled as on one device, so the loss is taken to be split like the rest.
    there, back = _scales(table, estimator)
    return _layer_graph(
        table,
        (
            _node(
                share.counts,
                there * estimator.seconds(share.counts.forward)
                + _reduce_seconds(degree, share.forward_reduced_bytes, estimator),
                back * estimator.seconds(share.counts.backward)
                + _reduce_seconds(degree, share.backward_reduced_bytes, estimator),
                _core(share.counts.core, there, estimator),
            )
            for share in shares
        ),
    )


def _reduce_seconds(num_devices: int, num_bytes: int, estimator: Estimator) -> float:
    if not num_bytes:
        return 0.0
    link = Wire(LINK_LATENCY_SECONDS, estimator.link_bytes_per_second)
    return collective_seconds("all-reduce", num_bytes, num_devices, link)


def _layer_graph(table: LayerTable, nodes: Iterable[LayerNode]) -> LayerGraph:
    return LayerGraph(
        microbatch_size=table.whole.batch_size,
        nodes=tuple(nodes),
        edges=table.edges,
        trace=table.trace,
        sample_bytes=table.whole.batch_bytes,
    )


def _scales(table: LayerTable, estimator: Estimator) -> tuple[float, float]:
    """What the passes of a model take over those of its layers alone: forward, backward."""
    forward = sum(estimator.seconds(layer.forward) for layer in table.layers)
    backward = sum(estimator.seconds(layer.backward) for layer in table.layers)
    return (
        estimator.seconds(table.whole.forward) / forward if forward else 1.0,
        estimator.seconds(table.whole.backward) / backward if backward else 1.0,
    )


def _core(core: CoreCounts | None, scale: float, estimator: Estimator) -> LayerCore | None:
    """What selective recomputation changes; its forward pass is scaled as the layer's."""
    if core is None:
        return None
    return LayerCore(
        forward_seconds=scale * estimator.seconds(core.forward),
        made_bytes=core.made_bytes,
        stashed_bytes=core.stashed_bytes,
    )


def _node(
    layer: LayerCounts, forward_seconds: float, backward_seconds: float, core: LayerCore | None
) -> LayerNode:
    return LayerNode(
        id=layer.id,
        op=layer.op,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        activation_bytes=layer.activation_bytes,
        weight_bytes=layer.weight_bytes,
        stashed_bytes=layer.stashed_bytes,
        workspace_bytes=layer.workspace_bytes,
        shared_with=layer.shared_with,
        shared_weight_bytes=layer.shared_weight_bytes,
        core=core,
        frozen_weight_bytes=layer.frozen_weight_bytes,
        halved_bytes=layer.halved_bytes,
    )


def _sync(weight_bytes: int, estimator: Estimator) -> Sync:
    rate = estimator.link_bytes_per_second
    return Sync(
        num_devices=SYNC_DEVICES,
        sync_seconds=_reduce_seconds(SYNC_DEVICES, weight_bytes, estimator),
        latency_seconds=LINK_LATENCY_SECONDS,
        bytes_per_second=rate,
    )


def _links(estimator: Estimator) -> Links:
    return Links(
        latency_seconds=LINK_LATENCY_SECONDS,
        bytes_per_second=estimator.link_bytes_per_second,
        points=(),
    )


def carried_profile(
    measured: Profile, counts: ModelCounts, source: Estimator, target: Estimator
) -> Profile:
    """Carry a profile that was measured on one type to another.

    Every measured time is multiplied by what the estimates of the two devices say, so what the
    roofline does not know of the model's kernels is kept. Sizes that were not measured are not
    carried; memory is the measured one where it fits.

    ``counts`` are at the batch sizes and microbatch sizes of ``measured``, whose peaks are of the
    device's own memory.

    Raises:
        ProblemError: The profile is itself an estimate, of an emulated device, or of a CPU.
        InfeasibleError: No measured size fits the target.
    """
    _check_carriable(measured, counts)
    spec = target.spec
    estimate = estimated_profile(counts, target, model=measured.model)
    passes = {found.batch_size: found for found in counts.passes}
    curve = tuple(
        replace(
            point,
            step_seconds=_scaled(
                point.pass_seconds,
                source.pass_seconds(passes[point.batch_size]),
                target.pass_seconds(passes[point.batch_size]),
            )
            + (point.load_seconds or 0.0)
            + (point.virtual_node_seconds or 0.0),
            step_seconds_error=None,
            fragmentation_bytes=None,
        )
        for point in measured.batch_curve
        if point.batch_size in passes and point.peak_memory_bytes <= spec.memory_bytes
    )
    if not curve:
        raise InfeasibleError(
            f"no measured batch size of {measured.model} fits the {spec.memory_bytes} bytes of a "
            f"{spec.name}"
        )
    before = {graph.microbatch_size: graph for graph in measured.layer_tables}
    tables = tuple(
        _carried_graph(before[table.whole.batch_size], table, source, target)
        for table in counts.tables
    )
    assert estimate.estimate is not None
    error = RATIO_ERROR.of(counts.passes[0].forward)
    return replace(
        estimate,
        update_seconds=_scaled(
            measured.update_seconds,
            source.seconds(counts.update),
            target.seconds(counts.update),
        ),
        batch_curve=curve,
        layers=tables[0] if tables else None,
        more_layers=tables[1:],
        sequence_layers=(),
        tensor_layers=(),  # layers that were carried and estimated ones are not to be compared
        fixed_seconds=measured.fixed_seconds,
        optimizer=measured.optimizer,
        blocks=measured.blocks,
        out_of_memory_batch_size=None,
        step_error=error,
        estimate=replace(estimate.estimate, step_error=error, carried_from=measured.device_type),
        provenance={**(estimate.provenance or {}), "carried": measured.provenance},
    )


def _check_carriable(measured: Profile, counts: ModelCounts) -> None:
    where = f"the profile of {measured.model} on {measured.device_type}"
    if measured.estimate is not None:
        raise ProblemError(
            f"{where} is itself an estimate",
            hint=f"leave {option('from_profile')} out, or name a measured one",
        )
    if measured.emulation is not None:
        raise ProblemError(
            f"{where} is of an emulated device", hint="name one that was measured on a GPU"
        )
    if measured.weight_bytes != counts.weight_bytes:
        raise ProblemError(
            f"{where} has {measured.weight_bytes} bytes of weights, the target "
            f"{counts.weight_bytes}: they are two models",
            hint="name the target that was profiled",
        )


def _scaled(measured_seconds: float, source_seconds: float, target_seconds: float) -> float:
    return measured_seconds * target_seconds / source_seconds if source_seconds else target_seconds


def _carried_graph(
    measured: LayerGraph, table: LayerTable, source: Estimator, target: Estimator
) -> LayerGraph:
    """A measured graph's layers, each scaled as its own operators say."""
    counted = {layer.id: layer for layer in table.layers}
    if set(counted) != {node.id for node in measured.nodes}:
        raise ProblemError(
            "the target's layers are not those of the profile",
            hint=f"profile the target again, or leave {option('from_profile')} out",
        )

    def carried(node: LayerNode) -> LayerNode:
        layer = counted[node.id]
        is_halved = node.input_gradient_share is not None
        return replace(
            node if is_halved else _halved(node, layer, target, 1.0),
            forward_seconds=_scaled(
                node.forward_seconds, source.seconds(layer.forward), target.seconds(layer.forward)
            ),
            backward_seconds=_scaled(
                node.backward_seconds,
                source.seconds(layer.backward),
                target.seconds(layer.backward),
            ),
            core=None
            if node.core is None or layer.core is None
            else replace(
                node.core,
                forward_seconds=_scaled(
                    node.core.forward_seconds,
                    source.seconds(layer.core.forward),
                    target.seconds(layer.core.forward),
                ),
            ),
        )

    return replace(measured, nodes=tuple(map(carried, measured.nodes)))
