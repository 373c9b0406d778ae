"""The script's model while its stages are spread over workers: what a call of it runs."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from ...schema.errors import TargetError
from ..engine import LossFunction
from .arguments import by_placeholder
from .cut import CALL

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
