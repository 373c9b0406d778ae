"""What a stage of a plan of three dimensions costs beside its compute: messages and gradients."""

from ..schema.parallel import CostRule, LinkCurve


def bucketed_ring_seconds(
    gradient_bytes: float, num_replicas: int, curve: LinkCurve, bucket_bytes: int | None
) -> float:
    """A ring all-reduce, bucket by bucket: 2(d - 1) messages of 1/d of each; thesis 4.3.3.

    Args:
        gradient_bytes: Of one device of each replica.
        num_replicas: d.
        curve: The slowest link of the ring.
        bucket_bytes: Largest bucket; None reduces all at once.
    """
    if num_replicas < 2:
        return 0.0
    whole, rest = 0.0, gradient_bytes
    if bucket_bytes is not None:
        whole, rest = divmod(gradient_bytes, bucket_bytes)
    full = curve.seconds((bucket_bytes or 0) / num_replicas)
    last = curve.seconds(rest / num_replicas)
    return 2 * (num_replicas - 1) * (whole * full + last)


def transfer_seconds(
    rule: CostRule,
    *,
    output_seconds: float,
    gradient_seconds: float,
    is_first: bool,
    is_last: bool,
    num_stages: int,
) -> float:
    """A stage's messages of one microbatch.

    ``hetflow``: its output to the next stage, and its input's gradient to the one before.
    ``sailor``: the same for inner stages; the last counts its gradient twice, and so does the
    first its output where there are more than three stages, as Sailor's simulator does.

    Args:
        rule: Whose convention.
        output_seconds: Sending the output on.
        gradient_seconds: Sending the input's gradient back.
        is_first: Whether no stage is before it.
        is_last: Whether none is behind it.
        num_stages: Of the pipeline, p.
    """
    if is_first and is_last:
        return 0.0
    if is_first:
        return output_seconds * (2 if rule == "sailor" and num_stages > 3 else 1)
    if is_last:
        return gradient_seconds * (2 if rule == "sailor" else 1)
    return output_seconds + gradient_seconds


def step_seconds(
    num_microbatches: int,
    stage_seconds: list[float],
    update_seconds: list[float],
    reduce_seconds: list[float],
) -> float:
    """A step of 1F1B: (m - 1) times the slowest stage, once through all, update, all-reduce.

    Equation 4.1 with unlike stages: of p equal ones it is (m + p - 1)(t_f + t_b).

    Args:
        num_microbatches: m of each pipeline.
        stage_seconds: Compute and messages of a microbatch, by stage.
        update_seconds: By stage; the longest counts.
        reduce_seconds: By stage; the longest counts.
    """
    slowest = (num_microbatches - 1) * max(stage_seconds)
    return slowest + sum(stage_seconds) + max(update_seconds) + max(reduce_seconds)
