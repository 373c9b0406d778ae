"""A job without lasting effects, in which a profiler trains a few steps; several may follow.

It is the job that ``prepare`` makes, under a launch config of the profiler; the loop over it is the
script's. Lasting effects are left out or undone: the process's exit is not hooked, nothing is
saved, no workers are compared, and afterwards the model has its own tensors and the optimizer its
own parameters again. The values stay trained.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .agreement.agreement import Watch
from .group import Place
from .job import Job
from .setup import named_parameters
from .start import assemble
from .streams import streams_kept


@contextmanager
def rehearsed(
    model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], place: Place
) -> Iterator[Job]:
    """Make a job for the body of a ``with`` statement.

    Args:
        model: Gets its own parameters and buffers back. Under a pipeline, parameters of other
            workers' stages have their earlier values.
        optimizers: Get their own groups back.
        place: This worker among the others. Workers of one job enter and leave together, and
            close the process group themselves.

    Raises:
        TargetError: As ``prepare``.
    """
    config = place.start.config
    with streams_kept(), _tensors_kept(model, optimizers):
        job = assemble(
            model,
            optimizers,
            place,
            seed=config.seed if config is not None else 0,
            watch=Watch(every=0, watches_first=False),
            tests=False,
        )
        try:
            yield job
        finally:
            job.abandon()


@contextmanager
def _tensors_kept(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    parameters = list(named_parameters(model, optimizers).values())
    data = [parameter.data for parameter in parameters]
    buffers = [
        (module, name, value)
        for module in model.modules()
        for name, value in module._buffers.items()
    ]
    own = [_OptimizerParts(optimizer) for optimizer in optimizers]
    forward = model.__dict__.get("forward")
    try:
        yield
    finally:
        for parameter, tensor in zip(parameters, data, strict=True):
            parameter.grad = None
            parameter.data = tensor
        for module, name, value in buffers:
            module._buffers[name] = value
        for parts in own:
            parts.put_back()
        model.__dict__.pop("forward", None)
        if forward is not None:
            model.forward = forward


class _OptimizerParts:
    """What a pipeline removes from an optimizer, which keeps one worker's parameters only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = [dict(group) for group in optimizer.param_groups]
        self._state = dict(optimizer.state)
        self._step = optimizer.__dict__.get("step")

    def put_back(self) -> None:
        """Restore the groups and their settings, the state, and the ``step`` method."""
        optimizer = self._optimizer
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        for parameter, state in self._state.items():
            optimizer.state.setdefault(parameter, state)
        optimizer.__dict__.pop("step", None)
        if self._step is not None:
            optimizer.__dict__["step"] = self._step
