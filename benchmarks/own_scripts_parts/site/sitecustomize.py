"""Slow down a worker of torchrun or accelerate exactly as hetflow emulates a slower device.

``HELD_RANKS`` is JSON: a rank's [batch size, seconds] table. The passes of such a rank are held to
it by the runtime's own PassHolder, and the last gradients are summed when the time is over, as
``runtime/adapters/training.py`` does. Nothing of the training changes.
"""

import json
import os
import sys

HELD = json.loads(os.environ.get("HELD_RANKS", "{}")).get(os.environ.get("RANK"))


def hold_passes() -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel as Replica

    from hetflow.runtime.emulation import PassHolder
    from hetflow.schema.plan import PassTime

    holder = PassHolder([PassTime(batch_size=size, step_seconds=s) for size, s in HELD])
    make = Replica.__init__

    def begin(replica, values, options):
        if replica.training and torch.is_grad_enabled():
            holder.begin_step()
            holder.begin_pass(len(options["input_ids"]))

    def reduced(
        _: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            holder.end_pass()
        return allreduce_hook(torch.distributed.group.WORLD, bucket)

    def made(self, *values, **options):
        make(self, *values, **options)
        self.register_forward_pre_hook(begin, with_kwargs=True)
        self.register_comm_hook(None, reduced)

    Replica.__init__ = made


if HELD is not None and any("train.py" in word for word in sys.argv + sys.orig_argv):
    hold_passes()
