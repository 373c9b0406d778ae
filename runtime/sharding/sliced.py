"""Slices of parameters and gradients that a script reads and writes as whole tensors.

Between steps a worker holds a slice of each parameter and of its gradient, on which torch's
optimizers work. A script that calls anything else with one means the whole tensor::

    p.grad.norm(), ema.lerp_(p, 0.1)     the function is given the whole tensor
    p.mul_(0.9), p.grad.add_(noise)      done on the slice; of ``noise`` the same slice is taken
    p.data[0] = 0, p.copy_(q.T)          done on the whole tensor, of which the slice is kept
    p.shape, p.numel()                   the whole tensor's

A tensor is brought together each time, and nothing of it is kept.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ...schema.errors import TargetError
from ...schema.options import option
from .flats import OF_NO_NUMBER, OF_NUMBERS, OF_SHAPE

P = ParamSpec("P")
R = TypeVar("R")
plain = torch._C.DisableTorchFunctionSubclass  # a context in which slices are plain tensors


def plainly(method: Callable[P, R]) -> Callable[P, R]:
    """A method that sees slices as what they are."""

    @functools.wraps(method)
    def run(*values: P.args, **options: P.kwargs) -> R:
        with plain():
            return method(*values, **options)

    return run


@dataclass(frozen=True, slots=True)
class Origin:
    """What a slice is of.

    Attributes:
        shape: Of the whole tensor.
        kept: Which of its numbers the slice has.
        bring: Gives the whole tensor of a slice, which all workers bring together.
        is_here: Whether a parameter is whole now.
        gradient: What a parameter's gradient is a slice of; None of what is no parameter.
        carried: Parameters' gradients of earlier steps, which a step sets aside until its own come.
    """

    shape: torch.Size
    kept: slice
    bring: Callable[[Tensor], Tensor]
    is_here: Callable[[], bool] = lambda: False
    gradient: "Origin | None" = None
    carried: dict[Any, Tensor] = field(default_factory=dict)

    def cut(self, whole: Tensor) -> Tensor:
        """The slice's numbers of a whole tensor."""
        return whole.detach().reshape(-1)[self.kept]

    def of(self, tensor: Tensor) -> Tensor:
        """A slice that is no parameter, and known to be one of this."""
        if self.gradient is not None:  # of a parameter that may be whole later
            return Origin(self.shape, self.kept, self.bring).of(tensor)
        vars(tensor)["_origin"], tensor.__class__ = self, SlicedTensor
        return tensor

    def hold(self, parameter: nn.Parameter) -> None:
        """Let a parameter be a slice of this to the script."""
        vars(parameter)["_origin"], parameter.__class__ = self, SlicedParameter

    @staticmethod
    def leave(parameter: nn.Parameter) -> None:
        """Let a parameter be what it is; nothing of its origin is pickled."""
        parameter.__class__ = nn.Parameter
        vars(parameter).pop("_origin", None)


def _origin_of(value: Any) -> Origin | None:
    """What a value is a slice of; None for all else."""
    origin: Origin | None = getattr(value, "_origin", None) if isinstance(value, _KINDS) else None
    return None if origin is None or origin.is_here() else origin


class SlicedTensor(Tensor):
    """A slice that is no parameter: a gradient, or what ``data`` and ``detach`` give."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's with whole tensors."""
        return _called(function, args, kwargs or {})


class SlicedParameter(nn.Parameter):
    """A slice of a parameter between two steps; within its layers' passes it is a Parameter."""

    _origin: Origin

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's with whole tensors."""
        return _called(function, args, kwargs or {})

    @property
    def grad(self) -> Any:
        """The gradient, which scripts ask for often: a property of Python's is the shortest way."""
        with plain():
            gradient = get_grad(self)
            if gradient is None and self._origin.carried:
                return self._origin.carried.get(self)
            return gradient

    @grad.setter
    def grad(self, value: Any) -> None:
        with plain():
            if self._origin.carried:
                self._origin.carried.pop(self, None)
            _set(set_grad, self._origin.gradient, self, value)

    def _copy(self) -> nn.Parameter:
        with torch.no_grad():
            return nn.Parameter(self.clone(), self.requires_grad)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """Copy the whole parameter."""
        memo[id(self)] = made = self._copy()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole parameter."""
        return self._copy().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _Copied(Tensor):
    """A view of a whole tensor that was brought together: what is written to it would be lost."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's, if it writes nothing."""
        name = getattr(function, "__name__", "")
        if writes(name) and isinstance(args[0], _Copied):
            raise TargetError(
                f"the script writes to a view of a parameter or gradient ({name}), of which this "
                "worker has a slice",
                hint="write to the parameter itself: p.data[rows] = values, p.mul_(mask)",
            )
        views = [value for value in _tensors((args, kwargs)) if isinstance(value, _Copied)]
        if name == "__reduce_ex__":
            args = (args[0].as_subclass(Tensor), *args[1:])
        made = _called(function, args, kwargs or {})
        with plain():
            return _guarded(made, views)


_GRAD: Any = Tensor.grad
get_grad, set_grad = _GRAD.__get__, _GRAD.__set__
"""A tensor's gradient, without the property of ``SlicedParameter``."""
_KINDS: tuple[type[Tensor], ...] = (SlicedTensor, SlicedParameter)
_foreach_utils._foreach_supported_types += _KINDS
_EACH = {
    "add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_", "clamp_", "clamp_min_",
    "clamp_max_", "copy_", "zero_", "fill_", "neg_", "sign_", "abs_", "sqrt_", "square_",
    "masked_fill_", "nan_to_num_", "__iadd__", "__isub__", "__imul__", "__itruediv__",
}  # fmt: skip


_SPECIAL = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__",
}  # fmt: skip


def writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return name in _SPECIAL or name.endswith("_") and not name.endswith("__")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _called(function: Any, args: Any, kwargs: Any) -> Any:
    name: str = getattr(function, "__name__", "")
    first: Any = args[0] if args else None
    with plain():
        origin = _origin_of(first)
        if name == "__get__":
            name = getattr(function.__self__, "__name__", "")
            if origin is None or name not in OF_SHAPE | OF_NUMBERS:
                return function(*args)
        if name == "__set__":
            return _set(function, origin if function.__self__.__name__ == "data" else None, *args)
        if origin is not None and name in OF_SHAPE:
            return function(torch.empty(origin.shape, dtype=first.dtype, device="meta"), *args[1:])
        if origin is not None and name in ("data", "detach"):
            return origin.of(function(first))
        if origin is not None and (name in OF_NO_NUMBER or name.startswith("new_")):
            return function(*args, **kwargs)
        if origin is not None and name.endswith("_like"):
            return function(first.new_empty(origin.shape), *args[1:], **kwargs)
        if writes(name):
            return _write(function, name, args, kwargs)
        made, wholes = _read(function, args, kwargs)
        return _guarded(made, wholes.values())


def _set(function: Any, origin: Origin | None, self: Tensor, value: Any) -> Any:
    """Set an attribute; of ``data`` and ``grad``, which have an origin, the slice is kept."""
    name = function.__self__.__name__
    if origin is None or not isinstance(value, Tensor):
        return function(self, value)
    if _origin_of(value) is None:
        if value.shape != origin.shape:
            raise TargetError(
                f"the script sets {name} of a parameter of shape {list(origin.shape)} to a tensor "
                f"of shape {list(value.shape)}, and workers share it",
                hint="keep its shape",
            )
        value = origin.of(origin.cut(value).clone())
    if name == "grad":
        return function(self, value)
    with torch.no_grad(), _disable_current_modes():
        self.detach().copy_(value)
    return None


def _wholes(values: Any) -> dict[int, Tensor]:
    """Id of each slice among some values -> its whole tensor."""
    found: dict[int, Tensor] = {}
    for value in _tensors(values):
        origin = _origin_of(value)
        if origin is not None and id(value) not in found:
            whole = origin.bring(value.detach())
            if value.requires_grad and torch.is_grad_enabled():
                whole.requires_grad_().register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
            found[id(value)] = whole
    return found


def _refuse_gradient(_: Tensor) -> None:
    raise TargetError(
        "the loss reads a parameter outside of its layer, where workers share it",
        hint="for a penalty on weights take the optimizer's weight_decay, or solve with "
        + option("shard", "optimizer"),
    )


def _guarded(result: Any, sources: Any) -> Any:
    """A result in which views of the sources can be read only."""
    storages = {source.untyped_storage().data_ptr() for source in sources} - {0}
    for made in _tensors(result):
        if type(made) is Tensor and made.untyped_storage().data_ptr() in storages:
            made.__class__ = _Copied
    return result


def _write(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a function that changes its first argument."""
    first = args[0]
    targets = first if isinstance(first, list | tuple) else [first]
    origins = [_origin_of(target) for target in targets]
    if None not in origins and (name in _EACH or "foreach" in name):
        cut = _cut((args[1:], kwargs), origins)
        if cut is not None:
            with _disable_current_modes():  # a loss that is recorded is not of slices
                return function(first, *cut[0], **cut[1])
    writes = any(origin is not None for origin in origins)
    with torch.no_grad() if writes else nullcontext():
        made, wholes = _read(function, args, kwargs)
        for target, origin in zip(targets, origins, strict=True):
            if origin is not None:
                with _disable_current_modes():
                    target.detach().copy_(origin.cut(wholes[id(target)]))
    return first if writes and made is not None else made


def _read(function: Any, args: Any, kwargs: Any) -> tuple[Any, dict[int, Tensor]]:
    """What a function gives for whole tensors, and these by the id of their slices."""
    wholes = _wholes((args, kwargs))
    args, kwargs = tree_map(lambda value: wholes.get(id(value), value), (args, kwargs))
    return function(*args, **kwargs), wholes


def _cut(values: Any, origins: Sequence[Any]) -> Any:
    """Values of which slices are taken as the targets have them; None where that cannot be."""
    at, fits = {}, True
    for number, value in _numbered(values):
        origin = origins[number if len(origins) > 1 else 0]
        own = _origin_of(value)
        if own is not None:
            fits = fits and (own.shape, own.kept) == (origin.shape, origin.kept)
        elif value.dim() and value.shape == origin.shape:
            at[id(value)] = origin.cut(value)
        else:
            fits = fits and not value.dim()
    return tree_map(lambda value: at.get(id(value), value), values) if fits else None


def _numbered(values: Any) -> Iterator[tuple[int, Tensor]]:
    """Tensors with their position in their list."""
    args, kwargs = values
    for value in (*args, *kwargs.values()):
        for number, entry in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(entry, Tensor):
                yield number, entry
