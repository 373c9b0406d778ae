"""Costs of steps while the host's other devices train too, and of synchronising them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..devices.backend import DeviceRequest
from ..schema.errors import HetflowError
from ..schema.profile import Sync
from . import links
from .carried import Carried, a_few, measured_and_carried
from .crew import Crew
from .loop_costs import LoopCosts, LoopPolicy, Rounds
from .process import ChildDied
from .sync_in_loop import measure_sync_in_loop
from .targets import Target

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

    Args:
        target: What they train.
        request: The device type; emulated types share their base's.
        alone: What each size costs a device alone.
        sync: Over how many devices to synchronise, and how to where the loop fails.
        options: How.
        clock: Wall seconds.
        progress: Told what is being measured now, and how many seconds it takes at most.
    """
    number = _num_busy(request, sync.num_devices)
    pass_seconds = {point.batch_size: point.step_seconds for point in alone.points}
    found: Carried | None = None
    skipped: str | None = "emulated types are held to their table"
    with Crew(target, request, max(number, 2), sync.optimizer) as crew:
        if number < 2 or sync.num_devices < 2:
            skipped = "not asked for" if sync.num_devices < 2 else "one device of the type here"
        elif options.with_curve:

            def rehearsed(sizes: Sequence[int]) -> LoopCosts:
                return Rounds(
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


def _num_busy(request: DeviceRequest, sync_devices: int) -> int:
    local = request.local.num_devices
    return min(local, sync_devices) if request.local.is_host else local


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
