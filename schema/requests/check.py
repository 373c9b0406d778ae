"""The request to judge a plan or an allocation."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..choices import Placement
from ..options import Option
from .allocate import AT, MARKET, POOL
from .solve import MEMORY_RESERVE, MODEL, OPTIMIZER, PROFILES

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import (
        Allocation,
        Bytes,
        Dollars,
        JobsTable,
        Markets,
        OptimizerState,
        Plan,
        Pool,
        PositiveRate,
        Profiles,
        ThroughputsTable,
    )

PLANS = "For a plan"
ALLOCATIONS = "For an allocation"
AS_STATED = "what it states"


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What ``check`` needs to know."""

    claim: Annotated[
        "Plan | Allocation | Path | str",
        Option(argument=True, help="A plan or an allocation, or its file."),
    ]
    profiles: Annotated[
        "Profiles | None",
        replace(
            PROFILES,
            help="Folder of profiles to check a plan against; without them only what a split plan "
            "says of itself is judged.",
        ),
    ] = None
    pool: Annotated["Pool | None", replace(POOL, default="what a plan states or uses")] = None
    _: KW_ONLY
    model: Annotated[str | None, replace(MODEL, panel=PLANS)] = None
    link_bytes_per_second: Annotated[
        "PositiveRate | None",
        Option(
            panel=PLANS, help="Bandwidth of links that the pool does not state.", default=AS_STATED
        ),
    ] = None
    optimizer: Annotated[
        "OptimizerState | str | None", replace(OPTIMIZER, panel=PLANS, default=AS_STATED)
    ] = None
    memory_reserve_bytes: Annotated[
        "Bytes | None", replace(MEMORY_RESERVE, panel=PLANS, default=AS_STATED)
    ] = None
    jobs: Annotated[
        "JobsTable | None", Option(panel=ALLOCATIONS, help="The jobs that it is for.")
    ] = None
    throughputs: Annotated[
        "ThroughputsTable | None", Option(panel=ALLOCATIONS, help="The throughputs of these.")
    ] = None
    space_sharing: Annotated[
        bool | None,
        Option(
            panel=ALLOCATIONS, help="Whether pairs of jobs may share devices.", default=AS_STATED
        ),
    ] = None
    placement: Annotated[
        Placement | None,
        Option(
            panel=ALLOCATIONS,
            help="Which throughputs of jobs with several devices count.",
            default=AS_STATED,
        ),
    ] = None
    budget_dollars: Annotated[
        "Dollars | None",
        Option(flag="--budget", panel=ALLOCATIONS, help="Its budget.", default=AS_STATED),
    ] = None
    market: Annotated["Markets | None", replace(MARKET, panel=ALLOCATIONS)] = None
    at: Annotated[str | None, replace(AT, panel=ALLOCATIONS)] = None
