"""Stages keep one copy of gradients, as the planner counts them."""

from types import SimpleNamespace

import torch
from torch import nn

from hetflow.runtime.pipeline.executor import Unflushed
from hetflow.schema.schedule import Kind, Operation


def test_microbatches_of_an_update_add_to_the_same_gradients():
    weight = nn.Parameter(torch.ones(3))
    work = SimpleNamespace(stages=[SimpleNamespace(ranks=(0,))], num_microbatches=3)
    stage = SimpleNamespace(parameters={"weight": weight})
    optimizer = torch.optim.SGD([weight], lr=0.1)
    late = Unflushed(work, {0: stage}, None, None, optimizer)
    passes = [
        Operation(kind=Kind.BACKWARD, stage=0, microbatch=k, weight_version=0) for k in range(3)
    ]
    update = Operation(
        kind=Kind.UPDATE, stage=0, microbatch=2, weight_version=1, num_microbatches=3
    )
    late._versions[0].begin(passes)
    late._steps.feed(0)
    places = set()
    for number, operation in enumerate(passes, start=1):
        late.lend(operation)
        leaf = late.weights(operation)["weight"]
        (number * leaf).sum().backward()
        places.add(leaf.grad.data_ptr())
        late.collect(operation)
        assert leaf.grad is None
        late.passed(operation)
    assert len(places) == 1
    late.update(update)
    # The mean of 1, 2 and 3.
    assert torch.allclose(weight, torch.full((3,), 1 - 0.1 * 2))
    assert weight.grad is None
