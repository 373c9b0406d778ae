"""The microbatches of one step on a worker: their inputs, and the treatment of their losses.

Losses are checked for the parameters that they read. The last stage's worker has stand-ins for
other stages' parameters, so a loss that reads these (a weight-decay term) would be silently wrong.
Autograd's graph shows which parameters a loss reads.

Under a GradScaler, every worker must learn of an overflow on another one. Each worker's scaler
inspects its own optimizer's gradients only. An overflow in one stage must skip the step in all
stages, so it is made visible in the gradients of each.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from ..agreement.agreement import leaves_of, nodes_of
from ..data import Pass
from ..engine import LossFunction, Step
from ..losses import Weighted
from .cut import CALL, by_placeholder
from .norms import plain
from .ownership import Ownership
from .synchronise import Synchroniser


class LossScaling:
    """The scaling of one step's loss; it does nothing without a scaler.

    Raises:
        TargetError: This worker's stages have no parameters, so its scaler has nothing to inspect.
    """

    def __init__(
        self,
        scaler: "torch.amp.GradScaler | None",
        ownership: Ownership,
        synchroniser: Synchroniser,
    ) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._own: list[nn.Parameter] = []
        self._synchroniser = synchroniser
        synchroniser.loss_scale = 1.0
        synchroniser.checks_overflow = self._scaler is not None
        if self._scaler is None:
            return
        self._own = [ownership.parameters[name] for name in sorted(ownership.own)]
        if not self._own:
            raise TargetError(
                "a GradScaler needs parameters on every worker, and this one's stages have none",
                hint="solve for another cut, or use bfloat16 without a scaler",
            )
        # A scaler makes its state at the first loss, which only the last stage has.
        self._scaler.scale(torch.zeros((), device=self._own[0].device))
        # ``get_scale`` would make the host wait.
        on_device = self._scaler._get_scale_async() if synchroniser.stays_on_device else None
        synchroniser.loss_scale = self._scaler.get_scale() if on_device is None else on_device

    def scale(self, loss: Tensor) -> Tensor:
        """The tensor to differentiate: the loss, scaled where there is a scaler."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def refuse(self) -> None:
        """Refuse a scaler if the schedule makes the updates, because no step can be skipped.

        Raises:
            TargetError: There is a scaler.
        """
        if self._scaler is not None:
            raise TargetError(
                "a GradScaler needs a schedule that flushes", hint="such as 1f1b; or use bfloat16"
            )

    def share_overflow(self) -> None:
        """Make an overflow of any stage visible to this worker's scaler."""
        is_finite = self._synchroniser.is_finite
        if self._scaler is None or is_finite is True:
            return
        for parameter in self._own:
            if parameter.grad is not None and parameter.grad.numel():
                gradient = plain(parameter.grad)
                entry = gradient[(0,) * gradient.dim()]
                if isinstance(is_finite, Tensor):
                    entry.copy_(torch.where(is_finite, entry, math.inf))
                else:
                    entry.fill_(math.inf)
                return


class StepMicrobatches:
    """The microbatches of one call of ``job.backward`` on this worker; made anew for each call.

    Args:
        step: The call.
        scaling: The scaling of the step's loss.
        strangers: Names of the parameters that the loss may not read, by ``id``.
    """

    def __init__(self, step: Step, scaling: LossScaling, strangers: Mapping[int, str]) -> None:
        self.step, self.scaling = step, scaling
        self._strangers = strangers
        self._feeding = step.batch.inputs()
        self._inputs: dict[int, tuple[Pass, Any]] = {}
        self._answered: set[Any] = set()
        self._loss_is_checked = not strangers

    def input_of(self, microbatch: int) -> tuple[Pass, Any]:
        """The pass and the function's arguments; the first stage to ask reads the loader."""
        while microbatch not in self._inputs:
            item, inputs = next(self._feeding)
            self._inputs[item.virtual_node] = (item, inputs)
        return self._inputs[microbatch]

    def answered(self, answer: Any) -> None:
        """Remember the last stage's answer before the function computes a loss from it."""
        if not self._loss_is_checked or self.step.agreement.looks:
            self._answered = set(nodes_of(answer))

    def test(
        self,
        item: Pass,
        answer: Any,
        loss: Any,
        answering: Callable[[Callable[..., Any]], AbstractContextManager[None]],
    ) -> None:
        """Test the function where that is due; see ``Promise.test_after_model``."""
        step = self.step
        if step.promise is not None:
            inputs = self._inputs[item.virtual_node][1]
            step.promise.test_after_model(
                step.function, inputs, answer, item.num_samples, loss, answering
            )

    def look_at(self, answer: Any) -> None:
        """Check the loss that the function returned, also by ``job.agreement``.

        Raises:
            TargetError: It reads parameters of other stages.
        """
        loss = answer.loss if isinstance(answer, Weighted) else answer
        if not self._loss_is_checked:  # later microbatches run the same code
            for leaf in leaves_of(loss, self._answered):
                if id(leaf) in self._strangers:
                    raise TargetError(
                        f"the loss reads parameter {self._strangers[id(leaf)]}, which a pipeline "
                        "keeps on another worker or in another version",
                        hint="use the optimizer's weight_decay, or compute the term inside the "
                        "model",
                    )
        self._loss_is_checked = True
        self.step.agreement.look_at(loss, self._answered)
        self._answered = set()  # else the graph would outlive its backward pass


RunStage = Callable[[dict[str, Any]], Any]
"""Runs this worker's stage. Takes the model's arguments by the names of the traced graph, and the
whole call under ``CALL``."""


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
