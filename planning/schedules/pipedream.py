"""The schedules without flushes, all in 1F1B order: PipeDream's two and PipeDream-2BW."""

from ...schema.errors import ProblemError
from ...schema.schedule import PipelineShape, Schedule
from . import closed_forms
from .one_f_one_b import build
from .registry import schedule


@schedule("pipedream", weight_semantics="stashing", replicas="any", order="alternating")
def pipedream(shape: PipelineShape) -> Schedule:
    """Generate PipeDream: 1F1B-RR without flushes, with weight stashing (2.4.2, 2.4.3)."""
    # A stage updates after every backward pass. With R replicas, it updates after one backward
    # pass on each of them, from the mean of the R gradients. A forward pass reads the latest
    # version, and its backward pass reads the same version.
    return build("pipedream", shape, "stashing")


@schedule("pipedream-vertical-sync", weight_semantics="vertical-sync", order="alternating")
def pipedream_vertical_sync(shape: PipelineShape) -> Schedule:
    """Generate PipeDream with vertical sync: all stages read the input stage's version (2.4.3).

    Raises:
        ProblemError: Stages have different numbers of replicas, so that their versions do not
            correspond.
    """
    shape.parallel_pipelines("pipedream-vertical-sync")
    return build("pipedream-vertical-sync", shape, "vertical-sync")


@schedule("2bw", weight_semantics="double-buffered", replicas="any", order="alternating")
def pipedream_2bw(shape: PipelineShape) -> Schedule:
    """Generate PipeDream-2BW: 1F1B without flushes and with two weight versions (3.2.1).

    Weights are updated once per m microbatches. m is ``microbatches_per_update``, by default the
    least allowed.

    Raises:
        ProblemError: m is less than the microbatches in flight (p without replicas), for which two
            versions do not suffice, or m does not divide the number of microbatches.
    """
    least = max(
        closed_forms.in_flight(shape.replicas, position) * count
        for position, count in enumerate(shape.replicas)
    )
    per_update = shape.microbatches_per_update or least
    if per_update < least:
        raise ProblemError(
            f"2bw cannot keep to two weight versions with {per_update} microbatches per update; "
            f"ask for at least {least}"
        )
    if shape.num_microbatches % per_update:
        raise ProblemError(
            f"{shape.num_microbatches} microbatches are not whole updates of {per_update}; "
            f"make them a multiple"
        )
    return build("2bw", shape, "double-buffered", per_update)
