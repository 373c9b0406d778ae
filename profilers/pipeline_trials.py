"""Which pipelines a profile rehearses, and the launch configs of them."""

from collections.abc import Sequence
from itertools import accumulate

from ..schema.launch import LaunchConfig, PipelineStage, PipelineWork, VirtualNode, WorkerSlot
from ..schema.profile import LayerGraph
from ..schema.schedule_traits import schedule_in_order
from .pipeline_fit import Trial


def trials_of(graph: LayerGraph) -> tuple[Trial, ...]:
    """Pipelines on two devices from which the costs can be told apart, the most useful first.

    One stage on both devices sends no messages, so it tells what passes cost from what messages
    do; and it tells what replicas wait for their all-reduce. The others have two stages, cut near
    the middle of the layers' time, and where about a quarter is before the cut. GPipe waits for
    one message in filling and one in draining, however many microbatches there are; equal 1F1B
    stages wait for one in every round.

    Args:
        graph: Layers in running order; fewer than two, or edges that go backwards, give none.
    """
    position = {node.id: index for index, node in enumerate(graph.nodes)}
    goes_back = any(position[source] >= position[target] for source, target in graph.edges)
    if len(graph.nodes) < 2 or goes_back:
        return ()
    # GPipe and 1F1B
    filling, alternating = schedule_in_order("forward-first"), schedule_in_order("alternating")
    middle, uneven, whole = _cut(graph, 1 / 2), _cut(graph, 1 / 4), len(graph.nodes)
    found = (
        Trial(cut=middle, schedule=alternating, num_microbatches=2),
        Trial(cut=middle, schedule=alternating, num_microbatches=8),
        Trial(cut=uneven, schedule=filling, num_microbatches=2),
        Trial(cut=middle, schedule=filling, num_microbatches=8),
        Trial(cut=whole, schedule=alternating, num_microbatches=8, num_replicas=2),
        Trial(cut=whole, schedule=alternating, num_microbatches=2, num_replicas=2),
        Trial(cut=uneven, schedule=alternating, num_microbatches=8),
        Trial(cut=middle, schedule=filling, num_microbatches=2),
        Trial(cut=uneven, schedule=filling, num_microbatches=8),
        Trial(cut=uneven, schedule=alternating, num_microbatches=2),
    )
    return tuple(dict.fromkeys(found))


def _cut(graph: LayerGraph, share: float) -> int:
    """How many layers take about this share of the time; at least one stays on either side."""
    sums = list(accumulate(node.forward_seconds + node.backward_seconds for node in graph.nodes))
    cuts: Sequence[int] = range(1, len(sums))
    return min(cuts, key=lambda cut: (abs(sums[cut - 1] - share * sums[-1]), cut))


def launch_config(graph: LayerGraph, trial: Trial, *, device_type: str) -> LaunchConfig:
    """The launch config of a trial.

    Rank 0 holds the layers before the cut and rank 1 the others, or both hold all.
    """
    names = tuple(node.id for node in graph.nodes)
    stages: tuple[PipelineStage, ...] = (
        PipelineStage(layers=names[: trial.cut], ranks=(0,)),
        PipelineStage(layers=names[trial.cut :], ranks=(1,)),
    )
    if trial.num_replicas > 1:
        stages = (PipelineStage(layers=names, ranks=tuple(range(trial.num_replicas))),)
    nodes = tuple(
        VirtualNode(index=index, batch_size=graph.microbatch_size)
        for index in range(trial.num_microbatches)
    )
    return LaunchConfig(
        model="model",
        global_batch_size=graph.microbatch_size * trial.num_microbatches,
        workers=tuple(
            WorkerSlot(
                rank=rank,
                device_type=device_type,
                virtual_nodes=nodes[rank % trial.num_replicas :: trial.num_replicas],
            )
            for rank in range(2)
        ),
        pipeline=PipelineWork(
            schedule=trial.schedule,
            num_microbatches=trial.num_microbatches,
            recompute=trial.recompute,
            stages=stages,
            trace=graph.trace,
        ),
    )
