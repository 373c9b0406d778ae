"""Schedules in the papers' notation: one line per rank, ``F0 F1 BW0 ...``.

``F`` is a forward pass, ``BW`` a whole backward pass, ``B`` and ``W`` its two parts: the gradient
of the input and that of the weights. The number is the microbatch; ``.s`` is the stage, if a rank
holds several. ``F3&BW1`` are two passes that overlap.
"""

import re
from collections.abc import Sequence

from ...schema.errors import ProblemError
from ...schema.schedule import PASSES, Kind, Operation, Placement, Schedule
from .assemble import Pass, PassOrder, assemble

_LETTERS = {
    "F": Kind.FORWARD,
    "BW": Kind.BACKWARD,
    "B": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}
_NAMES = {kind: letters for letters, kind in _LETTERS.items()}
_PASS = re.compile(r"(F|BW|B|W)(\d+)(?:\.(\d+))?")


def pass_name(kind: Kind, microbatch: int, stage: int | None = None) -> str:
    """Return the name of a pass in this notation: ``BW3`` or ``BW3.5``."""
    return f"{_NAMES[kind]}{microbatch}" + ("" if stage is None else f".{stage}")


def to_text(schedule: Schedule) -> tuple[str, ...]:
    """[ranks] the passes of a schedule in this notation; overlapped pairs are joined by &."""
    lines = []
    for operations, stages in zip(schedule.ranks, schedule.stages_of_rank, strict=True):
        words: list[str] = []
        for at, operation in enumerate(operations):
            if operation.kind not in PASSES:
                continue
            stage = operation.stage if len(stages) > 1 else None
            word = pass_name(operation.kind, operation.microbatch, stage)
            if is_overlapped(operations, at):
                words[-1] += f"&{word}"
            else:
                words.append(word)
        lines.append(" ".join(words))
    return tuple(lines)


def is_overlapped(operations: Sequence[Operation], at: int) -> bool:
    """Whether a pass forms an overlapped pair with the pass right before it.

    It does if its gradient is received before the other pass starts, or if the other's result is
    sent only after it.
    """
    if at == 0:
        return False
    before, operation = operations[at - 1], operations[at]
    if before.kind is not Kind.FORWARD or operation.kind is not Kind.BACKWARD:
        return False
    needs = (Kind.RECEIVE_GRADIENT, operation.stage, operation.microbatch)
    makes = (Kind.SEND_ACTIVATION, before.stage, before.microbatch)
    ahead = [(op.kind, op.stage, op.microbatch) for op in operations[max(0, at - 3) : at]]
    behind = [(op.kind, op.stage, op.microbatch) for op in operations[at + 1 : at + 3]]
    return needs in ahead or makes in behind


def from_text(
    name: str, lines: Sequence[str], *, placement: Placement, num_microbatches: int
) -> Schedule:
    """Parse a schedule with one flush from this notation.

    The result is not validated (`checks.schedule.validate` does), and has no bounds on memory.

    Args:
        name: Name of the new schedule.
        lines: [ranks] the passes of each rank.
        placement: [stages] the ranks that hold each stage.
        num_microbatches: Number of microbatches.

    Raises:
        ProblemError: A word is not a pass, or lacks its stage although the rank holds several.
    """
    slots = [
        [tuple(_read(word, rank, placement) for word in pair.split("&")) for pair in line.split()]
        for rank, line in enumerate(lines)
    ]
    order = PassOrder(placement=placement, slots=slots, num_microbatches=num_microbatches)
    return assemble(name, order)


def _read(word: str, rank: int, placement: Placement) -> Pass:
    match = _PASS.fullmatch(word)
    if match is None:
        raise ProblemError(f"rank {rank}: {word!r} is no pass; write F0, BW0, B0 or W0")
    letters, microbatch, stage = match.groups()
    held = [number for number, ranks in enumerate(placement) if rank in ranks]
    if stage is None and len(held) != 1:
        raise ProblemError(
            f"rank {rank}: {word!r} names no stage but the rank holds {len(held)}; "
            f"write {word}.STAGE"
        )
    return _LETTERS[letters], held[0] if stage is None else int(stage), int(microbatch)
