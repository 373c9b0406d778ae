"""Fixed costs of a step and of a pipeline's passes, and the costs of links.

All are measured in the training loop (runtime/), and each is one term of a predicted step.
"""

from .errors import ProblemError
from .records import Bytes, Count, MeasuredSeconds, Name, PositiveRate, Ratio, record


@record
class MessageTime:
    """The measured ``seconds`` of an all-reduce of ``num_bytes`` over all devices."""

    num_bytes: Count
    seconds: MeasuredSeconds


@record
class LinkPoint:
    """Seconds to send ``num_bytes`` from one device to another, back, and both at once."""

    num_bytes: Count
    there_seconds: MeasuredSeconds
    back_seconds: MeasuredSeconds
    both_seconds: MeasuredSeconds


@record
class Links:
    """The link between two devices, measured by sending messages from one to the other.

    ``latency_seconds`` and ``bytes_per_second`` are fitted to messages that go both ways at once,
    as they do in a pipeline that is full; ``points`` are the medians behind the fit.
    ``channel_bytes`` is the device memory that one channel of a pipeline takes at each end, for the
    buffers of its communicator; None on a CPU, or if it was not measured.
    """

    latency_seconds: MeasuredSeconds
    bytes_per_second: PositiveRate
    points: tuple[LinkPoint, ...]
    channel_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        sizes = [point.num_bytes for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ProblemError("points must be sorted by num_bytes, each size once")


@record
class TypeLink:
    """The link from the profile's device type to another type on the same host."""

    device_type: Name
    links: Links


@record
class PipelineCosts:
    """What a pipeline's step costs beyond its layers and the bytes on its links.

    Args:
        pass_seconds: Cost of one forward or one backward pass of a stage, beyond its layers.
        lone_pass_seconds: The same for a stage that holds all layers and so has no messages; None
            if no such stage was measured.
        message_seconds: Fixed cost of one message between two stages, which occupies the link.
        fixed_seconds: Cost of a whole step: starting it, its sums, the request for the next batch.
        step_error: Relative error of steps computed from these terms.
        reduce_latency_seconds: Latency of one message of the ring all-reduce between a stage's
            replicas, as far as workers wait for it at the end of a step.
        reduce_bytes_per_second: Rate of that ring's links. This and the latency are None if no
            stage with replicas was measured.
        fragmentation_bytes: The most free memory that the allocator of a worker still held at a
            step's end, beyond what a step takes for a while; None on a GPU, whose allocator tells
            it for each batch size, and where it was not measured.
    """

    pass_seconds: MeasuredSeconds
    message_seconds: MeasuredSeconds
    fixed_seconds: MeasuredSeconds
    step_error: Ratio | None = None
    reduce_latency_seconds: MeasuredSeconds | None = None
    reduce_bytes_per_second: PositiveRate | None = None
    lone_pass_seconds: MeasuredSeconds | None = None
    fragmentation_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        if (self.lone_pass_seconds or 0.0) > self.pass_seconds:
            raise ProblemError(
                f"lone_pass_seconds is {self.lone_pass_seconds}, more than pass_seconds"
            )
        if (self.reduce_latency_seconds is None) != (self.reduce_bytes_per_second is None):
            raise ProblemError(
                "reduce_latency_seconds and reduce_bytes_per_second come together or not at all"
            )
