"""A model whose modules compute one worker's share: only their forwards are replaced.

Names, parameters and hooks stay the script's. The engine knows who holds what, so it cuts the
parameters' values (pipeline/ownership.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..group import Place, subgroup
from .layers import column_linear, joined_linear, row_linear, vocabulary_embedding
from .operators import TensorGroup
from .roles import Role, Sharing, is_transposed, num_outputs


class ShardedModel:
    """The shared modules of a model, as one worker runs them.

    Args:
        model: The whole model.
        sharing: The shared modules and parameters.
        group: The tensor-parallel group.
    """

    def __init__(self, model: nn.Module, sharing: Sharing, group: TensorGroup) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self._sizes: list[tuple[nn.Module, str, int]] = []
        self._is_installed = False
        if group.degree == 1:
            return
        for name, role in sharing.roles.items():
            if role.style == "inner":
                continue
            module = model.get_submodule(name)
            self._forwards.append((module, _forward_of(module, role, group)))
        for name, attributes in sharing.sizes.items():
            module = model.get_submodule(name)
            self._sizes += [(module, attribute, group.degree) for attribute in attributes]

    def install(self) -> None:
        """Make the modules compute with this worker's part of their parameters."""
        if self._is_installed:
            return
        for module, forward in self._forwards:
            module.forward = forward
        for module, attribute, degree in self._sizes:
            setattr(module, attribute, getattr(module, attribute) // degree)
        self._is_installed = True

    def remove(self) -> None:
        """Make the modules compute with whole parameters again, as the script made them."""
        if not self._is_installed:
            return
        for module, _ in self._forwards:
            del module.forward
        for module, attribute, degree in self._sizes:
            setattr(module, attribute, getattr(module, attribute) * degree)
        self._is_installed = False


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
                own = TensorGroup(len(ranks), lane, tuple(ranks), made)
    return own


def _forward_of(module: nn.Module, role: Role, group: TensorGroup) -> Callable[..., Tensor]:
    if isinstance(module, nn.Embedding):
        return partial(_embedding, module, group, module.num_embeddings)
    return partial(_linear, module, role, group, num_outputs(module))


def _embedding(module: nn.Embedding, group: TensorGroup, vocabulary: int, input: Tensor) -> Tensor:
    return vocabulary_embedding(
        input, module.weight, group, vocabulary=vocabulary, padding_idx=module.padding_idx
    )


def _linear(module: Any, role: Role, group: TensorGroup, size: int, input: Tensor) -> Tensor:
    weight = module.weight.t() if is_transposed(module) else module.weight
    if role.style == "row":
        return row_linear(input, weight, module.bias, group)
    if role.style == "output":
        return joined_linear(input, weight, module.bias, group, size)
    return column_linear(input, weight, module.bias, group)
