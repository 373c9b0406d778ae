"""Which way a launch is looked after: chosen once, from what was asked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..protocol.environment import Channel
from .first_failure import FirstFailure
from .generations import Generations
from .hosts import Alone, Hosts, Together
from .regroup import Regroup
from .repartition import Repartitions
from .request import LaunchRequest
from .supervisor import Launched, Supervisor

Place = TypeVar("Place", bound=Hosts)


@dataclass(frozen=True, slots=True)
class Supervision(Generic[Place]):
    """A way to look after a launch.

    ``channel`` is what workers and their controller tell each other; None where they have no
    control channel. ``supervisor`` makes the supervisor when the workers were started.
    """

    hosts: Place
    channel: Channel | None
    supervisor: Callable[[Launched, Place], Supervisor]

    def begin(self, launched: Launched) -> Supervisor:
        """The supervisor of a launch whose workers were started."""
        return self.supervisor(launched, self.hosts)


def supervision_of(request: LaunchRequest) -> Supervision[Alone] | Supervision[Together]:
    """The way that fits a launch.

    Raises:
        HetflowError: The store has no socket to listen on, or the token is none.
    """
    if request.rendezvous is not None:
        together = Together(request, request.rendezvous)
        if request.policy == "replace":
            return Supervision(together, "heartbeats", Regroup)
        return Supervision(together, None, FirstFailure)
    alone = Alone(request.config)
    if request.config.pipeline is not None:
        return Supervision(alone, "heartbeats", Repartitions)
    channel: Channel = "changes" if request.policy == "stop" else "losses"
    if channel == "losses" and request.on_failure is not None:  # asked for, so worth a wait a step
        channel = "device-losses"
    return Supervision(alone, channel, Generations)
