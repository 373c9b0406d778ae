"""Pipeline partitions: the solver's problem (thesis 2.4.1)."""

from collections.abc import Iterable, Sequence
from typing import Literal

from .errors import ProblemError
from .optimizer import OptimizerState
from .options import StageCost, option
from .records import Bytes, Count, Index, Name, PositiveBytes, PositiveRate, Ratio, Seconds, record
from .schedule import DEFAULT_SCHEDULE, ScheduleTraits, planned_schedules, traits

Solved = Literal["flat", "nested"]
CutRule = Literal["edges", "released"]
WorkerCount = Literal["at_most", "exactly"]
Objective = Literal["step_seconds", "bottleneck"]

# A schedule lists every pass of every replica. More microbatches are a mistake of the user.
MAX_MICROBATCHES = 1 << 16


@record
class PipelineLayer:
    """One layer: a_l and w_l of thesis 2.4.1, for one microbatch. Its times are in ``DevicePool``.

    ``stashed_bytes`` is what is kept for its backward pass; None, if not measured, takes the bytes
    of its output. ``weight_bytes`` counts the weights that no earlier layer holds, and
    ``shared_weight_bytes`` those that the layers ``shared_with`` hold (tied weights).
    ``halved_bytes`` is what is kept besides between the two halves of a backward pass.
    ``saved_later`` are outputs, of what is kept, that only later layers save: the position of the
    first that does, and bytes. Allocators add ``padding_bytes`` to the weights. ``buffer_bytes``
    are there twice, and ``statistics_bytes`` of them once more for each microbatch of a step.
    """

    id: Name
    activation_bytes: Bytes
    weight_bytes: Bytes
    stashed_bytes: Bytes | None = None
    shared_with: tuple[Name, ...] = ()
    shared_weight_bytes: Bytes = 0
    halved_bytes: Bytes = 0
    saved_later: tuple[tuple[Index, Bytes], ...] = ()
    padding_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    statistics_bytes: Bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that a microbatch in flight keeps of this layer."""
        return self.activation_bytes if self.stashed_bytes is None else self.stashed_bytes

    @property
    def has_bytes(self) -> bool:
        """Whether it counts in a stage's memory."""
        own = self.weight_bytes, self.shared_weight_bytes, self.buffer_bytes
        return any((*own, self.activation_bytes, self.kept_bytes))


@record
class TopologyLevel:
    """Level k: ``num_components`` (m_k) parts of the level below, linked with bandwidth B_k."""

    num_components: Count
    bytes_per_second: PositiveRate


@record
class DevicePool:
    """The devices of one type, with this type's layer times.

    ``levels`` are ordered from the lowest up. For example, 4 servers of 4 devices are a level of 4
    with the bandwidth inside a server, then a level of 4 with the network's. ``update_seconds`` is
    one optimizer update of the whole model.

    Memory: ``memory_bytes`` is a device's memory; None sets no limit. On every device
    ``workspace_bytes`` of it are reserved for temporary memory beside passes: that of exchanges,
    and on a CPU that of the optimizer update. Of these ``compared_bytes`` compare workers that hold
    the same weights, and only such workers take them. ``layer_workspace_bytes`` is what each
    layer's passes take for a while; empty if it was not measured. ``base_memory_bytes`` is what a
    worker holds before the model exists, if it counts against the device's memory (0 on a GPU).
    None, as in older profiles, leaves all three out of a stage's stated memory. An update takes
    ``update_bytes_per_weight_byte`` for a while, in place of activations. Of a step's first
    gradients up to ``waiting_bytes`` wait until they are summed. ``copies_messages`` says that
    messages on their way are there once more.

    Fixed costs: ``pass_seconds`` is the cost of every forward and every backward pass of a stage
    beyond its layers. ``lone_pass_seconds`` is the same if one stage holds all layers and the
    schedule flushes (flat plans, ``ring`` stage cost); None takes ``pass_seconds``.
    ``fixed_seconds`` is the cost of a step beyond passes, messages and updates.

    Halves: where the schedule splits backward passes, ``input_gradient_seconds`` are the part of
    ``backward_seconds`` for the inputs' gradients, and ``repeated_seconds`` what the other part
    computes a second time. Empty: the halves are equal. The first stage's inputs need no gradients,
    so its first half is empty and the second repeats nothing.

    All-reduces: ``reduce_bytes_per_second`` and ``reduce_latency_seconds`` are the measured rate
    and latency per hop of the ring between replicas; None and 0 take the links' rate.
    """

    device_type: Name
    levels: tuple[TopologyLevel, ...]
    forward_seconds: tuple[Seconds, ...]
    backward_seconds: tuple[Seconds, ...]
    update_seconds: Seconds = 0.0
    memory_bytes: PositiveBytes | None = None
    workspace_bytes: Bytes = 0
    compared_bytes: Bytes = 0
    layer_workspace_bytes: tuple[Bytes, ...] = ()
    base_memory_bytes: Bytes | None = None
    update_bytes_per_weight_byte: Ratio = 0.0
    waiting_bytes: Bytes = 0
    copies_messages: bool = False
    pass_seconds: Seconds = 0.0
    fixed_seconds: Seconds = 0.0
    reduce_latency_seconds: Seconds = 0.0
    reduce_bytes_per_second: PositiveRate | None = None
    lone_pass_seconds: Seconds | None = None
    input_gradient_seconds: tuple[Seconds, ...] = ()
    repeated_seconds: tuple[Seconds, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels:
            raise ProblemError(f"{self.device_type}: a pool needs at least one level of devices")
        if (self.lone_pass_seconds or 0.0) > self.pass_seconds:
            raise ProblemError(
                f"{self.device_type}: a pass of a single stage costs {self.lone_pass_seconds}, "
                f"more than one beside messages, {self.pass_seconds}"
            )
        if self.reduce_latency_seconds and self.reduce_bytes_per_second is None:
            raise ProblemError(
                f"{self.device_type}: reduce_latency_seconds needs reduce_bytes_per_second"
            )

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of a device that stages may use: its memory without base and workspace."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes - self.workspace_bytes - (self.base_memory_bytes or 0)

    @property
    def num_devices(self) -> int:
        """Number of devices over all levels."""
        total = 1
        for level in self.levels:
            total *= level.num_components
        return total


@record
class PipelineProblem:
    """Cut a graph of layers into replicated stages, each on devices of one type.

    Args:
        layers: The model's layers, in topological order.
        edges: Which layer feeds which, as pairs of positions in ``layers``. None is a chain.
        num_microbatches: Inputs per optimizer step over the whole pipeline. ``pipedream`` updates
            after every input; there it is only the unit in which a step is reported.
        inter_bytes_per_second: Bandwidth between two pools; needed if there are several.
        stage_cost: Name of the stage cost; planning/costs/pipeline.py lists them and their sources.
        solved: ``nested`` solves level by level as the thesis's text does. ``flat`` gives each
            stage a run of devices in the order of the topology, which allows 15-1 on 4x4.
        workers: Whether exactly all devices must be used, as in the thesis's recurrence.
        recompute: Whether stages recompute activations. None recomputes only if the plan without
            it does not fit or is slower.
        optimizer: The optimizer whose state every replica keeps. Gradients (one copy) and weight
            versions (by schedule) are counted separately.
        link_bytes_per_second: The bandwidth given for links that the pool does not state; the
            plan repeats it.
        count_boundaries: False only to compare with runs of the published optimizer that ignored
            transfers between stages.
        cut_rule: ``edges`` counts the bytes that cross a cut from the graph's edges. ``released``
            counts as the published optimizer does, which includes some tensors that do not cross
            (nested only; the stage cost ``published`` always does).
        num_stages: Exact number of stages; None lets the solver choose.
        objective: ``step_seconds`` is the whole step of a schedule that flushes, timed event by
            event. ``bottleneck`` is the slowest stage or boundary. None takes the step if it
            exists: for flat plans, the stage cost ``ring`` and a schedule that flushes.
        num_model_chunks: v, stages per device, if the schedule takes any number. None tries the
            numbers that the schedule states.
        launchable: Whether to allow only (flat) plans that ``hetflow launch`` can run. Then every
            replica has a microbatch of each batch. Without flushes it has the same ones of each
            batch, so a stage's replicas divide the microbatches; and 2BW, which keeps two weight
            versions, uses no more devices than there are microbatches.
        message_seconds: Fixed cost of a message between two stages, whatever its size.
        sample_bytes: Of a microbatch as the loader gives it.
        step_error: Relative error of steps computed from these terms; None if not measured.
        tied_bytes_per_second: Rate of all-reduces of weights that several stages hold; None takes
            that of the slowest pool.
        most_devices: Most devices to use (flat); None allows all.
        most_stages: Most stages (flat); None sets no limit.
    """

    model: Name
    layers: tuple[PipelineLayer, ...]
    pools: tuple[DevicePool, ...]
    microbatch_size: Count
    num_microbatches: Count
    optimizer: OptimizerState
    link_bytes_per_second: PositiveRate | None = None
    edges: tuple[tuple[Index, Index], ...] | None = None
    inter_bytes_per_second: PositiveRate | None = None
    schedule: Name = DEFAULT_SCHEDULE
    stage_cost: StageCost = "ring"
    solved: Solved = "flat"
    workers: WorkerCount = "at_most"
    replication: bool = True
    recompute: bool | None = False
    count_boundaries: bool = True
    cut_rule: CutRule = "edges"
    num_stages: Count | None = None
    objective: Objective | None = None
    num_model_chunks: Count | None = None
    launchable: bool = False
    message_seconds: Seconds = 0.0
    step_error: Ratio | None = None
    tied_bytes_per_second: PositiveRate | None = None
    most_devices: Count | None = None
    most_stages: Count | None = None
    sample_bytes: Bytes = 0

    def __post_init__(self) -> None:
        check_microbatches(self.num_microbatches)
        if not self.traits.plannable:
            raise ProblemError(
                f"schedule {self.schedule} is none that `hetflow solve` plans; those are "
                f"{', '.join(planned_schedules())}"
            )
        _check_pools(self)
        _check_graph(self)
        _check_choices(self)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, B."""
        return self.microbatch_size * self.num_microbatches

    @property
    def traits(self) -> ScheduleTraits:
        """What the schedule does: whether it flushes, keeps old weights, and so on."""
        return traits(self.schedule)

    @property
    def minimises(self) -> Objective:
        """The objective, with the default resolved."""
        return self.objective or ("step_seconds" if _has_step(self) else "bottleneck")

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The edges as pairs of positions, also for a chain."""
        if self.edges is not None:
            return self.edges
        return tuple((layer, layer + 1) for layer in range(len(self.layers) - 1))

    @property
    def num_devices(self) -> int:
        """Number of devices over all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def stage_limit(self) -> int | None:
        """Most stages that a plan may have; None sets no limit."""
        return self.num_stages or self.most_stages

    @property
    def most_workers(self) -> int:
        """Most devices that a plan may use."""
        most = min(self.num_devices, self.most_devices or self.num_devices)
        is_bounded = self.launchable and self.traits.is_double_buffered
        return min(most, self.num_microbatches) if is_bounded else most

    def may_replicate(self, num_replicas: int) -> bool:
        """Whether a stage may have ``num_replicas`` replicas."""
        if not self.launchable:
            return True
        if self.traits.flushes:
            return num_replicas <= self.num_microbatches
        return self.num_microbatches % num_replicas == 0


def check_microbatches(number: int) -> None:
    """Refuse a schedule that is too long to list: it has events for every microbatch."""
    if number > MAX_MICROBATCHES:
        raise ProblemError(
            f"{number} microbatches in a step; at most {MAX_MICROBATCHES}",
            hint=f"take larger microbatches ({option('microbatch_size')}) or a smaller batch",
        )


def _check_pools(problem: PipelineProblem) -> None:
    if not problem.layers:
        raise ProblemError("a pipeline needs at least one layer")
    if len({layer.id for layer in problem.layers}) != len(problem.layers):
        raise ProblemError("layer ids must be unique")
    if not problem.pools:
        raise ProblemError("a pipeline needs at least one pool of devices")
    if len({pool.device_type for pool in problem.pools}) != len(problem.pools):
        raise ProblemError("each device type may have one pool")
    for pool in problem.pools:
        halves = pool.input_gradient_seconds or pool.repeated_seconds
        own = (pool.input_gradient_seconds, pool.repeated_seconds) if halves else ()
        aside = (pool.layer_workspace_bytes,) if pool.layer_workspace_bytes else ()
        for numbers in (pool.forward_seconds, pool.backward_seconds, *own, *aside):
            if len(numbers) != len(problem.layers):
                raise ProblemError(
                    f"{pool.device_type}: {len(numbers)} numbers of layers for "
                    f"{len(problem.layers)} layers; give one a layer"
                )
    if len(problem.pools) > 1 and problem.inter_bytes_per_second is None:
        raise ProblemError(
            "the bandwidth between device types is missing", hint="give inter_bytes_per_second"
        )


def _check_graph(problem: PipelineProblem) -> None:
    size = len(problem.layers)
    for source, target in problem.links:
        if source >= size or target >= size:
            raise ProblemError(f"edge {source} -> {target} names a layer that does not exist")
        if source >= target:
            raise ProblemError(
                f"edge {problem.layers[source].id} -> {problem.layers[target].id} goes backwards; "
                "order the layers topologically"
            )
    check_joined([layer.id for layer in problem.layers], problem.links)


def check_joined(names: Sequence[str], links: Iterable[tuple[int, int]]) -> None:
    """Refuse a graph that is not connected.

    Args:
        names: Names of the layers.
        links: Which layer feeds which, as pairs of positions in ``names``.

    Raises:
        ProblemError: The graph is not connected; names a layer without a path to the first one.
    """
    group = list(range(len(names)))
    for source, target in links:
        group[_root(group, source)] = _root(group, target)
    roots = [_root(group, layer) for layer in range(len(names))]
    if len(set(roots)) > 1:
        odd = next(name for name, root in zip(names, roots, strict=True) if root != roots[0])
        raise ProblemError(
            f"the layer graph falls into {len(set(roots))} parts: nothing joins {odd} to "
            f"{names[0]}",
            hint="add the missing edges, or plan the parts one by one",
        )


def _root(group: list[int], layer: int) -> int:
    while group[layer] != layer:
        group[layer] = group[group[layer]]
        layer = group[layer]
    return layer


def _has_step(problem: PipelineProblem) -> bool:
    flat = problem.solved == "flat" and problem.stage_cost == "ring"
    return flat and problem.traits.flushes and problem.count_boundaries


def _check_uniform(problem: PipelineProblem) -> None:
    chunks, schedule = problem.num_model_chunks, problem.traits
    if chunks is not None and not schedule.takes_chunks:
        raise ProblemError(
            f"schedule {problem.schedule} fixes how many stages a device holds",
            hint="leave the chunks per device out, or use interleaved",
        )
    if chunks is not None and chunks < 2:
        raise ProblemError(
            f"{problem.schedule} needs at least 2 chunks on a device", hint="or use 1f1b"
        )
    if not schedule.is_uniform:
        return
    if problem.stage_cost != "ring" or problem.solved != "flat" or not problem.count_boundaries:
        raise ProblemError(f"schedule {problem.schedule} is planned flat, with ring prices")
    if schedule.splits_backward and problem.recompute:
        raise ProblemError(
            f"schedule {problem.schedule} splits backward passes, which cannot recompute",
            hint="use 1f1b or interleaved",
        )
    if schedule.flushes and problem.objective == "bottleneck":
        raise ProblemError(
            f"schedule {problem.schedule} is planned for its step",
            hint="leave the bottleneck objective out",
        )


def _check_choices(problem: PipelineProblem) -> None:
    _check_uniform(problem)
    size = len(problem.layers)
    if problem.objective == "step_seconds" and not _has_step(problem):
        raise ProblemError(
            f"schedule {problem.schedule} with {problem.solved} {problem.stage_cost} prices has "
            "no step to minimise, only a steady state",
            hint="use the bottleneck objective, or a schedule that flushes with flat ring prices",
        )
    if problem.launchable and problem.solved == "nested":
        raise ProblemError("plans that can be launched are sought flat", hint="solve flat")
    if problem.num_stages is not None and problem.most_stages is not None:
        raise ProblemError("give a number of stages or a limit on them", hint="leave one out")
    if problem.num_stages is not None and problem.num_stages > size:
        raise ProblemError(
            f"{size} layers cannot fill {problem.num_stages} stages; ask for at most {size}"
        )
    chunked = problem.traits.is_chunked
    if problem.num_stages is not None and problem.num_stages > problem.num_devices and not chunked:
        raise ProblemError(
            f"{problem.num_devices} devices cannot hold {problem.num_stages} stages; "
            f"ask for at most {problem.num_devices}"
        )
    if problem.stage_cost == "published" and problem.solved != "nested":
        raise ProblemError("the published optimizer solves level by level", hint="solved: nested")
    if problem.cut_rule == "released" and problem.solved != "nested":
        raise ProblemError(
            "the released optimizer's cuts go with nested levels", hint="solved: nested"
        )
    if problem.solved == "nested":
        _check_nested(problem)
    known = {layer.id for layer in problem.layers}
    for layer in problem.layers:
        for other in layer.shared_with:
            if other not in known or other == layer.id:
                raise ProblemError(f"layer {layer.id} shares weights with {other}, no other layer")


def _check_nested(problem: PipelineProblem) -> None:
    tied = next((layer for layer in problem.layers if layer.shared_with), None)
    if tied is not None:
        raise ProblemError(
            f"nested levels know no tied weights, as {tied.id} has with {tied.shared_with[0]}",
            hint="solved: flat",
        )
    if len(problem.pools) > 1:
        raise ProblemError("nested levels hold one device type", hint="solved: flat")
    if problem.traits.weight_semantics != "stashing":
        raise ProblemError(
            f"nested levels are the text's, for schedule pipedream, not {problem.schedule}",
            hint="solved: flat",
        )
    if problem.num_stages is not None or problem.recompute is not False:
        raise ProblemError(
            "a number of stages and recomputation need flat solving", hint="solved: flat"
        )
    if problem.most_devices is not None or problem.most_stages is not None:
        raise ProblemError("a limit on devices or stages needs flat solving", hint="solved: flat")
    if problem.pools[0].memory_bytes is not None and problem.stage_cost != "published":
        raise ProblemError(
            "the text's nested recurrence knows no later stages, so it cannot bound memory",
            hint="solved: flat",
        )
