"""Interleaved 1F1B: each device holds several model chunks (thesis 4.2.2, figure 4.4 bottom)."""

from ...schema.errors import ProblemError
from ...schema.schedule import Kind, PipelineShape, Schedule
from . import closed_forms
from .assemble import Slot, parallel_pipelines
from .registry import schedule


@schedule("interleaved", placement="round-robin", num_model_chunks=(2, 3, 4))
def generate(shape: PipelineShape) -> Schedule:
    """Order the passes of one batch as Megatron-LM's interleaved schedule does.

    Device d of p holds stages d, d + p, d + 2p, ... Microbatches go through the chunks in groups of
    p.

    Raises:
        ProblemError: The microbatches of each parallel pipeline are not a multiple of p.
    """
    p, v = shape.pipeline_parallel_size, shape.num_model_chunks
    count = shape.parallel_pipelines("interleaved")
    if shape.num_microbatches % (p * count):
        each = f" on each of {count} pipelines" if count > 1 else ""
        raise ProblemError(
            f"interleaved needs a multiple of {p} microbatches{each}, got {shape.num_microbatches}",
            hint="use 1f1b for any number of microbatches",
        )
    m = shape.num_microbatches // count
    warmups = [closed_forms.interleaved_warmup(p, m, v, position) for position in range(p)]
    return parallel_pipelines(
        "interleaved",
        shape,
        positions=[stage % p for stage in range(p * v)],
        one_pipeline=lambda _: [
            _one_rank(p, v, m, position, warmups[position]) for position in range(p)
        ],
        max_in_flight=[min(m * v, warmup + 1) for warmup in warmups],
    )


def _one_rank(p: int, v: int, m: int, position: int, warmup: int) -> list[Slot]:
    forward: list[Slot] = []
    backward: list[Slot] = []
    for number in range(m * v):
        group, within = divmod(number, p * v)
        chunk, offset = divmod(within, p)
        microbatch = group * p + offset
        forward.append(((Kind.FORWARD, chunk * p + position, microbatch),))
        backward.append(((Kind.BACKWARD, (v - 1 - chunk) * p + position, microbatch),))
    slots = forward[:warmup]
    for number, one in enumerate(backward):
        slots += forward[warmup + number : warmup + number + 1]
        slots.append(one)
    return slots
