"""A device's share of layers against Megatron-LM's split by hand."""

from dataclasses import replace

import pytest

from hetflow.planning.costs.tensor_layers import degrees_of, sharded_layers
from hetflow.schema.layers import (
    CoreCounts,
    LayerCounts,
    LayerTable,
    LayerTrace,
    Operator,
    PassCounts,
    TensorRole,
)
from hetflow.tests.papers.ptdp_equations import tensor_parallel_elements

TOKENS, HIDDEN, ELEMENT = 64, 32, 4
WIDE = TOKENS * HIDDEN * ELEMENT


def layer(name: str, role: TensorRole, fan_in: int, fan_out: int, bias: int = 0) -> LayerCounts:
    """A product with its bias, or where there is no product what moves activations."""
    output = TOKENS * fan_out * ELEMENT
    if role in ("column", "row"):
        weights = ELEMENT * fan_in * fan_out
        moved = weights + TOKENS * fan_in * ELEMENT + output
        product = Operator(
            name="mm", dtype="float32", flops=2.0 * TOKENS * fan_in * fan_out, num_bytes=moved
        )
        operators = (product,)
    else:
        weights = 0
        operators = (Operator(name="gelu", dtype="float32", flops=0.0, num_bytes=2 * output),)
    return LayerCounts(
        id=name,
        op="Toy",
        forward=operators,
        backward=operators * 2,
        activation_bytes=output,
        weight_bytes=weights + ELEMENT * bias,
        stashed_bytes=output,
        workspace_bytes=weights,
        role=role,
        whole_weight_bytes=ELEMENT * bias,
    )


def table(*layers: LayerCounts, edges: tuple[tuple[str, str], ...]) -> LayerTable:
    whole = PassCounts(
        batch_size=1, forward=(), backward=(), kept_bytes=0, peak_bytes=0, batch_bytes=0
    )
    return LayerTable(whole=whole, layers=layers, edges=edges, trace=LayerTrace(way="fx"))


BLOCK = table(
    layer("norm1", "replicated", 0, HIDDEN),
    layer("q", "column", HIDDEN, HIDDEN),
    layer("v", "column", HIDDEN, HIDDEN),
    layer("o", "row", HIDDEN, HIDDEN, bias=HIDDEN),
    layer("norm2", "replicated", 0, HIDDEN),
    layer("up", "column", HIDDEN, 4 * HIDDEN),
    layer("gelu", "sharded", 0, 4 * HIDDEN),
    layer("down", "row", 4 * HIDDEN, HIDDEN),
    edges=(
        ("norm1", "q"), ("norm1", "v"), ("q", "v"), ("v", "o"), ("o", "norm2"), ("norm2", "up"),
        ("up", "gelu"), ("gelu", "down"),
    ),
)  # fmt: skip


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_block_all_reduces_as_4_3_2_says(degree: int) -> None:
    found = sharded_layers(BLOCK, degree)
    forward = sum(share.forward_reduced_bytes for share in found)
    backward = sum(share.backward_reduced_bytes for share in found)
    assert forward == backward == 2 * WIDE  # q and v read one norm, whose gradient is summed once
    ring = 2 * (degree - 1) / degree * (forward + backward) / ELEMENT
    assert ring == tensor_parallel_elements(1, 1, TOKENS, HIDDEN, degree)


def test_products_and_weights_are_split_and_biases_of_rows_are_not() -> None:
    share = {s.counts.id: s.counts for s in sharded_layers(BLOCK, 4)}
    whole = {row.id: row for row in BLOCK.layers}
    assert share["up"].weight_bytes == whole["up"].weight_bytes // 4
    assert share["o"].weight_bytes == ELEMENT * (HIDDEN * HIDDEN // 4 + HIDDEN)
    for name in ("q", "o", "up", "down"):
        assert share[name].forward[0].flops == whole[name].forward[0].flops / 4
    assert share["norm1"] == whole["norm1"]
    # A column reads all of its input, a row writes all of its output.
    split = (whole["up"].forward[0].num_bytes - WIDE) // 4
    assert share["up"].forward[0].num_bytes == WIDE + split
    assert share["down"].forward[0].num_bytes == WIDE + split
    assert share["gelu"].forward[0].num_bytes == whole["gelu"].forward[0].num_bytes // 4


def test_what_is_kept_between_a_column_and_its_row_is_split() -> None:
    share = {s.counts.id: s.counts for s in sharded_layers(BLOCK, 8)}
    for row in BLOCK.layers:
        parts = 8 if row.role in ("column", "sharded") else 1
        assert share[row.id].stashed_bytes == row.stashed_bytes // parts
        assert share[row.id].activation_bytes == row.activation_bytes  # the group's, all of it


def test_products_of_attention_are_split_on_every_side() -> None:
    attended = Operator(
        name="_scaled_dot_product_flash_attention", dtype="float32", flops=8e6, num_bytes=4 * WIDE
    )
    plain = layer("v", "column", HIDDEN, HIDDEN)
    row = LayerCounts(
        **{
            **{name: getattr(plain, name) for name in plain.__dataclass_fields__},
            "forward": (attended,),
        }
    )
    found = sharded_layers(
        table(layer("norm", "replicated", 0, HIDDEN), row, edges=(("norm", "v"),)), 4
    )
    assert found[1].counts.forward[0].num_bytes == WIDE
    assert found[1].counts.forward[0].flops == 2e6


def test_a_core_is_split_by_heads_and_what_others_keep_for_it_is_not() -> None:
    product = Operator(name="bmm", dtype="float32", flops=80.0, num_bytes=41)
    core = CoreCounts(forward=(product,), made_bytes=30, stashed_bytes=7)
    layers = tuple(
        replace(each, core=core) if each.id in ("v", "norm1") else each for each in BLOCK.layers
    )
    shares = {
        share.counts.id: share.counts for share in sharded_layers(replace(BLOCK, layers=layers), 4)
    }
    assert shares["v"].core == CoreCounts(
        forward=(replace(product, flops=20.0, num_bytes=11),), made_bytes=8, stashed_bytes=2
    )
    assert shares["norm1"].core == core
    assert shares["q"].core is None


def test_an_embedding_by_vocabulary_sums_its_rows_once() -> None:
    embedding = LayerCounts(
        id="wte",
        op="Embedding",
        forward=(Operator(name="embedding", dtype="float32", flops=0, num_bytes=2 * WIDE),),
        backward=(),
        activation_bytes=WIDE,
        weight_bytes=1001,
        stashed_bytes=8,
        workspace_bytes=1001,
        role="vocabulary",
    )
    (share,) = sharded_layers(table(embedding, edges=()), 2)
    assert (share.forward_reduced_bytes, share.backward_reduced_bytes) == (WIDE, 0)
    assert share.counts.weight_bytes == 501  # rounded up, as a vocabulary is padded
    assert share.counts.stashed_bytes == 8


def test_degrees_split_heads_evenly() -> None:
    assert degrees_of(16) == (2, 4, 8)
    assert degrees_of(12) == (2, 4)
    assert degrees_of(25) == ()
    assert degrees_of(None) == ()
