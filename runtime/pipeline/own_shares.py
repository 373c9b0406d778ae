"""Which values of a stage's graph are one worker's share, and which are equal on its whole group.

A column-parallel layer makes shares, a row-parallel layer takes them (thesis 4.2.3). What is
computed from a share in between is a share too.
"""

from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.nn import functional

from ...schema.errors import TargetError
from ..tensor.roles import Sharing
from .crossing import OwnShares
from .cut import StageModule


def own_shares(parts: Sequence[StageModule], sharing: Sharing) -> list[OwnShares]:
    """[stages] for each output of a stage, whether it is a share; empty where none is.

    Args:
        parts: The stages, in order.
        sharing: The shared modules.

    Raises:
        TargetError: A stage begins between a column- and a row-parallel layer and has dropout
            before the second.
    """
    found: list[OwnShares] = []
    shares: set[str] = set()
    for number, stage in enumerate(parts):
        own = {name for name in stage.inputs if name in shares}
        begins_inside, is_before_layers = bool(own), True
        for node in stage.nodes:
            role = sharing.roles.get(str(node.target)) if node.op == "call_module" else None
            if role is None or role.style == "inner":
                is_share = any(source.name in own for source in node.all_input_nodes)
            else:
                is_share = role.style == "column"
            is_before_layers = is_before_layers and (role is None or role.style == "inner")
            if is_share and begins_inside and is_before_layers and _drops(stage, node):
                raise TargetError(
                    f"stage {number} begins between a column and a row layer, and "
                    f"{node.name} drops activations there, of which each worker has a share",
                    hint="move the cut, set this dropout to 0, or plan with degree 1",
                )
            if is_share:
                own.add(node.name)
        shares |= own
        flags = tuple(name in own for name in stage.outputs)
        found.append(flags if any(flags) else ())
    return found


def _drops(stage: StageModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = stage.module.get_submodule(str(node.target))
        return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    if node.target is functional.scaled_dot_product_attention:
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0))
    return node.target in (functional.dropout, torch.dropout)
