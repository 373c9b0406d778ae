"""``hetflow.profile``."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ..schema.errors import ProblemError
from ..schema.estimate import Precision
from ..schema.optimizer import named_optimizer
from ..schema.profile import Profile
from .naming import names_arguments

_log = logging.getLogger("hetflow")

Effort = Literal["quick", "usual", "thorough"]
Progress = Callable[[str, float | None], None]


@names_arguments(device="devices", quick='effort="quick"', thorough='effort="thorough"')
def profile(
    target: str,
    devices: Sequence[str] = (),
    *,
    name: str | None = None,
    batch_sizes: Sequence[int] | str | None = None,
    max_batch_size: int | None = None,
    effort: Effort = "usual",
    steps: int | None = None,
    optimizer: str | None = None,
    links: bool | None = None,
    layers: bool = False,
    microbatch_sizes: Sequence[int] = (8,),
    sync_devices: int = 2,
    precision: Precision | None = None,
    from_profile: Profile | Path | str | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> tuple[Profile, ...]:
    """Measure a model's step time and memory over batch sizes, on each local device type.

    Devices named ``spec:NAME`` need not be here: they are estimated from counted operators and
    a table of data sheets, and their profiles say so.

    Args:
        target: ``file.py:factory``, ``zoo:NAME``, ``hf:CONFIG_OR_DIR`` or ``torchvision:NAME``.
        devices: Device types: ``V100``, ``cuda:0``, ``cpu``, or an emulated one such as
            ``cpu:slow=0.25``, or ``spec:H100`` to estimate; none: every CUDA type, or the CPU
            where there is none.
        name: What to call the model; None: as the target does.
        batch_sizes: Sizes, or a range such as ``"8-256"``; None grows from 1.
        max_batch_size: Grow no further.
        effort: How narrow the intervals must be, and how long that may take.
        steps: Most repeats of one size.
        optimizer: The one that will train, where the target brings none.
        links: Measure links and all-reduces over sizes; None: links where layers are profiled.
        layers: Profile each layer too, for pipelines.
        microbatch_sizes: Samples of a microbatch, for layers.
        sync_devices: Devices to synchronise over; 0 leaves it unmeasured.
        precision: With ``spec:``, how products of 32-bit tensors are computed; None as torch does
            by default.
        from_profile: With ``spec:``, a measured profile of the target to carry to the devices.
        command: How the user asked, for the provenance.
        progress: Told what is being measured, and how many seconds it may take at most.

    Returns:
        One profile a device type, in order.

    Raises:
        TargetError: The workload is at fault, or does not fit a device at its first size.
        ProblemError: A device that this machine has not, or sizes that make no sense.

    Example:
        >>> import hetflow
        >>> (cpu,) = hetflow.profile(
        ...     "zoo:mlp", ["cpu"], effort="quick", batch_sizes=[8], sync_devices=0
        ... )
        >>> [point.batch_size for point in cpu.batch_curve], cpu.batch_curve[0].step_seconds > 0
        ([8], True)
    """
    from ..devices.local import local_devices
    from ..devices.precision import emulated_bfloat16, mixed_tf32
    from ..devices.requests import parse_requests
    from ..profilers import targets
    from ..profilers.batch_curve import CurveLimits, parse_sizes
    from ..profilers.estimate import EstimateOptions, estimate_target, specs_of
    from ..profilers.loop_costs import LoopPolicy
    from ..profilers.profile import ProfileOptions, profile_target

    if optimizer is not None:
        named_optimizer(optimizer)  # refuses a name that there is not
    if layers and not microbatch_sizes:
        raise ProblemError("layers are profiled at a microbatch size", hint="give at least one")
    parsed = targets.parse(target)
    parsed = replace(parsed, model=name) if name else parsed
    options = ProfileOptions()
    if effort == "quick":
        options = ProfileOptions(
            limits=CurveLimits.quick(),
            loop=LoopPolicy.quick(),
            sync_seconds=3.0,
            exchange_seconds=3.0,
            hold_seconds=4.0,
        )
    elif effort == "usual" and batch_sizes:
        options = ProfileOptions.for_stated_sizes()
    elif effort == "thorough":
        options = ProfileOptions(
            loop=LoopPolicy.thorough(), sync_seconds=30.0, exchange_seconds=30.0
        )
    limits = replace(options.limits, largest=max_batch_size)
    if batch_sizes:
        text = batch_sizes if isinstance(batch_sizes, str) else ",".join(map(str, batch_sizes))
        limits = parse_sizes(text, limits)
    options = replace(
        options,
        limits=limits,
        loop=replace(options.loop, most_samples=steps),
        optimizer=optimizer,
        sync_devices=sync_devices,
        links=links,
        layers_at=tuple(microbatch_sizes) if layers else (),
        command=command,
    )
    specs = specs_of(devices)
    if specs:
        if effort != "usual" or steps is not None or links is not None:
            raise ProblemError(
                "spec: devices are estimated, nothing of them is measured",
                hint="leave out --quick, --thorough, --steps and --links",
            )
        estimate = EstimateOptions(
            sizes=limits.sizes,
            first=limits.first,
            largest=max_batch_size,
            optimizer=optimizer,
            layers_at=options.layers_at,
            precision=precision,
            carried=_measured(from_profile),
            command=command,
        )
        return estimate_target(parsed, specs, estimate, progress or (lambda text, left: None))
    if precision is not None or from_profile is not None:
        raise ProblemError(
            "--precision and --from-profile are for estimates", hint="add --device spec:NAME"
        )
    requests = parse_requests(devices, local_devices())
    capabilities = {request.device_type: request.local.compute_capability for request in requests}
    for remark in (emulated_bfloat16(capabilities), mixed_tf32(capabilities, os.environ)):
        if remark is not None:
            _log.warning(remark)
    if progress is None:
        return profile_target(parsed, requests, options)
    return profile_target(parsed, requests, options, progress)


def _measured(given: Profile | Path | str | None) -> Profile | None:
    if given is None or isinstance(given, Profile):
        return given
    from ..schema import files

    return files.read(Path(given), Profile)
