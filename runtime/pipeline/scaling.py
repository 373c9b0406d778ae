"""A GradScaler under a pipeline: every worker must learn of an overflow on another one.

Each worker's scaler inspects its own optimizer's gradients only. An overflow in one stage must skip
the step in all stages, so it is made visible in the gradients of each.
"""

import math

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
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
