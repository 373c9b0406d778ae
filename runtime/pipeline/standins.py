"""What stands for the gradient of a parameter on another worker: its norms.

``clip_grad_norm_(model.parameters(), limit, norm_type)`` takes each gradient's norm and the norm of
those, so a single number with the right norm does for a gradient, whatever its shape.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...schema.errors import TargetError

# Which norms the workers tell each other of every parameter, in this order.
NORMS = (2.0, 1.0, math.inf)
_TAKE_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,
}
_NEED_ALL = {"abs", "max", "min", "amax", "amin", "mean", "median", "std", "var", "sort", "topk"}


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """[NORMS, gradients] the norms of each gradient, in float64."""

    def each(norm: float) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(g, norm).double() for g in gradients])

    return torch.stack([each(norm) for norm in NORMS])


class NormOnly(Tensor):
    """One number, the 2-norm of a gradient elsewhere; asked for another norm, it gives that one.

    Scaling it (clipping, unscaling) scales all its norms.
    """

    _ratios: dict[float, float]

    @staticmethod
    def of(number: Tensor, norms: Sequence[float]) -> "NormOnly":
        """A stand-in.

        Args:
            number: [1] the 2-norm, of the gradient's type and on its device.
            norms: [NORMS] all norms.
        """
        made: NormOnly = number.as_subclass(NormOnly)
        two = norms[0]
        usable = 0 < two < math.inf
        made._ratios = {
            norm: value / two if usable else 1.0 for norm, value in zip(NORMS, norms, strict=True)
        }
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer for norms; refuse what would need the gradient itself."""
        kwargs = kwargs or {}
        if func in _TAKE_NORMS:
            order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else 2.0))
            if isinstance(args[0], Tensor):
                return _norm(args[0], order)
            return [_norm(gradient, order) for gradient in args[0]]
        if getattr(func, "__name__", "") in _NEED_ALL:
            raise TargetError(
                f"{func.__name__} of a gradient that another worker of the pipeline has",
                hint="only norms are known here: use clip_grad_norm_ or clip_grad_value_",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _norm(gradient: Tensor, order: Any) -> Tensor:
    plain = gradient.as_subclass(Tensor)
    order = 2.0 if order in (None, "fro") else float(order)
    if not isinstance(gradient, NormOnly):
        whole: Tensor = torch.linalg.vector_norm(plain, order)
        return whole
    if order not in gradient._ratios:
        known = ", ".join(f"{norm:g}" for norm in NORMS)
        raise TargetError(
            f"the {order:g}-norm of a gradient that another worker of the pipeline has",
            hint=f"norms {known} are known everywhere",
        )
    found: Tensor = plain.abs().squeeze() * gradient._ratios[order]
    return found
