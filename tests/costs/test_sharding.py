"""Units by which weights are gathered, by the names of layers."""

from dataclasses import replace

from hetflow.planning.costs.sharding import unit_bytes
from hetflow.schema.layers import unit_of
from hetflow.schema.profile import LayerGraph, LayerNode


def test_units_are_repeated_layers() -> None:
    assert unit_of("transformer.h.11.attn.weight") == "transformer.h.11"
    assert unit_of("blocks_3_norm") == "blocks_3"
    assert unit_of("layer1.0.conv1") == "layer1.0"
    assert [unit_of(name) for name in ("fc1", "conv2.weight", "wte")] == ["", "", ""]
    nodes = tuple(
        LayerNode(
            id=name, op="Linear", forward_seconds=0.0, backward_seconds=0.0, activation_bytes=0,
            weight_bytes=size,
        )
        for name, size in (("wte", 30), ("h.0.a", 5), ("h.0.b", 6), ("h.1.a", 7), ("h.2.a", 9))
    )  # fmt: skip
    graph = LayerGraph(microbatch_size=1, nodes=nodes, edges=())
    assert unit_bytes(graph, 57) == (30 + 11 + 9, 30, 4, 9)
    assert unit_bytes(None, 57) == (57, 57, 1, 0)
    # ``h.1`` and all of ``h.0`` are blocks, ``h.2`` is none, nor is what only begins as one.
    assert unit_bytes(graph, 57, blocks=["h.0", "h.1", "h.10"]) == (39 + 11 + 7, 39, 3, 7)
    assert unit_bytes(graph, 57, blocks=["h", "h.2", "w"]) == (30 + 18 + 9, 30, 3, 9)
    frozen = replace(graph, nodes=(replace(nodes[0], frozen_weight_bytes=4), *nodes[1:]))
    assert unit_bytes(frozen, 61) == (34 + 11 + 9, 34, 4, 9)
    assert unit_bytes(frozen, 57, frozen=False) == (30 + 11 + 9, 30, 4, 9)
