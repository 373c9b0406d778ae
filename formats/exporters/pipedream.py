"""Write layers as PipeDream's ``graph.txt``, which ``importers.pipedream`` reads."""

from ...schema.errors import ProblemError
from ...schema.options import command
from ...schema.profile import LayerGraph, Profile
from .registry import exporter


def write_graph(graph: LayerGraph) -> str:
    """Write layers as PipeDream's ``graph.txt``; ``read_graph`` gives the same graph back.

    Raises:
        ProblemError: The format cannot hold an id or a description.
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


@exporter(
    "pipedream",
    takes=(Profile,),
    wrote=lambda profile: f"{len(profile.layers.nodes)} layers",
    document=lambda profile, text: {
        "model": profile.model,
        "layers": len(profile.layers.nodes),
        "graph": text,
    },
)
def graph_of_profile(profile: Profile, name: str) -> str:
    """Write a profile's layers as PipeDream's ``graph.txt``; ``name`` stands for it in errors.

    Raises:
        ProblemError: The profile holds no layers, or some that the format cannot hold.
    """
    if profile.layers is None:
        raise ProblemError(
            f"{name}: holds no layers", hint=f"run {command('profile', layers=True)}"
        )
    return write_graph(profile.layers)
