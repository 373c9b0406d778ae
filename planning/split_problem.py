"""Build the problem of a batch split from profiles and a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd

from ..schema.choices import Shard
from ..schema.cluster import Cluster, Link
from ..schema.errors import InfeasibleError, ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.options import option
from ..schema.problem import (
    AloneDevice,
    DeviceOption,
    ShardedDevices,
    ShardedProblem,
    SplitProblem,
)
from ..schema.profile import BatchPoint, BusyHost, Profile
from ..schema.records import nearest
from .costs.compute import point_at
from .costs.memory import fitting_points, reserve_of, with_reserve
from .costs.sharding import unit_bytes
from .links import Pair, measured_between, stated_link
from .pool_parts import Key, Keys, worst_of

MAX_INTERPOLATED_SIZES = 512


def split_problem(
    profiles: Sequence[Profile],
    cluster: Cluster,
    global_batch_size: int,
    virtual_nodes: int | None = None,
    interpolate: bool = False,
    optimizer: OptimizerState | None = None,
    memory_reserve_bytes: int = 0,
) -> SplitProblem:
    """Build the problem from the profiles of a cluster's device types (VirtualFlow 5.1.2).

    Sizes that do not fit a device's memory are dropped, and so is a type on which no size fits. The
    memory is the cluster's if stated, else the profiled device's. A plan on one device uses the
    measurements made on one device alone. A plan on several devices uses those made on a busy host,
    if some server holds the type with other devices, the type was measured so, and a measured size
    fits. The ring of gradients is as slow as the pool's slowest link, where that is known: stated,
    or measured between two types (``split_keys``).

    With ``interpolate``, sizes between profiled ones are allowed; their time and memory are linear
    between the neighbours'. In the uniform regime this is the one size that the plan needs. In the
    free regime it is every multiple of the greatest common divisor of the batch and all profiled
    sizes. If these are more than 512 on a type, the divisor is doubled until they are not.

    Profiled peak memory includes the state of the optimizer used for profiling. If another
    optimizer will train, the difference of the two states is added. So is what a worker takes of
    its device beside tensors (``costs.memory.reserve_of``).

    Args:
        profiles: Profiles of one model; those of types that the cluster lacks are ignored.
        cluster: The pool.
        global_batch_size: Samples per step, B.
        virtual_nodes: N of the uniform regime, None for the free regime.
        interpolate: Whether to allow sizes that were not profiled.
        optimizer: The optimizer that will train; None takes the profiles'.
        memory_reserve_bytes: Bytes of each device to leave free besides.

    Raises:
        ProblemError: A device type has no profile, the profiles are of several models or
            optimizers, or do not say which optimizer another one takes the place of.
        InfeasibleError: No profiled size fits the memory of any device.
    """
    cluster = cluster.spelled_as(profile.device_type for profile in profiles)
    used, counted = _used(profiles, cluster, optimizer, memory_reserve_bytes)
    link = _slowest_link(used, cluster)
    options, short = [], []
    for profile in used:
        name = profile.device_type
        number = cluster.num_devices[name]
        limit = cluster.device_types[name].memory_bytes or profile.device_memory_bytes
        curve = fitting_points(profile.batch_curve, limit)
        if curve:
            options.append(
                _option(profile, number, curve, _busy_host(profile, limit, cluster), link)
            )
        else:
            short.append((name, profile.batch_curve[0], limit))
    if not options:
        raise _does_not_fit(short)
    problem = SplitProblem(
        model=used[0].model,
        global_batch_size=global_batch_size,
        devices=tuple(options),
        virtual_nodes=virtual_nodes,
        optimizer=counted,
    )
    if not interpolate:
        return problem
    return replace(problem, devices=tuple(_option_between(problem, one) for one in options))


def sharded_problem(
    profiles: Sequence[Profile],
    cluster: Cluster,
    global_batch_size: int,
    shards: Sequence[Shard],
    virtual_nodes: int | None = None,
    interpolate: bool = False,
    optimizer: OptimizerState | None = None,
    memory_reserve_bytes: int = 0,
) -> ShardedProblem:
    """Build the problem of a split whose devices share the model's states.

    As ``split_problem``, but sizes stay whose peak fits no device: with less of the states it may.
    Gathers and reductions run at the rate of the slowest link, and no faster than the slowest
    all-reduce that the profiles measured.

    ``shards`` is what may be shared; the other arguments are those of ``split_problem``.

    Raises:
        ProblemError: As ``split_problem``; or the profiles do not say which optimizer trains.
    """
    cluster = cluster.spelled_as(profile.device_type for profile in profiles)
    used, counted = _used(profiles, cluster, optimizer, memory_reserve_bytes)
    if counted is None:
        raise ProblemError(
            "the profiles do not say which optimizer they count, so its state cannot be shared",
            hint=f"profile again, or state {option('optimizer')}",
        )
    link, kinds = _slowest_link(used, cluster), []
    for profile in used:
        name = profile.device_type
        busy = profile.busy if cluster.shares_servers(name) else None
        costs = busy or profile
        kinds.append(
            ShardedDevices(
                device_type=name,
                num_devices=cluster.num_devices[name],
                memory_bytes=cluster.device_types[name].memory_bytes or profile.device_memory_bytes,
                batch_curve=costs.batch_curve,
                update_seconds=costs.update_seconds,
                fixed_seconds=costs.fixed_seconds or 0.0,
                measured_busy=busy is not None,
            )
        )
    rings = [p.sync for p in used if p.sync is not None and p.sync.bytes_per_second is not None]
    rates = [ring.bytes_per_second for ring in rings if ring.bytes_per_second is not None]
    rates += [] if link is None else [link.bytes_per_second]
    late = [ring.latency_seconds or 0.0 for ring in rings]
    late += [] if link is None else [link.latency_seconds]
    trained = max(profile.weight_bytes for profile in used)
    frozen = max(profile.frozen_weight_bytes or 0 for profile in used)
    weights = trained + frozen
    layers = next((profile.layers for profile in used if profile.layers is not None), None)
    gathered, edge, number = unit_bytes(layers, weights)
    problem = ShardedProblem(
        model=used[0].model,
        global_batch_size=global_batch_size,
        devices=tuple(kinds),
        optimizer=counted,
        shards=tuple(shards),
        weight_bytes=weights,
        gathered_bytes=gathered,
        edge_bytes=edge,
        num_units=number,
        bytes_per_second=min(rates, default=None),
        latency_seconds=max(late, default=0.0),
        virtual_nodes=virtual_nodes,
        frozen_bytes=frozen,
        gathered_trained_bytes=unit_bytes(layers, trained, frozen=False)[0],
    )
    if not interpolate:
        return problem
    between = [_curve_between(problem, kind.batch_curve) for kind in kinds]
    return replace(
        problem,
        devices=tuple(
            replace(kind, batch_curve=curve, interpolated_sizes=added)
            for kind, (curve, added) in zip(kinds, between, strict=True)
        ),
    )


def _used(
    profiles: Sequence[Profile],
    cluster: Cluster,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int,
) -> tuple[list[Profile], OptimizerState | None]:
    """The profiles of a pool's types, with all that memory has to hold; and the optimizer."""
    _check_model(profiles)
    by_type = _by_device_type(profiles)
    used = [_profile_of(name, by_type) for name in cluster.num_devices]
    counted, total = optimizer or _measured_optimizer(used), sum(cluster.num_devices.values())
    if optimizer is not None:
        used = [_with_state(profile, optimizer) for profile in used]
    reserves = [reserve_of(each, memory_reserve_bytes, num_devices=total) for each in used]
    return [with_reserve(*each) for each in zip(used, reserves, strict=True)], counted


def split_keys(profiles: Sequence[Profile], pool: Cluster) -> Keys:
    """What splits of a pool count for a pair of devices: links, and that a host is busy."""
    by_type = {profile.device_type: profile for profile in profiles}

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


def _slowest_link(profiles: Sequence[Profile], pool: Cluster) -> Link | None:
    """The least rate and the longest latency of the pool's links; None where none is known."""
    worst = worst_of(pool, split_keys(profiles, pool))
    if ("rate",) not in worst:
        return None
    late = -worst.get(("latency",), 0.0)
    return Link(level="pool", bytes_per_second=worst["rate",], latency_seconds=late)


def _check_model(profiles: Sequence[Profile]) -> None:
    models = sorted({profile.model for profile in profiles})
    if not models:
        raise ProblemError("there are no profiles", hint="run `hetflow profile` first")
    if len(models) > 1:
        raise ProblemError(
            f"the profiles are of several models: {', '.join(models)}",
            hint=f"choose one, for example {option('model', models[0])}",
        )


def _by_device_type(profiles: Sequence[Profile]) -> dict[str, Profile]:
    found: dict[str, Profile] = {}
    for profile in profiles:
        if profile.device_type in found:
            raise ProblemError(
                f"two profiles of {profile.model} on {profile.device_type}; keep one of them"
            )
        found[profile.device_type] = profile
    return found


def _profile_of(name: str, by_type: dict[str, Profile]) -> Profile:
    if name in by_type:
        return by_type[name]
    guess = nearest(name, list(by_type))
    raise ProblemError(
        f"no profile of device type {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
        hint=f"profiled types: {', '.join(sorted(by_type))}",
    )


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

    def with_added(curve: tuple[BatchPoint, ...]) -> tuple[BatchPoint, ...]:
        return tuple(
            replace(point, peak_memory_bytes=max(0, point.peak_memory_bytes + added))
            for point in curve
        )

    busy = profile.busy and replace(profile.busy, batch_curve=with_added(profile.busy.batch_curve))
    return replace(
        profile, batch_curve=with_added(profile.batch_curve), busy=busy, optimizer=optimizer
    )


def _busy_host(profile: Profile, limit: int, cluster: Cluster) -> BusyHost | None:
    """Select the busy-host measurements for plans on several devices; None if there are none.

    Without them, such plans use the measurements made on one device alone.
    """
    if profile.busy is None or not cluster.shares_servers(profile.device_type):
        return None
    curve = fitting_points(profile.busy.batch_curve, limit)
    return replace(profile.busy, batch_curve=curve) if curve else None


def _option(
    profile: Profile,
    number: int,
    curve: tuple[BatchPoint, ...],
    busy: BusyHost | None,
    link: Link | None,
) -> DeviceOption:
    alone = AloneDevice(
        batch_curve=curve,
        update_seconds=profile.update_seconds,
        fixed_seconds=profile.fixed_seconds or 0.0,
    )
    costs = busy or alone
    return DeviceOption(
        device_type=profile.device_type,
        num_devices=number,
        batch_curve=costs.batch_curve,
        update_seconds=costs.update_seconds,
        fixed_seconds=costs.fixed_seconds,
        alone=None if busy is None else alone,
        step_error=profile.step_error,
        weight_bytes=profile.weight_bytes,
        sync=profile.sync,
        link_bytes_per_second=None if link is None else link.bytes_per_second,
        link_latency_seconds=0.0 if link is None else link.latency_seconds,
    )


def _does_not_fit(short: list[tuple[str, BatchPoint, int]]) -> InfeasibleError:
    name, point, limit = min(short, key=lambda entry: entry[1].peak_memory_bytes - entry[2])
    missing = point.peak_memory_bytes - limit
    return InfeasibleError(
        f"the model fits no device: on {name} its smallest profiled batch of {point.batch_size} "
        f"needs {point.peak_memory_bytes} bytes, {missing} more than the {limit} there are",
        hint="use devices with more memory, or profile smaller batch sizes; or let devices share "
        f"the states ({option('shard', 'auto')})",
    )


def _option_between(problem: SplitProblem, option: DeviceOption) -> DeviceOption:
    curve, added = _curve_between(problem, option.batch_curve)
    alone = option.alone
    if alone is not None:
        own, own_added = _curve_between(problem, alone.batch_curve)
        alone = replace(alone, batch_curve=own, interpolated_sizes=own_added)
    return replace(option, batch_curve=curve, interpolated_sizes=added, alone=alone)


def _curve_between(
    problem: SplitProblem | ShardedProblem, curve: tuple[BatchPoint, ...]
) -> tuple[tuple[BatchPoint, ...], tuple[int, ...]]:
    """Interpolate a curve: all its points, and the sizes that are interpolated."""
    profiled = {point.batch_size for point in curve}
    added = tuple(size for size in _sizes_between(problem, curve) if size not in profiled)
    points = [*curve, *(point_at(curve, size) for size in added)]
    return tuple(sorted(points, key=lambda point: point.batch_size)), added


def _sizes_between(
    problem: SplitProblem | ShardedProblem, curve: tuple[BatchPoint, ...]
) -> list[int]:
    low, high = curve[0].batch_size, curve[-1].batch_size
    if problem.virtual_nodes is not None:
        size = problem.global_batch_size // problem.virtual_nodes
        return [size] if low < size < high else []
    step = gcd(problem.global_batch_size, *problem.batch_sizes)
    while (high - low) // step > MAX_INTERPOLATED_SIZES:
        step *= 2
    return list(range(-(-low // step) * step, high, step))
