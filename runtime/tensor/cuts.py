"""How a parameter is cut over a tensor-parallel group, and put together again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """The dimension in which a parameter is cut.

    ``parts`` are what is fused in it one behind the other (queries, keys and values): each is cut
    by itself, and a worker holds its share of every one.
    """

    dim: int
    parts: int = 1

    def own(self, whole: Tensor, lane: int, degree: int) -> Tensor:
        """A worker's part, in memory of its own."""
        fused = self._unfused(whole)
        share = fused.tensor_split(degree, self.dim + 1)[lane]
        return share.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """The parameter of which these are all workers' parts, in order."""
        fused = [self._unfused(share) for share in shares]
        return torch.cat(fused, self.dim + 1).flatten(self.dim, self.dim + 1)

    def _unfused(self, value: Tensor) -> Tensor:
        """With a dimension of its own for the parts."""
        size = value.shape[self.dim] // self.parts
        shape = (*value.shape[: self.dim], self.parts, size, *value.shape[self.dim + 1 :])
        return value.reshape(shape)
