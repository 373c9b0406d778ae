"""The optimizer under a pipeline: this worker's share of it, and whose batch an update belongs to.

Parameters are numbered as in the script's whole optimizer, through its groups. State is saved
under these numbers, so the shares of all workers together are the state of the whole.
"""

from typing import Any

import torch
from torch import nn

from ...schema.errors import TargetError


class OwnShare:
    """An optimizer that is left with this worker's parameters.

    Args:
        optimizer: The script's; changed in place.
        parameters: All of the model's, by name.
        own: The names of this worker's.

    Raises:
        TargetError: It holds parameters that are not the model's, or mixes all of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, nn.Parameter],
        own: set[str],
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TargetError(
                "LBFGS needs all gradients at once, and a pipeline has them on several workers",
                hint="use an optimizer that treats each parameter by itself, such as Adam",
            )
        names = {id(parameter): name for name, parameter in parameters.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in names for parameter in held):
            raise TargetError("under a pipeline the optimizer may hold the model's parameters only")
        self._optimizer = optimizer
        self.order = [names[id(parameter)] for parameter in held]
        self._own = [index for index, name in enumerate(self.order) if name in own]
        self._groups: list[list[int]] = []
        first = 0
        for group in optimizer.param_groups:
            number = len(group["params"])
            self._groups.append(list(range(first, first + number)))
            first += number
            for parameter in group["params"]:
                if names[id(parameter)] not in own:
                    optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if names[id(p)] in own]

    def state_dict(self) -> dict[str, Any]:
        """As the whole optimizer's, with the state of this worker's parameters only."""
        state = self._optimizer.state_dict()
        return {
            "state": {self._own[local]: value for local, value in state["state"].items()},
            "param_groups": [
                {**group, "params": indices}
                for group, indices in zip(state["param_groups"], self._groups, strict=True)
            ],
        }

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        """Take this worker's share of the whole optimizer's state.

        Raises:
            TargetError: It has other groups.
        """
        if [group["params"] for group in whole["param_groups"]] != self._groups:
            raise TargetError(
                "the checkpoint's optimizer has other groups of parameters",
                hint="build the same optimizer, or start with an empty --checkpoint folder",
            )
        local = {index: number for number, index in enumerate(self._own)}
        self._optimizer.load_state_dict(
            {
                "state": {local[i]: v for i, v in whole["state"].items() if i in local},
                "param_groups": [
                    {**group, "params": [local[i] for i in group["params"] if i in local]}
                    for group in whole["param_groups"]
                ],
            }
        )


class ScheduledSteps:
    """Steps that the schedule makes (no flushes): the script's own calls do nothing.

    An update may come when the script is a batch further and its learning-rate schedule too. It
    is made with what the groups held when its own batch was fed, on every stage alike.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, most_behind: int) -> None:
        """``most_behind``: how many batches an update may come after its own."""
        self._optimizer, self._most_behind = optimizer, most_behind
        self._step = optimizer.step
        self._settings: dict[int, list[dict[str, Any]]] = {}

        def step(closure: object = None) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign, assignment]

    def feed(self, batch: int) -> None:
        """Note the groups' settings for a batch of the run that begins now."""
        self._settings[batch] = self._now()
        self._settings.pop(batch - self._most_behind - 1, None)

    def make(self, batch: int) -> None:
        """One step, with the settings of a batch."""
        now = self._now()
        self._set(self._settings[batch])
        self._step()
        self._set(now)

    def _now(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)
