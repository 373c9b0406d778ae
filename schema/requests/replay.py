"""The request to simulate the jobs of a live cluster."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from .allocate import POLICIES

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Mapping, RoundSeconds, WaitSeconds

RATES = Option(
    flag="--rate",
    help="With {sacct}: a type's relative speed, v100=3.5; may be repeated.",
    default="a job runs only on the type that it ran on",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What ``cluster replay`` needs to know."""

    policy: Annotated[
        str | None,
        Option(names=POLICIES.names, help="Another policy than the live one."),
    ] = None
    restart_seconds: Annotated[
        "WaitSeconds", Option(help="Seconds that a job loses when it starts or restarts.")
    ] = 0.0
    resize_seconds: Annotated[
        "WaitSeconds | None",
        Option(
            help="Seconds that a job loses when it changes devices while it runs.",
            default="{restart_seconds}",
        ),
    ] = None
    sacct: Annotated[
        "Path | str | None",
        Option(
            help="What `sacct` says of a Slurm cluster's jobs, instead of a state folder: "
            "--parsable2 or --json."
        ),
    ] = None
    gpus: Annotated[
        str | None,
        Option(help="With {sacct}: the pool.", default="the most GPUs held at once"),
    ] = None
    rates: Annotated["Mapping[str, float] | None", RATES] = None
    round_seconds: Annotated["RoundSeconds", Option(help="With {sacct}: length of a round.")] = (
        360.0
    )
