"""Which layers a tensor-parallel group shares, and how (Megatron-LM; thesis 4.2.3).

A column-parallel product splits its outputs, a row-parallel one its inputs; between the two nothing
is exchanged, so a block all-reduces twice a pass. Which product is which, the runtime knows
(``runtime/tensor/roles.py``): what a launch cannot share is not estimated.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from ..schema.errors import TargetError
from ..schema.operator_counts import TensorRole

_ROLES: dict[str, TensorRole] = {
    "column": "column", "output": "column", "logits": "column", "row": "row",
    "vocabulary": "vocabulary",
}  # fmt: skip
"""What an estimate calls the runtime's ways to share a layer."""

_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head")


class NoTensorRolesError(Exception):
    """The model is not one whose layers a group can share; the message says why."""


def shared_layers(model: Any) -> dict[str, TensorRole]:
    """The layers that a tensor-parallel group shares, by module name.

    Raises:
        NoTensorRolesError: A launch could not share the model's layers.
    """
    from ..runtime.tensor.roles import sharing_of

    try:
        roles = sharing_of(model).roles
    except TargetError as error:
        raise NoTensorRolesError(error.message) from error
    return {name: _ROLES[role.style] for name, role in roles.items() if role.style in _ROLES}


def tensor_roles(
    ids: Sequence[str], edges: Sequence[tuple[str, str]], shared: Mapping[str, TensorRole]
) -> dict[str, TensorRole]:
    """The role of each layer.

    A layer that is not shared by itself is ``sharded`` where all that it reads is split, and
    ``replicated`` where nothing is.

    Args:
        ids: In topological order.
        edges: Who reads whose output.
        shared: The roles of ``shared_layers``.

    Raises:
        NoTensorRolesError: The shared layers do not pair.
    """
    before: Mapping[str, list[str]] = {name: [] for name in ids}
    for source, target in edges:
        before[target].append(source)
    roles: dict[str, TensorRole] = {}
    for name in ids:
        inputs = [roles[source] in ("column", "sharded") for source in before[name]]
        roles[name] = _role(name, shared.get(name.partition("#")[0]), inputs)
    if "row" not in roles.values():
        raise NoTensorRolesError("none of its layers is shared by a tensor-parallel group")
    return roles


def _role(name: str, role: TensorRole | None, is_split: Sequence[bool]) -> TensorRole:
    """Of one layer, whose inputs are split among the group or whole."""
    if role == "row" and not any(is_split):  # whole ones may be the residual added to its sum
        raise NoTensorRolesError(f"{name} reads what no column-parallel layer made")
    if role == "column" and is_split and all(is_split):
        raise NoTensorRolesError(f"{name} reads what a column-parallel layer made")
    if role is not None:
        return role
    if any(is_split):
        if not all(is_split):
            raise NoTensorRolesError(f"{name} reads what is split, and what is whole")
        return "sharded"
    return "replicated"


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
