"""What stands for the gradient of a parameter on another worker: its norms.

``clip_grad_norm_(model.parameters(), limit, norm_type)`` takes each gradient's norm and the norm of
those, so a single number with the right norm does for a gradient, whatever its shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from ..tensor.gradients import PartGradient, companions, plain, scale_companions
from .norms import NORMS, Table, ToldNorms

_TAKE_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,
}
_NEED_ALL = {"abs", "max", "min", "amax", "amin", "mean", "median", "std", "var", "sort", "topk"}


class NormOnly(Tensor):
    """One number, the 2-norm of a gradient elsewhere; asked for another norm, it gives that one.

    Scaling it (clipping, unscaling) scales all its norms. It serves step after step.
    """

    _told: ToldNorms
    _index: int

    @staticmethod
    def of(number: Tensor, told: ToldNorms, index: int) -> "NormOnly":
        """A stand-in.

        Args:
            number: [1] where the 2-norm will stand, of the gradient's type and on its device.
            told: Knows the other norms.
            index: The parameter's number in them.
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
        """Answer for norms; refuse what would need the gradient itself."""
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
    scaled = found * gradient._told.ratio(gradient._index, order)
    # Not scaled yet, it is as told, to the last bit: a tied weight's workers clip alike.
    two, exact = gradient._told.told(gradient._index, order)
    return torch.where(found == two, torch.full_like(found, exact), scaled)


class PartNorms:
    """Lets one worker's parts of gradients answer with the norms that all are told.

    Where another replica holds a parameter whole, its gradient does so too: a norm that it took by
    itself would be rounded otherwise, and the replicas would clip by unlike numbers.
    """

    def __init__(self, parts: Sequence[tuple[int, nn.Parameter]], told: ToldNorms) -> None:
        """Take the parameters with their numbers in tables of norms."""
        self._parts, self._told = list(parts), told

    def show(self, table: Table, loss_scale: float) -> None:
        """Give each that has a gradient a companion with the norm of the whole.

        Args:
            table: Of gradients whose scale is taken off.
            loss_scale: What a GradScaler will take off both, the part and its companion.
        """
        for index, parameter in self._parts:
            if parameter.grad is None:
                continue
            part = plain(parameter.grad)
            norm = float(table[1, index]) * loss_scale
            number = torch.full((1,), norm, dtype=part.dtype, device=part.device)
            parameter.grad = PartGradient.of(part, NormOnly.of(number, self._told, index))


class StandIns:
    """The stand-ins of one worker, for the parameters that it does not hold."""

    def __init__(self, apart: Sequence[tuple[int, nn.Parameter]], told: ToldNorms) -> None:
        """Take the parameters with their numbers in tables of norms."""
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
        """Make them the ``grad`` of the parameters that have one elsewhere, with its 2-norm."""
        for numbers, indices in self._kinds:
            numbers.copy_(torch.from_numpy(table[1, indices]))
        used = table[0].tolist()
        for index, parameter, stand_in in self._all:
            wanted = stand_in if used[index] > 0 else None
            if parameter.grad is not wanted:
                parameter.grad = wanted
