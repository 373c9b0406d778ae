"""Stand-ins for the gradients of parameters on other workers: only their norms.

``clip_grad_norm_(model.parameters(), limit, norm_type)`` takes each gradient's norm, and the norm
of these norms. So a single number with the right norm can replace a gradient of any shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from ..tensor.gradients import PartGradient, companions, plain, scale_companions
from .norms import ToldNorms
from .tables import NORMS, Table

_TAKE_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,
}
_NEED_ALL = {"abs", "max", "min", "amax", "amin", "mean", "median", "std", "var", "sort", "topk"}


class NormOnly(Tensor):
    """One number, the 2-norm of a gradient elsewhere; functions for other norms return those.

    Scaling it (clipping, unscaling) scales all its norms. It is reused in every step.
    """

    _told: ToldNorms
    _index: int

    @staticmethod
    def of(number: Tensor, told: ToldNorms, index: int) -> "NormOnly":
        """Make a stand-in.

        Args:
            number: [1] receives the 2-norm; of the gradient's dtype, on its device.
            told: Has the other norms.
            index: The parameter's index in their tables.
        """
        made: NormOnly = number.as_subclass(NormOnly)
        made._told, made._index = told, index
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return norms; refuse functions that would need the gradient itself."""
        kwargs = kwargs or {}
        if func in _TAKE_NORMS:
            order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else 2.0))
            given = companions(args[0])
            if isinstance(given, Tensor):
                return _norm(given, order)
            return [_norm(gradient, order) for gradient in given]
        if getattr(func, "__name__", "") in _NEED_ALL:
            raise TargetError(
                f"{func.__name__} of a gradient that another worker of the pipeline has",
                hint="only norms are known here: use clip_grad_norm_ or clip_grad_value_",
            )
        scale_companions(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _norm(gradient: Tensor, order: Any) -> Tensor:
    plain = gradient.as_subclass(Tensor)
    order = 2.0 if order in (None, "fro") else float(order)
    if not isinstance(gradient, NormOnly):
        whole: Tensor = torch.linalg.vector_norm(plain, order)
        return whole
    if order not in NORMS:
        known = ", ".join(f"{norm:g}" for norm in NORMS)
        raise TargetError(
            f"the {order:g}-norm of a gradient that another worker of the pipeline has",
            hint=f"norms {known} are known everywhere",
        )
    found: Tensor = plain.abs().squeeze()
    if order == 2:
        return found
    scaled = _product(found, gradient._told.ratio(gradient._index, order))
    # If not yet scaled, return it exactly as received: a tied weight's workers clip equally.
    two, exact = (_as(found, told) for told in gradient._told.told(gradient._index, order))
    return torch.where(found == two, exact, scaled)


def _product(found: Tensor, ratio: float | Tensor) -> Tensor:
    """Multiply by a ratio of float64 as by a Python number: the dtype stays."""
    if not isinstance(ratio, Tensor):
        return found * ratio
    wide = torch.promote_types(found.dtype, torch.float32)
    return (found.to(wide) * ratio.to(wide)).to(found.dtype)


def _as(found: Tensor, told: float | Tensor) -> Tensor:
    """A number that was told, as a tensor like another."""
    return told.to(found.dtype) if isinstance(told, Tensor) else torch.full_like(found, told)


class PartNorms:
    """Makes one worker's parts of gradients return the whole gradients' norms.

    If another replica holds a parameter whole, its gradient returns the same norm. A norm that it
    computed itself would be rounded differently, and the replicas would clip by different numbers.
    """

    def __init__(self, parts: Sequence[tuple[int, nn.Parameter]], told: ToldNorms) -> None:
        """Take the parameters, with their indices in tables of norms."""
        self._parts, self._told = list(parts), told

    def show(self, table: Table, loss_scale: float | Tensor) -> None:
        """Give each part of a gradient a companion with the norm of the whole gradient.

        Args:
            table: Norms of gradients without the loss scale.
            loss_scale: The factor by which a GradScaler will divide both part and companion.
        """
        shown = [(i, p, plain(p.grad)) for i, p in self._parts if p.grad is not None]
        if not shown:
            return
        norms = table.two_norms([index for index, _, _ in shown]) * loss_scale
        kinds = {(part.dtype, part.device) for _, _, part in shown}
        numbers = {kind: norms.to(dtype=kind[0], device=kind[1]) for kind in kinds}
        for place, (index, parameter, part) in enumerate(shown):
            number = numbers[part.dtype, part.device][place : place + 1]
            parameter.grad = PartGradient.of(part, NormOnly.of(number, self._told, index))


class StandIns:
    """One worker's stand-ins for the gradients of parameters that it does not hold."""

    def __init__(self, apart: Sequence[tuple[int, nn.Parameter]], told: ToldNorms) -> None:
        """Take the parameters, with their indices in tables of norms."""
        self._kinds: list[tuple[Tensor, list[int]]] = []
        self._all: list[tuple[int, nn.Parameter, NormOnly]] = []
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[int, nn.Parameter]]] = {}
        for index, parameter in apart:
            kind = (parameter.dtype, parameter.device)
            by_kind.setdefault(kind, []).append((index, parameter))
        for (dtype, device), members in by_kind.items():
            numbers = torch.zeros(len(members), dtype=dtype, device=device)
            self._kinds.append((numbers, [index for index, _ in members]))
            self._all += [
                (index, parameter, NormOnly.of(numbers[place : place + 1], told, index))
                for place, (index, parameter) in enumerate(members)
            ]

    def show(self, table: Table) -> None:
        """Set each as ``grad`` of its parameter, with the 2-norm, where a gradient exists."""
        for numbers, indices in self._kinds:
            numbers.copy_(table.two_norms(indices))
        for index, parameter, stand_in in self._all:
            wanted = stand_in if table.used[index] else None
            if parameter.grad is not wanted:
                parameter.grad = wanted
