"""Many buckets summed on uneven workers, without a model. A script, not a test.

Usage: exchanging.py STORE_FILE RANK.
"""

import sys

import torch
import torch.distributed as dist

from hetflow.runtime.invariant import MAX_IN_FLIGHT, InvariantSum

HOLDINGS = [[0, 1, 2, 3, 4], [5, 6], [7]]
NUM_BUCKETS, BUCKET = 3 * MAX_IN_FLIGHT + 1, 6


def gradient_of(node):
    """A virtual node's gradient: the same wherever it is made."""
    return torch.randn(NUM_BUCKETS * BUCKET, generator=torch.Generator().manual_seed(node))


def tree_sum(values):
    """The aligned tree over eight leaves, from its definition."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def work(rank, path):
    """Two steps, bucket by bucket; the sum and what is held must be as promised."""
    store = dist.FileStore(path, len(HOLDINGS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(HOLDINGS))
    flat, sums = torch.zeros(NUM_BUCKETS * BUCKET), InvariantSum(HOLDINGS, rank)
    sums.allocate([flat])
    for _ in range(2):
        sums.begin()
        flat.zero_()
        for node in HOLDINGS[rank]:
            sums.enter(node)
            flat += gradient_of(node)
            sums.leave()
        sums.settle()
        for number in range(NUM_BUCKETS):
            sums.launch(0, number * BUCKET, (number + 1) * BUCKET)
        sums.wait()
        assert torch.equal(flat, tree_sum([gradient_of(node) for node in range(8)]))
    others = 5 - len(sums._trees[rank])
    assert sums.num_received_bytes == MAX_IN_FLIGHT * others * BUCKET // 3 * 4
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[2]), sys.argv[1])
