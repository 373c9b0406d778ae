"""PipeDream's graph.txt, in and out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.formats.exporters.pipedream import write_graph
from hetflow.formats.importers.pipedream import profile_of, read_graph, without_placeholders
from hetflow.schema.errors import FileError, ProblemError
from hetflow.schema.profile import LayerGraph, LayerNode
from hetflow.tests.data import reference
from hetflow.tests.profiles import examples

NODE = (
    "node{n} -- {op} -- forward_compute_time=1.500, backward_compute_time=0.250, "
    "activation_size={a}, parameter_size=12.000"
)
TEXT = "\n".join(
    [
        NODE.format(n=1, op="Input0", a="0.0"),
        NODE.format(n=2, op="Linear(in_features=2, out_features=3)", a="[6.0; 2.0]"),
        NODE.format(n=3, op="__getitem__(0)", a="6.0"),
        NODE.format(n=4, op="ReLU", a="6.0"),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        "",
    ]
)


def test_units_lists_and_edges():
    graph = read_graph(TEXT, microbatch_size=64)
    linear = graph.nodes[1]
    assert graph.microbatch_size == 64
    assert linear.op == "Linear(in_features=2, out_features=3)"
    assert linear.forward_seconds == pytest.approx(0.0015)
    assert linear.backward_seconds == pytest.approx(0.00025)
    assert (linear.activation_bytes, linear.weight_bytes) == (8, 12)
    assert graph.edges == (("node1", "node2"), ("node2", "node3"), ("node2", "node4"))


def test_placeholders_go_as_in_the_released_optimizer():
    graph = without_placeholders(read_graph(TEXT))
    assert [node.id for node in graph.nodes] == ["node2", "node4"]
    assert graph.edges == (("node2", "node4"),)


IDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=6)


@settings(max_examples=examples(60))
@given(st.lists(IDS, min_size=1, max_size=6, unique=True), st.data())
def test_written_graphs_come_back(ids, data):
    number = st.integers(0, 2**40)
    nodes = tuple(
        LayerNode(
            id=name,
            op=data.draw(IDS),
            forward_seconds=data.draw(number) / 4096,
            backward_seconds=data.draw(number) / 4096,
            activation_bytes=data.draw(number),
            weight_bytes=data.draw(number),
        )
        for name in ids
    )
    edges = tuple(zip(ids, ids[1:], strict=False))
    graph = LayerGraph(microbatch_size=3, nodes=nodes, edges=edges)
    back = read_graph(write_graph(graph), microbatch_size=3)
    assert back.edges == graph.edges
    for found, expected in zip(back.nodes, nodes, strict=True):
        assert (found.id, found.op) == (expected.id, expected.op)
        assert found.forward_seconds == pytest.approx(expected.forward_seconds, rel=1e-15)
        assert found.activation_bytes == expected.activation_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no nodes"),
        ("node1", "line 1: not a node"),
        ("a -- b -- forward_compute_time=1", "line 1: no backward_compute_time"),
        (NODE.format(n=1, op="x", a="[1; y]"), "activation_size must be a number"),
        (NODE.format(n=1, op="x", a="-4"), "activation_size must be >= 0"),
        (NODE.format(n=1, op="x", a="inf"), "activation_size must be >= 0 and finite"),
        (TEXT + "\tnode1", "not an edge"),
        (TEXT + "\tnode1 -- node9", "unknown layer"),
        (NODE.format(n=1, op="x", a="1") + "\n" + NODE.format(n=1, op="x", a="1"), "unique"),
    ],
)
def test_faults_name_the_line(text, message):
    with pytest.raises(FileError, match=message):
        read_graph(text)


def test_a_profile_says_what_nobody_measured():
    graph = without_placeholders(read_graph(TEXT, microbatch_size=8))
    profile = profile_of(
        graph, model="m", device_type="V100", device_memory_bytes=10**9, source="graph.txt"
    )
    assert profile.batch_curve[0].step_seconds == pytest.approx(2 * 0.00175)
    assert profile.weight_bytes == 24
    assert "not_measured" in profile.provenance


def test_layers_without_time_are_refused():
    text = TEXT.replace("=1.500", "=0").replace("=0.250", "=0")
    with pytest.raises(ProblemError, match="0 seconds"):
        profile_of(
            read_graph(text), model="m", device_type="V100", device_memory_bytes=1, source="x"
        )


@pytest.mark.parametrize("model", ["vgg16", "gnmt", "resnet18", "resnet50", "squeezenet1_0"])
def test_published_profiles(model):
    path = reference.folder() / "pipedream" / f"{model}.graph.txt"
    graph = read_graph(path.read_text())
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(graph.nodes) + len(graph.edges) == len(lines)
    assert read_graph(write_graph(graph)).edges == graph.edges
