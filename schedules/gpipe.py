"""GPipe: all forward passes, then all backward passes, then one update (thesis 4.2.2)."""

from ..schema.operations import Kind, Schedule
from ..schema.pipeline_shape import PipelineShape
from .assemble import Order, Slot, assemble
from .registry import schedule


@schedule("gpipe", replicas="any", order="forward-first")
def generate(shape: PipelineShape) -> Schedule:
    """Order the passes of one batch as GPipe does.

    Backward passes run in the order of the forward passes, as in figure 4.3. A stage may have any
    number of replicas. A rank holds the activations of all its microbatches.
    """
    shape.one_chunk("gpipe")
    slots: list[list[Slot]] = []
    for position, ranks in enumerate(shape.ranks_of_position):
        for replica in range(len(ranks)):
            mine = shape.microbatches_of(position, replica)
            forward: list[Slot] = [((Kind.FORWARD, position, k),) for k in mine]
            slots.append(forward + [((Kind.BACKWARD, position, k),) for k in mine])
    order = Order(
        placement=shape.ranks_of_position, slots=slots, num_microbatches=shape.num_microbatches
    )
    return assemble(
        "gpipe",
        order,
        max_in_flight=[len(rank_slots) // 2 for rank_slots in slots],
        max_weight_versions=[1] * len(slots),
    )
