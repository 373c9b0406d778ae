"""What runs on a Ray cluster's node: the actor that holds one lease's devices."""

import threading
from collections.abc import Mapping
from pathlib import Path

import ray

from .keeper import stopped_with_parent
from .local import HostLeases
from .protocol import claim


class LeaseActor:
    """Runs one lease beside it, and ends with it; when it is killed, the launch is asked to end."""

    def __init__(
        self, folder: str, document: Mapping[str, object], environment: Mapping[str, str]
    ) -> None:
        """Hold the devices, and run the lease unless it was claimed before."""
        # That begins here, not by a call: Ray keeps what makes an actor, but forgets the calls of
        # a scheduler that was killed.
        self._folder = Path(folder)
        self._leases = HostLeases(stopped_with_parent())
        self._own = ray.get_runtime_context().current_actor
        # The keeper is bound to the thread that starts it, so this one waits for its end.
        threading.Thread(target=self._run, args=(document, environment), daemon=True).start()

    def _run(self, document: Mapping[str, object], environment: Mapping[str, str]) -> None:
        try:
            if claim(self._folder, "actor"):
                self._leases.keep(self._folder, document, environment)
                self._leases.keepers[self._folder].wait()
        finally:
            ray.kill(self._own)

    def stop(self) -> None:
        """Send the launch SIGTERM, once."""
        self._leases.stop(self._folder)

    def kill(self) -> None:
        """Send the launch SIGKILL."""
        self._leases.kill(self._folder)
