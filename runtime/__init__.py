"""The runtime of one worker: virtual nodes, one gradient buffer, exact sharding of the data.

A training script needs five changed lines, and still runs under plain ``python``::

    from hetflow import runtime as hf

    job = hf.prepare(model, optimizer)
    for batch in job.batches(loader):
        loss = job.backward(lambda x, y: criterion(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()

Beside the worker's own files stand the rooms that start it, which do not import torch with this:

- ``protocol``: what launcher and workers agree on.
- ``preload``: processes forked from one that has imported torch.
- ``launcher``: starts and supervises workers, and writes the run record.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoints.saving import load_weights
    from .initial_values import deferred
    from .job import Job
    from .start import prepare
    from .tensor.roles import tensor_parallel
    from .totals import Weighted

__all__ = ["Job", "Weighted", "deferred", "load_weights", "prepare", "tensor_parallel"]


def __getattr__(name: str) -> object:
    """Import a public name, and torch with it, on first use: planning starts without torch."""
    if name in __all__:
        from . import initial_values, job, start, totals
        from .checkpoints import saving
        from .tensor import roles

        return {
            "Job": job.Job,
            "Weighted": totals.Weighted,
            "deferred": initial_values.deferred,
            "load_weights": saving.load_weights,
            "prepare": start.prepare,
            "tensor_parallel": roles.tensor_parallel,
        }[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
