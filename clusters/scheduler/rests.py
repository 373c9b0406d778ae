"""Servers on which a launch could not begin are left alone for a while, longer each time.

What was wrong there is no fault of the job (its folder was full, a daemon was gone), and would be
of the next job's launch, too. As with Slurm, which drains such nodes, but hetflow comes back.
"""

from .store import Store

FIRST_SECONDS = 10.0
LONGEST_SECONDS = 300.0
_KEY = "rests"


class Rests:
    """Which servers rest, and until when; in the state, so that another scheduler knows."""

    def __init__(self, store: Store) -> None:
        """Go on where the state is."""
        self._store = store
        # Until when, and how long it was in all, by server.
        self._rests: dict[str, list[float]] = store.get(_KEY) or {}
        self._resting: frozenset[str] = frozenset()

    def begin(self, server: str, now: float) -> float:
        """Let a server rest; for how many seconds more it does.

        Launches that fail together count once.
        """
        until, seconds = self._rests.get(server, (-1e18, 0.0))
        if now >= until:
            recent = now - until <= LONGEST_SECONDS
            seconds = min(2.0 * seconds, LONGEST_SECONDS) if recent else FIRST_SECONDS
            until = now + seconds
            self._rests[server] = [until, seconds]
            self._store.set(_KEY, self._rests)
        return until - now

    def forget_future(self, now: float) -> None:
        """Let no rest last longer from now on than it does in all: a clock was set back."""
        for rest in self._rests.values():
            rest[0] = min(rest[0], now + rest[1])
        self._store.set(_KEY, self._rests)

    def forget(self, server: str) -> None:
        """A launch began there: it works."""
        if self._rests.pop(server, None) is not None:
            self._store.set(_KEY, self._rests)

    def resting(self, now: float) -> frozenset[str]:
        """Servers that rest."""
        return frozenset(server for server, (until, _) in self._rests.items() if now < until)

    def somebody_rose(self, now: float) -> bool:
        """Whether a server's rest has ended since this was asked last."""
        before, self._resting = self._resting, self.resting(now)
        return bool(before - self._resting)
