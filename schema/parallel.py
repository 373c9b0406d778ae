"""Plans with pipeline, tensor and data parallelism on unlike devices (thesis chapter 4)."""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import log2
from typing import Any, Literal

from .errors import ProblemError
from .optimizer import OptimizerState
from .options import Shard
from .records import Bytes, Count, Name, NonNegative, PositiveBytes, Seconds, record
from .schedule import DEFAULT_SCHEDULE, traits

Recompute = Literal["none", "selective", "full"]
"""What a stage computes again in its backward passes: nothing, the cores of attention, or all."""
CostRule = Literal["hetflow", "sailor"]
"""How messages and updates are counted. ``hetflow``: output and gradient of a microbatch go beside
passes; a stage's update time is the sum over its layers. ``sailor``: both as in Sailor's
simulator (docs/parallel.md)."""
BoundaryRule = Literal["scattered", "whole", "blocking"]
"""What crosses a boundary between stages. ``scattered``: each device of a tensor-parallel group
sends its part of the activation (scatter/gather, thesis 4.4.1). ``whole``: each device sends the
whole activation. ``blocking``: as ``scattered``, and a stage waits for what it sends and
receives."""


@record
class LinkCurve:
    """The bandwidth of a link as a function of the message size.

    ``coefficients`` are those of a polynomial in log2(bytes / 1e6) that gives bytes per second, the
    highest power first. A single coefficient is a constant bandwidth.
    """

    coefficients: tuple[float, ...]
    latency_seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        if not self.coefficients:
            raise ProblemError("coefficients must hold at least one number")
        if len(self.coefficients) == 1 and self.coefficients[0] <= 0:
            raise ProblemError(f"a constant bandwidth must be > 0, got {self.coefficients[0]}")

    def seconds(self, message_bytes: float) -> float:
        """Seconds of one message.

        Raises:
            ProblemError: The curve's bandwidth is not positive at that size.
        """
        if message_bytes <= 0:
            return 0.0
        bandwidth, size = 0.0, log2(message_bytes / 1e6)
        for coefficient in self.coefficients:
            bandwidth = bandwidth * size + coefficient
        if bandwidth <= 0:
            raise ProblemError(
                f"the curve of a link gives {bandwidth:.3g} bytes/s for messages of "
                f"{message_bytes:.4g} bytes",
                hint="fit it over the sizes that training sends",
            )
        return self.latency_seconds + message_bytes / bandwidth


@record
class ShardTimes:
    """[layers] times on one device type, at one tensor-parallel degree and microbatch size.

    The times include tensor-parallel communication. ``update_seconds`` is the optimizer update.
    ``core_seconds`` is the forward pass of a layer's attention core, which selective recomputation
    repeats. ``workspace_bytes`` is the most temporary memory of a layer's passes in the microbatch,
    with the gradients that it makes, before they are added to others. Both are empty if unknown.
    """

    tensor_parallel_size: Count
    microbatch_size: Count
    forward_seconds: tuple[Seconds, ...]
    backward_seconds: tuple[Seconds, ...]
    update_seconds: tuple[Seconds, ...]
    core_seconds: tuple[Seconds, ...] = ()
    workspace_bytes: tuple[Bytes, ...] = ()

    def __post_init__(self) -> None:
        if sum(self.forward_seconds) + sum(self.backward_seconds) <= 0:
            raise ProblemError(
                f"at degree {self.tensor_parallel_size} and microbatch {self.microbatch_size} all "
                "layers take 0 seconds; profile them again"
            )


@record
class ShardSizes:
    """[layers] bytes on one device of a tensor-parallel group.

    ``stashed_bytes`` is what a forward pass keeps for the backward pass of one sample, and
    ``selective_bytes`` the same with selective recomputation. ``core_bytes`` is what the backward
    pass then makes again of the layer's attention core, and frees before the next core. Both are
    empty if unknown.
    """

    tensor_parallel_size: Count
    weight_bytes: tuple[Bytes, ...]
    stashed_bytes: tuple[NonNegative, ...]
    selective_bytes: tuple[NonNegative, ...] = ()
    core_bytes: tuple[NonNegative, ...] = ()
    tied_bytes: tuple[Bytes, ...] = ()


@record
class DegreeLink:
    """The link of groups of one tensor-parallel degree; between two groups, the slower counts."""

    tensor_parallel_size: Count
    curve: LinkCurve


@record
class TypesLink:
    """The link between devices of two types, for messages and for rings over both."""

    device_types: tuple[Name, Name]
    curve: LinkCurve


@record
class ParallelPool:
    """Devices of one type, the model's times on them, and their links.

    A group of ``tensor_parallel_size`` devices lies within one server. ``inside`` is the link
    within a server, where it is faster than ``links``; a stage whose replicas are within one
    reduces over it (``is_inside``). ``dollars_per_hour`` is the price of one device.
    """

    device_type: Name
    num_devices: Count
    devices_per_server: Count
    memory_bytes: PositiveBytes | None = None
    times: tuple[ShardTimes, ...]
    links: tuple[DegreeLink, ...]
    dollars_per_hour: NonNegative | None = None
    inside: LinkCurve | None = None

    def num_groups(self, tensor_parallel_size: int) -> int:
        """Return how many groups of that degree the servers hold."""
        full, rest = divmod(self.num_devices, self.devices_per_server)
        return full * (self.devices_per_server // tensor_parallel_size) + (
            rest // tensor_parallel_size
        )

    def link(self, tensor_parallel_size: int) -> LinkCurve:
        """Return the bandwidth curve of a group of that degree.

        Raises:
            ProblemError: The pool has no link for that degree.
        """
        for link in self.links:
            if link.tensor_parallel_size == tensor_parallel_size:
                return link.curve
        raise ProblemError(f"{self.device_type}: no link for degree {tensor_parallel_size}")


def is_inside(num_devices: int, devices_per_server: int) -> bool:
    """Whether a stage on devices of one type is placed inside a server: its devices divide it."""
    return devices_per_server % num_devices == 0


def first_devices(
    sizes: Sequence[int], num_devices: int, devices_per_server: int
) -> list[int] | None:
    """Where sets of devices that each lie inside a server begin: first fit, the largest first.

    Args:
        sizes: Devices of each set.
        num_devices: Devices in order, server after server.
        devices_per_server: Devices of a server; the last one may have fewer.

    Returns:
        The first device of each set; None where first fit finds no room.
    """
    found = [0] * len(sizes)
    used = [0] * -(-num_devices // devices_per_server)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        for server, taken in enumerate(used):
            begin = server * devices_per_server
            room = min(devices_per_server, num_devices - begin)
            if taken + sizes[number] <= room:
                found[number], used[server] = begin + taken, taken + sizes[number]
                break
        else:
            return None
    return found


@record
class ParallelProblem:
    """A model to train on a pool with pipeline, tensor and data parallelism.

    ``output_bytes`` is what crosses the boundary after each layer for one sample, not sharded. The
    memory of a device is ``bytes_per_weight_byte`` (weights, gradients, optimizer state) times its
    weight bytes, plus ``reserved_bytes``. Stashed activations, messages and a layer's workspace
    come on top, or an update's workspace. ``tied_to`` [layers] are the positions of earlier layers
    whose weights a layer uses too; a stage without these has a copy. Where several devices sum a
    gradient, its first one of a step may wait beside ``waiting_bytes`` of others until it is
    written to where they are summed. Gradients are all-reduced in
    buckets of ``bucket_bytes`` by rings of single devices (links of degree 1). ``most_stages``
    limits the stages of a pipeline; None sets no limit. ``num_model_chunks`` are the numbers of
    stages per device to try; above 1 the schedule is interleaved 1F1B. Between two types counts the
    slowest of both types' own links and of their entry in ``between``. ``shards`` is what replicas
    of a stage, which then have one degree, may share; all stages of a plan share alike, None:
    nothing. With ``gradients`` a gradient is summed only for the one that updates the parameter.
    """

    model: Name
    global_batch_size: Count
    layers: tuple[Name, ...]
    output_bytes: tuple[Bytes, ...]
    pools: tuple[ParallelPool, ...]
    sizes: tuple[ShardSizes, ...]
    bytes_per_weight_byte: NonNegative = 4.0
    reserved_bytes: Bytes = 0
    bucket_bytes: PositiveBytes | None = None
    recompute: tuple[Recompute, ...] = ("none",)
    cost_rule: CostRule = "hetflow"
    boundary_rule: BoundaryRule = "scattered"
    most_stages: Count | None = None
    num_model_chunks: tuple[Count, ...] = (1,)
    optimizer: OptimizerState | None = None
    shards: tuple[Shard | None, ...] = (None,)
    between: tuple[TypesLink, ...] = ()
    tied_to: tuple[tuple[int, ...], ...] = ()
    waiting_bytes: Bytes = 0

    def __post_init__(self) -> None:
        _check_names(self)
        if not self.num_model_chunks:
            raise ProblemError("num_model_chunks must hold at least one number")
        if self.shards != (None,) and self.optimizer is None:
            raise ProblemError("shards need the optimizer, whose state is counted")
        if "all" in self.shards and (self.cost_rule == "sailor" or not self.has_constant_rates):
            raise ProblemError("weights are shared over links of one rate each, by hetflow's rule")
        if self.between and self.cost_rule == "sailor":
            raise ProblemError("the cost rule sailor knows no links between types; leave them out")
        size = len(self.layers)
        tables: list[tuple[str, tuple[float, ...]]] = [("output_bytes", self.output_bytes)]
        owners: list[tuple[str, Any]] = [("", sizes) for sizes in self.sizes]
        owners += [(f"{pool.device_type} ", times) for pool in self.pools for times in pool.times]
        for where, owner in owners:
            for field in fields(owner):
                table, may_lack = getattr(owner, field.name), field.default == ()
                is_core = "core" in field.name or "selective" in field.name
                is_needed = table or not may_lack or (is_core and "selective" in self.recompute)
                if isinstance(table, tuple) and is_needed:
                    tables.append((f"{where}{field.name}", table))
        for name, table in tables:
            if len(table) != size:
                raise ProblemError(f"{name}: {len(table)} values for {size} layers; give one each")

    @property
    def hides_messages(self) -> bool:
        """Whether messages between stages overlap with passes."""
        return self.cost_rule == "hetflow" and self.boundary_rule != "blocking"

    @property
    def has_constant_rates(self) -> bool:
        """Whether no link's rate depends on the size of a message."""
        curves = [link.curve for pool in self.pools for link in pool.links]
        curves += [link.curve for link in self.between]
        curves += [pool.inside for pool in self.pools if pool.inside is not None]
        return all(len(curve.coefficients) == 1 for curve in curves)

    @property
    def shard(self) -> Shard | None:
        """What replicas share, where ``shards`` names one kind of plans."""
        return self.shards[0]

    @property
    def update_ratio(self) -> float:
        """Bytes that an update takes for a while for each byte of weights that it updates."""
        known = None if self.optimizer is None else self.optimizer.workspace_bytes_per_weight_byte
        return known or 0.0

    @property
    def by_shard(self) -> tuple["ParallelProblem", ...]:
        """The problem once for each of ``shards``."""
        return tuple(replace(self, shards=(shard,)) for shard in self.shards)

    @property
    def state_bytes_per_weight_byte(self) -> float:
        """What of ``bytes_per_weight_byte`` replicas share: the optimizer's state, or all of it."""
        if self.shard is None or self.optimizer is None:
            return 0.0
        state = self.optimizer.state_bytes_per_weight_byte
        return self.bytes_per_weight_byte if self.shard == "all" else state

    def link_between(self, one: str, other: str) -> LinkCurve | None:
        """Return the link between two device types; None for one, or if only their own count."""
        pair = {one, other}
        return next((each.curve for each in self.between if set(each.device_types) == pair), None)

    def sizes_of(self, tensor_parallel_size: int) -> ShardSizes | None:
        """Return the layers' bytes at a tensor-parallel degree; None if unknown."""
        for sizes in self.sizes:
            if sizes.tensor_parallel_size == tensor_parallel_size:
                return sizes
        return None


def _check_names(problem: ParallelProblem) -> None:
    if not problem.layers or len(set(problem.layers)) != len(problem.layers):
        raise ProblemError("a parallel problem needs layers, each with a name of its own")
    types = [pool.device_type for pool in problem.pools]
    if not types or len(set(types)) != len(types):
        raise ProblemError("a parallel problem needs pools, one a device type")
    if problem.sizes_of(1) is None:
        raise ProblemError("sizes must hold those at tensor_parallel_size 1: gradients follow them")


def parallel_schedule(*, is_chunked: bool) -> str:
    """The schedule of parallel plans; ``is_chunked``: where a device holds several stages.

    It is the default one, 1F1B: the planner's equations and the judge's are of its order.
    """
    plain = traits(DEFAULT_SCHEDULE)
    return plain.chunked_as or plain.name if is_chunked else plain.name
