"""Split plans by hand whose workers share states."""

from collections.abc import Sequence
from dataclasses import replace

from hetflow.schema.options import Shard
from hetflow.schema.plan import Plan


def shared(plan: Plan, shard: Shard | None, shares: Sequence[int]) -> Plan:
    """The plan with states shared so; where all are, the first devices recompute layers."""
    if shard is None:
        return plan
    groups = tuple(
        replace(
            group,
            state_share_bytes=share,
            memory_bytes=1,
            activations="recomputed" if shard == "all" and place == 0 else None,
        )
        for place, (group, share) in enumerate(zip(plan.groups, shares, strict=True))
    )
    return replace(plan, stages=(replace(plan.stages[0], replicas=groups, shard=shard),))
