"""The generations of a launch, for its run record."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ...schema.launch import LaunchConfig
from ...schema.run import Generation, GenerationKind, GenerationWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGeneration:
    """Where a launch's last workers report: how many, which generation, and its last restart."""

    world_size: int
    number: int = 0
    restarted_at: int = 0


class History:
    """The generations so far; ``entries`` go into the run record."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.entries: list[Generation] = []

    def add(
        self,
        number: int,
        kind: GenerationKind,
        detail: str,
        config: LaunchConfig,
        ranks: Mapping[str, int],
        *,
        joined: tuple[str, ...] = (),
        left: tuple[str, ...] = (),
        pause_seconds: float | None = None,
    ) -> None:
        """Record a generation that has started; ``ranks`` names its workers."""
        by_rank = {rank: name for name, rank in ranks.items()}
        workers = tuple(
            GenerationWorker(
                name=by_rank[slot.rank],
                device_type=slot.device_type,
                virtual_nodes=tuple(node.index for node in slot.virtual_nodes),
            )
            for slot in config.workers
        )
        self.entries.append(
            Generation(
                number=number,
                kind=kind,
                at_seconds=time.monotonic() - self._began,
                detail=detail,
                workers=workers,
                joined=joined,
                left=left,
                pause_seconds=pause_seconds,
            )
        )


def devices_of(config: LaunchConfig) -> str:
    """The devices of a launch as ``--gpus`` names them."""
    numbers: dict[str, int] = {}
    for slot in config.workers:
        numbers[slot.device_type] = numbers.get(slot.device_type, 0) + 1
    return ",".join(f"{number}x{name}" for name, number in numbers.items())
