"""The microbatches of one step on a worker: their inputs, and the treatment of their losses."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..data import Pass
from ..engine import Step
from ..losses import Weighted
from .losses import check_reads_none_of, nodes_of
from .scaling import LossScaling


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
            check_reads_none_of(loss, self._strangers, self._answered)
        self._loss_is_checked = True
        self.step.agreement.look_at(loss, self._answered)
        self._answered = set()  # else the graph would outlive its backward pass
