"""Profiles of devices that are not here: a target's operators counted, and a data sheet.

Counting runs the target's code, so it has a process of its own, as measuring does.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import __version__
from ..planning.costs.device_table import DeviceSpec, spec_of
from ..planning.costs.estimate import RESERVE_BYTES, Estimator, carried_profile, estimated_profile
from ..schema.errors import HetflowError, ProblemError, TargetError
from ..schema.layers import ModelCounts, PassCounts
from ..schema.optimizer import NAMES
from ..schema.options import Activations, Precision, option
from ..schema.profile import Profile
from ..schema.records import adapter_of
from .batch_curve import are_flat, growing_sizes
from .process import Child, ChildDied
from .profile import DEFAULT_OPTIMIZER
from .targets import Target

PREFIX = "spec:"
_ANSWER_SECONDS = 1200.0
_LARGEST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """How to estimate.

    ``sizes`` None means powers of two and their midpoints, from ``first`` until memory or the
    gain ends. ``activations`` are further ways to treat those of repeated layers.
    ``optimizer`` None counts DEFAULT_OPTIMIZER where the target brings none, and the
    profile says that nobody chose it. ``layers_at`` are microbatch sizes; none leaves layers out.
    ``carried`` is a measured profile of the model to carry to the devices.
    """

    sizes: tuple[int, ...] | None = None
    first: int = 1
    largest: int | None = None
    optimizer: str | None = None
    layers_at: tuple[int, ...] = ()
    precision: Precision | None = None
    activations: tuple[Activations, ...] = ()
    carried: Profile | None = None
    command: str = ""


def specs_of(devices: Sequence[str]) -> tuple[DeviceSpec, ...]:
    """The rows of the device table that ``--device`` names; none where it names local devices.

    Raises:
        ProblemError: There is no such row, one type is named twice, or local devices are among
            them.
    """
    items = [item.strip() for text in devices for item in text.split(",")]
    named = [item for item in items if item.startswith(PREFIX)]
    if named and len(named) < len(items):
        other = next(item for item in items if item not in named)
        raise ProblemError(
            f"{option('devices', named[0])} is estimated and {other} is measured",
            hint="give each a command of its own, with one folder for both",
        )
    specs = tuple(spec_of(item.removeprefix(PREFIX)) for item in named)
    types = [spec.device_type for spec in specs]
    for spec in specs:
        if types.count(spec.device_type) > 1:
            raise ProblemError(
                f"{option('devices')}: {spec.device_type} is asked for twice; keep one"
            )
    return specs


def estimate_target(
    target: Target,
    specs: Sequence[DeviceSpec],
    options: EstimateOptions,
    progress: Callable[[str, float | None], None] = lambda text, left: None,
) -> tuple[Profile, ...]:
    """Estimate a target on devices of the table.

    Returns:
        One profile a device, in order.

    Raises:
        TargetError: The workload is at fault, or what it does depends on values.
        InfeasibleError: It fits one of the devices at no size.
        ProblemError: The profile to carry is not one of this target on a device of the table.
    """
    began = time.monotonic()
    progress(f"{target.model}: counting operators", None)
    source = None
    if options.carried is not None:
        source = Estimator(spec=_measured_spec(options.carried), precision=options.precision)
        kept = options.carried.optimizer
        options = replace(
            options,
            sizes=tuple(point.batch_size for point in options.carried.batch_curve),
            layers_at=tuple(table.microbatch_size for table in options.carried.layer_tables),
            optimizer=kept.name if kept is not None and kept.name in NAMES else options.optimizer,
        )
    counts = _counts(target, specs, options)
    how = {
        "command": options.command,
        "hetflow": __version__,
        "platform": sys.platform,
        "estimated_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "estimated_in_seconds": time.monotonic() - began,
    }
    profiles = []
    for spec in specs:
        estimator = Estimator(spec=spec, precision=options.precision)
        if options.carried is not None and source is not None:
            profile = carried_profile(options.carried, counts, source, estimator)
        else:
            profile = estimated_profile(counts, estimator, model=target.model)
        profiles.append(replace(profile, provenance={**how, **(profile.provenance or {})}))
    return tuple(profiles)


def _measured_spec(measured: Profile) -> DeviceSpec:
    """The row of the device that a profile was measured on, by the driver's own name of it."""
    device = str((measured.provenance or {}).get("device", ""))
    for name in (device.removeprefix("NVIDIA ").removeprefix("Tesla "), measured.device_type):
        try:
            return spec_of(name)
        except ProblemError:
            continue
    raise ProblemError(
        f"the profile was measured on {measured.device_type}, which is not in the device table",
        hint=f"leave {option('from_profile')} out: the devices are then estimated from "
        "their data sheets",
    )


def _counts(target: Target, specs: Sequence[DeviceSpec], options: EstimateOptions) -> ModelCounts:
    """Ask a process of its own to count."""
    with Child() as child:
        try:
            child.send(
                "count",
                target=target.text,
                specs=[spec.name for spec in specs],
                sizes=options.sizes,
                first=options.first,
                largest=options.largest,
                layers_at=options.layers_at,
                optimizer=options.optimizer or DEFAULT_OPTIMIZER,
                is_default=options.optimizer is None,
                precision=options.precision,
                activations=options.activations,
                blocks=target.blocks,
            )
            plain = child.receive(_ANSWER_SECONDS)
        except ChildDied as death:
            raise TargetError(
                f"{target.text}: the counting process ended with {death.how}: {death.said}"
            ) from None
        except MemoryError:
            raise TargetError(
                f"{target.text}: building the model took more memory than this machine has",
                hint="let the factory build it without values (no numpy, no .item())",
            ) from None
        except HetflowError as error:
            error.args = (f"{target.text}: {error.message.removeprefix(f'{target.text}: ')}",)
            error.message = error.args[0]
            raise
    counts: ModelCounts = adapter_of(ModelCounts).validate_json(json.dumps(plain))
    return counts


def answer_counts(
    target: str,
    specs: Sequence[str],
    sizes: Sequence[int] | None,
    first: int,
    largest: int | None,
    layers_at: Sequence[int],
    optimizer: str,
    is_default: bool,
    precision: Precision | None,
    activations: Sequence[Activations],
    blocks: Sequence[str],
) -> dict[str, Any]:
    """What the counting process answers: the counts as plain data."""
    from ..schema.files import to_plain
    from . import targets
    from .operator_counts import count_model

    estimators = [Estimator(spec=spec_of(name), precision=precision) for name in specs]
    most = min(largest or _LARGEST, _LARGEST)
    found = count_model(
        replace(targets.parse(target), blocks=tuple(blocks)),
        sizes or [size for size in growing_sizes(first) if size <= most],
        layers_at,
        optimizer,
        is_default=is_default,
        precision=precision,
        activations=activations,
        is_enough=(
            (lambda standing, passes: False)
            if sizes
            else lambda standing, passes: all(
                _has_ended(standing, passes, estimator) for estimator in estimators
            )
        ),
    )
    plain: dict[str, Any] = to_plain(found)
    return plain


def _has_ended(standing_bytes: int, passes: Sequence[PassCounts], estimator: Estimator) -> bool:
    """Whether the next size cannot be of use: memory has ended, or the gain has."""
    last = passes[-1]
    needed = standing_bytes + last.peak_bytes + last.batch_bytes + RESERVE_BYTES
    if needed > estimator.spec.memory_bytes:
        return True
    rates = [found.batch_size / estimator.pass_seconds(found) for found in passes]
    return are_flat(rates, estimator.pass_seconds(last))
