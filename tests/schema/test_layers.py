"""Layers of a profile at several microbatch sizes, and how they were found."""

import dataclasses

import pytest

from hetflow.schema import files
from hetflow.schema.errors import ProblemError
from hetflow.schema.layers import LayerTrace, TracedInput
from hetflow.schema.profile import BatchPoint, LayerGraph, LayerNode, Profile

TRACE = LayerTrace(
    way="export",
    inputs=(TracedInput(name="ids", shape=(4, 6), dtype="int64"),),
    constants={"scale": 2.0, "mask": None},
    reason="torch.fx: a forward that asks for missing arguments",
)


def table(size: int, *names: str) -> LayerGraph:
    nodes = tuple(
        LayerNode(
            id=name, op="Linear", forward_seconds=0.1, backward_seconds=0.2, activation_bytes=8,
            weight_bytes=4, stashed_bytes=8, workspace_bytes=0,
        )
        for name in names
    )  # fmt: skip
    return LayerGraph(microbatch_size=size, nodes=nodes, edges=(), trace=TRACE)


def profile(*tables: LayerGraph) -> Profile:
    return Profile(
        model="m", device_type="V100", device_memory_bytes=10**9, weight_bytes=8,
        update_seconds=0.0, layers=tables[0], more_layers=tables[1:],
        batch_curve=(BatchPoint(batch_size=4, step_seconds=0.1, peak_memory_bytes=10**6),),
    )  # fmt: skip


def test_tables_and_their_trace_survive_a_file() -> None:
    made = profile(table(4, "a", "b"), table(8, "a", "b"))
    read = files.from_json(files.to_json(made), Profile)
    assert read == made
    assert [entry.microbatch_size for entry in read.layer_tables] == [4, 8]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ((table(4, "a"), table(4, "a")), "a microbatch size twice"),
        ((table(4, "a"), table(8, "b")), "at 8 lists other layers"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(
    tables: tuple[LayerGraph, ...], said: str
) -> None:
    with pytest.raises(ProblemError, match=said):
        profile(*tables)


def test_further_tables_need_a_first() -> None:
    with pytest.raises(ProblemError, match="more_layers adds to layers"):
        dataclasses.replace(profile(table(4, "a")), layers=None, more_layers=(table(8, "a"),))


def test_a_trace_by_export_needs_its_inputs() -> None:
    with pytest.raises(ProblemError, match="names the model's inputs"):
        LayerTrace(way="export")
