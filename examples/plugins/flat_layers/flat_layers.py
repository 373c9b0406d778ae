"""Layer profiles from a plain table: one layer per line, each layer feeds the next.

The columns are ``name,forward_ms,backward_ms,output_bytes,weight_bytes``, as a spreadsheet or a
short script can write them.
"""

from hetflow import FileError
from hetflow.plugins import LayerGraph, LayerNode, layer_importer


@layer_importer("flat-layers", title="a table of layers")
def read(text: str, *, microbatch_size: int, name: str) -> LayerGraph:
    """Read a chain of layers; milliseconds become seconds."""
    nodes = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            layer, forward, backward, output, weights = line.split(",")
            nodes.append(
                LayerNode(
                    id=layer.strip(),
                    op="layer",
                    forward_seconds=float(forward) / 1e3,
                    backward_seconds=float(backward) / 1e3,
                    activation_bytes=int(output),
                    weight_bytes=int(weights),
                )
            )
        except ValueError as error:  # hetflow's own errors are ValueErrors too
            raise FileError(f"{name}: line {number}: {error}") from None
    names = [node.id for node in nodes]
    edges = tuple(zip(names, names[1:], strict=False))
    return LayerGraph(microbatch_size=microbatch_size, nodes=tuple(nodes), edges=edges)
