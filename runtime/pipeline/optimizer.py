"""The optimizer under a pipeline: one worker's share of it, and the settings of late updates.

Parameters are numbered through the groups of the script's whole optimizer. State is saved under
these numbers, so the shares of all workers together are the state of the whole.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...schema.errors import TargetError
from .ownership import Holders, Ownership
from .sharded_updates import keepers_of

_MIX_A_PARAMETER = ("Adafactor", "Muon")


class OwnShare:
    """Reduces an optimizer to this worker's parameters.

    Args:
        optimizer: The script's optimizer; changed in place.
        ownership: The model's parameters, and which belong to this worker. Make this object before
            they are cut.
        is_sharded: Whether only one of the workers that hold a parameter keeps its state.

    Attributes:
        order: Names of all parameters of the whole optimizer.
        keepers: Of a sharded optimizer, the ranks that keep each parameter's state, by name.
        kept: Names of the parameters whose state this worker keeps.

    Raises:
        TargetError: The optimizer holds parameters that are not the model's, or it combines the
            elements of all parameters, or of one that is cut.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ownership: Ownership,
        *,
        rank: int = 0,
        is_sharded: bool = False,
    ) -> None:
        parameters, own = ownership.parameters, ownership.own
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TargetError(
                "LBFGS needs all gradients at once, and a pipeline has them on several workers",
                hint="use an optimizer that treats each parameter by itself, such as Adam",
            )
        if ownership.cut and type(optimizer).__name__ in _MIX_A_PARAMETER:
            raise TargetError(
                f"{type(optimizer).__name__} needs whole parameters, and a tensor-parallel group "
                f"cuts {min(ownership.cut)}",
                hint="use an optimizer that treats each element by itself, such as AdamW",
            )
        names = {id(parameter): name for name, parameter in parameters.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in names for parameter in held):
            raise TargetError("under a pipeline the optimizer may hold the model's parameters only")
        self._optimizer, self._ownership = optimizer, ownership
        self.order = [names[id(parameter)] for parameter in held]
        self.keepers: dict[str, Holders] = {}
        if is_sharded:
            self.keepers = keepers_of(ownership, self.order)
        self.kept = {name for name in own if rank in self.keepers.get(name, (rank,))}
        self._own = [index for index, name in enumerate(self.order) if name in own]
        self._groups: list[list[int]] = []
        first = 0
        for group in optimizer.param_groups:
            number = len(group["params"])
            self._groups.append(list(range(first, first + number)))
            first += number
            for parameter in group["params"]:
                if names[id(parameter)] not in self.kept:
                    optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if names[id(p)] in own]
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    values = optimizer.state[parameter]
                    optimizer.state[parameter] = self._cut(names[id(parameter)], values)

    def state_dict(self, join: Callable[[str, Any], Any]) -> dict[str, Any]:
        """The state in the whole optimizer's form, with what this worker keeps only.

        Args:
            join: Makes a value of a parameter's state whole, by the parameter's name. Of the
                workers that share a parameter, only the first has its state in the result.
        """
        state, found = self._optimizer.state_dict(), {}
        for local, values in sorted(state["state"].items()):
            index = self._own[local]
            name = self.order[index]
            joined = {key: join(name, value) for key, value in values.items()}
            if self._ownership.is_first_to_share(name):
                found[index] = joined
        return {
            "state": found,
            "param_groups": [
                {**group, "params": indices}
                for group, indices in zip(state["param_groups"], self._groups, strict=True)
            ],
        }

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        """Load what this worker keeps of the whole optimizer's state.

        Raises:
            TargetError: The state has other groups.
        """
        if [group["params"] for group in whole["param_groups"]] != self._groups:
            raise TargetError(
                "the checkpoint's optimizer has other groups of parameters",
                hint="build the same optimizer, or start with an empty --checkpoint folder",
            )
        local = {index: number for number, index in enumerate(self._own)}
        self._optimizer.load_state_dict(
            {
                "state": {
                    local[i]: self._cut(self.order[i], values)
                    for i, values in whole["state"].items()
                    if i in local and self.order[i] in self.kept
                },
                "param_groups": [
                    {**group, "params": [local[i] for i in group["params"] if i in local]}
                    for group in whole["param_groups"]
                ],
            }
        )

    def _cut(self, name: str, values: Any) -> Any:
        """The part of a parameter's state that belongs to this worker's part of the parameter."""
        if name not in self._ownership.cut or not isinstance(values, dict):
            return values
        return {key: self._ownership.own_part(name, value) for key, value in values.items()}


class ScheduledSteps:
    """Steps that the schedule makes, without flushes: the script's own calls do nothing.

    When an update is made, the script may already be a batch further, and its learning-rate
    schedule too. So the update uses the settings that the groups had when its own batch was fed;
    every stage does the same.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, most_behind: int) -> None:
        """``most_behind``: by how many batches an update may come after its own batch."""
        self._optimizer, self._most_behind = optimizer, most_behind
        self._step = optimizer.step
        self._settings: dict[int, list[dict[str, Any]]] = {}

        def step(closure: object = None) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign, assignment]

    def feed(self, batch: int) -> None:
        """Note the groups' settings for a batch of the schedule's run."""
        self._settings[batch] = self._now()
        self._settings.pop(batch - self._most_behind - 1, None)

    def make(self, batch: int) -> None:
        """Make one step, with the settings noted for a batch."""
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
