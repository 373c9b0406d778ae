"""A resize in progress: joining and leaving workers, and the messages to all workers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..protocol.messages import Resize
from ..schema.launch import LaunchConfig
from ..schema.resize import ResizeAnswer
from .history import devices_of


@dataclass(slots=True, kw_only=True)
class Change:
    """The next mapping of virtual nodes, until all workers have changed to it.

    ``ranks`` has the workers of the next generation by name; ``request`` is None where the
    controller asked by itself.
    """

    config: LaunchConfig
    ranks: dict[str, int]
    joining: list[str]
    leaving: list[str]
    request: Path | None
    detail: str
    kind: Literal["resize", "replace"] = "resize"
    began: float = field(default_factory=time.monotonic)
    ready: set[str] = field(default_factory=set)
    start_seconds: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether every joining worker waits at its first batch."""
        return self.ready >= set(self.joining)

    def announcement(self, now: Mapping[str, int], generation: int) -> Resize:
        """The message to all workers, running and joining ones.

        Each joining worker gets the state from a donor, the staying workers in turn. If no worker
        stays, the first one is the guest: it meets the joining workers once, and leaves.

        Args:
            now: Rank of each worker there is.
            generation: The number of the next mapping.
        """
        self.start_seconds = time.monotonic() - self.began if self.joining else None
        staying = [name for name in self.ranks if name in now]
        first = min(now, key=now.__getitem__)
        givers = staying or [first]
        return Resize(
            generation=generation,
            config=self.config,
            ranks=self.ranks,
            donors={name: givers[n % len(givers)] for n, name in enumerate(self.joining)},
            guest=None if staying else first,
        )

    def answer(self, generation: int, pause_seconds: float) -> ResizeAnswer:
        """The answer to send when all workers have met."""
        return ResizeAnswer(
            status="done",
            detail=f"{devices_of(self.config)} from now on",
            generation=generation,
            joined=tuple(self.joining),
            left=tuple(self.leaving),
            start_seconds=self.start_seconds,
            pause_seconds=pause_seconds,
        )
