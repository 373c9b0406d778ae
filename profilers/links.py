"""Gradient synchronisation and links between local devices (VirtualFlow 5.1.2).

Synchronisation is the distributed minus the single-device step time at batch size 1, with real
worker processes, the runtime's own gradient buffer and overlap. A link model of two numbers,
fitted to all-reduce times over message sizes, carries it to other device counts.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..schema.errors import HetflowError
from ..schema.profile import Sync
from .devices import DeviceRequest
from .process import Child, ChildDied
from .targets import Target
from .timing import Timing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

MESSAGE_BYTES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
_ANSWER_SECONDS = 600.0
_FIT_ROUNDS = 50
_FIT_FLOOR = 1e-6
_LEAST_SHARE = 0.01  # of the longest message's time that its bytes must explain
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A fitted link. ``error`` is the median of |model - measured| / measured over sizes."""

    latency_seconds: float
    bytes_per_second: float
    error: float


def measure_sync(
    target: Target, request: DeviceRequest, options: SyncOptions
) -> tuple[Sync | None, dict[str, Any]]:
    """Measure synchronisation between local devices of one type.

    Args:
        target: What the workers train.
        request: The device type; emulated types synchronise as their base does.
        options: How.

    Returns:
        The measurement, None where it was not possible, and its provenance: how, or why not.
    """
    why_not = obstacle(request, options)
    if why_not:
        return None, {"skipped": why_not}
    backend = "gloo" if request.torch_device == "cpu" else "nccl"
    failure: Exception | None = None
    for batch_size in dict.fromkeys((1, options.fallback_batch_size)):
        try:
            answers = _run_workers(target, request, options, backend, batch_size)
        except (HetflowError, ChildDied, MemoryError) as error:
            failure = error
            continue
        sync, provenance = _summary(request, options, answers)
        return sync, {"backend": backend, "batch_size": batch_size, **provenance}
    # A profile without synchronisation is still worth having; it says what is missing.
    return None, {"skipped": f"the workers failed: {said(failure)}"}


def fit_link(
    num_devices: int, message_bytes: Sequence[int], seconds: Sequence[float]
) -> LinkFit | None:
    """Fit latency and bandwidth of a ring all-reduce (costs.comm.ring_seconds) to its times.

    Relative errors are made small, so that short messages decide the latency as much as long ones
    the bandwidth; their absolute values, not squares, so that a few disturbed sizes do not tilt
    the line; neither number can be negative.

    Args:
        num_devices: Members of the ring.
        message_bytes: Sizes that were all-reduced.
        seconds: The time of each, > 0.

    Returns:
        The fit; None where time does not grow with size, so that no bandwidth can be told.
    """
    import numpy as np

    hops = 2 * (num_devices - 1)
    measured = np.asarray(seconds, dtype=np.float64)
    carried = hops / num_devices * np.asarray(message_bytes, dtype=np.float64)
    # Rows are divided by their time, so that the residuals are relative errors.
    terms = np.stack([np.full_like(measured, hops), carried], axis=1) / measured[:, None]
    latency, seconds_per_byte = _robust_fit(terms)
    if seconds_per_byte * carried.max() < _LEAST_SHARE * measured.max():
        return None
    errors = np.abs(terms @ [latency, seconds_per_byte] - 1)
    return LinkFit(
        latency_seconds=latency,
        bytes_per_second=1 / seconds_per_byte,
        error=float(np.median(errors)),
    )


def _robust_fit(terms: "Array") -> tuple[float, float]:
    """Least absolute deviations of ``terms @ x`` from 1, x >= 0, by reweighted least squares."""
    import numpy as np

    weights = np.ones(len(terms))
    for _ in range(_FIT_ROUNDS):
        unknown = _non_negative(terms * weights[:, None], weights)
        weights = np.maximum(np.abs(terms @ unknown - 1), _FIT_FLOOR) ** -0.5
    return float(unknown[0]), float(unknown[1])


def _non_negative(terms: "Array", values: "Array") -> "Array":
    """Least squares for two unknowns that cannot be negative: on the plane, else on an axis."""
    import numpy as np

    found: Array = np.linalg.lstsq(terms, values, rcond=None)[0].astype(np.float64)
    if (found >= 0).all():
        return found
    candidates = []
    for axis in range(2):
        column = terms[:, axis]
        candidate = np.zeros(2)
        candidate[axis] = max(0.0, float(column @ values / (column @ column)))
        candidates.append(candidate)
    return min(candidates, key=lambda x: float(np.linalg.norm(terms @ x - values)))


def obstacle(request: DeviceRequest, options: SyncOptions) -> str | None:
    """Why synchronisation cannot be measured, or None."""
    if options.num_devices < 2:
        return "not asked for"
    if request.torch_device != "cpu" and request.local.num_devices < options.num_devices:
        return (
            f"{options.num_devices} {request.local.device_type} devices are needed, "
            f"{request.local.num_devices} here"
        )
    return None


def said(error: Exception | None) -> str:
    """What a worker's failure was, in one line."""
    if isinstance(error, ChildDied):
        return f"{error.how}: {error.said}"
    return str(error) or "out of memory"


def _run_workers(
    target: Target,
    request: DeviceRequest,
    options: SyncOptions,
    backend: str,
    batch_size: int,
) -> list[dict[str, Any]]:
    on_cpu = request.torch_device == "cpu"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hetflow-sync-"))
        workers = [stack.enter_context(Child(_LOOPBACK)) for _ in range(options.num_devices)]
        for rank, worker in enumerate(workers):
            worker.send(
                "load",
                target=target.text,
                device="cpu" if on_cpu else request.local.torch_devices[rank],
                memory_bytes=request.local.memory_bytes,
                optimizer=options.optimizer,
            )
        for worker in workers:
            worker.receive(_ANSWER_SECONDS)
        for rank, worker in enumerate(workers):
            worker.send(
                "exchange",
                rank=rank,
                world_size=options.num_devices,
                folder=folder,
                backend=backend,
                batch_size=batch_size,
                budget_seconds=options.budget_seconds,
                message_bytes=list(MESSAGE_BYTES) if options.links else [],
            )
        return [worker.receive(_ANSWER_SECONDS) for worker in workers]


def _slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """A step is over when its slowest worker is: the maximum over workers of each step."""
    return [max(step) for step in zip(*samples, strict=True)]


def _summary(
    request: DeviceRequest, options: SyncOptions, answers: list[dict[str, Any]]
) -> tuple[Sync, dict[str, Any]]:
    single = Timing.of(_slowest([answer["single"] for answer in answers]))
    distributed = Timing.of(_slowest([answer["distributed"] for answer in answers]))
    provenance: dict[str, Any] = {
        "method": "distributed minus single step time",
        "single": asdict(single),
        "distributed": asdict(distributed),
    }
    if request.torch_device == "cpu" and request.local.num_devices < options.num_devices:
        provenance["note"] = f"workers shared {request.local.num_devices} cores"
    fit = _fit_of(options.num_devices, answers, provenance) if options.links else None
    sync = Sync(
        num_devices=options.num_devices,
        sync_seconds=max(0.0, distributed.median_seconds - single.median_seconds),
        latency_seconds=fit.latency_seconds if fit else None,
        bytes_per_second=fit.bytes_per_second if fit else None,
    )
    return sync, provenance


def _fit_of(
    num_devices: int, answers: list[dict[str, Any]], provenance: dict[str, Any]
) -> LinkFit | None:
    columns = zip(*(answer["messages"] for answer in answers), strict=True)
    seconds = [Timing.of(_slowest(column)).median_seconds for column in columns]
    fit = fit_link(num_devices, MESSAGE_BYTES, seconds)
    provenance["links"] = {
        "message_bytes": list(MESSAGE_BYTES),
        "seconds": seconds,
        "fit_error": fit.error if fit else None,
    }
    return fit
