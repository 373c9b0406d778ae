"""Why no partition exists: which stage lacks how many bytes."""

from math import ceil

from ...schema.errors import InfeasibleError
from ...schema.pipeline import DevicePool, PipelineProblem
from .assemble import names_between
from .placements import PlacedStage, PlacementSpace
from .search import PlacementSearch
from .stage_costs import StageCosts


def explain(
    problem: PipelineProblem, costs: StageCosts, space: PlacementSpace, search: PlacementSearch
) -> InfeasibleError:
    """Find how many bytes more a device would need, and the stage that needs them.

    ``costs`` are of the option that needs the least memory; ``search`` is asked for larger memory.
    """
    if search(problem, costs, space, float("inf")) is None:
        more = ", or another batch" if problem.launchable else ""
        hint = f"use fewer workers or stages, or at_most{more}"
        return InfeasibleError(_counts(problem), hint=hint)
    low, high = 0.0, 1.0
    while search(problem, costs, space, high) is None:
        low, high = high, high * 4
    while high - low > max(1.0, 1e-6 * high):
        middle = (low + high) / 2
        if search(problem, costs, space, middle) is None:
            low = middle
        else:
            high = middle
    placed = search(problem, costs, space, high)
    return _shortfall(problem, costs, placed or [], high)


def needs(pool: DevicePool, used_bytes: float) -> str:
    """Say how many bytes a device would have to hold, workspace and base included, and has."""
    parts = {
        "for workspace": pool.workspace_bytes,
        "before there is a model": pool.base_memory_bytes,
    }
    whole = used_bytes + sum(size or 0 for size in parts.values())
    said = [f"{size} of them {what}" for what, size in parts.items() if size]
    aside = f" ({', '.join(said)})" if said else ""
    return (
        f"needs {round(whole)} bytes{aside} on a {pool.device_type} of {pool.memory_bytes}, "
        f"{round(whole - (pool.memory_bytes or 0))} bytes too many"
    )


def _counts(problem: PipelineProblem) -> str:
    return (
        f"no partition of {len(problem.layers)} layers uses "
        f"{'exactly ' if problem.workers == 'exactly' else ''}{problem.num_devices} devices"
        + (f" in {problem.num_stages} stages" if problem.num_stages else "")
        + ("" if problem.replication else " without replicated stages")
        + (f" with {problem.num_microbatches} microbatches" if problem.launchable else "")
    )


def _shortfall(
    problem: PipelineProblem, costs: StageCosts, placed: list[PlacedStage], extra: float
) -> InfeasibleError:
    def lack(index: int) -> float:
        workers = sum(entry[2].num_replicas for entry in placed[index:])
        return costs.lack_bytes(*placed[index], workers)

    worst = max(range(len(placed)), key=lack)
    first, last, move = placed[worst]
    names = names_between(problem, costs, first, last)
    pool = problem.pools[move.pool]
    what = f"layer {names[0]}" if len(names) == 1 else f"the stage {names[0]} .. {names[-1]}"
    return InfeasibleError(
        "no partition fits the memory: even where the least is needed, "
        f"{what} {needs(pool, lack(worst) + (pool.limit_bytes or 0))}",
        hint=f"it would fit with {ceil(extra)} bytes more on every device; or use a smaller "
        f"microbatch{'' if costs.recompute else ' or recomputation'}",
    )
