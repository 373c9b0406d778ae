"""A model whose modules compute one worker's share: only their forwards are replaced.

Names, parameters and hooks stay the script's. The engine knows who holds what, so it cuts the
parameters' values (pipeline/ownership.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ..group import Place, subgroup
from .layers import (
    column_linear,
    joined_linear,
    row_linear,
    row_linear_to_tokens,
    vocabulary_embedding,
)
from .logits import CutLogits
from .opaque import opaque_forward
from .operators import SharedInput, TensorGroup, join_from
from .regions import Region
from .roles import Role, Sharing, is_transposed, num_outputs
from .sequence import (
    column_linear_of_tokens,
    dropped_tokens,
    gathered,
    scattering,
    spread_first,
)


class ShardedModel:
    """The shared modules of a model, as one worker runs them.

    Args:
        model: The whole model.
        sharing: The shared modules and parameters.
        group: The tensor-parallel group.
        sequence_parallel: Whether tokens are spread between tensor-parallel layers.
    """

    def __init__(
        self,
        model: nn.Module,
        sharing: Sharing,
        group: TensorGroup,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self._opaque: list[tuple[nn.Module, Callable[..., Tensor]]] = []  # while it is traced
        self._sizes: list[tuple[nn.Module, str, int]] = []
        self._is_installed = False
        self._region, self._input = Region(group), SharedInput(group)
        self._entry: tuple[nn.Module, Callable[..., Any]] | None = None
        self._spreads, self._is_shared = sequence_parallel, group.degree > 1
        if sequence_parallel:
            self._add_sequence(model, sharing, group)
        if group.degree == 1:
            return
        for name, role in sharing.roles.items():
            if role.style == "inner":
                continue
            module = model.get_submodule(name)
            self._forwards.append((module, self._forward_of(name, module, role, group)))
            self._opaque.append((module, opaque_forward(module, role, group.degree)))
        for name, attributes in sharing.sizes.items():
            module = model.get_submodule(name)
            self._sizes += [(module, attribute, group.degree) for attribute in attributes]

    def _add_sequence(self, model: nn.Module, sharing: Sharing, group: TensorGroup) -> None:
        for name, role in sharing.sequence.items():
            module = model.get_submodule(name)
            if role == "begin":
                self._entry = (module, spread_first(module.forward, scattering(group)))
            elif group.degree > 1 and role == "norm":
                self._forwards.append((module, _gathering(module.forward, group)))
            elif group.degree > 1 and isinstance(module, nn.Dropout):
                self._forwards.append((module, partial(dropped_tokens, module, group)))

    @contextmanager
    def traceable(self) -> Iterator[None]:
        """Trace the model inside, as this worker computes it.

        Its first block spreads tokens, shared layers are calls of their own, and sizes are divided:
        tracers write the numbers that a forward reads into the graph as constants.
        """
        self._divide_sizes()
        for module, forward in self._opaque:
            module.forward = forward
        if self._entry is not None:
            self._entry[0].forward = self._entry[1]
        try:
            yield
        finally:
            if self._entry is not None:
                del self._entry[0].forward
            for module, _ in self._opaque:
                del module.forward
            self._restore_sizes()

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
        for module, forward in self._forwards:
            module.forward = forward
        if self._entry is not None:
            self._entry[0].forward = self._entry[1]
        self._divide_sizes()
        self._is_installed = True

    def remove(self) -> None:
        """Make the modules compute with whole parameters again, as the script made them."""
        if not self._is_installed:
            return
        for module, _ in self._forwards:
            del module.forward
        if self._entry is not None:
            del self._entry[0].forward
        self._restore_sizes()
        self._is_installed = False

    def _forward_of(
        self, name: str, module: nn.Module, role: Role, group: TensorGroup
    ) -> Callable[..., Tensor]:
        if isinstance(module, nn.Embedding):
            return partial(_embedding, module, group, module.num_embeddings)
        if role.style == "output":
            return partial(_output, module, group, num_outputs(module))
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
        self._region.close()
        self._input.forget()
        if self._spreads:
            return row_linear_to_tokens(input, _weight(module), module.bias, group)
        return row_linear(input, _weight(module), module.bias, group)


def tensor_group(place: Place, groups: Sequence[Sequence[int]]) -> TensorGroup:
    """Make this worker's tensor-parallel group; every worker makes all groups, in one order.

    Args:
        place: This worker among the others.
        groups: [groups] the ranks of each.
    """
    own = TensorGroup(ranks=(place.rank,))
    for ranks in groups:
        if len(ranks) > 1:
            made = subgroup(place, ranks)
            if place.rank in ranks:
                lane = list(ranks).index(place.rank)
                keeps_order = place.start.determinism != "none"
                own = TensorGroup(len(ranks), lane, tuple(ranks), made, keeps_order)
    return own


def _embedding(module: nn.Embedding, group: TensorGroup, vocabulary: int, input: Tensor) -> Tensor:
    return vocabulary_embedding(
        input, module.weight, group, vocabulary=vocabulary, padding_idx=module.padding_idx
    )


def _output(module: Any, group: TensorGroup, size: int, input: Tensor) -> Tensor:
    return joined_linear(input, _weight(module), module.bias, group, size)


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
