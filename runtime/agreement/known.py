"""Check in each step, by identity, that the trained parameters are those given to ``prepare``.

The gradients of parameters that are added later are not reduced over the workers, so each worker
would train a version of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...schema.errors import TargetError

_BEFORE = "build the whole model and its optimizer before hf.prepare"


class KnownParameters:
    """The parameters of a job, and where the script holds them.

    Args:
        model: The script's model.
        optimizers: The script's optimizers.
        parameters: All parameters that are synchronised, by name.
        keeps_groups: Whether the optimizers' groups must stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        parameters: Mapping[str, nn.Parameter],
        *,
        keeps_groups: bool,
    ) -> None:
        self._model, self._optimizers, self._parameters = model, optimizers, parameters
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self._watch()
        self._groups = self._group_sizes() if keeps_groups else None
        self._seen: list[int] = []
        self.check()

    def check(self) -> None:
        """Compare identities with those seen before; look closer only where they have changed.

        Raises:
            TargetError: There is a parameter that ``prepare`` did not see.
        """
        now = self._identities()
        if now == self._seen:
            return
        self._check_model()
        self._check_optimizers()
        self._watch()
        self._seen = self._identities()

    def _watch(self) -> None:
        """Note where modules hold their parts.

        The modules are kept alive, so that no later one can get the id of one of these. Their dicts
        are kept too: to reach them through the modules takes twice as long in every step.
        """
        self._modules = list(self._model.modules())
        parts = [(module._modules, module._parameters) for module in self._modules]
        self._held: list[dict[str, Any]] = [held for pair in parts for held in pair]

    def look_closer(self) -> None:
        """Like ``check``, also where modules hold their parts in other dicts than before.

        Raises:
            TargetError: There is a parameter that ``prepare`` did not see.
        """
        self._watch()
        self.check()

    def _identities(self) -> list[int]:
        found: list[int] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found += map(id, group["params"])
                found.append(0)
        for held in self._held:
            if held:
                found += map(id, held.values())
        return found

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for o in self._optimizers for group in o.param_groups]

    def _check_model(self) -> None:
        new = {n: p for n, p in self._model.named_parameters() if id(p) not in self.names}
        if not new:
            return
        name = next(iter(new))
        more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        if name not in self._parameters:
            raise TargetError(
                f"parameter {name}{more} was added to the model after hf.prepare, so workers "
                f"would train it apart",
                hint=_BEFORE,
            )
        old = self._parameters[name]
        stale = any(p is old for o in self._optimizers for g in o.param_groups for p in g["params"])
        left = ", and the optimizer still holds the old one" if stale else ""
        raise TargetError(
            f"parameter {name}{more} was replaced after hf.prepare, so workers would train it "
            f"apart{left}",
            hint=_BEFORE,
        )

    def _check_optimizers(self) -> None:
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in self.names:
                        kind, shape = type(optimizer).__name__, list(parameter.shape)
                        raise TargetError(
                            f"parameter {index} of group {number} of the {kind}, of shape {shape}, "
                            f"was added after hf.prepare, so workers would train it apart",
                            hint=_BEFORE,
                        )
        if self._groups is not None and self._groups != self._group_sizes():
            raise TargetError(
                "the optimizer's groups of parameters have changed, and a pipeline has shared "
                "them out in hf.prepare",
                hint="give the optimizer all its groups before; freeze with requires_grad",
            )

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that do not require a gradient now."""
        return [name for name, p in self._parameters.items() if not p.requires_grad]

    def unheld(self) -> list[str]:
        """Names of the parameters that no optimizer of the job holds."""
        held = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        return [name for name, p in self._parameters.items() if id(p) not in held]

    def first_of_groups(self) -> list[str]:
        """[groups] name of the first parameter of each group of the optimizers, in order."""
        return [
            next((self.names[id(p)] for p in group["params"]), "no parameter")
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
