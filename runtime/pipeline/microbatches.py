"""The microbatches of one step on a worker: their inputs, and the treatment of their losses.

Losses are checked for the parameters that they read. The last stage's worker has stand-ins for
other stages' parameters, so a loss that reads these (a weight-decay term) would be silently wrong.
Autograd's graph shows which parameters a loss reads.

Under a GradScaler, every worker must learn of an overflow on another one. Each worker's scaler
inspects its own optimizer's gradients only. An overflow in one stage must skip the step in all
stages, so it is made visible in the gradients of each.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from ..data import Pass
from ..engine import Step
from ..losses import Weighted
from ..tensor.gradients import plain
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


def nodes_of(value: Any) -> Iterator[Any]:
    """Yield the autograd nodes that made the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from nodes_of(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from nodes_of(entry)


def check_reads_none_of(loss: Any, strangers: Mapping[int, str], answered: set[Any]) -> None:
    """Refuse a loss that depends on a parameter which this worker does not hold.

    Args:
        loss: The result of the script's function.
        strangers: Names of the parameters that must not be read, by ``id``.
        answered: Nodes that made the model's answer; the search stops at them.

    Raises:
        TargetError: Names the parameter.
    """
    seen = set(answered)
    ahead = list(nodes_of(loss))
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        name = strangers.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise TargetError(
                f"the loss reads parameter {name}, which a pipeline keeps on another worker or "
                f"in another version",
                hint="use the optimizer's weight_decay, or compute the term inside the model",
            )
        ahead += [source for source, _ in node.next_functions if source is not None]


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
