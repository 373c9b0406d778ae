"""DualPipe and DualPipeV: forward and backward passes of unlike microbatches, overlapped.

DeepSeek-V3 technical report, section 3.2.1. In DualPipe, half of the microbatches enter at each
end of the pipeline, and every stage is on two ranks. In DualPipeV, each rank holds one stage of
the way down the ranks and one of the way up. A pass of one direction and a pass of the other run
as a pair, so that the transfers of each hide behind the other's computation.
"""

from collections.abc import Callable

from ..planning.schedules.assemble import Pass, PassOrder, Slot, assemble
from ..planning.schedules.registry import schedule
from ..schema.errors import ProblemError
from ..schema.schedule import Kind, PipelineShape, Schedule

_Make = Callable[[Kind, int, int], Pass]
"""(kind, phase, number within the phase) -> pass; phase 0 enters at the rank's near end."""


@schedule("dualpipe", replicas="one", placement="both-ways", plannable=False)
def bidirectional(shape: PipelineShape) -> Schedule:
    """Generate DualPipe: stage s is on rank s for one direction and on p - 1 - s for the other.

    The first half of the microbatches enters at rank 0, the second half at the last rank.

    Raises:
        ProblemError: p or m is odd, m < 2p, or the shape has replicas or model chunks.
    """
    shape.one_chunk("dualpipe")
    p, m = shape.pipeline_parallel_size, shape.num_microbatches
    _need_single("dualpipe", shape)
    if p % 2 or m % 2 or m < 2 * p:
        raise ProblemError(
            f"dualpipe needs an even number of ranks and an even number of microbatches, at least "
            f"twice the ranks; got {p} ranks, {m} microbatches"
        )
    slots = []
    for rank in range(p):
        place = min(rank, p - 1 - rank)
        slots.append(_one_rank(p // 2, place, m // 2, _direction(rank, p, m)))
    order = PassOrder(
        placement=tuple((min(s, p - 1 - s), max(s, p - 1 - s)) for s in range(p)),
        slots=slots,
        num_microbatches=m,
    )
    return assemble("dualpipe", order, max_in_flight=[p + 1] * p, max_weight_versions=[1] * p)


@schedule("dualpipe-v", replicas="one", placement="v", num_model_chunks=(2,), plannable=False)
def v_shaped(shape: PipelineShape) -> Schedule:
    """Generate DualPipeV: rank r holds stages r and 2p - 1 - r.

    Raises:
        ProblemError: m < 2p, or the shape has replicas or more than 2 model chunks.
    """
    p, m = shape.pipeline_parallel_size, shape.num_microbatches
    _need_single("dualpipe-v", shape)
    if m < 2 * p or shape.num_model_chunks not in (1, 2):
        raise ProblemError(
            f"dualpipe-v needs two chunks a rank and at least twice as many microbatches as "
            f"ranks; got {shape.num_model_chunks} chunks, {p} ranks, {m} microbatches"
        )

    def make(rank: int) -> _Make:
        stage = (rank, 2 * p - 1 - rank)
        return lambda kind, phase, k: (kind, stage[phase], k)

    slots = [_one_rank(p, rank, m, make(rank)) for rank in range(p)]
    order = PassOrder(
        placement=tuple((min(s, 2 * p - 1 - s),) for s in range(2 * p)),
        slots=slots,
        num_microbatches=m,
    )
    return assemble("dualpipe-v", order, max_in_flight=[2 * p + 1] * p, max_weight_versions=[1] * p)


def _need_single(name: str, shape: PipelineShape) -> None:
    if shape.parallel_pipelines(name) != 1:
        raise ProblemError(f"{name} does not take replicas, got {shape.replicas[0]} of each stage")


def _direction(rank: int, p: int, m: int) -> _Make:
    """Make a rank's naming of passes; phase 0 enters at the rank's own half of the pipeline."""

    def make(kind: Kind, phase: int, k: int) -> Pass:
        backwards = phase ^ (rank >= p // 2)
        return kind, p - 1 - rank if backwards else rank, k + backwards * (m // 2)

    return make


def _one_rank(half: int, position: int, m: int, make: _Make) -> list[Slot]:
    """The eight steps of DualPipe for a rank ``position`` places from its end of ``half``.

    Args:
        half: Number of ranks between an end of the pipeline and its middle.
        position: Distance from the end, 0 at the end itself.
        m: Microbatches of each phase.
        make: Makes the pass of a kind, phase and number.
    """
    line = _Line(make)
    inner = half - position - 1
    for _ in range(2 * inner):  # 1: nF0
        line.add("F0")
    for _ in range(position + 1):  # 2: nF0F1
        line.add("F0", "F1")
    for _ in range(inner):  # 3: nB1W1F1
        line.add("B1", "W", "F1")
    for number in range(m - 2 * half + position + 1):  # 4: nF0B1F1B0, the main step
        if number == 0 and inner == 0:
            line.add("F0", "BW1")
        else:
            line.add("F0&BW1")
        line.add("F1&BW0")
    for _ in range(inner):  # 5: nB1F1B0
        line.add("BW1", "F1&BW0")
    for number in range(position + 1):  # 6: nB1B0, its second half with the pass split
        first, second = 2 * number >= position + 1, 2 * number + 1 >= position + 1
        line.add("B1" if first else "BW1", "B0" if second else "BW0")
    for _ in range(inner):  # 7: nW B0
        line.add("W", "B0")
    line.add(*["W"] * len(line.pending))  # 8: nW
    return line.slots


class _Line:
    """Collects the passes of a rank, numbers them, and queues split weight gradients."""

    def __init__(self, make: _Make) -> None:
        self.make = make
        self.slots: list[Slot] = []
        self.next = {"F0": 0, "F1": 0, "B0": 0, "B1": 0}
        self.pending: list[tuple[int, int]] = []

    def add(self, *words: str) -> None:
        for word in words:
            self.slots.append(tuple(self._pass(part) for part in word.split("&")))

    def _pass(self, word: str) -> Pass:
        if word == "W":
            return self.make(Kind.BACKWARD_WEIGHT, *self.pending.pop(0))
        phase = int(word[-1])
        counter = f"{word[0]}{phase}"
        number = self.next[counter]
        self.next[counter] += 1
        if word[0] == "F":
            return self.make(Kind.FORWARD, phase, number)
        if word.startswith("BW"):
            return self.make(Kind.BACKWARD, phase, number)
        self.pending.append((phase, number))
        return self.make(Kind.BACKWARD_INPUT, phase, number)
