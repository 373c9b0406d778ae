"""What each worker of a group holds of the values in a stage's graph.

A column-parallel layer makes shares, a row-parallel layer takes them (thesis 4.2.3). What is
computed from a share in between is a share too. With sequence parallelism a row-parallel layer
makes tokens, and a norm gathers them (tensor/sequence.py).
"""

from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.nn import functional

from ...schema.errors import TargetError
from ..tensor.roles import Sharing
from ..tensor.sequence import spreads_tokens
from .crossing import Holding, Holdings
from .cut import StageModule


def holdings_of(
    parts: Sequence[StageModule], sharing: Sharing, *, sequence_parallel: bool = False
) -> list[Holdings]:
    """[stages] what each worker holds of a stage's outputs.

    Args:
        parts: The stages, in order.
        sharing: The shared modules.
        sequence_parallel: Whether tokens are spread between tensor-parallel layers.

    Raises:
        TargetError: A stage begins between a column- and a row-parallel layer and has dropout
            before the second.
    """
    found: list[Holdings] = []
    held: dict[str, Holding] = {}
    for number, stage in enumerate(parts):
        is_before_layers = any(held[name] is Holding.OWN for name in stage.inputs)
        here = {name: held[name] for name in stage.inputs}
        for node in stage.nodes:
            if node.op == "placeholder":
                continue
            role = sharing.roles.get(str(node.target)) if node.op == "call_module" else None
            if role is not None and role.style != "inner":
                is_before_layers = False
            here[node.name] = _holding(node, sharing, here, sequence_parallel)
            if is_before_layers and here[node.name] is Holding.OWN and _drops(stage, node):
                raise TargetError(
                    f"stage {number} begins between a column and a row layer, and "
                    f"{node.name} drops activations there, of which each worker has a share",
                    hint="move the cut, set this dropout to 0, or plan with degree 1",
                )
        held |= here
        flags = tuple(here.get(name, Holding.WHOLE) for name in stage.outputs)
        found.append(flags if any(flags) else ())
    return found


def _holding(
    node: fx.Node, sharing: Sharing, here: dict[str, Holding], sequence_parallel: bool
) -> Holding:
    """What each worker holds of a node's value; ``here`` is the same of the nodes before it."""
    name = str(node.target) if node.op == "call_module" else ""
    role = sharing.roles.get(name)
    if role is not None and role.style != "inner":
        if role.style == "column":
            return Holding.OWN
        spreads = role.style == "row" and sequence_parallel
        return Holding.TOKENS if spreads else Holding.WHOLE
    if sequence_parallel and sharing.sequence.get(name) == "norm":
        return Holding.WHOLE
    if spreads_tokens(node.target):
        return Holding.TOKENS
    read = {here.get(source.name, Holding.WHOLE) for source in node.all_input_nodes}
    return next((h for h in (Holding.OWN, Holding.TOKENS) if h in read), Holding.WHOLE)


def _drops(stage: StageModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = stage.module.get_submodule(str(node.target))
        return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    if node.target is functional.scaled_dot_product_attention:
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0))
    return node.target in (functional.dropout, torch.dropout)
