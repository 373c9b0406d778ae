"""Let workers wait for each other before they have a process group, through the store.

Loading data or a model may take one worker minutes longer than another. So a worker that has not
reached ``hf.prepare`` is waited for until the time limit; after ``LATE_SECONDS`` its rank is
printed. A wait that cannot end well is given up early: for a worker that ended without reaching
``hf.prepare``, and for one that reached it ``LATE_SECONDS`` ago but has not written the value.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..schema.errors import LaunchError, PeerLostError
from ..schema.options import option
from .log import log
from .peers import SharedStore

LATE_SECONDS = 40.0
LOOK_SECONDS = 0.5
# The pause between two questions to the store: a fraction of the wait so far, within these limits.
_PAUSE_FRACTION = 0.05
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.001, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All workers that are to form one process group.

    Args:
        store: The store that they share.
        device_types: [ranks] the device type of each worker.
        limit_seconds: How long to wait for any worker.
        late_seconds: How long to wait for the value of a worker that has arrived; also after how
            long a worker that has not arrived is named.
    """

    store: SharedStore
    device_types: Sequence[str]
    limit_seconds: float
    late_seconds: float = LATE_SECONDS

    def arrive(self, rank: int) -> None:
        """Say that this worker has reached ``hf.prepare``."""
        self.store.set(f"arrived/{rank}", "1")

    def leave(self, rank: int) -> None:
        """Say that this worker has ended without reaching ``hf.prepare``."""
        self.store.set(f"left/{rank}", "1")

    def read(self, name: str) -> list[str]:
        """Read what every worker has written under a name, by rank; wait for all of them.

        Raises:
            LaunchError: A worker ended without arriving.
            PeerLostError: A worker did not arrive in time, or stopped after it arrived
                (``timed_out``); or the store is gone.
        """
        ranks = range(len(self.device_types))
        keys = [f"{name}/{rank}" for rank in ranks]
        wait = _Wait(self)
        while not self.store.has(*keys):
            wait.look(lambda: [rank for rank in ranks if not self.store.has(keys[rank])])
            time.sleep(wait.pause_seconds)
        return [self.store.get(key) for key in keys]

    def names(self, ranks: Sequence[int]) -> str:
        """Name these workers, for a sentence."""
        said = [f"{rank} ({self.device_types[rank]})" for rank in ranks]
        return f"rank{'s' if len(said) > 1 else ''} {', '.join(said)}"


class _Wait:
    """One wait for the values of other workers, and what is known of those still missing."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._began = self._looked_at = time.monotonic()
        self._on_the_way_since: dict[int, float] = {}
        self._has_told = False

    @property
    def pause_seconds(self) -> float:
        """How many seconds to wait before the store is asked again."""
        share = _PAUSE_FRACTION * (time.monotonic() - self._began)
        return min(max(share, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)

    def look(self, missing_ranks: Callable[[], list[int]]) -> None:
        """Check now and then which workers are missing; give up a wait that cannot end well.

        Args:
            missing_ranks: Gives the ranks whose values have not been written.

        Raises:
            LaunchError: A worker ended without arriving.
            PeerLostError: A worker did not arrive in time, or stopped after it arrived.
        """
        meeting, now = self._meeting, time.monotonic()
        if now - self._looked_at < min(LOOK_SECONDS, meeting.late_seconds):
            return
        self._looked_at = now
        missing = missing_ranks()
        left = [rank for rank in missing if meeting.store.has(f"left/{rank}")]
        if left:
            raise LaunchError(
                f"{meeting.names(left)} ended without coming to hf.prepare, where the others wait",
                hint="every worker of the plan must call hf.prepare",
                exit_code=1,
            )
        came = [rank for rank in missing if meeting.store.has(f"arrived/{rank}")]
        for rank in came:
            self._on_the_way_since.setdefault(rank, now)
        stuck = [r for r in came if now - self._on_the_way_since[r] > meeting.late_seconds]
        waited = now - self._began
        if stuck:
            who = f"{meeting.names(stuck)}, which came to hf.prepare and got no further"
            raise PeerLostError(f"waited {waited:.0f} s in vain for {who}", timed_out=True)
        if missing and waited > meeting.limit_seconds:
            who = f"{meeting.names(missing)}, which did not come to meet the others"
            raise PeerLostError(f"waited {waited:.0f} s in vain for {who}", timed_out=True)
        absent = [rank for rank in missing if rank not in came]
        if absent and waited > meeting.late_seconds and not self._has_told:
            self._has_told = True
            limit = f"{meeting.limit_seconds:g} s ({option('timeout_seconds')})"
            log.warning(
                f"still waiting for {meeting.names(absent)} to come to hf.prepare, where workers "
                f"meet; up to {limit}"
            )
