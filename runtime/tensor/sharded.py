"""A model whose modules compute one worker's share: only their forwards are replaced.

Names, parameters and hooks stay the script's. The engine knows who holds what, so it cuts the
parameters' values (pipeline/ownership.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...schema.errors import TargetError
from ..group import Place, subgroup
from ..nested_tensors import tensors_in
from .operators import (
    SharedInput,
    TensorGroup,
    column_linear,
    join_from,
    joined_linear,
    row_linear,
    row_linear_to_tokens,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from .regions import (
    ParallelRegion,
    column_linear_of_tokens,
    dropped_tokens,
    gathered,
    scattering,
    spread_first,
)
from .roles import Role, SharedParts, is_transposed, num_outputs

# Layers of a tensor-parallel group as single calls in a graph of torch.export.
#
# torch.export splits modules into operators on whole parameters. A shared layer computes with a
# part of them, by functions that communicate. So while the model is exported each shared layer
# calls one operator, which only tells the shape of this worker's output. The graph then calls the
# module itself in its place (``pipeline/trace.py``).


@torch.library.custom_op("hetflow::shared_layer", mutates_args=())
def shared_layer(input: Tensor, num_outputs: int, dtype: torch.dtype | None) -> Tensor:
    """Stand for a shared layer while a model is exported; it is never computed.

    Args:
        input: What the layer reads.
        num_outputs: The size of the last dimension of its output, on this worker.
        dtype: The output's type, of a layer that looks indices up; None for products, which keep
            the input's type and leading dimensions.
    """
    raise AssertionError("a shared layer stands in a graph as a call of its module")


@shared_layer.register_fake
def _(input: Tensor, num_outputs: int, dtype: torch.dtype | None) -> Tensor:
    leading = input.shape[:-1] if dtype is None else input.shape
    return input.new_empty((*leading, num_outputs), dtype=dtype or input.dtype)


def opaque_forward(module: nn.Module, role: Role, degree: int) -> Callable[..., Tensor]:
    """What a shared module computes while the model is exported."""
    if isinstance(module, nn.Embedding):
        return partial(_call, module.embedding_dim, module.weight.dtype)
    outputs = num_outputs(module)
    return partial(_call, outputs // degree if role.style == "column" else outputs, None)


def _call(num_outputs: int, dtype: torch.dtype | None, input: Tensor) -> Tensor:
    made: Tensor = shared_layer(input, num_outputs, dtype)
    return made


def is_shared_call(target: Any) -> bool:
    """Whether a graph's node stands for a shared layer."""
    return target is torch.ops.hetflow.shared_layer.default


# Logits that stay cut by vocabulary: each worker of a group has a part, which the loss reads.
#
# Joined logits are the largest value of a small model with a large vocabulary, and every worker of
# a group would compute the same loss from them. ``cross_entropy`` needs only a few numbers of each
# row from the other workers (thesis 4.2.3).

_RESHAPES = {
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.squeeze,
    Tensor.unsqueeze, Tensor.__getitem__, torch.flatten, torch.reshape,
}  # fmt: skip
_SAME_SHAPE = {
    Tensor.contiguous, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to,
    Tensor.detach,
}  # fmt: skip
_PLAIN = {
    Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point,
    torch.is_complex, Tensor.__repr__,
}  # fmt: skip
_SHAPE: Any = Tensor.shape
_OF_SHAPE = {Tensor.size, _SHAPE.__get__, Tensor.numel, Tensor.__len__}


class CutLogits(Tensor):
    """One worker's part of logits; it has the shape of the whole ones.

    Leading dimensions can be reshaped and sliced. ``cross_entropy`` gives the loss of the whole
    logits. Every other function is refused.
    """

    _group: TensorGroup
    _vocabulary: int
    _layer: str

    @staticmethod
    def of(part: Tensor, group: TensorGroup, vocabulary: int, layer: str) -> "CutLogits":
        """Wrap a part, in its own memory."""
        made: CutLogits = part.as_subclass(CutLogits)
        made._group, made._vocabulary, made._layer = group, vocabulary, layer
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute the loss from all workers' parts; reshape the own one; refuse anything else."""
        named, own = kwargs or {}, args[0] if args else None
        if func is functional.cross_entropy:
            return _loss(*args, **named)
        if not isinstance(own, CutLogits):
            _refuse(next(t for t in tensors_in((args, named)) if isinstance(t, CutLogits)), func)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PLAIN:
                return func(*args, **named)
            shape = (*own.shape[:-1], own._vocabulary)
            # Without memory: it answers questions of shape, and reshapes are tried on it, so that
            # torch itself checks their arguments.
            whole = torch.empty(shape, dtype=own.dtype, device="meta")
            if func in _OF_SHAPE:
                return func(whole, *args[1:], **named)
            if getattr(func, "__name__", "") == "__get__":  # dtype, device, grad_fn, ...
                found = func(own.as_subclass(Tensor))
                if not isinstance(found, Tensor):
                    return found
            if func in _SAME_SHAPE:
                return own._like(func(own.as_subclass(Tensor), *args[1:], **named))
            if func in _RESHAPES:
                made = func(whole, *args[1:], **named)
                if own._keeps_last(func, made, args):
                    part = own.as_subclass(Tensor)
                    if func is Tensor.__getitem__:
                        return own._like(part[args[1]])
                    return own._like(part.reshape(*made.shape[:-1], part.shape[-1]))
        _refuse(own, func)

    def _like(self, part: Tensor) -> "CutLogits":
        return CutLogits.of(part, self._group, self._vocabulary, self._layer)

    def _keeps_last(self, func: Callable[..., Any], made: Tensor, args: tuple[Any, ...]) -> bool:
        if not made.dim() or made.shape[-1] != self._vocabulary:
            return False
        if func is not Tensor.__getitem__:
            return True
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        # None adds a dimension and uses none up. Tensors are left out of the search, because ``in``
        # compares, and a tensor compares element by element.
        used = sum(entry is not None for entry in index)
        if Ellipsis in [entry for entry in index if not isinstance(entry, Tensor)]:
            return index[-1] is Ellipsis or index[-1] == slice(None)
        return used < self.dim() or index[-1] == slice(None)


def _loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``functional.cross_entropy`` of cut logits [N, C] and class indices [N]."""
    if not isinstance(input, CutLogits):
        raise TypeError("cross_entropy takes cut logits as its input, not as its target")
    indices = not target.is_floating_point() and target.dim() == 1 and input.dim() == 2
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not (indices and plain and reduction in ("mean", "sum", "none")):
        raise TargetError(
            f"the output of {input._layer} is cut over a tensor-parallel group, and cross_entropy "
            "of it takes [N, C] logits and [N] class indices only, without weight or "
            "label_smoothing",
            hint="flatten both, or give the layer the role 'output'",
        )
    with torch._C.DisableTorchFunctionSubclass():
        part = input.as_subclass(Tensor)
    return vocabulary_cross_entropy(
        part,
        target,
        input._group,
        vocabulary=input._vocabulary,
        ignore_index=ignore_index,
        reduction=reduction,
    )


def _refuse(logits: CutLogits, func: Callable[..., Any]) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    raise TargetError(
        f"the output of {logits._layer} is cut over a tensor-parallel group, and {name} would need "
        "all of it",
        hint="give the layer the role 'output', or compute this inside job.evaluation()",
    )


class ShardedModel:
    """The shared modules of a model, as one worker runs them."""

    def __init__(
        self,
        model: nn.Module,
        sharing: SharedParts,
        group: TensorGroup,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._hidden: list[tuple[nn.Module, Any]] = []  # while the forwards are installed
        self._opaque: list[tuple[nn.Module, Callable[..., Tensor]]] = []  # while it is traced
        self._sizes: list[tuple[nn.Module, str, int]] = []
        self._is_installed = False
        self._region, self._input = ParallelRegion(group), SharedInput(group)
        self._entry: tuple[nn.Module, Callable[..., Any]] | None = None
        self._spreads, self._is_shared = sequence_parallel, group.degree > 1
        if sequence_parallel:
            for name, kind in sharing.sequence.items():
                module = model.get_submodule(name)
                if kind == "begin":
                    self._entry = (module, spread_first(module.forward, scattering(group)))
                elif group.degree > 1 and kind == "norm":
                    self._forwards.append((module, _gathering(module.forward, group)))
                elif group.degree > 1 and isinstance(module, nn.Dropout):
                    self._forwards.append((module, partial(dropped_tokens, module, group)))
        for name, role in sharing.roles.items():
            if role.style == "inner":
                continue
            module = model.get_submodule(name)
            # A lone worker's graph has the same calls: its stage is cut as the others cut theirs.
            self._opaque.append((module, opaque_forward(module, role, group.degree)))
            if group.degree > 1:
                self._forwards.append((module, self._forward_of(name, module, role, group)))
        for name, attributes in sharing.sizes.items():
            module = model.get_submodule(name)
            self._sizes += [(module, attribute, group.degree) for attribute in attributes]

    @contextmanager
    def traceable(self) -> Iterator[None]:
        """Trace the model inside, as this worker computes it.

        Its first block spreads tokens, shared layers are calls of their own, and sizes are divided:
        tracers write the numbers that a forward reads into the graph as constants.
        """
        self._divide_sizes()
        hidden = self._replace(self._opaque)
        try:
            yield
        finally:
            _put_back(hidden)
            self._restore_sizes()

    def _replace(
        self, forwards: list[tuple[nn.Module, Callable[..., Any]]]
    ) -> list[tuple[nn.Module, Any]]:
        """Set forwards on instances, the entry's too; what ``_put_back`` needs."""
        made = [*forwards, *([] if self._entry is None else [self._entry])]
        hidden = [(module, vars(module).get("forward")) for module, _ in made]
        for module, forward in made:
            module.forward = forward
        return hidden

    def _divide_sizes(self) -> None:
        for module, attribute, degree in self._sizes:
            setattr(module, attribute, getattr(module, attribute) // degree)

    def _restore_sizes(self) -> None:
        for module, attribute, degree in self._sizes:
            setattr(module, attribute, getattr(module, attribute) * degree)

    def passing(self) -> AbstractContextManager[None]:
        """A context for a stage's pass; a lone worker has no regions, so nothing is done there."""
        return self._passing() if self._is_shared else nullcontext()

    @contextmanager
    def _passing(self) -> Iterator[None]:
        with self._region.passing():
            try:
                yield
            finally:
                self._input.forget()

    def install(self) -> None:
        """Make the modules compute with this worker's part of their parameters."""
        if self._is_installed:
            return
        self._hidden = self._replace(self._forwards)
        self._divide_sizes()
        self._is_installed = True

    def remove(self) -> None:
        """Make the modules compute with whole parameters again, as the script made them."""
        if not self._is_installed:
            return
        _put_back(self._hidden)
        self._restore_sizes()
        self._is_installed = False

    def _forward_of(
        self, name: str, module: Any, role: Role, group: TensorGroup
    ) -> Callable[..., Tensor]:
        if isinstance(module, nn.Embedding):
            return lambda input: vocabulary_embedding(
                input,
                module.weight,
                group,
                vocabulary=module.num_embeddings,
                padding_idx=module.padding_idx,
            )
        if role.style == "output":
            outputs = num_outputs(module)
            return lambda input: joined_linear(input, _weight(module), module.bias, group, outputs)
        if role.style == "logits":
            return partial(_logits, name, module, group, num_outputs(module))
        if role.style == "row":
            return partial(self._row, module, group)
        return partial(self._column, name, module, role.parts)

    def _column(self, name: str, module: Any, parts: int, input: Tensor) -> Tensor:
        made = None
        if self._spreads:
            made = column_linear_of_tokens(input, _weight(module), module.bias)
        if made is None:
            made = functional.linear(self._input.copy(input), _weight(module), module.bias)
        self._region.opened(name, made, parts)
        return made

    def _row(self, module: Any, group: TensorGroup, input: Tensor) -> Tensor:
        # Before the layer: dropout of its output is of whole values again, with a mask of its own.
        self._region.close()
        self._input.forget()
        if self._spreads:
            return row_linear_to_tokens(input, _weight(module), module.bias, group)
        return row_linear(input, _weight(module), module.bias, group)


def _put_back(hidden: Sequence[tuple[nn.Module, Any]]) -> None:
    """Show the forwards that others have hidden: the class's, or what a script has set (not None).

    In the opposite order: of a module that is replaced twice, its own comes back.
    """
    for module, forward in reversed(hidden):
        if forward is None:
            del module.forward
        else:
            module.forward = forward


def tensor_group(place: Place, groups: Sequence[Sequence[int]]) -> TensorGroup:
    """Make this worker's tensor-parallel group; every worker makes all groups, in one order."""
    own = TensorGroup(ranks=(place.rank,))
    for ranks in groups:
        if len(ranks) > 1:
            # Also on those outside: torch makes a group by a collective of all workers.
            made = subgroup(place, ranks)
            if place.rank in ranks:
                lane = list(ranks).index(place.rank)
                keeps_order = place.start.determinism != "none"
                own = TensorGroup(len(ranks), lane, tuple(ranks), made, keeps_order)
    return own


def _logits(name: str, module: Any, group: TensorGroup, size: int, input: Tensor) -> Tensor:
    made = column_linear(input, _weight(module), module.bias, group)
    if not made.requires_grad:  # in evaluation any function may read them
        return join_from(made, group, size)
    return CutLogits.of(made, group, size, name)


def _gathering(forward: Callable[..., Tensor], group: TensorGroup) -> Callable[..., Tensor]:
    return lambda input: gathered(forward(input), group)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight.t() if is_transposed(module) else weight
