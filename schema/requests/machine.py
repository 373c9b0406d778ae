"""The requests about this machine: what it lacks, and a training on it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ..options import Option

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What ``doctor`` needs to know."""

    report: Annotated[
        "Path | None",
        Option(metavar="FILE", help="Write versions, topology and findings here, to send."),
    ] = None
    suite: Annotated[
        "Path | None", Option(help="With {report}: results that `pytest --junitxml` has written.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """What ``demo`` needs to know."""

    output: Annotated[
        "Path | None", Option(other="-o", help="Keep profiles, plan and run in this new folder.")
    ] = None
    epochs: Annotated["Count", Option(help="Epochs of training.")] = 3
