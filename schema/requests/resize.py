"""The request to change the devices of a running launch."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from .allocate import POOL

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Plan, Pool, Profiles, WaitSeconds


@dataclass(frozen=True, slots=True)
class ResizingRequest:
    """What ``resize`` needs to know."""

    run: Annotated[
        "Path | str",
        Option(argument=True, help="The folder of a running launch, or its name in hetflow-runs."),
    ]
    pool: Annotated[
        "Pool | None", replace(POOL, help="All devices from now on: 2xV100,8xP100.")
    ] = None
    _: KW_ONLY
    plan: Annotated[
        "Plan | Path | str | None",
        Option(help="Instead of {pool}: a plan of the same virtual nodes or microbatches."),
    ] = None
    profiles: Annotated[
        "Profiles | None",
        Option(
            help="Folder of profiles: solve for the best mapping on {pool}. A pipeline needs them."
        ),
    ] = None
    wait: Annotated[
        bool, Option(help="Wait until it is done, and say what happened.", default="wait")
    ] = True
    timeout_seconds: Annotated[
        "WaitSeconds", Option(flag="--timeout", help="Seconds to wait for the answer.")
    ] = 600.0
