"""The judge's own schedules: for each name, its traits and its order of passes.

They are written from the papers' definitions, and share nothing with ``planning/schedules/``: an
order there that is not the one which the name promises is found. The authors of zero-bubble
schedules define two of theirs by what they keep to, not by an order: no bubble within a bound on
activations. For those the judge holds the list to that definition. A plug-in's list is only held to
its traits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from ...schema.errors import ProblemError
from ...schema.schedule import PipelineShape, Placement, ScheduleTraits, traits

Pass = tuple[str, int, int]
"""(kind, stage, microbatch)."""


@dataclass(frozen=True)
class Definition:
    """What a schedule's name promises.

    Attributes:
        traits: Its traits.
        passes: (shape, position, microbatches of one replica) -> that replica's passes in order.
            None where the papers define no order.
        most_in_flight: p -> microbatches that a rank without an order may hold, over its stages.
        exists: Shape -> whether the schedule exists for it.
    """

    traits: ScheduleTraits
    passes: Callable[[PipelineShape, int, Sequence[int]], Iterable[Pass]] | None = None
    most_in_flight: Callable[[int], int] | None = None
    exists: Callable[[PipelineShape], bool] = lambda shape: True


def in_turn(forward: Sequence[Pass], backward: Sequence[Pass], most_ahead: float) -> list[Pass]:
    """Order passes: forward while fewer than ``most_ahead`` are ahead, else backward."""
    turns: list[Pass] = []
    made = 0
    for number, one in enumerate(backward):
        while made < len(forward) and made - number < most_ahead:
            turns.append(forward[made])
            made += 1
        turns.append(one)
    return turns


def _one_stage(most_ahead: Callable[[PipelineShape, int], float]) -> Callable[..., list[Pass]]:
    def passes(shape: PipelineShape, position: int, mine: Sequence[int]) -> list[Pass]:
        forward = [("forward", position, k) for k in mine]
        backward = [("backward", position, k) for k in mine]
        return in_turn(forward, backward, most_ahead(shape, position))

    return passes


def _full(shape: PipelineShape, position: int) -> int:
    """Inputs that keep the pipeline full: one for each worker from here on, in turn (2.4.2)."""
    workers = sum(shape.replicas[position:])
    return len(range(0, workers, shape.replicas[position]))


def _interleaved(shape: PipelineShape, position: int, mine: Sequence[int]) -> list[Pass]:
    """Groups of p microbatches go through a device's chunks, one after another (4.2.2)."""
    # The position's warm-up: every later position twice, and p for each chunk but the last.
    p, chunks = shape.pipeline_parallel_size, range(shape.num_model_chunks)
    numbered = [(chunk, at) for chunk in chunks for at in range(len(mine))]
    down = sorted(numbered, key=lambda each: (each[1] // p, each[0], each[1]))
    up = sorted(numbered, key=lambda each: (each[1] // p, -each[0], each[1]))
    forward = [("forward", chunk * p + position, mine[at]) for chunk, at in down]
    backward = [("backward", chunk * p + position, mine[at]) for chunk, at in up]
    warmup = 2 * (p - 1 - position) + chunks[-1] * p
    return in_turn(forward, backward, warmup + 1)


def _zb_h1(shape: PipelineShape, position: int, mine: Sequence[int]) -> Iterable[Pass]:
    """1F1B, with each weight gradient ``position`` microbatches behind its input gradient."""
    late = 0
    for kind, stage, k in _one_stage(_full)(shape, position, mine):
        yield (kind if kind == "forward" else "backward_input", stage, k)
        if kind == "backward":
            late += 1
            if late > position:
                yield ("backward_weight", stage, mine[late - 1 - position])
    yield from (("backward_weight", position, k) for k in mine[max(0, late - position) :])


def _fills(shape: PipelineShape) -> bool:
    return shape.num_microbatches // shape.replicas[0] >= shape.pipeline_parallel_size


def _whole_groups(shape: PipelineShape) -> bool:
    return shape.num_microbatches % (shape.replicas[0] * shape.pipeline_parallel_size) == 0


def _two_versions(shape: PipelineShape) -> bool:
    """2BW: no microbatch may be older than one update, and a run is whole updates (3.2.1)."""
    needed = max(_full(shape, position) * count for position, count in enumerate(shape.replicas))
    every = shape.microbatches_per_update or needed
    return every >= needed and shape.num_microbatches % every == 0


_ALTERNATING = _one_stage(_full)
DEFINITIONS = {
    known.traits.name: known
    for known in (
        Definition(
            ScheduleTraits(name="gpipe", replicas="any", order="forward-first"),
            _one_stage(lambda shape, position: inf),
        ),
        Definition(
            ScheduleTraits(
                name="1f1b", replicas="any", order="alternating", chunked_as="interleaved"
            ),
            _ALTERNATING,
        ),
        Definition(
            ScheduleTraits(name="interleaved", placement="round-robin", num_model_chunks=(2, 3, 4)),
            _interleaved,
            exists=_whole_groups,
        ),
        Definition(
            ScheduleTraits(
                name="pipedream", weight_semantics="stashing", replicas="any", order="alternating"
            ),
            _ALTERNATING,
        ),
        Definition(
            ScheduleTraits(
                name="pipedream-vertical-sync",
                weight_semantics="vertical-sync",
                order="alternating",
            ),
            _ALTERNATING,
        ),
        Definition(
            ScheduleTraits(
                name="2bw", weight_semantics="double-buffered", replicas="any", order="alternating"
            ),
            _ALTERNATING,
            exists=_two_versions,
        ),
        Definition(ScheduleTraits(name="zb-h1", splits_backward=True), _zb_h1, exists=_fills),
        Definition(
            ScheduleTraits(name="zb-h2", splits_backward=True),
            most_in_flight=lambda p: 2 * p - 1,
            exists=_fills,
        ),
        Definition(
            ScheduleTraits(name="zb-v", placement="v", num_model_chunks=(2,), splits_backward=True),
            most_in_flight=lambda p: 2 * p,
            exists=_fills,
        ),
    )
}


def definition_of(name: str) -> Definition:
    """Return the judge's definition of a schedule; for a plug-in, the traits that it states."""
    return DEFINITIONS.get(name) or Definition(replace(traits(name), generate=None))


def own_passes(name: str, shape: PipelineShape) -> tuple[tuple[Pass, ...], ...] | None:
    """[ranks] the passes of each rank by definition; None if the papers define no order.

    Raises:
        ProblemError: The schedule does not exist for the shape.
    """
    known, replicas = definition_of(name), shape.replicas
    alike = known.traits.replicas == "any" or len(set(replicas)) == 1
    if not alike or not known.exists(shape):
        raise ProblemError(
            f"{name} does not exist for {shape.num_microbatches} microbatches on replicas "
            f"{list(replicas)}"
        )
    if known.passes is None:
        return None
    return tuple(
        tuple(known.passes(shape, position, range(first, shape.num_microbatches, count)))
        for position, count in enumerate(replicas)
        for first in range(count)
    )


def own_placement(name: str, shape: PipelineShape) -> Placement | None:
    """[stages] the ranks of each stage by definition; None if stages stand on two positions."""
    known = definition_of(name).traits
    ranks: list[tuple[int, ...]] = []
    for count in shape.replicas:
        first = ranks[-1][-1] + 1 if ranks else 0
        ranks.append(tuple(range(first, first + count)))
    if known.placement == "both-ways":
        return None
    if known.placement == "v":
        return (*ranks, *reversed(ranks))
    chunks = shape.num_model_chunks if known.placement == "round-robin" else 1
    return tuple(ranks) * chunks
