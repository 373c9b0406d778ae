"""Engines by name; plug-ins add theirs."""

from collections.abc import Callable

from ...schema.cluster import Cluster
from ...schema.plugins import Registry
from .protocol import Engine

MakeEngine = Callable[[Cluster], Engine]
"""From the pool that the user named to an engine."""

ENGINES: Registry[MakeEngine] = Registry(
    "engine",
    group="hetflow.engines",
    own=(
        "hetflow.clusters.engines.local",
        "hetflow.clusters.engines.ray",
        "hetflow.clusters.engines.skypilot",
        "hetflow.clusters.engines.slurm",
    ),
)


def engine(name: str) -> Callable[[MakeEngine], MakeEngine]:
    """Register an engine.

    Args:
        name: What ``hetflow cluster start --engine`` calls it.

    Returns:
        A decorator that leaves what makes the engine as it is.
    """
    return ENGINES.adding(name)
