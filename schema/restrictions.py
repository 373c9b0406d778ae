"""What a plan was solved under: its proof holds among the plans that keep to it."""

from .choices import Shard
from .records import Count, Name, record


@record
class Restrictions:
    """What the user asked of a plan, so that faster plans may exist without it.

    A plan states its schedule, objective and equal virtual nodes elsewhere. None and an empty dict
    restrict nothing.

    Args:
        devices: Device type -> devices of the pool, if the plan leaves some of them idle and does
            not state the pool as ``cluster``.
        microbatch_size: Samples of a microbatch.
        num_stages: Exact number of stages.
        num_model_chunks: Stages on each device.
        replication: False: no stage has replicas.
        recompute: False: no stage recomputes activations.
        shard: What the devices of a split were to share of the states.
    """

    devices: dict[Name, Count] | None = None
    microbatch_size: Count | None = None
    num_stages: Count | None = None
    num_model_chunks: Count | None = None
    replication: bool | None = None
    recompute: bool | None = None
    shard: Shard | None = None

    def __str__(self) -> str:
        parts = [
            (self.num_stages, f"{self.num_stages} stages"),
            (self.num_model_chunks, f"{self.num_model_chunks} stages on a device"),
            (self.microbatch_size, f"microbatches of {self.microbatch_size}"),
            (self.replication is False, "no replicas"),
            (self.recompute is False, "no recomputation"),
            (self.shard, f"shared states ({self.shard})"),
        ]
        return ", ".join(text for said, text in parts if said)
