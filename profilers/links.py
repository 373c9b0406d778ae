"""Gradient synchronisation between local devices, and the link between two of them.

Synchronisation is the distributed minus the single-device step time at batch size 1 (VirtualFlow
5.1.2), with real worker processes, the runtime's own gradient buffer and overlap. A ring of two
numbers, fitted to all-reduce times over message sizes, carries it to other device counts. What a
link does is measured apart, by messages: an all-reduce also costs what is no link's.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ..devices.backend import DeviceRequest
from ..devices.collectives import HOST_COLLECTIVE, LOOPBACK
from ..devices.local import Pinned, pinned_worker
from ..schema.errors import HetflowError
from ..schema.profile import LinkPoint, Links, MessageTime, Sync, TypeLink
from .process import GROUP_ANSWER_SECONDS, Child, ChildDied
from .several_devices import Crew
from .targets import Target
from .timing import RepeatTiming

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_ROUNDS = 50
_FLOOR = 1e-6
_LEAST_SHARE = 0.01  # of the longest message's time that its bytes must explain


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A fitted link. ``error`` is the median of |model - measured| / measured over sizes."""

    latency_seconds: float
    bytes_per_second: float
    error: float


def fit_link(message_bytes: Sequence[int], seconds: Sequence[float]) -> LinkFit | None:
    """Fit ``latency_seconds + bytes / bytes_per_second`` to the times of messages.

    Args:
        message_bytes: Sizes that were sent.
        seconds: The time of each, > 0.

    Returns:
        The fit; None where time does not grow with size, so that no bandwidth can be told.
    """
    return _fit(1.0, 1.0, message_bytes, seconds)


def fit_ring(
    num_devices: int, message_bytes: Sequence[int], seconds: Sequence[float]
) -> LinkFit | None:
    """Fit latency and bandwidth of a ring all-reduce (costs.comm.collective_seconds) to its times.

    Args:
        num_devices: Members of the ring.
        message_bytes: Sizes that were all-reduced.
        seconds: The time of each, > 0.

    Returns:
        As ``fit_link``.
    """
    hops = 2 * (num_devices - 1)
    return _fit(hops, hops / num_devices, message_bytes, seconds)


def _fit(
    hops: float, share: float, message_bytes: Sequence[int], seconds: Sequence[float]
) -> LinkFit | None:
    """Times of ``hops`` latencies and ``share`` of the bytes, by their relative errors."""
    import numpy as np

    measured = np.asarray(seconds, dtype=np.float64)
    carried = share * np.asarray(message_bytes, dtype=np.float64)
    # Rows are divided by their time, so that the residuals are relative errors: short messages then
    # decide the latency as much as long ones the bandwidth. [sizes, 2]
    terms = np.stack([np.full_like(measured, hops), carried], axis=1) / measured[:, None]
    latency, seconds_per_byte = least_deviations(terms, np.ones(len(measured))).tolist()
    if seconds_per_byte * carried.max() < _LEAST_SHARE * measured.max():
        return None
    errors = np.abs(terms @ [latency, seconds_per_byte] - 1)
    return LinkFit(
        latency_seconds=latency,
        bytes_per_second=1 / seconds_per_byte,
        error=float(np.median(errors)),
    )


def least_deviations(terms: "Array", values: "Array") -> "Array":
    """Minimise the sum of |terms @ x - values| over x >= 0, by reweighted least squares.

    Absolute values, not squares, so that a few disturbed measurements do not tilt the fit.

    Args:
        terms: [measurements, unknowns]; a handful of unknowns.
        values: [measurements], near 1: relative to what was measured.

    Returns:
        [unknowns].
    """
    import numpy as np

    weights = np.ones(len(terms))
    for _ in range(_ROUNDS):
        unknown = _non_negative(terms * weights[:, None], values * weights)
        # The square of a residual, times this weight's square, is its absolute value. The floor
        # keeps one row that fits exactly from deciding everything.
        weights = np.maximum(np.abs(terms @ unknown - values), _FLOOR) ** -0.5
    return unknown


def _non_negative(terms: "Array", values: "Array") -> "Array":
    """Least squares over x >= 0: the best over every set of unknowns that are not 0."""
    import numpy as np

    number = terms.shape[1]
    best, least = np.zeros(number), float(np.linalg.norm(values))
    # 2^n sets of n unknowns, of which there are a handful. With all unknowns the error is least, so
    # smaller sets are tried only where some unknown comes out negative.
    for size in range(number, 0, -1):
        for chosen in map(list, combinations(range(number), size)):
            found = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
            if (found < 0).any():
                continue
            if size == number:
                return np.asarray(found, dtype=np.float64)
            error = float(np.linalg.norm(terms[:, chosen] @ found - values))
            if error < least:
                best, least = np.zeros(number), error
                best[chosen] = found
    return best


MESSAGE_BYTES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """How to measure synchronisation. Fewer than 2 devices: not at all.

    Batch size 1 isolates synchronisation best; a model that cannot train on one sample
    (batch-norm, say) gets ``fallback_batch_size``.
    """

    num_devices: int = 2
    links: bool = False
    fallback_batch_size: int = 1
    optimizer: str = "sgd-momentum"
    budget_seconds: float = 8.0


def measure_sync(
    target: Target, request: DeviceRequest, options: SyncOptions
) -> tuple[Sync | None, dict[str, Any]]:
    """Measure synchronisation between local devices of one type.

    Returns:
        The measurement, None where it was not possible, and its provenance: how, or why not.
    """
    why_not = obstacle(request, options)
    if why_not:
        return None, {"skipped": why_not}
    failure: Exception | None = None
    for batch_size in dict.fromkeys((1, options.fallback_batch_size)):
        try:
            with Crew(target, request, options.num_devices, options.optimizer) as crew:
                answers = crew.exchange(
                    batch_size=batch_size,
                    budget_seconds=options.budget_seconds,
                    measures_messages=options.links,
                )
        except (HetflowError, ChildDied, MemoryError) as error:
            failure = error
            continue
        sync, provenance = _summary(request, options, answers)
        return sync, {"backend": crew.backend, "batch_size": batch_size, **provenance}
    # A profile without synchronisation is still worth having; it says what is missing.
    return None, {"skipped": f"the workers failed: {said(failure)}"}


def obstacle(request: DeviceRequest, options: SyncOptions) -> str | None:
    """Why synchronisation cannot be measured, or None."""
    if options.num_devices < 2:
        return "not asked for"
    return too_few_devices(request, options.num_devices)


def too_few_devices(request: DeviceRequest, num_devices: int) -> str | None:
    """Why so many workers cannot be had, or None: on a CPU they may share cores."""
    local = request.local
    if local.is_host or local.num_devices >= num_devices:
        return None
    return f"{num_devices} {local.device_type} devices are needed, {local.num_devices} here"


def _shared_cores(request: DeviceRequest, num_workers: int) -> str | None:
    cores = request.local.num_devices
    if request.local.is_host and cores < num_workers:
        return f"workers shared {cores} cores"
    return None


def said(error: Exception | None) -> str:
    """What a worker's failure was, in one line."""
    if isinstance(error, ChildDied):
        return f"{error.how}: {error.said}"
    return str(error) or "out of memory"


def _slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """A step is over when its slowest worker is: the maximum over workers of each step."""
    return [max(step) for step in zip(*samples, strict=True)]


def _summary(
    request: DeviceRequest, options: SyncOptions, answers: list[dict[str, Any]]
) -> tuple[Sync, dict[str, Any]]:
    single = RepeatTiming.of(_slowest([answer["single"] for answer in answers]))
    distributed = RepeatTiming.of(_slowest([answer["distributed"] for answer in answers]))
    provenance: dict[str, Any] = {
        "method": "distributed minus single step time",
        "single": asdict(single),
        "distributed": asdict(distributed),
    }
    known_seconds, at_most_seconds = distributed.minus(single).known_or_bound
    note = _shared_cores(request, options.num_devices)
    if note:
        provenance["note"] = note
    messages = _all_reduces(answers)
    fit = _ring_of(options.num_devices, messages, provenance) if messages else None
    sync = Sync(
        num_devices=options.num_devices,
        sync_seconds=known_seconds,
        at_most_seconds=at_most_seconds,
        latency_seconds=fit.latency_seconds if fit else None,
        bytes_per_second=fit.bytes_per_second if fit else None,
        messages=messages,
    )
    return sync, provenance


def _all_reduces(answers: list[dict[str, Any]]) -> tuple[MessageTime, ...]:
    return tuple(
        MessageTime(
            num_bytes=column[0]["num_bytes"],
            seconds=RepeatTiming.of(
                _slowest([entry["seconds"] for entry in column])
            ).median_seconds,
        )
        for column in zip(*(answer["messages"] for answer in answers), strict=True)
    )


def _ring_of(
    num_devices: int, messages: Sequence[MessageTime], provenance: dict[str, Any]
) -> LinkFit | None:
    sizes = [message.num_bytes for message in messages]
    fit = fit_ring(num_devices, sizes, [message.seconds for message in messages])
    provenance["messages"] = {"fit_error": fit.error if fit else None}
    if fit is None:
        provenance["messages"]["no_ring"] = "all-reduces did not take longer with their size"
    return fit


def measure_links(
    request: DeviceRequest, activation_bytes: Sequence[int] = (), budget_seconds: float = 4.0
) -> tuple[Links | None, dict[str, Any]]:
    """Measure the link between two local devices of one type, by messages as pipelines send them.

    Args:
        request: The device type; emulated types send as their base does.
        activation_bytes: What layers send; sizes between the least and the most are measured
            twice as densely.
        budget_seconds: Wall time to spend, about.

    Returns:
        The link, None where it could not be measured, and its provenance: how, or why not.
    """
    why_not = too_few_devices(request, 2)
    if why_not:
        return None, {"skipped": why_not}
    pins = [pinned_worker(request.local, rank) for rank in range(2)]
    return _linked(pins, activation_bytes, budget_seconds, note=_shared_cores(request, 2))


def measure_link_between(
    one: DeviceRequest, other: DeviceRequest, activation_bytes: Sequence[int], budget_seconds: float
) -> tuple[Links | None, dict[str, Any]]:
    """Measure the link between local devices of two types, as ``measure_links`` does of one.

    The first type's device sends there, the second's back.

    Returns:
        The link, None where it could not be measured, and its provenance: how, or why not.
    """
    if one.local.device_type == other.local.device_type:
        return None, {"skipped": "both are of one real type"}
    libraries = {one.local.backend.collective, other.local.backend.collective}
    backend = libraries.pop() if len(libraries) == 1 else HOST_COLLECTIVE
    pins = [pinned_worker(one.local, 0), pinned_worker(other.local, 0)]
    return _linked(pins, activation_bytes, budget_seconds, backend)


def message_sizes(activation_bytes: Sequence[int] = ()) -> tuple[int, ...]:
    """1 KiB to 16 MiB by steps of 4, by steps of 2 where activations lie, and on to the largest."""
    if not activation_bytes:
        return MESSAGE_BYTES
    least, most = min(activation_bytes), max(activation_bytes)
    between = [2 * size for size in MESSAGE_BYTES[:-1] if least / 4 < 2 * size < most * 4]
    beyond = []
    size = 4 * MESSAGE_BYTES[-1]
    while size < most:
        beyond.append(size)
        size *= 4
    if most > MESSAGE_BYTES[-1]:
        beyond.append(most)
    return tuple(sorted((*MESSAGE_BYTES, *between, *beyond)))


def links_of(
    message_bytes: Sequence[int],
    first: dict[str, Any],
    second: dict[str, Any],
    note: str | None = None,
) -> tuple[Links | None, dict[str, Any]]:
    """Put together what two workers measured (``messages.exchange_messages``).

    Args:
        message_bytes: Sizes that were sent.
        first: What rank 0 saw: messages back, and both at once.
        second: What rank 1 saw: messages there, and both at once.
        note: What to know of the measurement.

    Returns:
        The link, None where time does not grow with size, and its provenance.
    """
    there = [RepeatTiming.of(samples) for samples in second["there"]]
    back = [RepeatTiming.of(samples) for samples in first["back"]]
    pairs = zip(first["both"], second["both"], strict=True)
    both = [RepeatTiming.of(_slowest(pair)) for pair in pairs]
    fit = fit_link(message_bytes, [timing.median_seconds for timing in both])
    provenance: dict[str, Any] = {
        "method": "messages between two workers, there, back and both at once; fitted to the last",
        "fit_error": fit.error if fit else None,
        "repeats": min(timing.repeats for timing in both),
        "both": [
            {"num_bytes": size, **asdict(timing)}
            for size, timing in zip(message_bytes, both, strict=True)
        ],
        **({"note": note} if note else {}),
    }
    if fit is None:
        return None, {**provenance, "skipped": "messages did not take longer with their size"}
    points = tuple(
        LinkPoint(
            num_bytes=size,
            there_seconds=one.median_seconds,
            back_seconds=other.median_seconds,
            both_seconds=together.median_seconds,
        )
        for size, one, other, together in zip(message_bytes, there, back, both, strict=True)
    )
    ends = (first.get("channel_bytes"), second.get("channel_bytes"))
    links = Links(
        latency_seconds=fit.latency_seconds,
        bytes_per_second=fit.bytes_per_second,
        points=points,
        channel_bytes=max((end for end in ends if end is not None), default=None),
    )
    return links, provenance


def reversed_link(link: TypeLink, device_type: str) -> TypeLink:
    """A link as the other type sees it, to ``device_type``."""
    points = tuple(
        replace(point, there_seconds=point.back_seconds, back_seconds=point.there_seconds)
        for point in link.links.points
    )
    return TypeLink(device_type=device_type, links=replace(link.links, points=points))


def _linked(
    pins: Sequence[Pinned],
    activation_bytes: Sequence[int],
    budget_seconds: float,
    backend: str | None = None,
    note: str | None = None,
) -> tuple[Links | None, dict[str, Any]]:
    """The link between two workers, as ``measure_links`` returns it."""
    sizes = message_sizes(activation_bytes)
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hetflow-links-"))
            workers = [stack.enter_context(Child(LOOPBACK | pin.environment)) for pin in pins]
            for rank, (worker, pin) in enumerate(zip(workers, pins, strict=True)):
                worker.send(
                    "messages",
                    rank=rank,
                    folder=folder,
                    device=pin.device,
                    message_bytes=list(sizes),
                    budget_seconds=budget_seconds,
                    backend=backend,
                )
            first, second = [worker.receive(GROUP_ANSWER_SECONDS) for worker in workers]
    except (HetflowError, ChildDied, MemoryError) as error:
        return None, {"skipped": f"the workers failed: {said(error)}"}
    return links_of(sizes, first, second, note)
