"""Write layers as PipeDream's ``graph.txt``; ``importers.pipedream`` reads the same."""

from ..schema.errors import ProblemError
from ..schema.profile import LayerGraph


def write_graph(graph: LayerGraph) -> str:
    """Write layers as PipeDream's ``graph.txt``; ``read_graph`` gives the same graph back.

    Raises:
        ProblemError: An id or a description that the format cannot hold.
    """
    for node in graph.nodes:
        if " -- " in node.id or node.id[0].isspace():
            raise ProblemError(f"layer {node.id!r}: graph.txt cannot hold this id")
        if "\n" in node.op:
            raise ProblemError(f"layer {node.id!r}: graph.txt cannot hold a line break in its op")
    lines = [
        f"{node.id} -- {node.op} -- forward_compute_time={node.forward_seconds * 1000!r}, "
        f"backward_compute_time={node.backward_seconds * 1000!r}, "
        f"activation_size={node.activation_bytes}, parameter_size={node.weight_bytes}"
        for node in graph.nodes
    ]
    lines += [f"\t{source} -- {target}" for source, target in graph.edges]
    return "\n".join(lines) + "\n"
