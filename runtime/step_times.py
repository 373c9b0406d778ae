"""When the parts of one step began and ended, as a worker's ``StepClock`` has marked them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class StagePass:
    """One forward pass, or one backward pass or half of one, of a pipeline's stage."""

    stage: int
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One full step of one worker. Times are in seconds since the step began.

    A step begins where the script asked for its batch, and ends where it asks for the next one.

    Attributes:
        asked_seconds: Since the first step that is kept began, when this one did.
        passes: Begin and end of each pass, in order: forward and backward of a virtual node; of a
            pipeline the forward passes. The runtime's own work for a virtual node is inside;
            waiting for its samples is before.
        computed: The last pass has ended, and what was left to synchronise is on its way.
        synchronised: Gradients are the mean over all workers.
        ended: The script has updated, cleared gradients, and asks for the next batch.
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
        """Read back what ``as_json`` gave."""
        passes = tuple((float(began), float(ended)) for began, ended in found["passes"])
        stages = tuple(StagePass(**entry) for entry in found.get("stages", ()))
        return cls(**{**found, "passes": passes, "stages": stages})

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def pass_seconds(self) -> list[float]:
        """[passes] how long each took."""
        return [ended - began for began, ended in self.passes]

    @property
    def gap_seconds(self) -> list[float]:
        """[passes - 1] from the end of a pass to the begin of the next: waiting for samples."""
        return [after[0] - before[1] for before, after in pairwise(self.passes)]

    @property
    def sync_seconds(self) -> float:
        """From this worker's last pass until gradients are the mean over all workers."""
        return self.synchronised - self.computed

    @property
    def update_seconds(self) -> float:
        """From the gradients to the request for the next batch."""
        return self.ended - self.synchronised
