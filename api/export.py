"""``hetflow.export``."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..formats.exporters.registry import EXPORTERS
from ..planning.inputs import pool_of
from ..planning.market_prices import all_prices
from ..runtime.launcher.mapping import host_groups, host_types, virtual_types
from ..runtime.protocol.environment import pins
from ..runtime.protocol.lower import check_level, lower
from ..schema.deployment import Deployment, HostGroup, Machine, job_name
from ..schema.errors import ProblemError
from ..schema.files import read_text
from ..schema.options import option
from ..schema.requests.files import ExportRequest
from ..schema.requests.kinds import Markets
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
    made = _deployment(request)
    chosen = EXPORTERS.get(request.target)
    if Deployment not in chosen.takes:
        raise ProblemError(
            f"{request.target} starts no plan",
            hint="targets are slurm, kubernetes, skypilot, torchrun, ...",
        )
    return chosen.render(made, str(request.plan))


@takes(ExportRequest)
def deployment_of(request: ExportRequest) -> Deployment:
    """Lay out the launch of a plan; see ``export``."""
    return _deployment(request)


def _deployment(request: ExportRequest) -> Deployment:
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
    """The hosts with the machines that have just their devices, the cheapest first.

    Raises:
        ProblemError: No machine has them at that time.
    """
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
