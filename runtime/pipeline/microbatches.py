"""What a pipeline holds of one step: its microbatches' inputs, and how to treat its loss."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..data import Pass
from ..engine import Step
from .losses import check_reads_none_of, nodes_of
from .scaling import LossScaling


class StepMicrobatches:
    """The microbatches of one call of ``job.backward`` on this worker; made anew for each call.

    Args:
        step: The call.
        scaling: Of the step's loss.
        strangers: Names of the parameters, under their ids, that the loss may not read.
    """

    def __init__(self, step: Step, scaling: LossScaling, strangers: Mapping[int, str]) -> None:
        self.step, self.scaling = step, scaling
        self._strangers = strangers
        self._feeding = step.batch.inputs()
        self._inputs: dict[int, tuple[Pass, Any]] = {}
        self._answered: set[Any] = set()
        self._loss_is_checked = False

    def input_of(self, microbatch: int) -> tuple[Pass, Any]:
        """The pass and the function's arguments; the first stage to ask reads the loader."""
        while microbatch not in self._inputs:
            item, inputs = next(self._feeding)
            self._inputs[item.virtual_node] = (item, inputs)
        return self._inputs[microbatch]

    def answered(self, answer: Any) -> None:
        """Remember what the last stage gave the function, before the function makes its loss."""
        self._answered = set(nodes_of(answer))

    def look_at(self, loss: Tensor, num_samples: int) -> None:
        """Check a loss that the function made, and let ``job.agreement`` look into it.

        Raises:
            TargetError: It reads parameters of other stages.
        """
        if not self._loss_is_checked:  # later microbatches go the same way
            check_reads_none_of(loss, self._strangers, self._answered)
        self._loss_is_checked = True
        self.step.agreement.look_at(loss, num_samples, self._answered)
