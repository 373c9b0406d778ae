"""Profiles with the terms that runs have measured: planning/costs/split.py solved for its inputs.

The rules, and why, are in docs/decisions.md ("Runs correct profiles").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...schema.problem import DeviceCosts, DeviceOption
from ...schema.profile import SHORTEST_PASS_SECONDS, BatchPoint, BusyHost, Profile, Sync, SyncPoint
from .comm import hides, least_seconds, slowest_wire, sync_seconds
from .compute import point_at, value_at
from .observed import Measured, Run, Worker, together, workers_of
from .split import closing_seconds, exposed_on

_SAME = 1e-9
"""Of the whole: what differs by less is the same number, computed in another order."""

Curve = tuple[BatchPoint, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A split's run, its workers of all types, and the step they made together."""

    workers: tuple[Worker, ...]
    step_seconds: float


def corrected_by_splits(
    profiles: Sequence[Profile], runs: Sequence[Run]
) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """Fold what splits have measured into one model's profiles.

    The order of the runs does not matter, and a run that measured what was predicted changes
    nothing. After a single run, ``costs.split.predict`` gives its plan the step it measured.

    Returns:
        The profiles in their order, and one sentence for each measurement that was not used.
    """
    seen = []
    for run in runs:
        assert run.record.measured_step_seconds is not None
        seen.append(_Seen(workers_of(run.record), run.record.measured_step_seconds))
    said: list[str] = []
    folded = {p.device_type: _fold(p, seen, said) for p in profiles}
    before = {p.device_type: p for p in profiles}
    synced = {name: _with_sync(name, folded, before, seen) for name in folded}
    return tuple(synced[p.device_type] for p in profiles), tuple(said)


def _fold(profile: Profile, seen: Sequence[_Seen], said: list[str]) -> Profile:
    """Curve, update and fixed cost, alone and busy, and the peaks of one type."""
    workers = [w for run in seen for w in run.workers if w.device_type == profile.device_type]
    is_held = profile.emulation is not None
    if workers and is_held:
        said.append(
            f"{profile.device_type} is emulated: its passes are held to their table, and stay"
        )
    num_busy = max((w.num_host_devices for w in workers), default=1)
    other = sorted({w.num_host_devices for w in workers} - {1, num_busy})
    if other and not is_held:
        said.append(
            f"{profile.device_type}: with {num_busy} devices of the host at work, not with "
            f"{', '.join(map(str, other))}, which other runs had"
        )
    alone = [w for w in workers if is_held or w.num_host_devices == 1]
    busy = [] if is_held else [w for w in workers if 1 < w.num_host_devices == num_busy]
    costs = _folded(_alone(profile), alone, is_held=is_held)
    if costs != _alone(profile):
        profile = replace(profile, **_terms(costs))
    if busy:
        costs = _folded(_busy(profile), busy, is_held=False)
        if profile.busy is not None or costs != _alone(profile):
            profile = replace(profile, busy=BusyHost(num_devices=num_busy, **_terms(costs)))
    return _with_peaks(profile, workers)


def _terms(costs: DeviceCosts) -> dict[str, Any]:
    """The fields that profiles and busy hosts have of a device's costs."""
    names = ("batch_curve", "update_seconds", "fixed_seconds")
    return {name: getattr(costs, name) for name in names}


def _alone(profile: Profile) -> DeviceCosts:
    return DeviceCosts(
        batch_curve=profile.batch_curve,
        update_seconds=profile.update_seconds,
        fixed_seconds=profile.fixed_seconds or 0.0,
    )


def _busy(profile: Profile) -> DeviceCosts:
    """The costs with the host's other devices at work; those of a device alone where unmeasured."""
    busy = profile.busy
    if busy is None:
        return _alone(profile)
    return DeviceCosts(
        batch_curve=busy.batch_curve,
        update_seconds=busy.update_seconds,
        fixed_seconds=busy.fixed_seconds,
    )


def _folded(costs: DeviceCosts, workers: Sequence[Worker], *, is_held: bool) -> DeviceCosts:
    """The terms that workers in one state of their host have measured."""
    if not workers:
        return costs
    whole = max(worker.step.seconds for worker in workers)
    update = together([worker.update for worker in workers]).seconds
    curve = costs.batch_curve if is_held else _curve(costs, workers)
    rest = together(
        [
            Measured(
                w.own_seconds - w.virtual_nodes * point_at(curve, w.batch_size).step_seconds,
                w.rest_interval,
            )
            for w in workers
        ]
    ).seconds
    return DeviceCosts(
        batch_curve=curve,
        update_seconds=_settled(costs.update_seconds, update, whole),
        fixed_seconds=_settled(costs.fixed_seconds, max(0.0, rest), whole),
    )


def _settled(before: float, after: float, whole: float) -> float:
    return before if abs(after - before) <= _SAME * whole else after


def _curve(costs: DeviceCosts, workers: Sequence[Worker]) -> Curve:
    """Measured sizes take the measurement; others are scaled as the nearest measured ones."""
    before = {point.batch_size: point for point in costs.batch_curve}
    measured: dict[int, BatchPoint] = {}
    ratios: list[tuple[int, float]] = []
    for size in sorted({worker.batch_size for worker in workers}):
        point = point_at(costs.batch_curve, size)
        found = _point(point, costs, [w for w in workers if w.batch_size == size])
        ratios.append((size, found.step_seconds / point.step_seconds))
        if found != point:
            measured[size] = found
    sizes = sorted(before.keys() | measured.keys())
    return tuple(
        measured[size] if size in measured else _scaled(before[size], value_at(ratios, size))
        for size in sizes
    )


def _point(point: BatchPoint, costs: DeviceCosts, workers: Sequence[Worker]) -> BatchPoint:
    """One size, from all workers that ran it."""
    known = [w.virtual_node for w in workers if w.virtual_node is not None]
    run = together(known or [_share(point, costs, worker) for worker in workers])
    error = point.step_seconds_error
    own = Measured(point.step_seconds, None if error is None else error * point.step_seconds)
    chosen = _chosen(own, run)
    # More than its whole step cannot be a worker's virtual nodes.
    most = max(worker.own_seconds / worker.virtual_nodes for worker in workers)
    seconds = max(min(chosen.seconds, most), SHORTEST_PASS_SECONDS)
    if abs(seconds - point.step_seconds) <= _SAME * point.step_seconds:
        return point
    loads = [w.load_seconds for w in workers if w.load_seconds is not None]
    scaled = _scaled(point, seconds / point.step_seconds)
    load = scaled.load_seconds
    if load is not None and loads:
        most_load = max(0.0, seconds - (scaled.virtual_node_seconds or 0.0))
        load = min(together([Measured(value) for value in loads]).seconds, most_load)
    interval = chosen.interval
    return replace(
        scaled,
        step_seconds=seconds,
        load_seconds=load,
        step_seconds_error=None if interval is None else interval / seconds,
    )


def _share(point: BatchPoint, costs: DeviceCosts, worker: Worker) -> Measured:
    """A virtual node of a run that tells only the whole: in proportion to what was predicted."""
    whole = worker.virtual_nodes * point.step_seconds + costs.fixed_seconds
    return Measured(point.step_seconds * (worker.own_seconds / whole))


def _chosen(profile: Measured, run: Measured) -> Measured:
    """The mean of prediction and measurement if their intervals overlap, else the measurement."""
    if not profile.interval or not run.interval:
        return run
    if abs(profile.seconds - run.seconds) > profile.interval + run.interval:
        return run
    return together([profile, run])


def _scaled(point: BatchPoint, ratio: float) -> BatchPoint:
    """The point with all its times a ratio of what they were."""
    if abs(ratio - 1) <= _SAME:
        return point
    node, load = point.virtual_node_seconds, point.load_seconds
    seconds = max(point.step_seconds * ratio, SHORTEST_PASS_SECONDS)
    load = None if load is None else min(load * ratio, seconds)
    node = None if node is None else min(node * ratio, seconds - (load or 0.0))
    sums = tuple(replace(one, seconds_left=one.seconds_left * ratio) for one in point.sums)
    return replace(
        point, step_seconds=seconds, load_seconds=load, virtual_node_seconds=node, sums=sums
    )


def _with_peaks(profile: Profile, workers: Sequence[Worker]) -> Profile:
    """The largest peak that was measured at each size."""
    peaks: dict[int, int] = {}
    for worker in workers:
        if worker.peak_memory_bytes is not None:
            known = peaks.get(worker.batch_size, 0)
            peaks[worker.batch_size] = max(known, worker.peak_memory_bytes)

    def raised(curve: Curve) -> Curve:
        return tuple(
            replace(p, peak_memory_bytes=peaks[p.batch_size])
            if peaks.get(p.batch_size, 0) > p.peak_memory_bytes
            else p
            for p in curve
        )

    busy = profile.busy
    if busy is not None:
        busy = replace(busy, batch_curve=raised(busy.batch_curve))
    return replace(profile, batch_curve=raised(profile.batch_curve), busy=busy)


def _with_sync(
    name: str, folded: dict[str, Profile], before: dict[str, Profile], seen: Sequence[_Seen]
) -> Profile:
    """Synchronisation: what is left of a step beside its slowest worker."""
    # Where the profile tells sizes apart, all of them are moved by as much.
    profile = folded[name]
    mine = [
        run
        for run in seen
        if len(run.workers) > 1 and any(w.device_type == name for w in run.workers)
    ]
    if not mine:
        return profile
    number = max(len(run.workers) for run in mine)
    mine = [run for run in mine if len(run.workers) == number]
    left = together([Measured(_left(run, folded)) for run in mine]).seconds
    types = {w.device_type for run in mine for w in run.workers}
    predicted = max(sync_seconds(_option(before[kind]), number) for kind in types)
    if abs(left - predicted) <= _SAME * max(run.step_seconds for run in mine):
        return profile
    if any(hides(_option(folded[kind])) for kind in types):
        # What was measured takes the place of what passes were estimated to hide.
        folded = {kind: _without_sums(one) for kind, one in folded.items()}
        profile = folded[name]
        left = together([Measured(_left(run, folded)) for run in mine]).seconds
    if left < 0:
        profile = _cheaper(profile, -left, mine)
    sync = profile.sync or Sync(num_devices=number, sync_seconds=0.0)
    left = max(0.0, left)
    more = left - least_seconds(sync)
    points = tuple(
        SyncPoint(batch_size=point.batch_size, sync_seconds=max(0.0, point.counted_seconds + more))
        for point in sync.by_batch_size
    )
    whole = max(0.0, sync.counted_seconds + more) if points else left
    sync = replace(
        sync, num_devices=number, sync_seconds=whole, at_most_seconds=None, by_batch_size=points
    )
    return replace(profile, sync=sync)


def _without_sums(profile: Profile) -> Profile:
    def bare(curve: Curve) -> Curve:
        return tuple(replace(point, sums=()) for point in curve)

    busy = profile.busy and replace(profile.busy, batch_curve=bare(profile.busy.batch_curve))
    return replace(profile, batch_curve=bare(profile.batch_curve), busy=busy)


def _left(run: _Seen, profiles: dict[str, Profile]) -> float:
    own = []
    options = {worker.device_type: _option(profiles[worker.device_type]) for worker in run.workers}
    wire = slowest_wire(options.values())
    for worker in run.workers:
        profile = profiles[worker.device_type]
        costs = _busy(profile) if worker.num_host_devices > 1 else _alone(profile)
        point = point_at(costs.batch_curve, worker.batch_size)
        exposed = exposed_on(options[worker.device_type], point, len(run.workers), wire) or 0.0
        own.append(worker.virtual_nodes * point.step_seconds + exposed + closing_seconds(costs))
    return run.step_seconds - max(own)


def _cheaper(profile: Profile, seconds: float, runs: Sequence[_Seen]) -> Profile:
    """Reduce the fixed cost by the amount that synchronisation would be below zero."""
    mine = [w for run in runs for w in run.workers if w.device_type == profile.device_type]
    if any(w.num_host_devices > 1 for w in mine) and profile.busy is not None:
        less = max(0.0, profile.busy.fixed_seconds - seconds)
        return replace(profile, busy=replace(profile.busy, fixed_seconds=less))
    fixed = profile.fixed_seconds
    return profile if fixed is None else replace(profile, fixed_seconds=max(0.0, fixed - seconds))


def _option(profile: Profile) -> DeviceOption:
    return DeviceOption(
        device_type=profile.device_type,
        num_devices=1,
        batch_curve=profile.batch_curve,
        update_seconds=profile.update_seconds,
        weight_bytes=profile.weight_bytes,
        sync=profile.sync,
    )
