"""Layers with sequence parallelism: by hand, and against what a pass really keeps."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.planning.costs.tensor_layers import sequence_layers, sharded_layers
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.schema.layers import LayerTable
from hetflow.tests.papers.ptdp_equations import tensor_parallel_elements

from .test_tensor_layers import BLOCK, ELEMENT, HIDDEN, TOKENS, WIDE, layer, table

EMBEDDING = layer("embed", "replicated", 0, HIDDEN)
# Each row layer has the residual that is added behind it, so it reads the one before.
BEFORE = table(
    EMBEDDING,
    *BLOCK.layers,
    layer("norm3", "replicated", 0, HIDDEN),
    edges=(
        ("embed", "norm1"), *BLOCK.edges, ("embed", "o"), ("o", "down"), ("down", "norm3"),
    ),
)  # fmt: skip
# Behind each row layer a norm, which the next row layer reads.
AFTER = table(
    EMBEDDING,
    *BLOCK.layers,
    layer("norm3", "replicated", 0, HIDDEN),
    edges=(("embed", "norm1"), *BLOCK.edges, ("norm2", "down"), ("down", "norm3")),
)


@pytest.mark.parametrize("degree", [2, 4])
def test_tokens_are_kept_once_and_one_more_gather_is_sent_for_each_pair(degree: int) -> None:
    found, plain = sequence_layers(BEFORE, degree), sharded_layers(BEFORE, degree)
    assert found is not None
    share = {each.counts.id: each.counts for each in found}
    whole = {each.id: each for each in BEFORE.layers}
    for name in (each.id for each in BEFORE.layers):
        parts = 1 if name == "norm3" else degree
        assert share[name].stashed_bytes == whole[name].stashed_bytes // parts
    for before, after in zip(plain, found, strict=True):
        assert after.counts.weight_bytes == before.counts.weight_bytes
        flops = [operator.flops for operator in after.counts.forward]
        assert flops == [operator.flops for operator in before.counts.forward]
    assert share["norm1"].forward[0].num_bytes == whole["norm1"].forward[0].num_bytes // degree
    forward = sum(each.forward_reduced_bytes for each in found)
    backward = sum(each.backward_reduced_bytes for each in found)
    # In all-reduces: forward as many; backward one gather more for each pair, half of one.
    assert (forward, backward) == (2 * WIDE, 3 * WIDE)
    ring = 2 * (degree - 1) / degree * (forward + backward) / ELEMENT
    assert ring == tensor_parallel_elements(1, 1, TOKENS, HIDDEN, degree) * 5 / 4


def test_models_that_normalise_after_each_part_are_left_out() -> None:
    assert sequence_layers(AFTER, 2) is None
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    named = replace(
        AFTER,
        layers=tuple(replace(each, id=names.get(each.id, each.id)) for each in AFTER.layers),
        edges=tuple((names.get(a, a), names.get(b, b)) for a, b in AFTER.edges),
    )
    assert sequence_layers(named, 2) is not None  # known by name to come before
    without: LayerTable = replace(BEFORE, edges=tuple(e for e in BEFORE.edges if e[0] != "norm2"))
    assert sequence_layers(without, 2) is None


def test_dropout_behind_the_last_row_is_of_tokens() -> None:
    last = replace(layer("drop", "replicated", 0, HIDDEN), op="Dropout")
    layers = (*BEFORE.layers[:-1], last, BEFORE.layers[-1])
    edges = (*BEFORE.edges[:-1], ("down", "drop"), ("o", "drop"), ("drop", "norm3"))
    found = sequence_layers(replace(BEFORE, layers=layers, edges=edges), 2)
    assert found is not None
    assert [each.counts.stashed_bytes for each in found[-2:]] == [WIDE // 2, WIDE]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_families_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import BertConfig, GPT2Config, LlamaConfig

    hidden, vocabulary = 32, 64
    sizes = {"num_hidden_layers": 2, "hidden_size": hidden, "num_attention_heads": 4}
    sizes |= {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    config, kind = {
        "gpt2": (GPT2Config(**sizes, n_positions=16), "GPT2LMHeadModel"),
        "llama": (
            LlamaConfig(**sizes, intermediate_size=64, max_position_embeddings=16),
            "LlamaForCausalLM",
        ),
        "bert": (
            BertConfig(**sizes, intermediate_size=64, max_position_embeddings=16),
            "BertForMaskedLM",
        ),
    }[name]
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    (counted,) = count_model(targets.parse(f"hf:{tmp_path}"), (1,), (1,), "sgd").tables
    spread = sequence_layers(counted, 2)
    if name == "bert":  # normalises after each part
        assert spread is None
        return
    assert spread is not None
    kept = [
        sum(each.counts.stashed_bytes for each in shares)
        for shares in (sharded_layers(counted, 2), spread)
    ]
    activation = next(each.activation_bytes for each in counted.layers if each.role == "row")
    # At least the inputs and outputs of four norms.
    assert kept[0] - kept[1] >= 8 * activation // 2
