"""LaunchConfig: a plan lowered to ranks, which the launcher gives to every worker.

Also how ``hetflow resize`` asks for another one, and where several hosts meet.
"""

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from .cluster import Cluster
from .errors import ProblemError, TargetError
from .layers import LayerTrace
from .optimizer import OptimizerState
from .options import Activations, Shard, option, options
from .plan import EmulatedDevice
from .records import Bytes, Count, Index, Name, Ratio, Seconds, record
from .schedule import Kind, ScheduleTraits, traits

Determinism = Literal["none", "static", "elastic", "heterogeneous"]


@record
class VirtualNode:
    """One virtual node: its index, which never changes, and its samples of every batch."""

    index: Index
    batch_size: Count


@record
class WorkerSlot:
    """One worker: a rank, the device type it needs, and its virtual nodes in running order.

    ``device`` is the device that the plan assigned: its index among the devices of its type,
    counted host by host. None accepts any device of the type. ``state_share_bytes`` are the weights
    whose states it keeps; None: all, or in a pipeline as many as others of its stage.
    ``activations`` are those of repeated layers; None keeps them. ``memory_bytes`` is what the plan
    fills of the device; None if it does not say.
    """

    rank: Index
    device_type: Name
    virtual_nodes: tuple[VirtualNode, ...]
    device: Index | None = None
    state_share_bytes: Bytes | None = None
    activations: Activations | None = None
    memory_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        if not self.virtual_nodes:
            raise ProblemError(f"rank {self.rank} has no virtual nodes")


@record
class PipelineStage:
    """One stage: its layers and the ranks that hold it.

    An emulated device stretches its passes to ``forward_seconds`` and ``backward_seconds``, of
    which ``weight_gradient_seconds`` are the second half's (None: half of them). In a
    parallel plan, ``tensor_parallel_sizes`` is the number of ranks of each replica, in order of the
    ranks; if empty, each rank is a replica. ``recompute`` None takes the value of the whole work.
    ``recompute_cores`` recomputes the cores of attention only.
    """

    layers: tuple[Name, ...]
    ranks: tuple[Index, ...]
    forward_seconds: Seconds | None = None
    backward_seconds: Seconds | None = None
    weight_gradient_seconds: Seconds | None = None
    tensor_parallel_sizes: tuple[Count, ...] = ()
    recompute: bool | None = None
    recompute_cores: bool | None = None

    def __post_init__(self) -> None:
        total = sum(self.tensor_parallel_sizes)
        if self.tensor_parallel_sizes and total != len(self.ranks):
            raise ProblemError(f"tensor_parallel_sizes add up to {total}, not {len(self.ranks)}")

    def held_seconds(self, kind: Kind) -> float | None:
        """What an emulated device stretches a pass to; None where none is stretched."""
        whole, weight = self.backward_seconds, self.weight_gradient_seconds
        if kind in (Kind.FORWARD, Kind.BACKWARD) or whole is None:
            return self.forward_seconds if kind is Kind.FORWARD else whole
        weight = whole / 2 if weight is None else weight
        return weight if kind is Kind.BACKWARD_WEIGHT else whole - weight

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, which are a tensor-parallel group."""
        if not self.tensor_parallel_sizes:
            return tuple((rank,) for rank in self.ranks)
        ends = tuple(accumulate(self.tensor_parallel_sizes))
        return tuple(
            self.ranks[end - size : end]
            for size, end in zip(self.tensor_parallel_sizes, ends, strict=True)
        )


@record
class PipelineWork:
    """A lowered pipeline plan; each worker's virtual nodes are its microbatches.

    ``trace`` is how the layers were found; None is torch.fx. With ``sequence_parallel`` the ranks
    of a tensor-parallel group share the tokens between the layers that they share. With
    ``shard_optimizer`` one of the ranks that hold a parameter keeps its optimizer state; with
    ``shard_gradients`` only that one gets its gradient.
    """

    schedule: Name
    num_microbatches: Count
    recompute: bool
    stages: tuple[PipelineStage, ...]
    trace: LayerTrace | None = None
    sequence_parallel: bool | None = None
    shard_optimizer: bool | None = None
    shard_gradients: bool | None = None

    def __post_init__(self) -> None:
        traits(self.schedule)  # raises for an unknown schedule
        for number, stage in enumerate(self.stages):
            if not stage.layers or not stage.ranks:
                raise ProblemError(f"stage {number} needs layers and ranks")

    @property
    def traits(self) -> ScheduleTraits:
        """Traits of the schedule."""
        return traits(self.schedule)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each tensor-parallel group, in order of their first ranks.

        Rank i of the schedule is group i. Without tensor parallelism, group i is rank i.
        """
        return tuple(sorted({group for stage in self.stages for group in stage.replicas}))

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """[stages] numbers of the groups that are the stage's replicas."""
        numbers = {group: number for number, group in enumerate(self.groups)}
        return tuple(tuple(numbers[group] for group in stage.replicas) for stage in self.stages)

    def recomputes(self, stage: int) -> bool:
        """Whether a stage recomputes its activations in its backward passes."""
        own = self.stages[stage].recompute
        return self.recompute if own is None else own

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the work was lowered from a parallel plan, even one with degree 1."""
        return any(stage.tensor_parallel_sizes for stage in self.stages)

    @property
    def stages_of_rank(self) -> dict[int, list[int]]:
        """Rank -> its stages, in the order of the model."""
        held: dict[int, list[int]] = {}
        for number, stage in enumerate(self.stages):
            for rank in stage.ranks:
                held.setdefault(rank, []).append(number)
        return held


@record
class LaunchConfig:
    """The work of each rank. Ranks follow the plan's order of groups, not the order of hosts.

    ``optimizer`` is the one whose state the plan counted; workers check that the script uses it.
    ``predicted_step_seconds`` is the plan's; None where the workers are not the plan's any more.
    ``shard`` is what the workers share of the states, in proportion to ``state_share_bytes``;
    ``redundancy`` is how many others keep each share too, and ``copied_ratio`` the memory of such a
    copy for each of its weights' bytes. ``blocks`` are those of a ``Plan``.
    """

    schema: Literal["hetflow.launch/1"] = "hetflow.launch/1"
    model: Name
    global_batch_size: Count
    workers: tuple[WorkerSlot, ...]
    seed: Index = 0
    emulated: tuple[EmulatedDevice, ...] = ()
    determinism: Determinism = "none"
    pipeline: PipelineWork | None = None
    optimizer: OptimizerState | None = None
    predicted_step_seconds: Seconds | None = None
    shard: Shard | None = None
    redundancy: Index = 0
    copied_ratio: Ratio | None = None
    blocks: tuple[Name, ...] | None = None

    def __post_init__(self) -> None:
        if self.redundancy > int(self.shard is not None):
            raise ProblemError("shares of states, where there are some, have at most one copy")
        if self.shard is not None and not sum(s.state_share_bytes or 0 for s in self.workers):
            raise ProblemError("workers that share states must say their shares")
        numbers = {len(slot.virtual_nodes) for slot in self.workers}
        if self.shard in ("gradients", "all") and len(numbers) > 1:
            raise ProblemError(
                f"workers that share {self.shard} meet in every pass, and have {sorted(numbers)}"
            )
        if [slot.rank for slot in self.workers] != list(range(len(self.workers))):
            raise ProblemError("worker ranks must be 0, 1, 2, ... in order")
        if self.pipeline is None:
            self._check_nodes(self.workers)
            return
        for stage in self.pipeline.stages:
            if max(stage.ranks) >= len(self.workers):
                raise ProblemError(f"a stage names rank {max(stage.ranks)}, which does not exist")
            for group in stage.replicas:
                nodes = {self.workers[rank].virtual_nodes for rank in group}
                if len(nodes) > 1:
                    raise ProblemError(f"ranks {group} share layers, and run unlike virtual nodes")
            self._check_nodes(tuple(self.workers[group[0]] for group in stage.replicas))

    def _check_nodes(self, workers: tuple[WorkerSlot, ...]) -> None:
        nodes = [(n.index, n.batch_size) for slot in workers for n in slot.virtual_nodes]
        if self.pipeline is not None and self.pipeline.traits.placement == "both-ways":
            # Two ranks list each microbatch: with DualPipe, both directions hold every stage.
            nodes = list(set(nodes))
        if sorted(index for index, _ in nodes) != list(range(len(nodes))):
            raise ProblemError("virtual node indices must be 0, 1, 2, ... without gaps")
        total = sum(batch_size for _, batch_size in nodes)
        if total != self.global_batch_size:
            raise ProblemError(f"virtual nodes hold {total} samples, not {self.global_batch_size}")

    def kept(self, rank: int) -> range:
        """The ranks whose shares a worker keeps: with ``redundancy`` also a neighbour's."""
        # Workers are pairs, 0 and 1, 2 and 3, and so on, and each keeps both shares. The last
        # three of an odd number are a row, of which the middle one keeps all. So what a worker
        # keeps is one piece.
        last = self.world_size - 1
        if not self.redundancy or not last:
            return range(rank, rank + 1)
        first = rank - rank % 2
        if last % 2 or rank < last - 2:
            return range(first, first + 2)
        return range(max(rank - 1, last - 2), min(rank + 1, last) + 1)

    @property
    def world_size(self) -> int:
        """Number of workers over all hosts."""
        return len(self.workers)

    @property
    def workers_by_device(self) -> tuple[WorkerSlot, ...]:
        """The workers grouped by device type; within a type by planned device, then by rank."""
        types = list(dict.fromkeys(slot.device_type for slot in self.workers))
        return tuple(
            sorted(
                self.workers,
                key=lambda slot: (
                    types.index(slot.device_type), slot.device is None, slot.device or 0, slot.rank,
                ),
            )
        )  # fmt: skip


@record
class ResizeRequest:
    """A request to run the same virtual nodes on other devices from now on.

    If ``wants_answer`` is false, no client waits for the answer.
    """

    schema: Literal["hetflow.resize/1"] = "hetflow.resize/1"
    config: LaunchConfig
    wants_answer: bool = True


@record
class ResizeAnswer:
    """The outcome of a request.

    A ``refused`` request was not tried. A ``failed`` one was tried, and the job continues on its
    former devices. ``joined`` and ``left`` name workers. ``pause_seconds`` is how long training
    paused, ``start_seconds`` how long the joining workers took to start.

    Example:
        >>> import hetflow
        >>> hetflow.ResizeAnswer(status="refused", detail="the launch has ended").joined
        ()
    """

    schema: Literal["hetflow.resized/1"] = "hetflow.resized/1"
    status: Literal["done", "refused", "failed"]
    detail: str
    hint: str | None = None
    generation: Index | None = None
    joined: tuple[Name, ...] = ()
    left: tuple[Name, ...] = ()
    start_seconds: Seconds | None = None
    pause_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where several hosts meet. Node 0 listens on ``host``:``port``."""

    num_nodes: int
    node_rank: int
    host: str
    port: int
    devices: dict[str, int] | None

    def __post_init__(self) -> None:
        if self.num_nodes < 2:
            raise TargetError(
                f"several hosts means {option('nnodes')} of at least 2, got {self.num_nodes}"
            )
        if not 0 <= self.node_rank < self.num_nodes:
            raise TargetError(
                f"{option('node_rank')} must be 0 to {self.num_nodes - 1} with "
                f"{option('nnodes', self.num_nodes)}, "
                f"got {self.node_rank}"
            )

    @classmethod
    def parse(
        cls, num_nodes: int, node_rank: int | None, endpoint: str | None, devices: str | None
    ) -> "Rendezvous | None":
        """Read the flags of a launch over several hosts; None for one, which has all devices.

        Raises:
            ProblemError: Devices of one host.
            TargetError: A flag is missing, or the endpoint is not HOST:PORT.
        """
        if num_nodes == 1 and node_rank is None and endpoint is None:
            if devices is None:
                return None
            raise ProblemError(
                f"{option('devices', repr(devices))} is what this host gives to a launch over "
                "several hosts; a launch on one host takes the devices of its plan",
                hint=f"leave {option('devices')} out, or add {option('nnodes')}, "
                f"{option('node_rank')} and {option('rdzv_endpoint')}",
            )
        if node_rank is None or endpoint is None:
            raise TargetError(
                f"several hosts need {option('node_rank')} and {option('rdzv_endpoint')}",
                hint="for example "
                f"{options(nnodes=2, node_rank=0, rdzv_endpoint='10.0.0.1:29400')}",
            )
        match = re.fullmatch(r"\[?([^\s\[\]]+?)\]?:(\d{1,5})", endpoint)
        if not match or not 0 < int(match[2]) < 65536:
            raise TargetError(f"{option('rdzv_endpoint')} must be HOST:PORT, got {endpoint!r}")
        offered = None if devices is None else Cluster.parse(devices, field="devices")
        return cls(
            num_nodes=num_nodes,
            node_rank=node_rank,
            host=match[1],
            port=int(match[2]),
            devices=None if offered is None else offered.num_devices,
        )
