"""The loss of a whole batch's outputs, in two passes (gradient caching, Gao et al. 2021).

A loss that compares samples with each other is no mean over samples. Its gradient is exact by the
chain rule: ``d loss / d parameters`` is the sum over samples of ``d loss / d outputs`` times
``d outputs / d parameters``. The first pass computes every virtual node's outputs without graphs.
All workers get all outputs, in order of the samples, and compute the loss and its gradient by them.
The second pass runs each virtual node again, with the same random draws, and goes back from its
outputs with its slice of that gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..schema.errors import TargetError
from .data import to_device
from .losses import check_has_graph, loss_and_weight


class OutputsOfBatch:
    """The outputs of a global batch on this worker, and the gradient of the loss by them.

    Args:
        outputs: [virtual nodes with samples] what the function gave for each, in order.
        device: Where the loss is computed.

    Raises:
        TargetError: The outputs of virtual nodes cannot be joined.
    """

    def __init__(self, outputs: Sequence[Any], device: torch.device) -> None:
        rows = [tree_flatten(to_device(output, device)) for output in outputs]
        self._spec = rows[0][1]
        try:
            joined = [
                torch.cat(column) if isinstance(column[0], Tensor) else column[0]
                for column in zip(*(leaves for leaves, _ in rows), strict=True)
            ]
        except (RuntimeError, ValueError, TypeError) as error:
            raise TargetError(
                f"the outputs of virtual nodes cannot be joined: {error}",
                hint="with over_batch=, outputs have one shape for each sample, whatever the batch",
            ) from None
        self._leaves = [
            leaf.requires_grad_()
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
            else leaf
            for leaf in joined
        ]
        self._gradients: list[Tensor | None] = []

    def differentiate(
        self, over_batch: Any, scaler: "torch.amp.GradScaler | None", *, keeps: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of all outputs, and its gradient by them.

        Args:
            over_batch: The script's function of the outputs.
            scaler: The script's GradScaler; gradients are those of the scaled loss.
            keeps: Whether ``backward`` of the returned loss follows.

        Returns:
            The loss [], detached; and the (scaled) loss with its graph, for the gradients of
            parameters that ``over_batch`` itself reads.

        Raises:
            TargetError: The function returned no scalar loss, or one without a gradient.
        """
        outputs = tree_unflatten(self._leaves, self._spec)
        many = isinstance(outputs, tuple | list)
        loss, weight = loss_and_weight(over_batch(*outputs) if many else over_batch(outputs))
        if weight is not None:
            raise TargetError("the loss over a whole batch has no weight: return the loss alone")
        check_has_graph(loss)
        scaled = scaler.scale(loss) if scaler is not None else loss
        wanted = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        found = iter(torch.autograd.grad(scaled, wanted, retain_graph=keeps, allow_unused=True))
        self._gradients = [
            next(found) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            for leaf in self._leaves
        ]
        return loss.detach(), scaled

    def roots(self, answer: Any, start: int) -> tuple[list[Tensor], list[Tensor]]:
        """What to go back from in a virtual node's second pass, and the gradients there.

        Args:
            answer: What the function gave, with its graph.
            start: Where its samples begin among the batch's outputs.
        """
        roots, gradients = [], []
        for leaf, gradient in zip(tree_flatten(answer)[0], self._gradients, strict=True):
            if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad:
                roots.append(leaf)
                gradients.append(gradient[start : start + len(leaf)].to(leaf.dtype))
        return roots, gradients
