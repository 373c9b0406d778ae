"""Place this worker's own stages on its device, without ever moving the rest of the model there.

Stages are cut before anything is moved. A trace records the device of the tensors that a forward
makes, so layers are traced on the worker's device. Meanwhile the parameters are replaced by
stand-ins of the same shapes, which take no memory there.

A call of the script's model then runs what ``spread`` puts in its place.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...devices.collectives import wire_device
from ...schema.errors import TargetError
from ..engine import LossFunction
from ..group import Place
from ..initial_values import fill, initial_value
from ..setup import check_same_shapes, move_optimizer_state
from .cut import CALL, StageModule, by_placeholder
from .ownership import broadcast

RunStage = Callable[[dict[str, Any]], Any]
"""Runs this worker's stage. Takes the model's arguments by the names of the traced graph, and the
whole call under ``CALL``."""


class Held(Protocol):
    """The tensors of a model that a worker holds."""

    @property
    def is_readable(self) -> bool:
        """Whether every one of them has its whole value on this worker."""


class StageDone(BaseException):
    """Ends the script's function on a worker whose stage is not the last one."""


class SpreadModel:
    """Replaces a model's ``forward``: inside ``call`` it runs one stage, elsewhere it refuses.

    Args:
        model: The script's model.
        check_call: Refuses arguments for which the traced stages are not valid. None: the only
            stage is the model as it is, which takes the call itself.

    Attributes:
        signature: The parameters of a call of the model.
    """

    def __init__(
        self, model: nn.Module, check_call: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self._model, self._check_call = model, check_call
        self._forward = model.forward
        self.signature = inspect.signature(model.forward)
        self._run_stage: RunStage | None = None
        self._evaluate: Callable[..., Any] | None = None
        self.spread()

    def spread(self) -> None:
        """Make calls of the model run a stage, or refuse them, from now on."""
        self._model.forward = self._meet

    def release(self) -> None:
        """Give the model its own ``forward`` back."""
        self._model.forward = self._forward

    @contextmanager
    def evaluating(self, evaluate: Callable[..., Any]) -> Iterator[None]:
        """Within the context, calls of the model outside of ``call`` go to another function."""
        self._evaluate = evaluate
        try:
            yield
        finally:
            self._evaluate = None

    def call(self, function: LossFunction, run: RunStage, inputs: Any) -> Any:
        """Call the script's function, with ``run`` in place of the model.

        Args:
            function: The script's function of one microbatch.
            run: Called once, when the function calls the model.
            inputs: The function's arguments: a tuple or list of them, or the only one.

        Returns:
            The function's result; None where ``run`` raised ``StageDone``.

        Raises:
            TargetError: The function did not call the model, or called it twice.
        """
        self._run_stage = run
        try:
            whole = isinstance(inputs, tuple | list)
            answer = function(*inputs) if whole else function(inputs)
        except StageDone:
            return None
        finally:
            unused, self._run_stage = self._run_stage is run, None
        if unused:
            raise TargetError("the function did not call the model")
        return answer

    def _meet(self, *arguments: Any, **named: Any) -> Any:
        if self._run_stage is None and self._evaluate is not None:
            return self._evaluate(*arguments, **named)
        if self._run_stage is None:
            raise TargetError(
                "the model is spread over several workers",
                hint="call it inside job.backward's function, or inside job.evaluation()",
            )
        run, self._run_stage = self._run_stage, self._refuse_second
        call = {CALL: (arguments, named)}
        if self._check_call is None:
            return run(call)
        given = by_placeholder(self.signature, arguments, named)
        self._check_call(given)
        return run({**given, **call})

    def _refuse_second(self, arguments: object) -> Any:
        raise TargetError(
            "the function calls the model twice; a pipeline runs it once a microbatch",
            hint="join the inputs into one call",
        )


def refuse_saving(model: nn.Module, *held: Held) -> None:
    """Refuse ``model.state_dict()`` while tensors of other stages have no values here.

    A copy of the model is not refused: its owner knows which values it keeps.
    """

    def refuse(module: nn.Module, *rest: object) -> None:
        if module is model and not all(tensors.is_readable for tensors in held):
            raise TargetError(
                "model.state_dict() is called on a part of a model: other workers have the "
                "parameters of the other stages",
                hint="call job.sync_buffers() on all workers before, or job.checkpoint()",
            )

    model.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


Buffer = tuple[nn.Module, str, Tensor]


@contextmanager
def shapes_on(
    device: torch.device, model: nn.Module, shapes: Iterable[tuple[nn.Parameter, torch.Size]]
) -> Iterator[None]:
    """Within the context, give parameters and buffers their shapes on a device, without values.

    The tensors that the model's modules move themselves move to the device and stay.

    Args:
        device: The device.
        model: The model.
        shapes: Each parameter, with the shape of the whole parameter.
    """
    known = list(shapes)
    values = [(parameter, parameter.data, parameter.grad) for parameter, _ in known]
    buffers = [(m, key, b) for m in model.modules() for key, b in m._buffers.items()]
    zeros: dict[torch.dtype, Tensor] = {}
    try:
        _show_shapes([(m, key, b) for m, key, b in buffers if b is not None], device)
        for parameter, shape in known:
            if parameter.dtype not in zeros:
                zeros[parameter.dtype] = torch.zeros((), dtype=parameter.dtype, device=device)
            parameter.grad = None
            parameter.data = zeros[parameter.dtype].expand(shape)
        model.to(device)
        yield
    finally:
        for parameter, value, gradient in values:
            parameter.data = value
            parameter.grad = gradient
        for module, key, buffer in buffers:
            module._buffers[key] = buffer


def _show_shapes(buffers: Sequence[Buffer], device: torch.device) -> None:
    """Put tensors of the buffers' shapes in their places, all in one memory of the largest's size.

    Code that views a buffer needs its strides too.
    """
    layouts = {id(b): torch.empty_like(b, device="meta") for _, _, b in buffers}
    room: dict[torch.dtype, int] = {}
    for layout in layouts.values():
        room[layout.dtype] = max(room.get(layout.dtype, 0), layout.numel())
    memory = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in room.items()}
    shown = {
        name: memory[layout.dtype].as_strided(layout.shape, layout.stride())
        for name, layout in layouts.items()
    }
    for module, key, buffer in buffers:
        module._buffers[key] = shown[id(buffer)]


def place_own(
    own: Sequence[nn.Parameter],
    parts: Sequence[StageModule],
    optimizers: Sequence[torch.optim.Optimizer],
    place: Place,
) -> None:
    """Move this worker's parameters and their optimizer state to its device.

    Args:
        own: This worker's parameters.
        parts: This worker's stages.
        optimizers: The script's optimizers.
        place: This worker among the others.
    """
    for parameter in own:
        fill(parameter, place.device, computes=place.rank == 0)
    for part in parts:
        part.module.to(place.device)  # a module's own ``to`` may move more than its parameters
    for parameter in own:  # also those that no stage uses
        parameter.data = parameter.data.to(place.device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(place.device)
    for optimizer in optimizers:
        move_optimizer_state(optimizer, own)


def broadcast_parts(
    model: nn.Module, parameters: dict[str, nn.Parameter], own: Collection[str], place: Place
) -> None:
    """Start from the first worker's values; each worker keeps those of its own tensors only.

    Args:
        model: The whole model.
        parameters: All parameters by name; this worker's are on its device.
        own: Names of this worker's parameters and buffers.
        place: This worker among the others.
    """
    if not place.distributed:
        return
    wire = wire_device(place.device)
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        # A deferred value of another worker's parameter is computed here, sent, and freed.
        value = initial_value(tensor) if place.rank == 0 else tensor.detach()
        broadcast(value, wire, src=0, sends=place.rank == 0, keeps=name in own)


def check_same_model(model: nn.Module, parameters: dict[str, nn.Parameter], place: Place) -> None:
    """Compare the names, dtypes and shapes of what the workers have built.

    Raises:
        TargetError: The workers built different models.
    """
    if place.distributed:
        check_same_shapes({**parameters, **dict(model.named_buffers())}, place)


def move_buffers(model: nn.Module, device: torch.device) -> list[Buffer]:
    """Put copies of buffers of other devices on a device; return the originals and places."""
    before: list[Buffer] = []
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and value.device != device:
                before.append((module, name, value))
                module._buffers[name] = made.setdefault(id(value), value.to(device))
    return before


def put_back(buffers: Sequence[Buffer]) -> None:
    """Undo ``move_buffers``."""
    for module, name, value in buffers:
        module._buffers[name] = value
