"""Which layers a tensor-parallel group shares, and how (Megatron-LM; thesis 4.2.3).

A column-parallel product splits its outputs, a row-parallel one its inputs; between the two nothing
is exchanged, so a block all-reduces twice a pass. Which product is which, a model's module names
tell: there is one table of them for the families of transformers.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from ..schema.operator_counts import TensorRole

# What a layer's id ends in. Llama, Qwen and OPT; GPT-2; GPT-NeoX and BLOOM; BERT and ViT; the zoo.
_COLUMN = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1",
    "c_attn", "c_fc", "query_key_value", "dense_h_to_4h", "query", "key", "value",
    "intermediate.dense", "project_in", "feed_forward.0", "lm_head", "embed_out",
    "predictions.decoder",
)  # fmt: skip
_ROW = (
    "o_proj", "out_proj", "down_proj", "fc2", "c_proj", "attention.dense", "dense_4h_to_h",
    "output.dense", "project_out", "feed_forward.2",
)  # fmt: skip
_VOCABULARY = ("wte", "embed_tokens", "embed_in", "word_embeddings")
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head")


class NoTensorRolesError(Exception):
    """The model is not one whose layers a group can share; the message says why."""


def tensor_roles(ids: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, TensorRole]:
    """The role of each layer.

    A layer without a name of the table is ``sharded`` where all that it reads is split, and
    ``replicated`` where nothing is.

    Args:
        ids: In topological order.
        edges: Who reads whose output.

    Raises:
        NoTensorRolesError: No products of the table, or they do not pair.
    """
    before: Mapping[str, list[str]] = {name: [] for name in ids}
    for source, target in edges:
        before[target].append(source)
    roles: dict[str, TensorRole] = {}
    for name in ids:
        inputs = [roles[source] in ("column", "sharded") for source in before[name]]
        roles[name] = _role(name, inputs)
    if "row" not in roles.values():
        raise NoTensorRolesError("no layer has the name of a transformer's products")
    return roles


def _role(name: str, is_split: Sequence[bool]) -> TensorRole:
    """Of one layer, whose inputs are split among the group or whole."""
    if _is_one_of(name, _ROW):
        if not any(is_split):  # whole ones may be the residual that is added to its sum
            raise NoTensorRolesError(f"{name} reads what no column-parallel layer made")
        return "row"
    if _is_one_of(name, _COLUMN):
        if is_split and all(is_split):
            raise NoTensorRolesError(f"{name} reads what a column-parallel layer made")
        return "column"
    if _is_one_of(name, _VOCABULARY):
        return "vocabulary"
    if any(is_split):
        if not all(is_split):
            raise NoTensorRolesError(f"{name} reads what is split, and what is whole")
        return "sharded"
    return "replicated"


def _is_one_of(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def heads_divisor(model: Any) -> int:
    """What degrees must divide: the greatest common divisor of all numbers of heads.

    Raises:
        NoTensorRolesError: The model has no heads that it tells of.
    """
    config = getattr(model, "config", None)
    found = [
        getattr(holder, name, None)
        for holder in (config, *model.modules())
        if holder is not None
        for name in _HEADS
    ]
    heads = [each for each in found if isinstance(each, int) and each > 0]
    if not heads:
        raise NoTensorRolesError("the model tells of no attention heads")
    return gcd(*heads)
