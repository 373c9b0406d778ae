"""Costs of steps while the host's other devices train too, and of synchronising them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..devices.backend import DeviceRequest
from ..runtime.measurements import FEWEST_FOR_AN_INTERVAL, StepTimes
from ..schema.errors import HetflowError
from ..schema.profile import Sync, SyncPoint
from . import links
from .loop_costs import Carried, LoopCosts, LoopPolicy, RehearsalRounds, a_few, measured_and_carried
from .process import ChildDied
from .rehearsal import config_of
from .several_devices import Crew, GroupPeak
from .targets import Target
from .timing import RepeatTiming

# Synchronisation, measured in the loop that trains.
#
# A whole step of several workers that synchronise, minus the same step of the same workers at the
# same time without it: what is left is the exposed wait for the others and their sums. Both kinds
# alternate, so that a drift of the machine meets both; where the wait hides behind the backward
# pass it costs nothing, so several sizes are measured.
#
# How much hides depends on how long that pass is, so sizes are told apart where their intervals do
# not overlap; where they do, one median over all of them is better known than any of theirs. Rounds
# go on until each is known to a small part of its step, or the budget ends: between rehearsals of
# short steps the difference swings by more than what is looked for.
#
# The first steps after workers have met are longer, most of all where they synchronise, by up to
# more than what is looked for: rehearsals are long enough to settle, and only settled steps count.

_NUM_NODES = 2
_LONG_SECONDS = 0.5  # a pass: larger sizes are left out, and those that are both
_SHORT_SECONDS, _SPAN = 0.05, 4  # longer than this, and so many times as long as the smallest
_TOLERANCE = 0.02  # half the width of a median's interval, relative to the step
_REHEARSAL_SECONDS = 0.1  # rehearsals differ by more than their steps: many short ones
_MOST_STEPS = 40
_SETTLING_STEPS = 3  # the first of a rehearsal: a launch's first steps are not in its median either
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 20
_FEWEST_STEPS_FOR_PEAK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncInLoop:
    """Seconds of a step that synchronisation takes.

    Attributes:
        timing: Over rounds and sizes.
        by_size: [sizes] of each over its rounds; may be negative by noise.
        peak_bytes: [sizes] the most memory of a worker that synchronises.
        beside_bytes: The most that no allocator of tensors holds of its device; None on a CPU.
    """

    timing: RepeatTiming
    by_size: dict[int, RepeatTiming]
    peak_bytes: dict[int, int]
    beside_bytes: int | None = None

    @property
    def is_told_apart(self) -> bool:
        """Whether sizes differ: their intervals leave no one value for all."""
        found = self.by_size.values()
        if any(timing.repeats < FEWEST_FOR_AN_INTERVAL for timing in found):
            return False
        return max(t.low_seconds for t in found) > min(t.high_seconds for t in found)

    def sync(self, num_devices: int) -> Sync:
        """The profile's record of it, on so many devices."""
        seconds, at_most_seconds = self.timing.known_or_bound
        points = []
        for size, timing in self.by_size.items() if self.is_told_apart else ():
            known, bound = timing.known_or_bound
            points.append(SyncPoint(batch_size=size, sync_seconds=known, at_most_seconds=bound))
        return Sync(
            num_devices=num_devices,
            sync_seconds=seconds,
            at_most_seconds=at_most_seconds,
            by_batch_size=tuple(points),
        )


def measure_sync_in_loop(
    crew: Crew,
    pass_seconds: dict[int, float],
    *,
    budget_seconds: float,
    clock: Callable[[], float],
    progress: Callable[[str, float], None] = lambda text, left: None,
) -> SyncInLoop:
    """Measure it at up to three sizes, in turns.

    Args:
        crew: The workers; all of them synchronise.
        pass_seconds: About how long a pass of each size takes, alone.
        budget_seconds: Wall time to spend at most, but that two rounds are made at least.
        clock: Wall seconds.
        progress: Told what is measured, and how many seconds there are left.

    Raises:
        ChildDied, HetflowError, MemoryError: Workers failed.
    """
    sizes = sizes_to_measure(pass_seconds)
    found: dict[int, list[float]] = {size: [] for size in sizes}
    steps: dict[int, list[float]] = {size: [] for size in sizes}
    peaks: dict[int, GroupPeak] = {}
    end = clock() + budget_seconds
    for number in range(_MOST_ROUNDS):
        is_known = all(_is_known(found[size], steps[size]) for size in sizes)
        if number >= _FEWEST_ROUNDS and (is_known or clock() >= end):
            break
        for size in sizes:
            progress(f"gradient synchronisation at {size}", max(0.0, end - clock()))
            nodes = [size] * (1 if crew.is_of_script else _NUM_NODES)
            wanted = round(_REHEARSAL_SECONDS / (_NUM_NODES * max(pass_seconds[size], 1e-6)))
            num_steps = max(3, min(_MOST_STEPS, _SETTLING_STEPS + wanted))
            config = config_of([nodes] * crew.num_workers)
            # One right after the other: a machine drifts, and only their difference is looked for.
            apart = slowest(crew.beside(nodes, num_steps=num_steps))
            whole = slowest(crew.together(config, num_steps=num_steps))
            found[size].append(whole - apart)
            steps[size].append(whole)
            if size not in peaks:
                for_peak = max(_FEWEST_STEPS_FOR_PEAK, num_steps)
                peaks[size] = crew.peak_together(config, num_steps=for_peak)
    return SyncInLoop(
        timing=RepeatTiming.of([seconds for samples in found.values() for seconds in samples]),
        by_size={size: RepeatTiming.of(samples) for size, samples in found.items()},
        peak_bytes={size: peak.peak_bytes for size, peak in peaks.items()},
        beside_bytes=max(
            (p.beside_bytes for p in peaks.values() if p.beside_bytes is not None), default=None
        ),
    )


def _is_known(samples: Sequence[float], steps: Sequence[float]) -> bool:
    """Whether the interval of a size's median is narrow beside its step."""
    if len(samples) < FEWEST_FOR_AN_INTERVAL:
        return False
    found = RepeatTiming.of(samples)
    width = found.high_seconds - found.low_seconds
    return width / 2 <= _TOLERANCE * statistics.median(steps)


def sizes_to_measure(pass_seconds: dict[int, float]) -> list[int]:
    """The smallest, the largest and one between, without those whose passes are long.

    The noise of long passes is more than what is looked for, and they take most of the budget.
    """
    sizes = sorted(pass_seconds)
    limit = min(_LONG_SECONDS, max(_SHORT_SECONDS, _SPAN * pass_seconds[sizes[0]]))
    short = [size for size in sizes if pass_seconds[size] < limit] or sizes[:1]
    return [short[index] for index in sorted({0, len(short) // 2, len(short) - 1})]


def slowest(workers: Sequence[Sequence[StepTimes]]) -> float:
    """The median settled step of a rehearsal's slowest worker, in seconds.

    The first step never counts; of a few steps the last two do.
    """
    first = min(_SETTLING_STEPS, max(1, len(workers[0]) - 2))
    return max(statistics.median(step.ended for step in steps[first:]) for steps in workers)


Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyOptions:
    """How to measure with several devices.

    Attributes:
        policy: Of the rounds.
        sync_seconds: Wall time for synchronisation.
        with_curve: Whether to measure the sizes too, and not synchronisation alone.
    """

    policy: LoopPolicy
    sync_seconds: float
    with_curve: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """``carried`` with ``num_devices`` training at once, and ``sync``; None where unmeasured.

    ``peak_bytes`` are [sizes] the peaks of workers that synchronise, where those were measured.
    ``beside_bytes`` is what no allocator of tensors holds of their devices; None on a CPU.
    """

    num_devices: int
    carried: Carried | None
    costs_skipped: str | None
    sync: Sync | None
    sync_provenance: dict[str, Any]
    peak_bytes: dict[int, int]
    beside_bytes: int | None = None

    @property
    def costs(self) -> LoopCosts | None:
        """Measured and carried."""
        return None if self.carried is None else self.carried.costs


def measure_busy(
    target: Target,
    request: DeviceRequest,
    alone: LoopCosts,
    sync: links.SyncOptions,
    options: BusyOptions,
    clock: Callable[[], float],
    progress: Progress,
) -> Busy:
    """Train on several local devices of one type at once: by themselves, then synchronised.

    On GPUs all of the type are at work; on a CPU as many cores as synchronise, one thread each.
    """
    local = request.local.num_devices
    number = min(local, sync.num_devices) if request.local.is_host else local
    pass_seconds = {point.batch_size: point.step_seconds for point in alone.points}
    found: Carried | None = None
    skipped: str | None = "emulated types are held to their table"
    with Crew(target, request, max(number, 2), sync.optimizer) as crew:
        if number < 2 or sync.num_devices < 2:
            skipped = "not asked for" if sync.num_devices < 2 else "one device of the type here"
        elif options.with_curve:

            def rehearsed(sizes: Sequence[int]) -> LoopCosts:
                return RehearsalRounds(
                    crew.beside,
                    {size: pass_seconds[size] for size in sizes},
                    options.policy,
                    clock,
                    lambda text, left: progress(f"{text}, {number} devices busy", left),
                    is_of_script=target.is_script,
                ).run()

            try:
                crew.start()  # or it would spend the budget of the rounds
                if options.policy.carries:
                    own = {point.batch_size: point.timing for point in alone.points}
                    found = measured_and_carried(own, a_few(pass_seconds), rehearsed)
                else:
                    found = Carried(costs=rehearsed(list(pass_seconds)))
                skipped = None
            except (HetflowError, ChildDied, MemoryError) as error:
                skipped = f"the workers failed: {links.said(error)}"
        measured, provenance, peaks, beside = _sync_of(
            crew, target, request, pass_seconds, sync, options, clock, progress
        )
    return Busy(
        num_devices=number,
        carried=found,
        costs_skipped=skipped,
        sync=measured,
        sync_provenance=provenance,
        peak_bytes=peaks,
        beside_bytes=beside,
    )


def _sync_of(
    crew: Crew,
    target: Target,
    request: DeviceRequest,
    pass_seconds: dict[int, float],
    sync: links.SyncOptions,
    options: BusyOptions,
    clock: Callable[[], float],
    progress: Progress,
) -> tuple[Sync | None, dict[str, Any], dict[int, int], int | None]:
    """In the loop; as VirtualFlow 5.1.2 where that fails, and for its messages where asked for."""
    why_not = links.obstacle(request, sync)
    if why_not:
        return None, {"skipped": why_not}, {}, None
    try:
        with _crew_of(crew, target, request, sync) as workers:
            found = measure_sync_in_loop(
                workers,
                pass_seconds,
                budget_seconds=options.sync_seconds,
                clock=clock,
                progress=progress,
            )
    except (HetflowError, ChildDied, MemoryError) as error:
        crew.release()
        if target.is_script:
            return None, {"skipped": f"the workers failed: {links.said(error)}"}, {}, None
        progress("gradient synchronisation", None)
        other, provenance = links.measure_sync(target, request, sync)
        return other, {**provenance, "not_in_the_loop": links.said(error)}, {}, None
    provenance = {
        "method": "a step that synchronises minus the same step that does not, in the loop",
        "backend": crew.backend,
        **asdict(found.timing),
        "by_batch_size": {str(size): asdict(timing) for size, timing in found.by_size.items()},
        "told_apart": found.is_told_apart,
        "peak_memory_bytes": {str(size): peak for size, peak in found.peak_bytes.items()},
    }
    measured = found.sync(sync.num_devices)
    if not sync.links:
        return measured, provenance, found.peak_bytes, found.beside_bytes
    crew.release()
    progress("all-reduces over sizes", None)
    with_messages, of_messages = links.measure_sync(target, request, sync)
    if with_messages is None:
        told = {**provenance, "at_batch_1": of_messages}
        return measured, told, found.peak_bytes, found.beside_bytes
    return (
        replace(
            measured,
            latency_seconds=with_messages.latency_seconds,
            bytes_per_second=with_messages.bytes_per_second,
            messages=with_messages.messages,
        ),
        {**provenance, "at_batch_1": of_messages},
        found.peak_bytes,
        found.beside_bytes,
    )


def _crew_of(crew: Crew, target: Target, request: DeviceRequest, sync: links.SyncOptions) -> Crew:
    """The crew that was busy, if it has as many workers as synchronise."""
    if crew.num_workers == sync.num_devices:
        return crew
    crew.release()
    return Crew(target, request, sync.num_devices, sync.optimizer)
