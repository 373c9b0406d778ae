"""A Ray cluster of two nodes on this host."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def why_not() -> str | None:
    """What this host lacks."""
    return None if importlib.util.find_spec("ray") else "Ray is not installed"


@contextmanager
def ray_cluster() -> Iterator[tuple[dict[str, str], Any]]:
    """Nodes ``fast0`` (2 x cpu:fast) and ``slow0`` (2 x cpu:slow).

    Yields:
        The variables by which Ray is found, and the second node.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # How often Ray asks a node. Five refusals are a lost node; late answers have ten seconds.
        patch.setenv("RAY_health_check_period_ms", "500")
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 2, "object_store_memory": 80 << 20}
        head = {"node_name": "fast0", "resources": {"cpu:fast": 2}, "include_dashboard": False}
        try:
            cluster = Cluster(initialize_head=True, head_node_args={**options, **head})
        except Exception as error:  # whatever its daemons lack here
            pytest.skip(f"Ray does not start here: {error}")
        try:
            node = cluster.add_node(**options, node_name="slow0", resources={"cpu:slow": 2})
            cluster.wait_for_nodes()
            yield {"RAY_ADDRESS": cluster.address}, _Node(cluster, node)
        finally:
            cluster.shutdown()


class _Node:
    def __init__(self, cluster: Any, node: Any) -> None:
        self._cluster, self._node = cluster, node

    def lose(self) -> None:
        """Kill the node's processes."""
        self._cluster.remove_node(self._node, allow_graceful=False)
