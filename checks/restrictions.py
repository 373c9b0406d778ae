"""Check that a plan keeps to the restrictions that it states."""

from collections.abc import Iterator

from ..schema.files import Plan
from ..schema.pipeline import PipelinePlan
from ..schema.plan import SplitPlan


def check(plan: Plan) -> list[str]:
    """List the restrictions that a plan states and breaks, as sentences."""
    return [f"restrictions: {fault}" for fault in _faults(plan)]


def _faults(plan: Plan) -> Iterator[str]:
    asked = plan.restrictions
    if asked is None:
        return
    if asked.devices is not None:
        for name, used in plan.devices_by_type.items():
            if used > asked.devices.get(name, 0):
                yield f"{used} {name} are used, the pool has {asked.devices.get(name, 0)}"
        if plan.cluster is not None and plan.cluster.num_devices != asked.devices:
            yield "devices are not those of cluster"
    counts: list[tuple[str, int | None]] = [
        ("microbatch_size", None), ("num_stages", None), ("num_model_chunks", None)
    ]  # fmt: skip
    if not isinstance(plan, SplitPlan):
        counts = [
            ("microbatch_size", plan.microbatch_size),
            ("num_stages", len(plan.stages)),
            ("num_model_chunks", plan.num_model_chunks),
        ]
    for name, stated in counts:
        limit = getattr(asked, name)
        if limit is not None and stated != limit:
            yield f"{name} is {limit}, the plan has {stated}"
    if asked.replication is not None and (asked.replication or _replicates(plan)):
        yield "replication is stated, and the plan has replicas or may have them"
    if asked.recompute is not None and (asked.recompute or _recomputes(plan)):
        yield "recompute is stated, and the plan recomputes or may do so"


def _replicates(plan: Plan) -> bool:
    if isinstance(plan, SplitPlan):
        return True
    return any(stage.num_replicas > 1 for stage in plan.stages)


def _recomputes(plan: Plan) -> bool:
    if isinstance(plan, SplitPlan):
        return True
    if isinstance(plan, PipelinePlan):
        return plan.recompute
    return any(stage.recompute != "none" for stage in plan.stages)
