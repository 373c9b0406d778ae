"""``hetflow.profile``."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema import files
from ..schema.errors import FileError, ProblemError
from ..schema.optimizer import named_optimizer
from ..schema.options import Activations, option
from ..schema.profile import Profile
from ..schema.requests.profile import ProfileRequest
from .calls import takes

if TYPE_CHECKING:
    from ..devices.backend import DeviceRequest

_log = logging.getLogger("hetflow")


@takes(ProfileRequest)
def profile(request: ProfileRequest) -> tuple[Profile, ...]:
    """Measure a model's step time and memory over batch sizes, on each local device type.

    Devices named ``spec:NAME`` need not be present. Their profiles are estimated from counted
    operators and a table of data sheets, and are marked as estimates.

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
    from ..devices.local import local_devices, parse_requests
    from ..devices.torch_support import emulated_bfloat16, mixed_tf32
    from ..profilers import targets
    from ..profilers.batch_curve import CurveLimits, parse_sizes
    from ..profilers.estimate import EstimateOptions, estimate_target, specs_of
    from ..profilers.loop_costs import LoopPolicy
    from ..profilers.profile import ProfileOptions, profile_target

    if request.optimizer is not None:
        named_optimizer(request.optimizer)  # raises for an unknown name
    if request.layers and not request.microbatch_sizes:
        raise ProblemError("layers are profiled at a microbatch size", hint="give at least one")
    parsed = targets.parse(request.target, request.arguments)
    if parsed.is_script:
        _check_script(request)
    parsed = replace(parsed, model=request.name) if request.name else parsed
    named = [name.strip() for text in request.blocks for name in text.split(",")]
    parsed = replace(parsed, blocks=tuple(name for name in named if name))
    options = ProfileOptions()
    if request.effort == "quick":
        options = ProfileOptions(
            limits=CurveLimits.quick(),
            loop=LoopPolicy.quick(),
            sync_seconds=3.0,
            exchange_seconds=3.0,
            link_seconds=1.0,
            hold_seconds=4.0,
        )
    elif request.effort == "usual" and request.batch_sizes:
        options = ProfileOptions.for_stated_sizes()
    elif request.effort == "thorough":
        options = ProfileOptions(
            loop=LoopPolicy.thorough(), sync_seconds=30.0, exchange_seconds=30.0
        )
    limits = replace(options.limits, largest=request.max_batch_size)
    if request.batch_sizes:
        text = (
            request.batch_sizes
            if isinstance(request.batch_sizes, str)
            else ",".join(map(str, request.batch_sizes))
        )
        limits = parse_sizes(text, limits)
        parsed = replace(parsed, few_samples=max(parsed.few_samples, min(limits.sizes or (1,))))
    wanted: dict[Activations, bool] = {
        "recomputed": request.recompute,
        "offloaded": request.offload,
    }
    activations = tuple(how for how, is_wanted in wanted.items() if is_wanted)
    flag = option("recompute" if request.recompute else "offload")
    options = replace(
        options,
        limits=limits,
        loop=replace(options.loop, most_samples=request.steps),
        optimizer=request.optimizer,
        sync_devices=request.sync_devices,
        links=request.links,
        layers_at=tuple(dict.fromkeys(request.microbatch_sizes)) if request.layers else (),
        activations=activations,
        command=request.command,
    )
    specs = specs_of(request.devices)
    if (activations or parsed.blocks) and request.from_profile is not None:
        raise ProblemError(
            f"{flag if activations else option('blocks')} is measured or estimated, not carried",
            hint=f"leave it or {option('from_profile')} out",
        )
    if specs:
        if request.effort != "usual" or request.steps is not None or request.links is not None:
            raise ProblemError(
                "spec: devices are estimated, nothing of them is measured",
                hint=f"leave out {option('quick')}, {option('thorough')}, {option('steps')} "
                f"and {option('links')}",
            )
        estimate = EstimateOptions(
            sizes=limits.sizes,
            first=limits.first,
            largest=request.max_batch_size,
            optimizer=request.optimizer,
            layers_at=options.layers_at,
            precision=request.precision,
            activations=activations,
            carried=_measured(request.from_profile),
            command=request.command,
        )
        return estimate_target(
            parsed, specs, estimate, request.progress or (lambda text, left: None)
        )
    if request.precision is not None or request.from_profile is not None:
        raise ProblemError(
            f"{option('precision')} and {option('from_profile')} are for estimates",
            hint=f"add {option('devices', 'spec:NAME')}",
        )
    requests = parse_requests(request.devices, local_devices())
    if activations and any(each.speed is not None for each in requests):
        raise ProblemError(
            f"{flag}: an emulated device keeps the times of plain passes",
            hint="leave it out, or profile the device that is here",
        )
    if request.offload and any(each.local.is_host for each in requests):
        raise ProblemError(
            f"{option('offload')}: a CPU's activations are on the host already",
            hint="leave it out, or profile the CPU by a command of its own",
        )
    capabilities = {request.device_type: request.local.compute_capability for request in requests}
    for remark in (emulated_bfloat16(capabilities), mixed_tf32(capabilities, os.environ)):
        if remark is not None:
            _log.warning(remark)
    if request.progress is None:
        return profile_target(parsed, requests, options)
    return profile_target(parsed, requests, options, request.progress)


def _check_script(request: ProfileRequest) -> None:
    """Refuse what cannot be taken from a script's loop."""
    from ..profilers.estimate import specs_of

    said = None
    if request.layers or request.links:
        said = f"{option('layers')} and {option('links')}: a script's loop trains the whole model"
    elif specs_of(request.devices):
        said = "spec: devices are estimated, and a script is measured where it runs"
    elif request.recompute or request.offload:
        flags = f"{option('recompute')} and {option('offload')}"
        said = f"{flags}: a script's loop decides itself what it recomputes"
    elif request.optimizer is not None:
        said = f"{option('optimizer')}: a script has its own"
    elif request.blocks:
        said = f"{option('blocks')}: a script lists its own, and its layers are not known"
    if said is not None:
        raise ProblemError(said, hint="leave it out, or profile a factory (file.py:factory)")


def _measured(given: Profile | Path | str | None) -> Profile | None:
    if given is None or isinstance(given, Profile):
        return given
    return files.read(Path(given), Profile)


@contextmanager
def profile_paths(
    folder: Path,
    model: str,
    device_types: Sequence[str],
    *,
    force: bool,
    measured: "Sequence[DeviceRequest]" = (),
) -> Iterator[list[Path]]:
    """Where each profile goes; refused now rather than after minutes of measuring."""
    names = [
        "".join(letter if letter.isalnum() or letter in "._+-" else "-" for letter in name)
        for name in (model, *device_types)
    ]
    paths = [folder / f"{names[0]}.{name}.json" for name in names[1:]]
    with files.made_folder(folder):
        for path, request in zip_longest(paths, measured):
            if request is not None and path.is_file() and not force:
                _refuse_other_card(path, request)
            files.check_writable(path, force=force)
        yield paths


def _refuse_other_card(path: Path, request: "DeviceRequest") -> None:
    """Refuse to take the place of a profile whose device has this one's name and other memory."""
    own, apart = request.local.memory_bytes, request.local.name_with_memory
    if apart is None:
        return
    other = files.read(path, Profile).device_memory_bytes
    if abs(other - own) > own // 50:
        raise FileError(
            f"{path}: is of a {request.device_type} of {other / 2**30:.1f} GiB, this one has "
            f"{own / 2**30:.1f}",
            hint=f"{option('devices', apart)} gives this one a name of its own; "
            f"{option('force', True)} overwrites the file",
        )
