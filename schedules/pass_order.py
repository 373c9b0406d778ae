"""The order in which a replica that warms up, then alternates, runs its passes.

1F1B-RR (thesis 2.4.2) for as many forward passes ahead as keep the pipeline full; GPipe for all.
"""

from collections.abc import Sequence

Turn = tuple[bool, int]
"""Whether it is a backward pass, and the microbatch."""


def alternating(microbatches: Sequence[int], ahead: int) -> list[Turn]:
    """``ahead`` forward passes, then one forward and one backward pass in turn."""
    turns: list[Turn] = [(False, microbatch) for microbatch in microbatches[:ahead]]
    for number, microbatch in enumerate(microbatches):
        if number + ahead < len(microbatches):
            turns.append((False, microbatches[number + ahead]))
        turns.append((True, microbatch))
    return turns
