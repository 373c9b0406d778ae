"""Check which parameters a loss reads under a pipeline.

The last stage's worker has stand-ins for other stages' parameters, so a loss that reads these (a
weight-decay term) would be silently wrong. Autograd's graph shows which parameters a loss reads.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...schema.errors import TargetError


def nodes_of(value: Any) -> Iterator[Any]:
    """Yield the autograd nodes that made the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from nodes_of(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from nodes_of(entry)


def check_reads_none_of(loss: Any, strangers: Mapping[int, str], answered: set[Any]) -> None:
    """Refuse a loss that depends on a parameter which this worker does not hold.

    Args:
        loss: The result of the script's function.
        strangers: Names of the parameters that must not be read, by ``id``.
        answered: Nodes that made the model's answer; the search stops at them.

    Raises:
        TargetError: Names the parameter.
    """
    seen = set(answered)
    ahead = list(nodes_of(loss))
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        name = strangers.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise TargetError(
                f"the loss reads parameter {name}, which a pipeline keeps on another worker or "
                f"in another version",
                hint="use the optimizer's weight_decay, or compute the term inside the model",
            )
        ahead += [source for source, _ in node.next_functions if source is not None]
