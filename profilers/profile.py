"""Profile one target on several device types: measure, derive, write down how."""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import __version__
from ..schema.errors import HetflowError
from ..schema.optimizer import OptimizerState
from ..schema.profile import Emulation, Profile, Sync
from . import emulated, links
from .batch_curve import Curve, CurveLimits, measure_curve
from .devices import DeviceRequest
from .layers import graph_of
from .measurer import Measurer
from .targets import Target
from .timing import Timing

LAYER_REPEATS = 7
DEFAULT_OPTIMIZER = "sgd-momentum"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How to profile. ``sync_devices`` below 2 leaves synchronisation unmeasured.

    ``optimizer`` None measures with DEFAULT_OPTIMIZER where the target brings none, and the
    profile says that nobody chose it.
    ``layers_at`` are the microbatch sizes to profile layers at; none leaves them out.
    """

    limits: CurveLimits = CurveLimits()
    optimizer: str | None = None
    sync_devices: int = 2
    links: bool = False
    command: str = ""
    layers_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What was measured on a real device; emulated types of it share it."""

    curve: Curve
    update: Timing
    optimizer: OptimizerState
    facts: dict[str, Any]
    death: str | None
    sync: Sync | None
    sync_provenance: dict[str, Any]
    layers: tuple[dict[str, Any], ...]
    seconds: float


def profile_target(
    target: Target,
    requests: Sequence[DeviceRequest],
    options: ProfileOptions,
    progress: Progress = lambda text: None,
) -> tuple[Profile, ...]:
    """Measure a target on every requested type, one device at a time.

    Emulated types share one measurement of the CPU, and each is then verified by held passes.

    Args:
        target: What to profile.
        requests: On which device types.
        options: How.
        progress: Told what is being measured now.

    Returns:
        One profile a request, in order.

    Raises:
        TargetError: The workload is at fault, or does not fit a device at its first size.
    """
    bases: dict[str, _Base] = {}
    measurers: dict[str, Measurer] = {}
    profiles = []
    with ExitStack() as stack:
        for request in requests:
            device = request.torch_device
            if device not in bases:
                measurers[device] = stack.enter_context(_measurer(target, request, options))
                bases[device] = _measure(target, request, options, measurers[device], progress)
            base, measurer = bases[device], measurers[device]
            profiles.append(_profile(target, request, options, base, measurer, progress))
    return tuple(profiles)


def _measurer(target: Target, request: DeviceRequest, options: ProfileOptions) -> Measurer:
    return Measurer(
        target,
        device=request.torch_device,
        memory_bytes=request.local.memory_bytes,
        optimizer=options.optimizer or DEFAULT_OPTIMIZER,
    )


def _measure(
    target: Target,
    request: DeviceRequest,
    options: ProfileOptions,
    measurer: Measurer,
    progress: Progress,
) -> _Base:
    start = time.monotonic()
    name = request.local.device_type
    limits = options.limits
    progress(f"{target.model} on {name}: starting")
    try:
        curve = measure_curve(
            lambda size: measurer.measure(size, limits.repeats),
            _limits_of(request, limits),
            time.monotonic,
            lambda size: progress(f"{target.model} on {name}: batch size {size}"),
        )
        progress(f"{target.model} on {name}: optimizer update")
        update = measurer.measure_update(curve.results[0].batch_size, limits.repeats)
        kept = measurer.optimizer_state(curve.results[0].batch_size)
        repeats = min(limits.repeats.max_repeats, LAYER_REPEATS)
        layers = []
        for size in options.layers_at:
            progress(f"{target.model} on {name}: layers at {size}")
            layers.append(measurer.measure_layers(size, repeats))
    except HetflowError as error:
        error.args = (f"{target.text} on {name}: {error.message}",)
        error.message = error.args[0]
        raise
    if request.torch_device != "cpu":
        measurer.release()  # its cached memory is the device's, and the workers need some
    progress(f"{target.model} on {name}: gradient synchronisation")
    sync, sync_provenance = links.measure_sync(target, request, _sync_options(options, curve))
    return _Base(
        curve=curve,
        update=update,
        optimizer=_optimizer(kept, measurer.facts["weight_bytes"], options),
        facts=measurer.facts,
        death=measurer.death,
        sync=sync,
        sync_provenance=sync_provenance,
        layers=tuple(layers),
        seconds=time.monotonic() - start,
    )


def _optimizer(kept: dict[str, Any], weight_bytes: int, options: ProfileOptions) -> OptimizerState:
    """What was measured of the optimizer: the target's own goes by its class."""
    named = options.optimizer or DEFAULT_OPTIMIZER
    return OptimizerState(
        name=kept["name"] if kept["is_own"] else named,
        state_bytes_per_weight_byte=kept["state_bytes"] / weight_bytes,
        is_default=options.optimizer is None and not kept["is_own"],
    )


def _sync_options(options: ProfileOptions, curve: Curve) -> links.SyncOptions:
    return links.SyncOptions(
        num_devices=options.sync_devices,
        links=options.links,
        fallback_batch_size=curve.results[0].batch_size,
        optimizer=options.optimizer or DEFAULT_OPTIMIZER,
        budget_seconds=3 * options.limits.repeats.budget_seconds,
    )


def _limits_of(request: DeviceRequest, limits: CurveLimits) -> CurveLimits:
    """On a GPU sizes grow until memory ends; on a CPU that would take hours."""
    return limits if request.torch_device == "cpu" else replace(limits, stop_when_flat=False)


def _profile(
    target: Target,
    request: DeviceRequest,
    options: ProfileOptions,
    base: _Base,
    measurer: Measurer,
    progress: Progress,
) -> Profile:
    points = base.curve.points
    provenance = _provenance(request, options, base)
    emulation = None
    if request.speed is not None:
        progress(f"{target.model} on {request.device_type} (emulated): held passes")
        points = emulated.stretched(points, request.speed)
        budget = 4 * options.limits.repeats.budget_seconds**0.5
        held = emulated.verify(measurer, points, budget)
        provenance["emulation"] = emulated.as_provenance(held, request.speed)
        emulation = Emulation(speed=request.speed, base_device_type=request.local.device_type)
    tables = tuple(graph_of(measured, request.speed or 1.0) for measured in base.layers)
    return Profile(
        model=target.model,
        device_type=request.device_type,
        device_memory_bytes=request.local.memory_bytes,
        weight_bytes=base.facts["weight_bytes"],
        update_seconds=base.update.median_seconds,
        batch_curve=points,
        layers=tables[0] if tables else None,
        more_layers=tables[1:],
        sync=base.sync,
        emulation=emulation,
        out_of_memory_batch_size=base.curve.out_of_memory_batch_size,
        optimizer=base.optimizer,
        provenance=provenance,
    )


def _provenance(request: DeviceRequest, options: ProfileOptions, base: _Base) -> dict[str, Any]:
    results = base.curve.results
    on_cpu = request.torch_device == "cpu"
    return {
        "command": options.command,
        "hetflow": __version__,
        "torch": base.facts["torch"],
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "device": request.local.name,
        "driver": request.local.driver,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "measured_in_seconds": base.seconds,
        "clock": "CPU time of the process, one thread" if on_cpu else "wall, device synchronised",
        "peak_memory": (
            "resident memory of the whole process"
            + ("" if base.facts["peak_memory_reset"] else ", highest so far")
            if on_cpu
            else "torch.cuda.max_memory_allocated"
        ),
        "optimizer": base.facts["optimizer"],
        "num_parameters": base.facts["num_parameters"],
        "repeats": max(result.timing.repeats for result in results),
        "spread": max(result.timing.spread for result in results),
        "curve_stopped": base.curve.stopped,
        "died_of": base.death,
        "update": asdict(base.update),
        "points": [
            {
                "batch_size": result.batch_size,
                "wall_seconds": result.wall_seconds,
                **asdict(result.timing),
            }
            for result in results
        ],
        "sync": base.sync_provenance,
        **({"layers": [measured["provenance"] for measured in base.layers]} if base.layers else {}),
    }
