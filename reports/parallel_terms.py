"""The terms of a step of three dimensions, from the seconds that a plan gives for its stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..schema.plan import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStepTerms:
    """The terms that add up to a predicted step (docs/parallel.md), in seconds.

    Attributes:
        passes: Passes of all microbatches in the slowest stage.
        messages: Messages of all microbatches in the slowest stage.
        other_stages: One microbatch in each of the other stages, before and after (the bubble of
            thesis 4.2.2).
        update: The optimizer's update.
        all_reduce: The all-reduce of gradients.
    """

    passes: float
    messages: float
    other_stages: float
    update: float
    all_reduce: float


def step_terms(
    num_microbatches: int, stages: Sequence[Stage], num_model_chunks: int = 1
) -> ParallelStepTerms | None:
    """The terms of a step from what a plan gives for its stages.

    Args:
        num_microbatches: Microbatches per pipeline (m).
        stages: The stages, with their seconds.
        num_model_chunks: Stages per device (v); above 1, all count as slow as the slowest.

    Returns:
        The terms; None where a stage does not give its seconds.
    """
    passes = [stage.compute_seconds for stage in stages]
    messages = [stage.transfer_seconds for stage in stages]
    updates = [stage.update_seconds for stage in stages]
    reductions = [stage.reduce_seconds for stage in stages]
    if None in (*passes, *messages, *updates, *reductions):
        return None
    both = [(own or 0.0) + (sent or 0.0) for own, sent in zip(passes, messages, strict=True)]
    slowest = both.index(max(both))
    positions = len(stages) // num_model_chunks
    others = sum(both) - both[slowest] if num_model_chunks == 1 else (positions - 1) * both[slowest]
    return ParallelStepTerms(
        passes=num_model_chunks * num_microbatches * (passes[slowest] or 0.0),
        messages=num_model_chunks * num_microbatches * (messages[slowest] or 0.0),
        other_stages=others,
        update=_most_of_a_device(updates, positions),
        all_reduce=_most_of_a_device(reductions, positions),
    )


def _most_of_a_device(seconds: Sequence[float | None], num_positions: int) -> float:
    """The sum over the stages of a position, of the position where it is largest."""
    return max(
        sum(each or 0.0 for each in seconds[position::num_positions])
        for position in range(num_positions)
    )
