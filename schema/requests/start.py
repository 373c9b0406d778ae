"""The request to run a queue of jobs on a pool of devices."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from .allocate import POOL

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import GraceSeconds, Pool, RoundSeconds


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What ``cluster start`` needs to know."""

    pool: Annotated[
        "Pool", replace(POOL, help="The devices, e.g. 2xV100,2xP100 or 1xcpu:fast,2xcpu:slow.")
    ]
    _: KW_ONLY
    engine: Annotated[
        str, Option(help="Where jobs run: local (this host), slurm or ray (their nodes).")
    ] = "local"
    policy: Annotated[
        str,
        Option(
            help="How devices are shared: a policy of `hetflow allocate`; elastic, weighted fair "
            "sharing that changes how many devices jobs hold; or easyscale, easyscale-taking or "
            "easyscale-homogeneous, which also change their types."
        ),
    ] = "las_weighted"
    round_seconds: Annotated[
        "RoundSeconds", Option(flag="--round", help="Seconds between decisions.")
    ] = 360.0
    grace_seconds: Annotated[
        "GraceSeconds",
        Option(flag="--grace", help="Seconds that a job has to save before it is killed."),
    ] = 30
    entities: Annotated[
        "Path | None",
        Option(help="The tree of entities that share the devices, for policy hierarchical."),
    ] = None
    on_change: Annotated[
        str | None,
        Option(
            metavar="PROGRAM|URL",
            help="Tell this program (on its stdin), or this http(s) address, when a job's state "
            "changes. No shell runs it.",
        ),
    ] = None
    group: Annotated[
        str | None,
        Option(
            help="Let this Unix group's users submit, too, and look after their own jobs, which "
            "run as them. Needs root and the engine local."
        ),
    ] = None
