"""Launches on this host at the lowest priority.

For a workstation that its owner also uses by day: jobs of the cluster get the processor time that
other programs leave.
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
