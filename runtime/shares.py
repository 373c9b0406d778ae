"""Which samples of a global batch belong to which virtual node (VirtualFlow 3.2, 5.2)."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def share_out(num_samples: int, batch_sizes: Sequence[int]) -> list[int]:
    """Samples of each virtual node in a global batch of ``num_samples``.

    A full batch gives each its own size. A short one (the last of an epoch) is shared in
    proportion, by largest remainder, ties to the lower index. It depends on the virtual nodes
    only, not on the devices that run them.

    Args:
        num_samples: Samples in this global batch.
        batch_sizes: Samples of each virtual node in a full batch, by index.
    """
    total = sum(batch_sizes)
    whole = [num_samples * size // total for size in batch_sizes]
    rest = [num_samples * size % total for size in batch_sizes]
    by_remainder = sorted(range(len(batch_sizes)), key=lambda index: (-rest[index], index))
    for index in by_remainder[: num_samples - sum(whole)]:
        whole[index] += 1
    return whole


def slices(num_samples: int, batch_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The contiguous (start, end) of each virtual node in a global batch, by index."""
    return list(pairwise([0, *accumulate(share_out(num_samples, batch_sizes))]))
