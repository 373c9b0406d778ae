"""What the script's function may return: a mean loss, or a mean loss with a stated weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..devices.backend import backend_of
from ..schema.errors import TargetError


@dataclass(frozen=True, slots=True)
class Weighted:
    """A mean loss over something else than samples, and the number of things it is the mean over.

    The step's loss is the mean of the virtual nodes' losses by these weights. A weight of 0 leaves
    the virtual node out, whatever its loss is (a mean over no tokens is not a number).

    Attributes:
        loss: [] the mean loss.
        weight: What it is the mean over, such as the number of tokens: finite and at least 0. A
            tensor on a device stays there, except under a pipeline plan. Its pass goes back even if
            it is 0, so let the loss divide by ``weight.clamp(min=1)``: a mean over nothing has
            gradients that are not numbers.

    Example:
        >>> import torch
        >>> from hetflow import runtime as hf
        >>> each, is_counted = torch.tensor([1.0, 3.0, 8.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> hf.Weighted((each * is_counted).sum() / is_counted.sum(), is_counted.sum())
        Weighted(loss=tensor(2.), weight=tensor(2.))
    """

    loss: Tensor
    weight: float | Tensor


def weighted_by(
    function: Callable[..., Any], weight: Callable[..., float], *, has_aux: bool
) -> Callable[..., Any]:
    """A function whose loss has the weight that another function gives for the same batch."""

    @wraps(function)
    def weighted(*inputs: Any) -> Any:
        answer = function(*inputs)
        loss, rest = loss_and_rest(answer) if has_aux else (answer, None)
        stated = Weighted(loss, weight(*inputs))
        return (stated, rest) if has_aux else stated

    return weighted


def loss_and_weight(answer: Any) -> tuple[Tensor, float | Tensor | None]:
    """Split the result of the script's function: the mean loss [], and its weight if it gave one.

    A weight on an accelerator stays there, as [] float64, and is not tested; see ``weight_number``.

    Raises:
        TargetError: The result has another form.
    """
    stated = answer if isinstance(answer, Weighted) else None
    loss = answer if stated is None else stated.loss
    if isinstance(loss, Weighted):
        raise TargetError(
            "the loss has two weights: one of hf.Weighted and one of weight=", hint="give one"
        )
    if isinstance(loss, tuple | list):
        raise TargetError(
            f"the loss function returned a {type(loss).__name__} of {len(loss)}, and hetflow does "
            f"not guess what each value is",
            hint="return hf.Weighted(mean loss, weight) for a mean over something else than "
            "samples; or give job.backward has_aux=True for (loss, other values)",
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TargetError(
            f"the loss function must return a scalar mean loss, got {_shown(loss)}",
            hint="return loss.mean(), or hf.Weighted(mean loss, weight)",
        )
    if stated is None:
        return loss, None
    weight = stated.weight
    if isinstance(weight, Tensor) and not backend_of(weight.device).is_host:
        return loss, weight.detach().double().reshape(())
    return loss, weight_number(weight)


def weight_number(weight: float | Tensor) -> float:
    """A loss's weight as a number; waits for the device where it is kept there.

    Raises:
        TargetError: It is negative or not finite.
    """
    number = float(weight)
    if not 0 <= number < math.inf:
        raise TargetError(f"the weight of a loss must be finite and >= 0, got {number}")
    return number


def check_has_graph(loss: Tensor) -> None:
    """Refuse a loss that has no gradient.

    Raises:
        TargetError: It was computed without autograd, or from values that need no gradient.
    """
    if not loss.requires_grad:
        raise TargetError(
            "the loss has no gradient: the function computes it under torch.no_grad() or "
            "inference_mode(), from detached values or numbers, or with frozen parameters only",
            hint="compute it from the model's outputs with gradients; to evaluate, use "
            "job.evaluation() or job.predict",
        )


def loss_and_rest(answer: Any) -> tuple[Any, Any]:
    """Split what a function returns under ``has_aux=True``: (its loss, its other values).

    Raises:
        TargetError: It is no pair.
    """
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TargetError(
            f"with has_aux=True the function must return (loss, other values), got {_shown(answer)}"
        )
    return answer


def outputs_in(answer: Any, num_samples: int) -> list[Tensor]:
    """The tensors of a function's outputs; each has the samples as its first dimension.

    Raises:
        TargetError: There are none, or one has another first dimension.
    """
    tensors = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
    if not tensors or any(t.dim() == 0 or len(t) != num_samples for t in tensors):
        shapes = [tuple(t.shape) for t in tensors]
        raise TargetError(
            f"with over_batch=, the function must return a tensor (or several) with one row for "
            f"each of its {num_samples} samples, got shapes {shapes}",
            hint="return what the model gives for each sample; compute the loss in over_batch",
        )
    return tensors


def _shown(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"
