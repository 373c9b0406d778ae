"""What the solvers of splits see of a problem."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd
from typing import Any

from ..schema.cluster import Cluster, Link
from ..schema.errors import InfeasibleError, ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.options import Shard, option
from ..schema.problem import (
    DeviceCosts,
    DeviceOption,
    Problem,
    ShardedDevices,
    ShardedProblem,
    SplitProblem,
)
from ..schema.profile import BatchPoint, Profile, changed_curves
from .costs.compute import busy_ratio, point_at
from .costs.memory import (
    COMPARED_BYTES,
    fitting_points,
    most_pinned_bytes,
    reserve_of,
    with_reserve,
)
from .costs.sharding import unit_bytes
from .links import Pair, measured_between, stated_link
from .pool_parts import Key, Keys, worst_of

MAX_INTERPOLATED_SIZES = 512
CUT_BYTES = 1 << 14
"""What a share takes more of each unit, whose tensors it cuts."""


def split_problem(
    problem: Problem,
    virtual_nodes: int | None = None,
    interpolate: bool = False,
    shards: Sequence[Shard] = (),
) -> SplitProblem:
    """The costs of a split's devices by batch size (VirtualFlow 5.1.2).

    Sizes that do not fit a device's memory are dropped, and so is a type on which no size fits;
    where devices share states all stay, as with less of the states each may fit. A plan on one
    device uses the measurements made on one device alone. A plan on several devices uses those made
    on a busy host, if the type was measured so and a measured size fits. Some server must also hold
    the type with other devices. The ring of gradients is as slow as the pool's slowest link, where
    that is known: stated, or measured between two types (``split_keys``). Shared states are
    gathered and reduced at that rate, and no faster than the slowest all-reduce in the profiles.
    Offloaded passes must leave their host's memory to its other devices, too.

    With ``interpolate``, sizes between profiled ones are allowed; their time and memory are linear
    between the neighbours'. In the uniform regime this is the one size that the plan needs. In the
    free regime it is every multiple of the greatest common divisor of the batch and all profiled
    sizes. If these are more than 512 on a type, the divisor is doubled until they are not.

    Profiled peak memory includes the state of the optimizer used for profiling. If another
    optimizer will train, the difference of the two states is added. So is what a worker takes of
    its device beside tensors (``costs.memory.reserve_of``).

    Args:
        problem: What is asked.
        virtual_nodes: N of the uniform regime, None for the free regime.
        interpolate: Whether to allow sizes that were not profiled.
        shards: What devices may share of the states; empty for nothing.

    Returns:
        A ``ShardedProblem`` if states may be shared.

    Raises:
        ProblemError: A device type has no profile, or the profiles are of several models or
            optimizers. Or they do not say which optimizer another one takes the place of, or which
            one trains where states are shared.
        InfeasibleError: No profiled size fits the memory of any device.
    """
    used, optimizer = _used(problem)
    link, pool = _slowest_link(problem), problem.pool
    options = [found for each in used if (found := _option(each, pool, link, bool(shards)))]
    if not options:
        raise _does_not_fit(used)
    asked: dict[str, Any] = {
        "model": used[0].model,
        "global_batch_size": problem.global_batch_size,
        "devices": tuple(options),
        "virtual_nodes": virtual_nodes,
        "optimizer": optimizer,
    }
    if shards:
        states = _states(used, optimizer, shards, link)
        more = CUT_BYTES * states["num_units"]
        asked["devices"] = tuple(
            replace(
                option,
                **changed_curves(option, lambda how, curve: _raised(curve, more, compares=True)),
            )
            for option in options
            if isinstance(option, ShardedDevices)
        )
        view: SplitProblem = ShardedProblem(**asked, **states)
    else:
        view = SplitProblem(**asked)
    if not interpolate:
        return view
    return replace(view, devices=tuple(_option_between(view, one) for one in view.devices))


def _states(
    used: Sequence[Profile],
    optimizer: OptimizerState | None,
    shards: Sequence[Shard],
    link: Link | None,
) -> dict[str, Any]:
    """What a ``ShardedProblem`` says of states and of their transfers."""
    if optimizer is None:
        raise ProblemError(
            "the profiles do not say which optimizer they count, so its state cannot be shared",
            hint=f"profile again, or state {option('optimizer')}",
        )
    rings = [p.sync for p in used if p.sync is not None and p.sync.bytes_per_second is not None]
    rates = [ring.bytes_per_second for ring in rings if ring.bytes_per_second is not None]
    late = [ring.latency_seconds or 0.0 for ring in rings]
    if link is not None:
        rates.append(link.bytes_per_second)
        late.append(link.latency_seconds)
    trained = max(profile.weight_bytes for profile in used)
    frozen = max(profile.frozen_weight_bytes or 0 for profile in used)
    layers = next((profile.layers for profile in used if profile.layers is not None), None)
    blocks = planned_blocks(used) or ()
    gathered, edge, number, _ = unit_bytes(layers, trained + frozen, blocks=blocks)
    gathered_trained, _, _, second = unit_bytes(layers, trained, frozen=False, blocks=blocks)
    return {
        "shards": tuple(shards),
        "weight_bytes": trained + frozen,
        "gathered_bytes": gathered,
        "edge_bytes": edge,
        "num_units": number,
        "bytes_per_second": min(rates, default=None),
        "latency_seconds": max(late, default=0.0),
        "frozen_bytes": frozen,
        "gathered_trained_bytes": gathered_trained,
        "second_trained_bytes": second,
    }


def planned_blocks(used: Sequence[Profile]) -> tuple[str, ...] | None:
    """The blocks that the memory of shared states is of, as a ``Plan`` has them.

    Raises:
        ProblemError: The profiles list unlike ones.
    """
    listed = {profile.blocks for profile in used if profile.blocks is not None}
    if len(listed) > 1:
        raise ProblemError(
            "the profiles list unlike blocks",
            hint=f"profile all types with the same {option('blocks')}",
        )
    is_known = any(p.layers is not None or any(b.moments for b in p.batch_curve) for p in used)
    return listed.pop() if is_known and listed else None


def _used(problem: Problem) -> tuple[list[Profile], OptimizerState | None]:
    """The profiles of a pool's types, with all that memory has to hold; and the optimizer."""
    used, total = problem.used, sum(problem.pool.num_devices.values())
    counted = problem.optimizer or _measured_optimizer(used)
    if problem.optimizer is not None:
        used = [_with_state(profile, problem.optimizer) for profile in used]
    free = problem.memory_reserve_bytes
    return [with_reserve(p, reserve_of(p, free, num_devices=total)) for p in used], counted


def split_keys(problem: Problem, pool: Cluster) -> Keys:
    """What splits of a pool count for a pair of devices: links, and that a host is busy."""
    by_type = {profile.device_type: profile for profile in problem.profiles}

    def keys(pair: Pair) -> dict[Key, float]:
        found: dict[Key, float] = {}
        link = stated_link(pool, pair)
        if link is not None:
            found = {("rate",): link.bytes_per_second, ("latency",): -link.latency_seconds}
        elif pair.level == "server":
            one, other = (by_type.get(name) for name in pair.types)
            measured = one and other and measured_between(one, other)
            if measured:
                found["rate",] = measured.bytes_per_second
        if pair.level == "server":
            for name in pair.types:
                if name in by_type and by_type[name].busy is not None:
                    found["alone", name] = 0.0
        return found

    return keys


def _slowest_link(problem: Problem) -> Link | None:
    """The least rate and the longest latency of the pool's links; None where none is known."""
    worst = worst_of(problem.pool, split_keys(problem, problem.pool))
    if ("rate",) not in worst:
        return None
    late = -worst.get(("latency",), 0.0)
    return Link(level="pool", bytes_per_second=worst["rate",], latency_seconds=late)


def _measured_optimizer(profiles: Sequence[Profile]) -> OptimizerState | None:
    """Return the optimizer used for profiling; None if a profile does not state it."""
    said = [profile.optimizer for profile in profiles]
    names = {entry.name for entry in said if entry is not None}
    if len(names) > 1:
        raise ProblemError(
            f"the profiles are of several optimizers: {', '.join(sorted(map(str, names)))}",
            hint=f"profile with one, or say which will train: {option('optimizer')}",
        )
    return None if None in said else said[0]


def _with_state(profile: Profile, optimizer: OptimizerState) -> Profile:
    """Return the profile with another optimizer's state in its peak memory."""
    if profile.optimizer is None:
        raise ProblemError(
            f"the profile of {profile.model} on {profile.device_type} does not say which "
            f"optimizer its peak memory holds, so {optimizer} cannot take its place",
            hint=f"profile again, or leave {option('optimizer')} and "
            f"{option('state_bytes_per_weight_byte')} out",
        )
    more = optimizer.state_bytes_per_weight_byte - profile.optimizer.state_bytes_per_weight_byte
    added = ceil(more * profile.weight_bytes)
    is_other = optimizer.name != profile.optimizer.name

    def with_state(curve: tuple[BatchPoint, ...]) -> tuple[BatchPoint, ...]:
        curve = _raised(curve, added)
        return tuple(replace(point, update_bytes=None) for point in curve) if is_other else curve

    busy = profile.busy and replace(profile.busy, batch_curve=with_state(profile.busy.batch_curve))
    return replace(
        profile,
        **changed_curves(profile, lambda how, curve: with_state(curve)),
        busy=busy,
        optimizer=optimizer,
    )


def _raised(
    curve: tuple[BatchPoint, ...], more_bytes: int, *, compares: bool = False
) -> tuple[BatchPoint, ...]:
    """Add to the peaks, or take from them.

    ``compares`` adds what compares workers, which profiles count with buffered passes.
    """

    def raised(point: BatchPoint) -> BatchPoint:
        more = COMPARED_BYTES if compares and point.buffered_pass_bytes is None else 0
        return replace(point, peak_memory_bytes=max(0, point.peak_memory_bytes + more_bytes + more))

    return tuple(map(raised, curve))


def _option(
    profile: Profile, pool: Cluster, link: Link | None, shares_states: bool
) -> DeviceOption | None:
    """The devices of a type; None if no size fits them."""
    busy = profile.busy if pool.shares_servers(profile.device_type) else None
    limit = profile.device_memory_bytes

    def costs_of(
        curve: tuple[BatchPoint, ...], update_seconds: float, fixed_seconds: float | None
    ) -> DeviceCosts | None:
        curve = curve if shares_states else fitting_points(curve, limit)
        return (
            DeviceCosts(
                batch_curve=curve, update_seconds=update_seconds, fixed_seconds=fixed_seconds or 0.0
            )
            if curve
            else None
        )

    alone = costs_of(profile.batch_curve, profile.update_seconds, profile.fixed_seconds)
    if alone is None:
        return None
    among = busy and costs_of(busy.batch_curve, busy.update_seconds, busy.fixed_seconds)
    costs = among or alone
    terms: dict[str, Any] = {
        "batch_curve": costs.batch_curve,
        "update_seconds": costs.update_seconds,
        "fixed_seconds": costs.fixed_seconds,
        "alone": alone if among else None,
        "device_type": profile.device_type,
        "num_devices": pool.num_devices[profile.device_type],
        "weight_bytes": profile.weight_bytes,
        "sync": profile.sync,
        "link_bytes_per_second": None if link is None else link.bytes_per_second,
        "link_latency_seconds": 0.0 if link is None else link.latency_seconds,
        "step_error": profile.step_error,
        "is_estimated": profile.estimate is not None,
    }
    if not shares_states:
        return DeviceOption(**terms)

    def beside_others(curve: tuple[BatchPoint, ...]) -> tuple[BatchPoint, ...]:
        if busy is None:
            return curve
        return tuple(
            replace(
                point,
                step_seconds=point.step_seconds
                * busy_ratio(profile.batch_curve, busy.batch_curve, point.batch_size),
                peak_memory_bytes=point.peak_memory_bytes + (profile.group_workspace_bytes or 0),
            )
            for point in curve
        )

    pinned = most_pinned_bytes(profile, pool)

    def on_host(point: BatchPoint) -> bool:
        return pinned is None or (point.pinned_bytes or 0) <= pinned

    others = changed_curves(
        profile, lambda how, curve: tuple(filter(on_host, beside_others(curve)))
    )
    return ShardedDevices(**{**others, **terms}, memory_bytes=limit)


def _does_not_fit(used: Sequence[Profile]) -> InfeasibleError:
    def short(profile: Profile) -> int:
        return profile.batch_curve[0].peak_memory_bytes - profile.device_memory_bytes

    least = min(used, key=short)
    point = least.batch_curve[0]
    return InfeasibleError(
        f"the model fits no device: on {least.device_type} its smallest profiled batch of "
        f"{point.batch_size} needs {point.peak_memory_bytes} bytes, {short(least)} more than the "
        f"{least.device_memory_bytes} there are",
        hint="use devices with more memory, or profile smaller batch sizes; or let devices share "
        f"the states ({option('shard', 'auto')})",
    )


def _option_between(view: SplitProblem, option: DeviceOption) -> DeviceOption:
    alone = option.alone and replace(option.alone, **_curve_between(view, option.alone.batch_curve))
    return replace(option, **_curve_between(view, option.batch_curve), alone=alone)


def _curve_between(view: SplitProblem, curve: tuple[BatchPoint, ...]) -> dict[str, Any]:
    """Interpolate a curve: all its points, and the sizes that are interpolated."""
    profiled = {point.batch_size for point in curve}
    added = tuple(size for size in _sizes_between(view, curve) if size not in profiled)
    points = [*curve, *(point_at(curve, size) for size in added)]
    points.sort(key=lambda point: point.batch_size)
    return {"batch_curve": tuple(points), "interpolated_sizes": added}


def _sizes_between(view: SplitProblem, curve: tuple[BatchPoint, ...]) -> list[int]:
    low, high = curve[0].batch_size, curve[-1].batch_size
    if view.virtual_nodes is not None:
        size = view.global_batch_size // view.virtual_nodes
        return [size] if low < size < high else []
    step = gcd(view.global_batch_size, *view.batch_sizes)
    while (high - low) // step > MAX_INTERPOLATED_SIZES:
        step *= 2
    return list(range(-(-low // step) * step, high, step))
