"""Which values of a stage's graph are one worker's share, and which are equal on its whole group.

A column-parallel layer makes shares, a row-parallel layer takes them (thesis 4.2.3). What is
computed from a share in between is a share too.
"""

from collections.abc import Sequence

from ..tensor.roles import Sharing
from .crossing import OwnShares
from .cut import StageModule


def own_shares(parts: Sequence[StageModule], sharing: Sharing) -> list[OwnShares]:
    """[stages] for each output of a stage, whether it is a share; empty where none is.

    Args:
        parts: The stages, in order.
        sharing: The shared modules.
    """
    found: list[OwnShares] = []
    shares: set[str] = set()
    for stage in parts:
        own = {name for name in stage.inputs if name in shares}
        for node in stage.nodes:
            role = sharing.roles.get(str(node.target)) if node.op == "call_module" else None
            if role is None or role.style == "inner":
                is_share = any(source.name in own for source in node.all_input_nodes)
            else:
                is_share = role.style == "column"
            if is_share:
                own.add(node.name)
        shares |= own
        flags = tuple(name in own for name in stage.outputs)
        found.append(flags if any(flags) else ())
    return found
