"""The request to turn profiles into throughputs of jobs."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from .solve import MEMORY_RESERVE

if TYPE_CHECKING:
    from .kinds import Bytes, Count, Mapping, Profiles, Sequence


@dataclass(frozen=True, slots=True)
class ThroughputsRequest:
    """What ``throughputs`` needs to know."""

    profiles: Annotated[
        "Profiles",
        Option(
            argument=True,
            help="Folder of profiles (hetflow profile -o).",
            python="Also ``Profile`` records, of one or more models.",
        ),
    ]
    _: KW_ONLY
    batch_size: Annotated[
        "Count | Mapping[str, Count]",
        Option(help="Samples of a job's step: one number, or resnet50=256,gpt=64 by model."),
    ]
    scale_factors: Annotated[
        "Sequence[Count]", Option(help="Numbers of devices that jobs ask for, such as 1,2,4.")
    ] = (1,)
    mixes: Annotated[bool, Option(help="Add jobs that hold several device types at once.")] = False
    memory_reserve_bytes: Annotated[
        "Bytes",
        replace(
            MEMORY_RESERVE, help="Memory of each device to leave free, such as 2GiB, as for solve."
        ),
    ] = 0
