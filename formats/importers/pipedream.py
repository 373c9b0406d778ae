"""Read PipeDream's layer profiles, ``graph.txt``.

A node is one line, ``id -- description -- forward_compute_time=<ms>, backward_compute_time=<ms>,
activation_size=<bytes or [a; b]>, parameter_size=<bytes>``; an edge is one tab-indented line.
``exporters.pipedream`` writes this format. torch is not needed.
"""

import re

from ...schema.errors import FileError, ProblemError
from ...schema.profile import BatchPoint, LayerGraph, LayerNode, Profile
from .registry import layer_importer

_TITLE = "PipeDream graph.txt"
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]+)")
_SHAPE = "id -- description -- forward_compute_time=<ms>, ..., parameter_size=<bytes>"


def read_graph(text: str, *, microbatch_size: int = 1, name: str = "graph.txt") -> LayerGraph:
    """Read PipeDream's profile of a model.

    The format's milliseconds become seconds; an activation of several tensors is summed.

    Args:
        text: The file's text.
        microbatch_size: Samples per pass in the profile; the format does not say.
        name: Stands for the text in errors; usually the path.

    Raises:
        FileError: A line is neither a node nor an edge, a number is invalid, or an edge names an
            unknown node; gives the line's number.
    """
    nodes: list[LayerNode] = []
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}: line {number}"
        if line[0].isspace():
            edges.append(_edge(line, where))
        else:
            nodes.append(_node(line, where))
    if not nodes:
        raise FileError(f"{name}: holds no nodes", hint=f"a node is a line `{_SHAPE}`")
    try:
        return LayerGraph(microbatch_size=microbatch_size, nodes=tuple(nodes), edges=tuple(edges))
    except ProblemError as error:
        raise FileError(f"{name}: {error.message}") from None


def _edge(line: str, where: str) -> tuple[str, str]:
    parts = [part.strip() for part in line.split(" -- ")]
    if len(parts) != 2 or not all(parts):
        raise FileError(f"{where}: not an edge: {line.strip()[:60]!r}", hint="write `a -- b`")
    return parts[0], parts[1]


def _node(line: str, where: str) -> LayerNode:
    parts = line.strip().split(" -- ")
    if len(parts) < 3:
        raise FileError(f"{where}: not a node: {line.strip()[:60]!r}", hint=f"write `{_SHAPE}`")
    fields = dict(_FIELD.findall(parts[-1]))
    missing = [field for field in _FIELDS if field not in fields]
    if missing:
        raise FileError(f"{where}: no {missing[0]}", hint=f"write `{_SHAPE}`")
    forward, backward, activation, parameter = (_number(fields[f], f, where) for f in _FIELDS)
    return LayerNode(
        id=parts[0].strip(),
        op=" -- ".join(parts[1:-1]),
        forward_seconds=forward / 1000,
        backward_seconds=backward / 1000,
        activation_bytes=round(activation),
        weight_bytes=round(parameter),
    )


def _number(text: str, field: str, where: str) -> float:
    try:
        total = sum(float(part) for part in text.strip("[] ").split(";") if part.strip())
    except ValueError:
        raise FileError(f"{where}: {field} must be a number, got {text[:40]!r}") from None
    if not 0 <= total < float("inf"):
        raise FileError(f"{where}: {field} must be >= 0 and finite, got {text[:40]!r}")
    return total


def without_placeholders(graph: LayerGraph) -> LayerGraph:
    """Drop the nodes that PipeDream's optimizer drops before it cuts a graph."""
    # First, sources that only stand for the input (their op starts with ``Input``; their time is
    # that of loading data). Then, sinks that pick one output of a layer and feed nothing
    # (``__getitem__``). Each rule is applied once.
    targets = {target for _, target in graph.edges}
    graph = _drop(
        graph, {n.id for n in graph.nodes if n.id not in targets and n.op.startswith("Input")}
    )
    sources = {source for source, _ in graph.edges}
    return _drop(
        graph, {n.id for n in graph.nodes if n.id not in sources and n.op.startswith("__getitem__")}
    )


def _drop(graph: LayerGraph, ids: set[str]) -> LayerGraph:
    return LayerGraph(
        microbatch_size=graph.microbatch_size,
        nodes=tuple(node for node in graph.nodes if node.id not in ids),
        edges=tuple(edge for edge in graph.edges if not ids & set(edge)),
    )


def profile_of(
    graph: LayerGraph,
    *,
    model: str,
    device_type: str,
    device_memory_bytes: int,
    source: str,
    format_title: str = _TITLE,
) -> Profile:
    """Make a profile that has measured layers only.

    Its batch curve has one point, the sum of the layers. The point's memory is the sum of weights
    and activations: a lower bound that was not measured, as the provenance says.

    Args:
        graph: The layers, at the microbatch size that was profiled.
        model: Name of the model.
        device_type: Device type on which the times were taken.
        device_memory_bytes: Memory of that device, in bytes.
        source: Where the layers come from, for the provenance.
        format_title: Name of the foreign format, for the provenance.

    Raises:
        ProblemError: All layers take no time.
    """
    seconds = sum(node.forward_seconds + node.backward_seconds for node in graph.nodes)
    weight_bytes = sum(node.weight_bytes for node in graph.nodes)
    activation_bytes = sum(node.activation_bytes for node in graph.nodes)
    if seconds <= 0:
        raise ProblemError(f"{source}: every layer takes 0 seconds", hint="profile the model again")
    return Profile(
        model=model,
        device_type=device_type,
        device_memory_bytes=device_memory_bytes,
        weight_bytes=weight_bytes,
        update_seconds=0.0,
        batch_curve=(
            BatchPoint(
                batch_size=graph.microbatch_size,
                step_seconds=seconds,
                peak_memory_bytes=weight_bytes + activation_bytes,
            ),
        ),
        layers=graph,
        provenance={
            "imported_from": source,
            "format": format_title,
            "not_measured": "update_seconds, peak_memory_bytes (weights + activations)",
        },
    )


layer_importer("pipedream", title=_TITLE, without_placeholders=without_placeholders)(read_graph)
