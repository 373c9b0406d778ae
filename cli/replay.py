"""``hetflow cluster replay``: a live cluster's jobs in the simulator, beside what happened."""

from ..schema.requests.replay import ReplayRequest
from .asking import Asked, asks
from .cluster import DEFAULT_STATE, StateOption
from .common import JsonFlag, emit, emit_json


@asks(ReplayRequest)
def replay(asked: Asked, state: StateOption = DEFAULT_STATE, json: JsonFlag = False) -> None:
    """Simulate the jobs of a live cluster, or of a Slurm cluster's log, and compare.

    Simulated jobs run at their predicted speed. What a job was to get is the sum of its shares, by
    the policy, over the time that it was there. Jobs that were cancelled or are held are
    left out.

    \b
    hetflow cluster replay
    hetflow cluster replay --policy fifo --restart-seconds 20 --resize-seconds 1
    hetflow cluster replay --sacct jobs.txt --policy las --rate v100=3.5 --rate k80=1
    """
    from ..api.replay import replay as compared
    from ..formats.reports.cluster_tables import replay_table
    from .allocate import warn_of_left_out

    document, run = compared(ReplayRequest(**asked), state)
    warn_of_left_out(run.left_out)
    if json:
        emit_json(document)
    else:
        emit(replay_table(document))
