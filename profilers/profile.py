"""Profile one target on several device types, with the provenance of each number."""

import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from .. import __version__
from ..devices.backend import DeviceRequest
from ..devices.local import pinned
from ..devices.memory import free_memory_bytes
from ..schema.errors import HetflowError, TargetError
from ..schema.optimizer import OptimizerState
from ..schema.options import Activations
from ..schema.profile import (
    CURVES,
    BatchPoint,
    BesideTensors,
    BusyHost,
    Emulation,
    Links,
    Profile,
    TypeLink,
)
from . import links
from .batch_curve import Curve, CurveLimits, SizeResult, measure_curve
from .busy import Busy, BusyOptions, Progress, measure_busy
from .layers import as_in_the_loop, graph_of
from .loop_costs import (
    Carried,
    LoopCosts,
    LoopPolicy,
    RehearsalRounds,
    every_second,
    measured_and_carried,
)
from .pipeline_costs import measure_pipeline
from .process import Loading, Measurer, as_provenance, started_like_workers, stretched, verify
from .targets import Target

LAYER_REPEATS = 7
DEFAULT_OPTIMIZER = "sgd-momentum"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How to profile. ``sync_devices`` below 2 leaves synchronisation unmeasured.

    ``optimizer`` None measures with DEFAULT_OPTIMIZER where the target brings none, and the
    profile says that nobody chose it.
    ``limits`` say which sizes there are, ``loop`` how well each is measured; ``sync_seconds``,
    ``exchange_seconds``, ``link_seconds`` and ``hold_seconds`` are for synchronisation in the loop,
    all-reduces by themselves and pipelines each, a link, and held passes of each emulated type.
    ``activations`` are further ways to treat those of repeated layers, which are measured too.
    ``layers_at`` are the microbatch sizes to profile layers at; none leaves them out.
    ``links`` measures links and all-reduces over sizes; None links alone, where layers are
    profiled.
    """

    limits: CurveLimits = CurveLimits()
    loop: LoopPolicy = LoopPolicy()
    sync_seconds: float = 4.0
    exchange_seconds: float = 6.0
    link_seconds: float = 4.0
    hold_seconds: float = 12.0
    optimizer: str | None = None
    sync_devices: int = 2
    links: bool | None = None
    command: str = ""
    layers_at: tuple[int, ...] = ()
    activations: tuple[Activations, ...] = ()

    @classmethod
    def for_stated_sizes(cls) -> "ProfileOptions":
        """Each of them is measured whole; few leave time to measure all better."""
        loop = LoopPolicy(least_total_seconds=4.0, most_total_seconds=None)
        return cls(loop=loop, sync_seconds=12.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What was measured on a real device; emulated types of it share it."""

    curve: Curve
    others: dict[Activations, Curve]
    alone: Carried
    no_loading: str | None
    optimizer: OptimizerState
    facts: dict[str, Any]
    death: str | None
    busy: Busy
    links: Links | None
    links_provenance: dict[str, Any]
    layers: tuple[dict[str, Any], ...]
    base_memory_bytes: int | None
    update_workspace_bytes: int | None
    group_workspace_bytes: int | None
    beside_tensors: BesideTensors | None
    seconds: float

    @property
    def costs(self) -> LoopCosts:
        """Of a device alone, measured and carried."""
        return self.alone.costs


def profile_target(
    target: Target,
    requests: Sequence[DeviceRequest],
    options: ProfileOptions,
    progress: Progress = lambda text, left: None,
) -> tuple[Profile, ...]:
    """Measure a target on every requested type, one device at a time.

    Emulated types share one measurement of the CPU, and each is then verified by held passes. All
    is measured in processes that start as a launch's workers do; call from a thread that lives on
    meanwhile.

    Returns:
        One profile a request, in order.

    Raises:
        TargetError: The workload is at fault, or does not fit a device at its first size.
    """
    bases: dict[tuple[str, str], _Base] = {}
    measurers: dict[tuple[str, str], Measurer] = {}
    profiles = []
    with started_like_workers(), ExitStack() as stack:
        for request in requests:
            device = _measured_device(request)
            if device not in bases:
                measurers[device] = stack.enter_context(_measurer(target, request, options))
                alike = [r for r in requests if _measured_device(r) == device]
                bases[device] = _measure(
                    target,
                    request,
                    options,
                    measurers[device],
                    progress,
                    is_real=any(r.speed is None for r in alike),
                )
            base, measurer = bases[device], measurers[device]
            profiles.append(_profile(target, request, options, base, measurer, progress))
        for measurer in measurers.values():
            measurer.release()  # the workers need the devices
        return _with_links_between(profiles, requests, options, progress)


def _with_links_between(
    profiles: Sequence[Profile],
    requests: Sequence[DeviceRequest],
    options: ProfileOptions,
    progress: Progress,
) -> tuple[Profile, ...]:
    """Add the links between every two types that were asked for and are real."""
    found: list[list[TypeLink]] = [[] for _ in profiles]
    notes: list[dict[str, Any]] = [{} for _ in profiles]
    # Emulated types are one device, whose own link is measured already.
    real = [index for index, request in enumerate(requests) if request.speed is None]
    for first, second in combinations(real, 2):
        names = (profiles[first].device_type, profiles[second].device_type)
        tables = [graph for index in (first, second) for graph in profiles[index].layer_tables]
        if not (bool(tables) if options.links is None else options.links):
            continue
        progress(f"the link between {names[0]} and {names[1]}", None)
        sent = [node.activation_bytes for graph in tables for node in graph.nodes]
        ends = requests[first], requests[second]
        measured, how = links.measure_link_between(*ends, sent, options.link_seconds)
        notes[first][names[1]] = notes[second][names[0]] = how
        if measured is not None:
            there = TypeLink(device_type=names[1], links=measured)
            found[first].append(there)
            found[second].append(links.reversed_link(there, names[0]))
    return tuple(
        replace(
            profile,
            links_to=tuple(to),
            provenance={**(profile.provenance or {}), "links_to": how}
            if how
            else profile.provenance,
        )
        for profile, to, how in zip(profiles, found, notes, strict=True)
    )


def _measured_device(request: DeviceRequest) -> tuple[str, str]:
    """What requests that share a measurement have in common: emulated types are their base's."""
    return request.local.device_type, request.torch_device


def _measurer(target: Target, request: DeviceRequest, options: ProfileOptions) -> Measurer:
    pin = pinned(request.local, request.torch_device)
    loading = Loading(
        target=target,
        device_type=request.local.device_type,
        memory_bytes=request.local.memory_bytes,
        optimizer=options.optimizer or DEFAULT_OPTIMIZER,
        num_threads=request.local.num_threads,
    )
    return Measurer(loading, device=pin.device, environment=pin.environment)


def _measure(
    target: Target,
    request: DeviceRequest,
    options: ProfileOptions,
    measurer: Measurer,
    progress: Progress,
    *,
    is_real: bool,
) -> _Base:
    """Measure a real device; ``is_real`` where not only emulated types of it are asked for."""
    start = time.monotonic()
    name = request.local.device_type
    limits, clock = options.limits, time.monotonic

    def say(text: str, left: float | None = None) -> None:
        progress(f"{target.model} on {name}: {text}", left)

    def curve_of(how: Activations, text: str) -> Curve:
        return measure_curve(
            lambda size: measurer.measure(size, limits.repeats, activations=how),
            _limits_of(request, limits),
            clock,
            lambda size: say(f"{text} batch size {size}"),
        )

    say("starting")
    try:
        if target.is_script:
            limits = _within(limits, measurer.load())
        curve = curve_of("kept", "looking at")
        kept = measurer.optimizer_state(curve.results[0].batch_size)
        carried = _measured_alone(curve, measurer, options, say, is_of_script=target.is_script)
        costs = carried.costs
        repeats = min(limits.repeats.max_repeats, LAYER_REPEATS)
        layers = []
        for size in options.layers_at:
            say(f"layers at {size}")
            found = measurer.measure_layers(size, repeats)
            layers.append(
                as_in_the_loop(found, _pass_seconds(found, costs, measurer, options, say))
            )

        others = {how: curve_of(how, f"{how},") for how in options.activations}
        facts, death = measurer.facts, measurer.death
        base_memory = measurer.base_memory(curve.results[0].batch_size)
    except HetflowError as error:
        error.args = (f"{target.text} on {name}: {error.message}",)
        error.message = error.args[0]
        raise
    if not request.local.is_host:
        measurer.release()  # its cached memory is the device's, and the workers need some
    busy = measure_busy(
        target,
        request,
        costs,
        links.SyncOptions(
            num_devices=options.sync_devices,
            links=bool(options.links),
            fallback_batch_size=curve.results[0].batch_size,
            optimizer=options.optimizer or DEFAULT_OPTIMIZER,
            budget_seconds=options.exchange_seconds,
        ),
        BusyOptions(policy=options.loop, sync_seconds=options.sync_seconds, with_curve=is_real),
        clock,
        say,
    )
    link, links_provenance = _measure_links(request, options, layers, say)
    return _Base(
        curve=_fitting(curve, costs),
        others=others,
        alone=carried,
        no_loading=measurer.no_loading,
        optimizer=_optimizer(kept, facts["weight_bytes"], options),
        facts=facts,
        death=death,
        busy=busy,
        links=link,
        links_provenance=links_provenance,
        layers=tuple(layers),
        base_memory_bytes=base_memory,
        update_workspace_bytes=kept["workspace_bytes"],
        group_workspace_bytes=_group_workspace(curve, kept["workspace_bytes"] or 0, busy),
        beside_tensors=_beside_tensors(curve, busy),
        seconds=time.monotonic() - start,
    )


def _within(limits: CurveLimits, facts: dict[str, Any]) -> CurveLimits:
    """Limits within the samples that a script's dataset has."""
    known: int | None = facts["num_samples"]
    if known is None:
        return limits
    asked = max(limits.sizes or (limits.first,))
    if asked > known:
        raise TargetError(
            f"batch size {asked}: the script's dataset has {known} samples",
            hint=f"profile sizes up to {known}, or give the script more data",
        )
    return replace(limits, largest=min(known, limits.largest or known))


def _measured_alone(
    curve: Curve,
    measurer: Measurer,
    options: ProfileOptions,
    progress: Progress,
    *,
    is_of_script: bool,
) -> Carried:
    """All sizes in the loop, by themselves; of sizes that nobody stated, some are carried."""
    walls = {result.batch_size: result.wall_seconds for result in curve.results}

    def rehearsed(sizes: Sequence[int]) -> LoopCosts:
        known = {size: walls[size] for size in sizes}
        return RehearsalRounds(
            measurer.rehearse,
            known,
            options.loop,
            time.monotonic,
            progress,
            is_of_script=is_of_script,
        ).run()

    if options.limits.sizes is not None or not options.loop.carries:
        return Carried(costs=rehearsed(list(walls)))
    own = {result.batch_size: result.timing for result in curve.results}
    chosen = {*every_second(walls), *(size for size in options.layers_at if size in own)}
    return measured_and_carried(own, sorted(chosen), rehearsed)


def _pass_seconds(
    layers: dict[str, Any],
    costs: LoopCosts,
    measurer: Measurer,
    options: ProfileOptions,
    progress: Progress,
) -> float:
    """A pass of the layers' size in the loop: of the curve, or rehearsed for the purpose."""
    how = layers["provenance"]
    size: int = how["microbatch_size"]
    known = costs.pass_seconds(size)
    if known is not None:
        return known
    whole = how["whole_forward_seconds"] + how["whole_backward_seconds"]
    rounds = RehearsalRounds(
        measurer.rehearse, {size: whole}, options.loop, time.monotonic, progress
    )
    rehearsed = rounds.run().pass_seconds(size)
    return whole if rehearsed is None else rehearsed


def _fitting(curve: Curve, costs: LoopCosts) -> Curve:
    """The sizes that a launch could train too: a whole job may need more than a step."""
    if costs.out_of_memory_batch_size is None:
        return curve
    known = {point.batch_size for point in costs.points}
    return replace(
        curve,
        results=tuple(result for result in curve.results if result.batch_size in known),
        out_of_memory_batch_size=costs.out_of_memory_batch_size,
        stopped="out of memory",
    )


def _group_workspace(curve: Curve, aside: int, busy: Busy) -> int | None:
    """What synchronising takes beside a worker's own step; None where it was not measured."""
    # The most over sizes: sums under way and threads' memory do not grow with the batch.
    alone = {result.batch_size: result.peak_memory_bytes + aside for result in curve.results}
    more = [peak - alone[size] for size, peak in busy.peak_bytes.items() if size in alone]
    return max(0, *more) if more else None


def _beside_tensors(curve: Curve, busy: Busy) -> BesideTensors | None:
    """What no peak counts; None where peaks count the whole process."""
    # The most over sizes: the driver loads kernels when they are first used.
    alone = [r.beside_bytes for r in curve.results if r.beside_bytes is not None]
    if not alone:
        return None
    context, group = max(alone), busy.beside_bytes
    return BesideTensors(
        context_bytes=context, group_bytes=None if group is None else max(0, group - context)
    )


def _points(base: _Base, costs: LoopCosts, group_bytes: int = 0) -> tuple[BatchPoint, ...]:
    """The curve of the loop; peaks hold the update's room too, which an allocator keeps apart."""
    aside = (base.update_workspace_bytes or 0) + group_bytes
    measured = {result.batch_size: result for result in base.curve.results}
    return tuple(
        BatchPoint(
            batch_size=point.batch_size,
            step_seconds=point.step_seconds,
            load_seconds=None if base.no_loading else min(point.load_seconds, point.step_seconds),
            virtual_node_seconds=min(
                costs.virtual_node_seconds,
                max(0.0, point.step_seconds - (0.0 if base.no_loading else point.load_seconds)),
            ),
            step_seconds_error=point.error,
            **_bytes_of(measured[point.batch_size], aside),
        )
        for point in costs.points
    )


def _bytes_of(result: SizeResult, aside: int) -> dict[str, Any]:
    """What a point says of memory, with bytes that are aside of what was measured."""
    taken = "fragmentation_bytes pass_bytes buffered_pass_bytes update_bytes pinned_bytes moments"
    found = {name: getattr(result, name) for name in taken.split()}
    return found | {"peak_memory_bytes": result.peak_memory_bytes + aside}


def _other_points(base: _Base, measured: Curve) -> tuple[BatchPoint, ...]:
    """Passes with other activations, as much longer in the loop as kept ones of about that size."""
    own = {result.batch_size: result.timing.median_seconds for result in base.curve.results}
    ratios = {p.batch_size: p.step_seconds / own[p.batch_size] for p in base.costs.points}
    return tuple(
        BatchPoint(
            batch_size=result.batch_size,
            step_seconds=result.timing.median_seconds
            * ratios[min(ratios, key=lambda size: abs(size - result.batch_size))],
            **_bytes_of(result, base.update_workspace_bytes or 0),
        )
        for result in measured.results
    )


def _busy_host(base: _Base) -> BusyHost | None:
    costs = base.busy.costs
    if costs is None:
        return None
    return BusyHost(
        num_devices=base.busy.num_devices,
        batch_curve=_points(base, costs, base.group_workspace_bytes or 0),
        update_seconds=costs.update.median_seconds,
        fixed_seconds=costs.fixed_seconds,
    )


def _optimizer(kept: dict[str, Any], weight_bytes: int, options: ProfileOptions) -> OptimizerState:
    """What was measured of the optimizer: the target's own goes by its class."""
    named = options.optimizer or DEFAULT_OPTIMIZER
    return OptimizerState(
        name=kept["name"] if kept["is_own"] else named,
        state_bytes_per_weight_byte=kept["state_bytes"] / weight_bytes,
        is_default=options.optimizer is None and not kept["is_own"],
        workspace_bytes_per_weight_byte=kept["workspace_bytes_per_weight_byte"],
    )


def _measure_links(
    request: DeviceRequest,
    options: ProfileOptions,
    layers: Sequence[dict[str, Any]],
    progress: Progress,
) -> tuple[Links | None, dict[str, Any]]:
    """Pipelines need the links: they are measured with the layers unless that is declined."""
    wanted = bool(layers) if options.links is None else options.links
    if not wanted:
        return None, {"skipped": "not asked for"}
    progress(f"links between two {request.local.device_type} devices", None)
    sent = [node.activation_bytes for measured in layers for node in graph_of(measured, 1.0).nodes]
    return links.measure_links(request, sent, options.link_seconds)


def _limits_of(request: DeviceRequest, limits: CurveLimits) -> CurveLimits:
    """On a GPU sizes grow until memory ends; on a CPU that would take hours."""
    return limits if request.local.is_host else replace(limits, stop_when_flat=False)


def _profile(
    target: Target,
    request: DeviceRequest,
    options: ProfileOptions,
    base: _Base,
    measurer: Measurer,
    progress: Progress,
) -> Profile:
    points = _points(base, base.costs)
    others: dict[str, Any] = {CURVES[how]: _other_points(base, c) for how, c in base.others.items()}
    provenance = _provenance(request, options, base)
    emulation = None
    busy = _busy_host(base)
    errors = [costs.step_error for costs in (base.costs, base.busy.costs) if costs is not None]
    known = [error for error in errors if error is not None]
    if request.speed is not None:
        progress(f"{target.model} on {request.device_type} (emulated): held passes", None)
        points, busy = stretched(points, request.speed), None
        held = verify(measurer, points, options.hold_seconds)
        provenance["emulation"] = as_provenance(held, request.speed)
        emulation = Emulation(speed=request.speed, base_device_type=request.local.device_type)
    tables = tuple(graph_of(measured, request.speed or 1.0) for measured in base.layers)
    profile = Profile(
        model=target.model,
        device_type=request.device_type,
        device_memory_bytes=request.local.memory_bytes,
        weight_bytes=base.facts["weight_bytes"],
        frozen_weight_bytes=base.facts.get("frozen_weight_bytes"),
        update_seconds=base.costs.update.median_seconds,
        blocks=tuple(base.facts.get("blocks", ())) or None,
        batch_curve=points,
        **others,
        fixed_seconds=base.costs.fixed_seconds,
        step_error=max(known) if known else None,
        busy=busy,
        layers=tables[0] if tables else None,
        more_layers=tables[1:],
        sync=base.busy.sync,
        links=base.links,
        emulation=emulation,
        out_of_memory_batch_size=base.curve.out_of_memory_batch_size,
        optimizer=base.optimizer,
        base_memory_bytes=base.base_memory_bytes,
        update_workspace_bytes=base.update_workspace_bytes,
        group_workspace_bytes=base.group_workspace_bytes,
        beside_tensors=base.beside_tensors,
        reference_seconds=base.facts["reference_seconds"],
        host_memory_bytes=free_memory_bytes() if "offloaded" in base.others else None,
    )
    if request.speed is not None or not tables or base.links is None:
        # Of emulated types nothing is rehearsed: a stage's passes are held to their layers' times.
        told = {"skipped": "needs layers, links and a device that is not emulated"}
    else:
        profile, told = measure_pipeline(
            target,
            request,
            profile,
            optimizer=options.optimizer or DEFAULT_OPTIMIZER,
            budget_seconds=options.exchange_seconds,
            progress=progress,
        )
    return replace(profile, provenance={**provenance, "pipeline": told})


def _provenance(request: DeviceRequest, options: ProfileOptions, base: _Base) -> dict[str, Any]:
    on_host, threads = request.local.is_host, request.local.num_threads
    threads_text = ", one thread" if threads == 1 else f", {threads} threads"
    timings = [point.timing for point in base.costs.points]
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
        "clock": "wall, in the loop that trains" + (threads_text if on_host else ""),
        "peak_memory": (
            "resident memory of the whole process"
            + ("" if base.facts["peak_memory_reset"] else ", highest so far")
            + ", and an update's workspace"
            if on_host
            else f"torch.{request.local.kind}.max_memory_allocated"
        ),
        "optimizer": base.facts["optimizer"],
        "num_parameters": base.facts["num_parameters"],
        "repeats": max(timing.repeats for timing in timings),
        "spread": max(timing.spread for timing in timings),
        "curve_stopped": base.curve.stopped,
        "died_of": base.death,
        "loading": base.no_loading or "measured",
        **(
            {"script_batch_size": base.facts["own_batch_size"]}
            if "own_batch_size" in base.facts
            else {}
        ),
        "alone": _as_provenance(base.alone),
        "busy": (
            {"skipped": base.busy.costs_skipped}
            if base.busy.carried is None
            else {"num_devices": base.busy.num_devices, **_as_provenance(base.busy.carried)}
        ),
        "passes_alone": [
            {
                "batch_size": result.batch_size,
                "wall_seconds": result.wall_seconds,
                **asdict(result.timing),
            }
            for result in base.curve.results
        ],
        "sync": base.busy.sync_provenance,
        "links": base.links_provenance,
        **({"layers": [measured["provenance"] for measured in base.layers]} if base.layers else {}),
    }


def _as_provenance(carried: Carried) -> dict[str, Any]:
    """How well the parts of a step are known; times in seconds."""
    costs = carried.costs
    return {
        "carried_batch_sizes": list(carried.sizes),
        "carried_error": carried.error,
        "rounds": costs.num_rounds,
        "tolerance": costs.tolerance,
        "wide_batch_sizes": list(costs.wide),
        "points": [
            {"batch_size": point.batch_size, "load_seconds": point.load_seconds}
            | asdict(point.timing)
            for point in costs.points
        ],
        "update": asdict(costs.update),
        "virtual_node_seconds": costs.virtual_node_seconds,
        "fixed_seconds": costs.fixed_seconds,
        "steps_put_together": [{**asdict(check), "error": check.error} for check in costs.checks],
        "step_error": costs.step_error,
    }
