"""The state of an aborted generation: which workers are dead, and how far the others are."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...schema.errors import LaunchError
from ...schema.launch import LaunchConfig
from ..protocol.messages import Recover
from .mapping import without

# How long a worker that lost its connections waits for a death to be seen.
CAUSE_SECONDS = 1.0
MAX_TRIES = 3  # at one step


@dataclass(slots=True)
class Losses:
    """The dead and their causes by name, and the operation that each of the others is in.

    ``first_sign`` is what the first of them to lose another says of it, ``last_sign`` what the
    first says of the last time.
    """

    dead: list[str] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    began: float = 0.0
    first_sign: str = ""
    last_sign: str = ""
    _since: float = 0.0
    _last: tuple[int, int] = (-1, 0)

    def begin(self, *, is_again: bool) -> None:
        """A generation is broken off; ``is_again`` where the one before never came together."""
        self._since = time.monotonic()
        if not is_again:
            self.began = self._since
            self.first_sign = ""
        self.last_sign = ""
        self.operations = {}

    def hear(self, why: str) -> None:
        """A worker says how it noticed."""
        self.first_sign, self.last_sign = self.first_sign or why, self.last_sign or why

    def bury(self, name: str, cause: str) -> None:
        """A worker is dead."""
        self.causes.setdefault(name, cause)
        self.dead.append(name)

    def forget(self) -> None:
        """The others have met again."""
        self.dead, self.causes = [], {}

    @property
    def sentence(self) -> str:
        """What happened."""
        return "; ".join(self.causes.values()) or "connections were lost"

    def are_known(self, alive: Sequence[str]) -> bool:
        """Whether all who are left have said how far they are, and a death had time to be seen."""
        all_said = bool(alive) and all(name in self.operations for name in alive)
        return all_said and (bool(self.dead) or time.monotonic() - self._since > CAUSE_SECONDS)

    def unheard(self, alive: Sequence[str], limit_seconds: float) -> list[str]:
        """Who has not said how far it is, that long after the generation was broken off."""
        is_late = time.monotonic() - self._since > limit_seconds
        return [name for name in alive if is_late and name not in self.operations]

    def check(self, alive: Sequence[str]) -> dict[str, int]:
        """The operation of each remaining worker.

        Raises:
            LaunchError: They cannot go on.
        """
        found = {name: self.operations[name] for name in alive}
        top = max(found.values())
        tries = self._last[1] + 1 if self._last[0] == top else 1
        self._last = (top, tries)
        if tries > MAX_TRIES:
            raise LaunchError(
                f"{self.sentence}; the others could not meet again in {tries - 1} tries: "
                f"{self.last_sign}"
                if self.dead
                else f"the workers lost each other {tries} times at the same step, though none has "
                f"ended: {self.first_sign}"
            )
        if min(found.values()) < top - 1:
            raise LaunchError("the workers are more than one step apart")
        return found


def recovery(
    config: LaunchConfig,
    ranks: Mapping[str, int],
    operations: Mapping[str, int],
    generation: int,
) -> Recover:
    """The mapping without the dead, as it is told to the others. Pure."""
    lost = [rank for name, rank in ranks.items() if name not in operations]
    order = sorted(operations, key=ranks.__getitem__)
    changed, top = without(config, lost), max(operations.values())
    return Recover(
        generation=generation,
        config=changed,
        ranks={name: rank for rank, name in enumerate(order)},
        behind=tuple(name for name in order if operations[name] < top),
        donor=next(name for name in order if operations[name] == top),
    )
