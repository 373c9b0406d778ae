"""Who shares which layers: the tensor-parallel groups and each worker's part of a parameter."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Cut a parameter over a tensor-parallel group, and join its parts again (thesis 4.2.3).


@dataclass(frozen=True, slots=True)
class ParameterCut:
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
        share = self._share(whole, lane, degree)
        return share.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def put(self, part: Tensor, whole: Tensor, lane: int, degree: int) -> None:
        """Write the part of a worker to its place in the whole parameter, which is contiguous."""
        self._share(whole, lane, degree).copy_(self._unfused(part))

    def _share(self, whole: Tensor, lane: int, degree: int) -> Tensor:
        return self._unfused(whole).tensor_split(degree, self.dim + 1)[lane]

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """Join the parts of all workers, in order of lanes, to the whole parameter."""
        fused = [self._unfused(share) for share in shares]
        return torch.cat(fused, self.dim + 1).flatten(self.dim, self.dim + 1)

    def _unfused(self, value: Tensor) -> Tensor:
        """The tensor with ``dim`` split into two dimensions: fused matrices, rows of each."""
        size = value.shape[self.dim] // self.parts
        shape = (*value.shape[: self.dim], self.parts, size, *value.shape[self.dim + 1 :])
        return value.reshape(shape)


Ranks = tuple[int, ...]


class Lanes:
    """The tensor-parallel groups of a launch. A worker's lane is its position in its group.

    Args:
        groups: [groups] the ranks of each group; every worker is in one group.
        cuts: How parameters are cut over a group, by name; others are whole on every worker.
        inner: Names of whole parameters for whose gradient each worker computes a share.
    """

    def __init__(
        self,
        groups: Sequence[Ranks],
        cuts: Mapping[str, ParameterCut],
        inner: Collection[str] = (),
    ) -> None:
        self._cuts, self._inner = cuts, inner
        self._groups = {rank: group for group in groups for rank in group}

    def group(self, rank: int) -> Ranks:
        """The ranks that share layers with a worker, its own included."""
        return self._groups[rank]

    def lane(self, rank: int) -> int:
        """A worker's position in its group, from 0."""
        return self._groups[rank].index(rank)

    def degree(self, rank: int) -> int:
        """The number of workers in a worker's group."""
        return len(self._groups[rank])

    def is_cut(self, name: str, rank: int) -> bool:
        """Whether a worker that has this parameter holds only a part of it."""
        return name in self._cuts and self.degree(rank) > 1

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """A worker's part of a parameter that is cut."""
        return self._cuts[name].own(whole, self.lane(rank), self.degree(rank))

    def part_shape(self, name: str, whole: torch.Size, rank: int) -> torch.Size:
        """The shape of a worker's part of a parameter that is cut."""
        return self.part(name, torch.empty(whole, device="meta"), rank).shape

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Join one group's parts of a parameter, in order of lanes."""
        return self._cuts[name].whole(parts)

    def sums(self, name: str, holders: Ranks) -> tuple[Ranks, ...]:
        """The sets of workers over which a parameter's gradients are summed, each set separately.

        If the parameter is cut, the workers with the same part in different groups form a set. If
        it is not cut, or if groups have different degrees, all holders sum whole gradients
        (``put``).
        """
        if self.adds_whole(name, holders):
            return (holders,)
        return tuple(
            tuple(rank for rank in holders if self.lane(rank) == lane)
            for lane in range(self.degree(holders[0]))
        )

    def adds_whole(self, name: str, holders: Ranks) -> bool:
        """Whether whole gradients are summed, to which each worker contributes its share.

        All workers of a group compute the gradient of a parameter that is not cut. But products
        round differently where memory is aligned differently, so only one worker contributes.
        """
        degrees = {self.degree(rank) for rank in holders}
        return len(degrees) > 1 or (degrees != {1} and name not in self._cuts)

    def is_told_by_parts(self, name: str, holders: Ranks) -> bool:
        """Whether the norm of a parameter's gradient is computed from the norms of its parts."""
        return any(self.is_cut(name, rank) for rank in holders)

    def alike(self, name: str, holders: Ranks) -> list[tuple[str, Ranks]]:
        """The sets of workers that must hold equal values of a parameter, with a name for each."""
        sets: dict[str, list[int]] = {}
        for rank in holders:
            is_cut = self.is_cut(name, rank)
            part = f" (part {self.lane(rank) + 1} of {self.degree(rank)})" if is_cut else ""
            sets.setdefault(f"{name}{part}", []).append(rank)
        return [(label, tuple(ranks)) for label, ranks in sets.items()]

    def contributes(self, name: str, rank: int) -> bool:
        """Whether a worker's gradient of a parameter counts in a sum of whole gradients."""
        return self.is_cut(name, rank) or self.lane(rank) == 0 or name in self._inner

    def put(self, name: str, part: Tensor, whole: Tensor, rank: int) -> None:
        """Write a worker's share in a sum of whole gradients to ``whole``, which is zero."""
        if self.is_cut(name, rank):
            self._cuts[name].put(part, whole, self.lane(rank), self.degree(rank))
        elif self.contributes(name, rank):
            whole.copy_(part)
