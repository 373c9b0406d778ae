"""A fast timer of one step of a pipeline that flushes, for searches over thousands of plans.

The result is that of ``timing`` for the schedule's list, but the list is not built. Passes run in
the order that the generators use too (``alternating``). Transfers overlap with them, one at a time
on each directed link. Each stage ends with its all-reduce and update.
"""

from typing import NamedTuple

from ...schema.schedule import traits
from .assemble import Turn, alternating
from .closed_forms import in_flight


class StepStage(NamedTuple):
    """Times of one stage: seconds per microbatch on one replica, and seconds of the step's end."""

    num_replicas: int
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float
    """Seconds of a transfer to the next stage, in one direction; 0 for the last stage."""
    reduce_seconds: float
    update_seconds: float


def flush_step_seconds(
    schedule: str, stages: tuple[StepStage, ...], num_microbatches: int
) -> float:
    """Time a step, in seconds from the first pass to the last update; O(stages x microbatches).

    The schedule flushes, and its trait ``order`` is not ``own``. Stages are in the model's order;
    their replicas take microbatches in turn.
    """
    replay = _Replay(schedule, stages, num_microbatches)
    replay.run()
    return replay.finish()


class _Replay:
    def __init__(self, schedule: str, stages: tuple[StepStage, ...], num_microbatches: int) -> None:
        self.stages, self.last = stages, len(stages) - 1
        takes_all = traits(schedule).order == "forward-first"
        self.first_rank: list[int] = []
        self.stage_of: list[int] = []
        self.passes: list[list[Turn]] = []
        replicas = [stage.num_replicas for stage in stages]
        for number, stage in enumerate(stages):
            self.first_rank.append(len(self.stage_of))
            ahead = in_flight(replicas, number) - 1
            for replica in range(stage.num_replicas):
                mine = range(replica, num_microbatches, stage.num_replicas)
                own = len(mine) if takes_all else min(ahead, len(mine))
                self.passes.append(alternating(mine, own))
                self.stage_of.append(number)
        # When a microbatch's activation or gradient arrives at a stage; None if not known yet.
        unknown: list[float | None] = [None] * num_microbatches
        known: list[float | None] = [0.0] * num_microbatches
        # [stages][microbatches]; the first stage has its inputs, the last one its gradients.
        self.activations = [
            list(unknown) if number else list(known) for number in range(len(stages))
        ]
        self.gradients = [list(unknown) for _ in stages]
        self.gradients[-1] = list(known)
        self.now = [0.0] * len(self.passes)
        self.done = [0] * len(self.passes)
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        # Whoever received something may go on; the order does not change any time.
        waiting = list(range(len(self.passes)))[::-1]
        while waiting:
            waiting += self._advance(waiting.pop())

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it has to wait; return the ranks that received something meanwhile."""
        number = self.stage_of[rank]
        stage, passes = self.stages[number], self.passes[rank]
        activations, gradients = self.activations[number], self.gradients[number]
        now, position, told = self.now[rank], self.done[rank], []
        # To the first pass whose input has not been sent yet.
        while position < len(passes):
            is_backward, microbatch = passes[position]
            ready = (gradients if is_backward else activations)[microbatch]
            if ready is None:
                break
            seconds = stage.backward_seconds if is_backward else stage.forward_seconds
            now = (now if now > ready else ready) + seconds
            position += 1
            other = number - 1 if is_backward else number + 1
            if 0 <= other <= self.last:
                told.append(self._send(rank, other, is_backward, microbatch, now))
        self.now[rank], self.done[rank] = now, position
        return told

    def _send(self, rank: int, other: int, is_backward: bool, microbatch: int, now: float) -> int:
        peer = self.first_rank[other] + microbatch % self.stages[other].num_replicas
        seconds = self.stages[min(other, self.stage_of[rank])].transfer_seconds
        # Both directions of a boundary take as long; a link carries one message at a time.
        begin = max(now, self.link_free.get((rank, peer), 0.0))
        arrival = self.link_free[rank, peer] = begin + seconds
        (self.gradients if is_backward else self.activations)[other][microbatch] = arrival
        return peer

    def finish(self) -> float:
        """Seconds until the last update of any stage has ended."""
        ends = []
        for first, stage in zip(self.first_rank, self.stages, strict=True):
            # A stage's replicas reduce together, so the last one decides.
            end = max(self.now[first : first + stage.num_replicas])
            if stage.num_replicas > 1:
                end += stage.reduce_seconds
            ends.append(end + stage.update_seconds)
        return max(ends)
