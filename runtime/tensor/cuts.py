"""Cut a parameter over a tensor-parallel group, and join its parts again (thesis 4.2.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut.

    Attributes:
        dim: The dimension in which it is cut.
        parts: How many matrices are fused along that dimension (3 for queries, keys and values).
            Each of them is cut by itself, and a worker holds its share of every one.
    """

    dim: int
    parts: int = 1

    def own(self, whole: Tensor, lane: int, degree: int) -> Tensor:
        """The part of the worker at position ``lane`` of ``degree``, as a copy."""
        fused = self._unfused(whole)
        share = fused.tensor_split(degree, self.dim + 1)[lane]
        return share.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """Join the parts of all workers, in order of lanes, to the whole parameter."""
        fused = [self._unfused(share) for share in shares]
        return torch.cat(fused, self.dim + 1).flatten(self.dim, self.dim + 1)

    def _unfused(self, value: Tensor) -> Tensor:
        """The tensor with ``dim`` split into two dimensions: fused matrices, rows of each."""
        size = value.shape[self.dim] // self.parts
        shape = (*value.shape[: self.dim], self.parts, size, *value.shape[self.dim + 1 :])
        return value.reshape(shape)
