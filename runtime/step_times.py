"""The times of one step's parts, as a worker's ``StepClock`` has marked them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class StagePass:
    """One forward pass of a pipeline's stage, one backward pass, or half of a backward pass."""

    stage: int
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One full step of one worker. Times are in seconds since the step began.

    A step begins when the script asks for its batch, and ends when it asks for the next one.

    Attributes:
        asked_seconds: When this step began, in seconds since the first step that is kept began.
        passes: (begin, end) of each pass, in order: forward and backward of a virtual node, or a
            pipeline's forward passes. The runtime's own work for a virtual node is included;
            waiting for its samples comes before.
        computed: When the last pass has ended, and the rest of the gradients is on its way.
        synchronised: When gradients are the mean over all workers.
        ended: When the script has updated, cleared gradients, and asks for the next batch.
        stages: The passes of a pipeline's stages, loading included.
    """

    asked_seconds: float
    passes: tuple[tuple[float, float], ...]
    computed: float
    synchronised: float
    ended: float
    stages: tuple[StagePass, ...] = ()

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "StepTimes":
        """Read back the values of ``as_json``."""
        passes = tuple((float(began), float(ended)) for began, ended in found["passes"])
        stages = tuple(StagePass(**entry) for entry in found.get("stages", ()))
        return cls(**{**found, "passes": passes, "stages": stages})

    def as_json(self) -> dict[str, Any]:
        """The times as plain values, for JSON."""
        return asdict(self)

    @property
    def pass_seconds(self) -> list[float]:
        """[passes] the seconds that each took."""
        return [ended - began for began, ended in self.passes]

    @property
    def gap_seconds(self) -> list[float]:
        """[passes - 1] seconds from the end of each pass to the next one's begin: loading."""
        return [after[0] - before[1] for before, after in pairwise(self.passes)]

    @property
    def sync_seconds(self) -> float:
        """Seconds from this worker's last pass until gradients are the mean over all workers."""
        return self.synchronised - self.computed

    @property
    def update_seconds(self) -> float:
        """Seconds from the mean gradients to the request for the next batch."""
        return self.ended - self.synchronised
