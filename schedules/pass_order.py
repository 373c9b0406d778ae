"""The order of a replica's passes: a number of forward passes first, then forward and backward.

With as many forward passes first as keep the pipeline full, this is 1F1B-RR (thesis 2.4.2); with
all of them first, it is GPipe.
"""

from collections.abc import Sequence

Turn = tuple[bool, int]
"""(whether the pass is a backward pass, its microbatch)."""


def alternating(microbatches: Sequence[int], ahead: int) -> list[Turn]:
    """Order ``ahead`` forward passes, then one forward and one backward pass in turn."""
    turns: list[Turn] = [(False, microbatch) for microbatch in microbatches[:ahead]]
    for number, microbatch in enumerate(microbatches):
        if number + ahead < len(microbatches):
            turns.append((False, microbatches[number + ahead]))
        turns.append((True, microbatch))
    return turns
