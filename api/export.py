"""``hetflow.export``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

from ..exporters.registry import EXPORTERS
from ..launcher.deploying import host_groups, host_types, virtual_types
from ..planning.inputs import pool_of
from ..planning.market_prices import all_prices, markets_of
from ..protocol.lower import check_level, lower
from ..protocol.pins import pins
from ..schema.deployment import Deployment, HostGroup, Machine, job_name
from ..schema.errors import ProblemError
from ..schema.files import read_text
from ..schema.options import option
from ..schema.records import Count, Index
from ..schema.requests.kinds import Markets, Pool
from .calls import checks
from .files import plan_of


class ExportOptions(TypedDict, total=False):
    """Options of an export.

    Attributes:
        hosts: The hosts in order of ranks, such as ``"1x(2xV100),2x(4xP100)"``; None takes the
            servers of the plan's pool, or one host for each device type of a flat one.
        names: Device type -> what the target calls it.
        job: Name of the job; None makes one of the model's.
        directory: Where to start; None: where the target starts jobs.
        setup: Lines of shell that run before the launch on each host.
        seed: Seed of sample order, dropout and augmentation.
        determinism: As in ``hetflow.launch``.
        checkpoint: Folder of checkpoints that all hosts see.
        checkpoint_every: Steps between checkpoints.
        cpus_per_device: Processors to ask for beside each device.
        image: The container image, for Kubernetes.
        volume: ``CLAIM:/PATH`` of a volume that all pods see, for Kubernetes.
        directives: Options of ``sbatch``, for Slurm.
        market: Markets, or their files, to rent machines of, the cheapest first.
        at: The time of the market's prices, in UTC; None takes the last known.
    """

    hosts: Pool | None
    names: Mapping[str, str]
    job: str | None
    directory: str | None
    setup: Sequence[str]
    seed: Index
    determinism: str
    checkpoint: str | None
    checkpoint_every: Index
    cpus_per_device: Count
    image: str | None
    volume: str | None
    directives: Sequence[str]
    market: Markets | None
    at: str | None


@checks
def export(
    plan: Path | str,
    target: str,
    script: Path | str,
    arguments: Sequence[str] = (),
    **options: Unpack[ExportOptions],
) -> str:
    """Write the script or manifest that starts a plan elsewhere; nothing is started.

    Args:
        plan: The plan's file.
        target: ``slurm``, ``kubernetes``, ``skypilot``, ``torchrun``, ``ray``, ``hosts``, or a
            plug-in's.
        script: The training script, or ``"-m"`` with a module as the first argument.
        arguments: Arguments of the script.
        options: See ``ExportOptions``.

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
    made = deployment_of(plan, (str(script), *arguments), **options)
    chosen = EXPORTERS.get(target)
    if Deployment not in chosen.takes:
        raise ProblemError(
            f"{target} starts no plan",
            hint="targets are slurm, kubernetes, skypilot, torchrun, ...",
        )
    return chosen.render(made, str(plan))


@checks
def deployment_of(
    plan: Path | str, script: tuple[str, ...], **options: Unpack[ExportOptions]
) -> Deployment:
    """Lay out the launch of a plan; see ``export``."""
    found = plan_of(plan)
    level = check_level(options.get("determinism", "none"))
    config = lower(found, options.get("seed", 0), level)
    checkpoint, every = options.get("checkpoint"), options.get("checkpoint_every", 0)
    if every and checkpoint is None:
        raise ProblemError(
            f"{option('checkpoint_every', every)} needs a folder",
            hint=f"give {option('checkpoint', 'DIR')} too",
        )
    hosts = options.get("hosts")
    pool = None if hosts is None else pool_of(hosts, field="hosts")
    groups = host_groups(config, found, pool)
    if (market := options.get("market")) is not None:
        groups = _rented(groups, market, options.get("at"))
    elif options.get("at") is not None:
        raise ProblemError(
            "a time of prices is given, and no market", hint=f"add {option('market', 'FILE')}"
        )
    return Deployment(
        name=job_name(options.get("job") or found.model),
        model=found.model,
        plan=str(plan),
        plan_text=read_text(Path(plan)),
        script=script,
        groups=groups,
        names=dict(options.get("names", {})),
        virtual_types=virtual_types(config),
        host_types=host_types(config),
        directory=options.get("directory"),
        setup=tuple(options.get("setup", ())),
        seed=config.seed,
        determinism=level,
        pins=pins(level),
        checkpoint=checkpoint,
        checkpoint_every=every,
        cpus_per_device=options.get("cpus_per_device", 1),
        image=options.get("image"),
        volume=_volume(options.get("volume")),
        directives=tuple(options.get("directives", ())),
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
