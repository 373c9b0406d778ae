"""LAS in the centre of its optima, call after call."""

import numpy as np

from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.pool import Active, ClusterPool
from hetflow.schema.jobs import Job, Throughputs


def test_the_simulators_centre_forgets_what_was(table: Throughputs) -> None:
    """After other jobs came and went the centre is that of the jobs present, from nothing."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4, "slow": 4})

    def jobs(*numbers: int) -> list[Job]:
        models = ("conv", "rnn")
        return [
            Job(id=str(n), model=models[n % 2], steps=1e5, scale_factor=1 + n % 3 // 2)
            for n in numbers
        ]

    active, used = Active(pool), allocator_named("las", warm=False)
    for come, go in ((1, 0), (13, 0), (0, 5), (4, 8), (0, 4), (30, 1)):
        active.add(jobs(*range(come)), 180.0)
        active.leave(list(range(go)))
        active.sweep()
        fresh = allocator_named("las", warm=False)
        now, then = used.allocate(active, 0.0).x, fresh.allocate(active, 0.0).x
        np.testing.assert_allclose(now, then, atol=1e-7)
