"""The request to estimate how long spot machines last."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from ..options import Option

if TYPE_CHECKING:
    from .kinds import WaitSeconds, Windows


@dataclass(frozen=True, slots=True)
class OddsRequest:
    """What ``rent odds`` needs to know."""

    sources: Annotated[
        "Windows",
        Option(
            argument=True,
            help="Markets (hetflow.market/1), or windows of Can't Be Late; a folder is one zone.",
        ),
    ]
    _: KW_ONLY
    checkpoint_seconds: Annotated[
        "WaitSeconds | None",
        Option(help="What writing a checkpoint takes; says how often to write."),
    ] = None
