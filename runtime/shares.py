"""Divide the samples of a global batch over the virtual nodes (VirtualFlow 3.2, 5.2)."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def share_out(num_samples: int, batch_sizes: Sequence[int]) -> list[int]:
    """Divide a global batch of ``num_samples`` samples.

    A full batch gives each virtual node its own size. A short one (the last of an epoch) is divided
    in proportion to the sizes by largest remainder; ties go to the lower index. The result depends
    on the virtual nodes only, not on the devices that run them.

    Args:
        num_samples: Samples in this global batch.
        batch_sizes: [virtual nodes] samples of each in a full batch, by index.

    Returns:
        [virtual nodes] samples of each in this batch.
    """
    total = sum(batch_sizes)
    whole = [num_samples * size // total for size in batch_sizes]
    rest = [num_samples * size % total for size in batch_sizes]
    by_remainder = sorted(range(len(batch_sizes)), key=lambda index: (-rest[index], index))
    for index in by_remainder[: num_samples - sum(whole)]:
        whole[index] += 1
    return whole


def slices(num_samples: int, batch_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """[virtual nodes] the (start, end) of each one's samples in a global batch, end excluded."""
    return list(pairwise([0, *accumulate(share_out(num_samples, batch_sizes))]))
