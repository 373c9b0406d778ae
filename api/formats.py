"""``hetflow.export``, and what ``hetflow import`` reads: layers, prices, traces."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..formats.exporters.registry import EXPORTERS, CheckpointExporter
from ..formats.importers.pipedream import profile_of
from ..formats.importers.price_lists import read_instance_types
from ..formats.importers.recognise import is_market, read_market
from ..formats.importers.registry import (
    LAYER_IMPORTERS,
    PRICE_IMPORTERS,
    TRACE_IMPORTERS,
    TraceOptions,
)
from ..planning.inputs import pool_of
from ..planning.market_prices import all_prices
from ..planning.pipeline_problem import layers_of_graph
from ..runtime.launcher.mapping import host_groups, host_types, virtual_types
from ..runtime.protocol.environment import pins
from ..runtime.protocol.lower import check_level, lower
from ..schema.cluster import is_device_type, parse_memory
from ..schema.deployment import Deployment, HostGroup, Machine, job_name
from ..schema.errors import FileError, ProblemError
from ..schema.files import read_text
from ..schema.market import Market
from ..schema.options import command, option
from ..schema.pipeline import check_joined
from ..schema.profile import Profile
from ..schema.requests.files import ExportRequest, ImportRequest
from ..schema.requests.kinds import Markets
from ..schema.spelling import did_you_mean, nearest
from .calls import takes
from .files import markets_of, plan_of


@takes(ExportRequest)
def export(request: ExportRequest) -> str:
    """Write the script or manifest that starts a plan elsewhere; nothing is started.

    Returns:
        The text.

    Raises:
        ProblemError: The plan cannot be launched, the hosts lack devices, or the target cannot
            start it; the message says what to change.
        FileError: The plan is missing or has faults.

    Example:
        >>> import hetflow
        >>> text = hetflow.export("plan.json", "slurm", "train.py")
        >>> text.splitlines()[0]
        '#!/bin/bash'
    """
    made = _deployment_of(request)
    chosen = EXPORTERS.get(request.target)
    if isinstance(chosen, CheckpointExporter) or Deployment not in chosen.takes:
        raise ProblemError(
            f"{request.target} starts no plan",
            hint="targets are slurm, kubernetes, skypilot, torchrun, ...",
        )
    return chosen.render(made, str(request.plan))


def _deployment_of(request: ExportRequest) -> Deployment:
    """Lay out the launch of a plan; see ``export``."""
    found = plan_of(request.plan)
    level = check_level(request.determinism)
    config = lower(found, request.seed, level)
    checkpoint, every = request.checkpoint, request.checkpoint_every
    if every and checkpoint is None:
        raise ProblemError(
            f"{option('checkpoint_every', every)} needs a folder",
            hint=f"give {option('checkpoint', 'DIR')} too",
        )
    pool = None if request.hosts is None else pool_of(request.hosts, field="hosts")
    groups = host_groups(config, found, pool)
    if request.market is not None:
        groups = _rented(groups, request.market, request.at)
    elif request.at is not None:
        raise ProblemError(
            "a time of prices is given, and no market", hint=f"add {option('market', 'FILE')}"
        )
    return Deployment(
        name=job_name(request.job or found.model),
        model=found.model,
        plan=str(request.plan),
        plan_text=read_text(Path(request.plan)),
        script=(str(request.script), *request.arguments) if request.script else (),
        groups=groups,
        names=dict(request.names or {}),
        virtual_types=virtual_types(config),
        host_types=host_types(config),
        directory=request.directory,
        setup=tuple(request.setup),
        seed=config.seed,
        determinism=level,
        pins=pins(level),
        checkpoint=checkpoint,
        checkpoint_every=every,
        cpus_per_device=request.cpus_per_device,
        image=request.image,
        volume=_volume(request.volume),
        directives=tuple(request.directives),
    )


deployment_of = takes(ExportRequest)(_deployment_of)


def _volume(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    claim, colon, path = text.partition(":")
    is_name = re.fullmatch(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", claim)
    if not is_name or not colon or not path.startswith("/") or not path.isprintable():
        raise ProblemError(
            f"{option('volume', repr(text))} is not CLAIM:/PATH", hint="write runs:/runs"
        )
    return claim, path


def _rented(groups: Sequence[HostGroup], market: Markets, at: str | None) -> tuple[HostGroup, ...]:
    """The hosts with the machines that have just their devices, the cheapest first."""
    prices = all_prices(markets_of(market), at)
    found = []
    for group in groups:
        device_type, number = group.one_type("a rented machine")
        fitting = [one for one in prices.get(device_type, ()) if one.num_devices == number]
        if not fitting:
            sizes = sorted({one.num_devices for one in prices.get(device_type, ())})
            raise ProblemError(
                f"the market has no machine with {number} x {device_type} then",
                hint=f"it has some with {', '.join(map(str, sizes))}: lay {option('hosts')} "
                "out over them"
                if sizes
                else f"it has prices of {', '.join(sorted(prices)) or 'nothing'}",
            )
        machines = tuple(
            Machine(
                cloud=one.cloud,
                place=one.place.removeprefix(one.cloud).strip(),
                instance_type=one.instance_type,
                is_spot=one.is_spot,
                dollars_per_hour=one.dollars_per_hour * number,
            )
            for one in sorted(fitting, key=lambda one: one.dollars_per_hour)
        )
        found.append(replace(group, machines=machines))
    return tuple(found)


SACCT = "sacct"
_CATALOGUE = "instance-types"


@dataclass(frozen=True, slots=True)
class Imported:
    """What was read, how much that is, and the command that takes it next."""

    record: Profile | Market
    contents: str
    next_command: str = "hetflow show"


def imported(request: ImportRequest, *, states_source: bool) -> Imported:
    """Read a file, or a folder, in a foreign format.

    Args:
        request: What to read.
        states_source: Whether the format was named; else market data is recognised.

    Raises:
        ProblemError: The format is unknown, or an option that it needs is missing or wrong.
        FileError: A file is missing or has faults.
    """
    file, source = request.file, request.source
    if not states_source and is_market(file):
        return _with_machines(read_market(file), request)
    if source == _CATALOGUE:
        machines = read_instance_types(file)
        if not machines:
            raise FileError(f"{file}: describes no machine", hint="add a line for each")
        return Imported(Market(instance_types=machines), f"{len(machines)} instance types")
    if PRICE_IMPORTERS.find(source) is not None:
        return _with_machines(Market(prices=PRICE_IMPORTERS.get(source)(file)), request)
    if TRACE_IMPORTERS.find(source) is not None:
        traces = TRACE_IMPORTERS.get(source)(file, _trace_options(request))
        return Imported(traces, f"{len(traces.availability) + len(traces.capacity)} traces")
    return _layers(request)


def _with_machines(market: Market, request: ImportRequest) -> Imported:
    """A market with the machines that its prices are of."""
    table = request.instance_types
    known = read_instance_types(table) if table is not None else ()
    market = replace(market, instance_types=(*known, *market.instance_types))
    for history in market.prices if known else ():
        if market.instance_type_of(history) is None:
            guess = nearest(history.instance_type, [one.name for one in known])
            raise ProblemError(
                f"{table}: does not describe {history.instance_type!r}, which "
                f"{request.file} has prices of",
                hint=f"nearest is {guess!r}" if guess else "add a line for it",
            )
    numbers = {
        "instance types": len(market.instance_types) if not market.prices else 0,
        "price histories": len(market.prices),
        "traces": len(market.availability) + len(market.capacity),
    }
    contents = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
    return Imported(market, contents)


def _trace_options(request: ImportRequest) -> TraceOptions:
    units, values = {"seconds": 1.0, "hours": 3600.0}, request.values
    if request.time_unit not in units:
        raise ProblemError(
            f"{option('time_unit')} must be seconds or hours, got {request.time_unit[:60]!r}"
        )
    if values not in (None, "instances", "preempted"):
        raise ProblemError(
            f"{option('values')} must be instances or preempted, got {values[:60]!r}"
        )
    return TraceOptions(
        tick_seconds=request.tick_seconds,
        time_unit_seconds=units[request.time_unit],
        trace_start=request.trace_start,
        values=values,  # type: ignore[arg-type]  # one of them
    )


def _layers(request: ImportRequest) -> Imported:
    file, source = request.file, request.source
    chosen = LAYER_IMPORTERS.find(source)
    if chosen is None:
        formats = (LAYER_IMPORTERS, PRICE_IMPORTERS, TRACE_IMPORTERS)
        names = (name for each in formats for name in each.names())
        known = tuple(dict.fromkeys((*names, _CATALOGUE, SACCT)))
        raise ProblemError(
            f"unknown import format {source!r}; known are {', '.join(known)}",
            hint=did_you_mean(
                source,
                known,
                f"install the plug-in that has it (entry points {LAYER_IMPORTERS.group})",
            ),
        )
    device_type, memory_bytes = _device(request)
    text, size = read_text(file), request.microbatch_size
    graph = chosen.read(text, microbatch_size=size, name=str(file))
    if not request.keep_placeholders and chosen.without_placeholders is not None:
        graph = chosen.without_placeholders(graph)
    try:
        layers, edges, _ = layers_of_graph(graph)
        check_joined([layer.id for layer in layers], edges)
    except ProblemError as error:
        raise ProblemError(f"{file}: {error.message}", hint=error.hint) from None
    profile = profile_of(
        graph,
        model=request.model or file.name.split(".")[0],
        device_type=device_type,
        device_memory_bytes=memory_bytes,
        source=file.name,
        format_title=chosen.title,
    )
    if chosen.tensor_layers is not None:
        groups = chosen.tensor_layers(text, microbatch_size=size, name=str(file))
        profile = replace(profile, tensor_layers=groups)
    return Imported(profile, f"{len(graph.nodes)} layers", command("solve", profiles=None))


def _device(request: ImportRequest) -> tuple[str, int]:
    """The type of the device that layers were profiled on, and its memory in bytes."""
    given = {name: getattr(request, name) for name in ("device_type", "device_memory")}
    missing = next((name for name, value in given.items() if value is None), None)
    if missing is not None:
        raise ProblemError(
            f"Missing option {option(missing)!r}", hint=f"see `{command('import', help=True)}`"
        )
    name, memory = given["device_type"], given["device_memory"]
    if not is_device_type(name):
        raise ProblemError(
            f"{option('device_type')} {name!r} is not the name of one device type",
            hint=f"name it as in {option('pool')}, for example V100",
        )
    memory_bytes = parse_memory(memory)
    if memory_bytes is None:
        raise ProblemError(
            f"{option('device_memory')} {memory!r} is no amount of memory",
            hint="write a number and a unit, for example 16GB",
        )
    return name, memory_bytes
