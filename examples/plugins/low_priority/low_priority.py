"""Launches on this host that give way to everything else that runs there.

For a workstation whose owner trains at night and writes by day: jobs of the cluster get what
processor time is left.
"""

from dataclasses import replace

from hetflow.plugins import LocalEngine, Work, engine


@engine("low-priority")
class LowPriorityEngine(LocalEngine):
    """The engine ``local``, with launches at the lowest priority."""

    name = "low-priority"

    def start(self, work: Work) -> None:
        """Start a lease's launch through ``nice``, which becomes the launch."""
        super().start(replace(work, command=("nice", "-n", "19", *work.command)))
