"""``hetflow.profile``."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ..schema.errors import ProblemError
from ..schema.optimizer import named_optimizer
from ..schema.options import option
from ..schema.precision import Precision
from ..schema.profile import Profile
from ..schema.records import Count, Index
from .calls import checks

_log = logging.getLogger("hetflow")

Effort = Literal["quick", "usual", "thorough"]
Progress = Callable[[str, float | None], None]


@checks
def profile(
    target: str,
    devices: Sequence[str] = (),
    *,
    arguments: Sequence[str] = (),
    name: str | None = None,
    batch_sizes: Sequence[Count] | str | None = None,
    max_batch_size: Count | None = None,
    effort: Effort = "usual",
    steps: Count | None = None,
    optimizer: str | None = None,
    links: bool | None = None,
    layers: bool = False,
    microbatch_sizes: Sequence[Count] = (8,),
    sync_devices: Index = 2,
    precision: Precision | None = None,
    from_profile: Profile | Path | str | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> tuple[Profile, ...]:
    """Measure a model's step time and memory over batch sizes, on each local device type.

    Devices named ``spec:NAME`` need not be present. Their profiles are estimated from counted
    operators and a table of data sheets, and are marked as estimates.

    Args:
        target: ``file.py`` (a training script, which is run until its loop has been measured),
            ``file.py:factory``, ``zoo:NAME``, ``hf:CONFIG_OR_DIR`` or ``torchvision:NAME``;
            ``hf:gpt2@1024`` states the tokens of a sample (or the pixels of an image's side).
        devices: Device types: ``V100``, ``cuda:0``, ``cpu``, an emulated one such as
            ``cpu:slow=0.25``, or ``spec:H100`` to estimate. Empty: every CUDA type, or the CPU if
            there is none.
        arguments: A script's own arguments.
        name: Name of the model; None takes the target's.
        batch_sizes: Sizes, or a range such as ``"8-256"``; None tries growing sizes from 1.
        max_batch_size: Largest size to try.
        effort: How narrow the confidence intervals must be, and how long measuring may take.
        steps: Most repetitions per size.
        optimizer: Name of the optimizer that will train, if the target has none.
        links: Whether to measure links and all-reduces over message sizes; None measures links if
            layers are profiled.
        layers: Whether to profile each layer too, for pipelines.
        microbatch_sizes: Samples per microbatch at which to profile layers.
        sync_devices: Devices over which to measure synchronisation; 0 does not measure it.
        precision: With ``spec:``, how products of 32-bit tensors are computed; None as torch does
            by default.
        from_profile: With ``spec:``, a measured profile of the target to scale to the devices.
        command: The user's command line, for the provenance.
        progress: Called with what is being measured, and the most seconds it may take.

    Returns:
        One profile per device type, in the order of ``devices``.

    Raises:
        TargetError: The workload fails, or does not fit a device at its first size.
        ProblemError: This machine does not have a device, or the sizes are invalid.

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
        named_optimizer(optimizer)  # raises for an unknown name
    if layers and not microbatch_sizes:
        raise ProblemError("layers are profiled at a microbatch size", hint="give at least one")
    parsed = targets.parse(target, arguments)
    if parsed.is_script:
        _check_script(devices, layers=layers, links=links, optimizer=optimizer)
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
        parsed = replace(parsed, few_samples=max(parsed.few_samples, min(limits.sizes or (1,))))
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
                hint=f"leave out {option('quick')}, {option('thorough')}, {option('steps')} "
                f"and {option('links')}",
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
            f"{option('precision')} and {option('from_profile')} are for estimates",
            hint=f"add {option('devices', 'spec:NAME')}",
        )
    requests = parse_requests(devices, local_devices())
    capabilities = {request.device_type: request.local.compute_capability for request in requests}
    for remark in (emulated_bfloat16(capabilities), mixed_tf32(capabilities, os.environ)):
        if remark is not None:
            _log.warning(remark)
    if progress is None:
        return profile_target(parsed, requests, options)
    return profile_target(parsed, requests, options, progress)


def _check_script(
    devices: Sequence[str], *, layers: bool, links: bool | None, optimizer: str | None
) -> None:
    """Refuse what cannot be taken from a script's loop."""
    from ..profilers.estimate import specs_of

    said = None
    if layers or links:
        said = f"{option('layers')} and {option('links')}: a script's loop trains the whole model"
    elif specs_of(devices):
        said = "spec: devices are estimated, and a script is measured where it runs"
    elif optimizer is not None:
        said = f"{option('optimizer')}: a script has its own"
    if said is not None:
        raise ProblemError(said, hint="leave it out, or profile a factory (file.py:factory)")


def _measured(given: Profile | Path | str | None) -> Profile | None:
    if given is None or isinstance(given, Profile):
        return given
    from ..schema import files

    return files.read(Path(given), Profile)
