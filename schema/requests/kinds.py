"""Types of what users give: the values themselves, or the files that hold them.

The request records name these types as text, because importing them takes longer than ``--help``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..cluster import Cluster
from ..lazy import lazy_names
from ..optimizer import OptimizerState
from ..options import OnFailure
from ..plan import Plan
from ..profile import Profile
from ..records import (
    Bytes,
    Count,
    Dollars,
    Fraction,
    Index,
    PositiveRate,
    PositiveSeconds,
    RentDollars,
    SpotDollars,
    WaitSeconds,
)

if TYPE_CHECKING:
    from ..files import Record
    from ..jobs import Allocation, JobsTable, ThroughputsTable
    from ..launch import Rendezvous
    from ..market import Markets, Offers, Windows

__all__ = [
    "Allocation", "Bytes", "Callable", "Count", "Dollars", "Fraction", "GraceSeconds",
    "HeartbeatSeconds", "Index", "JobCount", "JobsTable", "MachineSpeeds", "Mapping", "Markets",
    "Offers", "OnDemandPrices", "OnFailure", "OptimizerState", "Plan", "Pool", "PositiveRate",
    "PositiveSeconds", "Profile", "Profiles", "Record", "Rendezvous", "RoundSeconds", "Sequence",
    "Speeds", "SpotPrices", "SyncDevices", "ThroughputsTable", "TimeoutSeconds", "WaitSeconds",
    "Windows",
]  # fmt: skip

Profiles = Sequence[Profile] | Path | str
"""Profiles, or the folder (or file) that holds them."""
Pool = Cluster | Mapping[str, Count] | Path | str
"""A cluster; the numbers of devices by type, ``{"V100": 2, "P100": 8}``; a path: a cluster's
file or what ``nvidia-smi -L`` printed; or a string such as ``2xV100,8xP100`` or ``gpu:v100:2``."""
Speeds = Sequence[float]
"""The speed of a job on 0, 1, ... machines."""
MachineSpeeds = Mapping[str, PositiveRate | Plan | Path | str]
"""How many times as fast the machines of a type or zone are; or their plan, or its file."""
OnDemandPrices = RentDollars | Mapping[str, RentDollars]
"""Dollars per hour of a machine on demand, or of one of each type or in each zone."""
SpotPrices = SpotDollars | Mapping[str, SpotDollars]
"""Dollars per hour of a spot machine, or of one in each zone."""
GraceSeconds = Annotated[int, Field(ge=1, le=10**8)]
HeartbeatSeconds = Annotated[float, Field(ge=0.5, le=1e8)]
RoundSeconds = Annotated[float, Field(ge=1)]
TimeoutSeconds = Annotated[float, Field(ge=1, le=1e8)]
SyncDevices = Annotated[int, Field(ge=0, le=64)]
JobCount = Annotated[int, Field(ge=1, le=10_000_000)]
"""A number of jobs to draw."""


# Few verbs take these.
__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "..files": "Record",
        "..jobs": "Allocation JobsTable ThroughputsTable",
        "..launch": "Rendezvous",
        "..market": "Markets Offers Windows",
    },
)
