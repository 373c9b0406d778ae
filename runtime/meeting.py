"""Let workers wait for each other before they have a process group, through the store.

Loading data or a model may take one worker minutes longer than another. So a worker that has not
reached ``hf.prepare`` is waited for until the time limit; after ``LATE_SECONDS`` its rank is
printed. A wait that cannot end well is given up early: for a worker that ended without reaching
``hf.prepare``, and for one that reached it ``LATE_SECONDS`` ago but has not written the value.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..devices.backend import backend_of
from ..devices.collectives import HOST_COLLECTIVE
from ..schema.errors import LaunchError, PeerLostError, TargetError
from ..schema.files import to_json
from ..schema.launch import Determinism
from ..schema.options import option
from ..schema.records import Name, adapter_of, record
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


# Compare the torch builds of the workers and refuse those that cannot work together.
#
# Hosts with different GPUs may need different builds of torch: no one build has kernels for both
# the oldest and the newest GPUs. Where NCCL versions differ, NCCL fails with an error that names no
# host. Kernels of different torch releases give different bits.


@record
class Build:
    """The torch build of one worker.

    Attributes:
        host: Name of the worker's host.
        torch: Torch's version, with that of the build.
        toolkit: Toolkit that torch was built with for the worker's device, such as a CUDA version.
        collective_version: Version of the collectives' library; None where its versions mix.
    """

    host: Name
    torch: Name
    toolkit: Name | None = None
    collective_version: Name | None = None

    @property
    def release(self) -> str:
        """Torch's version without the build's suffix: 2.9.1 for 2.9.1+cu128."""
        return self.torch.partition("+")[0]

    def text(self) -> str:
        """The record as text, for the store."""
        return to_json(self)


def own_build(device: torch.device) -> Build:
    """The build of this process, for its device."""
    backend = backend_of(device)
    return Build(
        host=socket.gethostname() or "unknown",
        torch=torch.__version__,
        toolkit=backend.toolkit(),
        collective_version=backend.collective_version(),
    )


def parse_build(text: str) -> Build:
    """Read a build back from its text.

    Raises:
        pydantic.ValidationError: The text is not such a record.
    """
    build: Build = adapter_of(Build).validate_json(text)
    return build


def check_builds(builds: Sequence[Build], collective: str, determinism: Determinism) -> None:
    """Refuse builds that cannot work together; warn of those that may give different bits.

    Raises:
        TargetError: The workers have different versions of the backend; or different releases of
            torch, under a level that promises equal bits.
    """
    unlike = None
    if collective != HOST_COLLECTIVE:
        unlike = _unlike(builds, lambda build: build.collective_version or "none")
    if unlike is not None:
        raise TargetError(
            f"{collective.upper()} of unlike versions cannot work together: {unlike}",
            hint="install builds of torch with one version of it on all hosts",
        )
    unlike = _unlike(builds, lambda build: build.release)
    if unlike is None:
        return
    if determinism != "none":
        raise TargetError(
            f"{option('determinism', determinism)} needs one release of torch on all "
            f"hosts: {unlike}",
            hint="install the same torch everywhere, or launch with "
            f"{option('determinism', 'none')}",
        )
    log.warning(f"workers run unlike releases of torch, which may fail together: {unlike}")


def _unlike(builds: Sequence[Build], version_of: Callable[[Build], str]) -> str | None:
    """Name two ranks whose versions differ; None where all are equal."""
    first = builds[0]
    for rank, build in enumerate(builds):
        if version_of(build) != version_of(first):
            return f"{_said(0, first, version_of)}, {_said(rank, build, version_of)}"
    return None


def _said(rank: int, build: Build, version_of: Callable[[Build], str]) -> str:
    toolkit = f", {build.toolkit}" if build.toolkit else ""
    return f"rank {rank} on {build.host} has {version_of(build)} (torch {build.torch}{toolkit})"
