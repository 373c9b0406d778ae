"""Check in each step, by identity, that the trained parameters are those given to ``prepare``.

The gradients of parameters that are added later are not reduced over the workers, so each worker
would train a version of its own.
"""

import gc
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...schema.errors import TargetError
from ..unplanned import is_on_trial

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


# Find optimizers and parameters that train beside the job, unknown to ``prepare``.
#
# An optimizer that ``prepare`` was not given steps the job's parameters equally on all workers, but
# checkpoints and joining workers miss its state. A parameter that the loss depends on and that is
# not the job's gets a different gradient on each worker.

_GIVE_ALL = (
    "give hf.prepare(model, [optimizer, other]) all optimizers, and compute their losses in the "
    "function of job.backward"
)


class OtherOptimizers:
    """Watches the steps of every optimizer of the process.

    Args:
        own: The optimizers given to ``prepare``.
        names: Names of the job's parameters, by ``id``.
        matters: Whether this job's state is ever saved or sent to another worker.
        follow_steps: Whether an own optimizer may step only after ``job.backward``.
        is_launched: Whether there is a plan, so that each worker has gradients of its own samples.

    Attributes:
        has_met_unknown: Whether an optimizer has stepped parameters that are not the job's.
    """

    # A script may prepare several jobs, also with one optimizer.
    _of_jobs: ClassVar["WeakSet[Any]"] = WeakSet()
    _open: ClassVar[list["OtherOptimizers"]] = []

    def __init__(
        self,
        own: tuple[Any, ...],
        names: Mapping[int, str],
        *,
        matters: bool,
        follow_steps: bool,
        is_launched: bool,
    ) -> None:
        self._own, self._names, self._matters = own, names, matters
        self._of_jobs.update(own)
        self._cleared: WeakSet[Any] = WeakSet()
        self.has_met_unknown = False
        self._follow_steps, self._is_launched = follow_steps, is_launched
        # Own optimizers that have used up the gradients of the last ``job.backward``.
        self._spent = set(map(id, own))
        self._open.append(self)
        self._handles = [
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def begin_step(self) -> None:
        """Note a call of ``job.backward``: each optimizer of a job may step after it."""
        for others in self._open:
            others._spent.clear()

    def withhold(self) -> None:
        """Note that gradients are in the making: no own optimizer may step."""
        self._spent.update(map(id, self._own))

    def clear(self, optimizer: object) -> None:
        """Accept an optimizer that is registered with the job, because its state is saved."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._cleared.add(optimizer)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        if self in self._open:
            self._open.remove(self)

    def _stepping(self, optimizer: Any, values: Any, options: Any) -> None:
        for own in self._own:  # as a rule; to ask a WeakSet takes several times as long
            if own is optimizer:
                if _has_closure(values, options):  # which may call ``job.backward``
                    self._spent.add(id(own))
                else:
                    self._spend(own)
                return
        if is_on_trial() or optimizer in self._cleared or optimizer in self._of_jobs:
            return
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ours = [self._names[id(p)] for p in held if id(p) in self._names]
        self.has_met_unknown = self.has_met_unknown or len(ours) < len(held)
        # A wrapper given to ``prepare`` shows its inner optimizer's state as its own.
        is_inner = any(getattr(own, "state", None) is optimizer.state for own in self._own)
        if ours and not is_inner and self._matters:
            more = f" and {len(ours) - 1} more" if len(ours) > 1 else ""
            raise TargetError(
                f"a second optimizer ({type(optimizer).__name__}) steps {ours[0]}{more}, and "
                f"hf.prepare does not know it: its state would be in no checkpoint",
                hint=_GIVE_ALL,
            )
        strange = [p for p in held if id(p) not in self._names and p.grad is not None]
        if strange and self._is_launched:
            raise TargetError(
                f"{type(optimizer).__name__} steps {_name_of(strange[0])} of shape "
                f"{list(strange[0].shape)}, which hf.prepare does not know: each worker would "
                f"train it on its own part of the batch",
                hint=_GIVE_ALL,
            )
        if len(ours) == len(held) or not self._is_launched:
            self._cleared.add(optimizer)

    def _stepped(self, optimizer: Any, values: Any, options: Any) -> None:
        """After a step with a closure: it must have called ``job.backward``."""
        if _has_closure(values, options) and any(own is optimizer for own in self._own):
            self._spend(optimizer)

    def _spend(self, own: Any) -> None:
        """Refuse gradients that ``job.backward`` has not made: each worker would use its own."""
        if id(own) not in self._spent:
            self._spent.add(id(own))
        elif self._follow_steps and any(
            parameter.grad is not None for g in own.param_groups for parameter in g["params"]
        ):
            raise TargetError(
                f"{type(own).__name__} steps, and there was no job.backward since hf.prepare or "
                f"its last step: each worker would train on whole batches of its own, not under "
                f"the plan",
                hint="in the loop: for batch in job.batches(loader), and job.backward(function, "
                "batch) in place of loss.backward(), once before each step",
            )


def _has_closure(values: Any, options: Any) -> bool:
    """Whether ``optimizer.step`` got a closure, by what its hooks get."""
    return any(callable(value) for value in (*values[1:], options.get("closure")))


def check_leaves(
    loss: Any,
    names: Mapping[int, str],
    met: MutableMapping[Tensor, int],
    answered: set[Any] | None = None,
) -> None:
    """Refuse a loss that depends on a parameter which is not the job's.

    A plain tensor that requires a gradient (an input) is accepted, unless an optimizer holds it, or
    an earlier pass depended on it too: the script keeps it then, and may update it by hand. This
    walks autograd's whole graph, so it is too slow for every step.

    Args:
        loss: The result of the script's function.
        names: Names of the job's parameters, by ``id``.
        met: The plain tensors of earlier passes; those of this one are added.
        answered: Nodes of the graph at which to stop; by default none.

    Raises:
        TargetError: Names the parameter, if any module of the process has it.
    """
    for leaf in leaves_of(loss, answered):
        if id(leaf) in names:
            continue
        if isinstance(leaf, nn.Parameter) or leaf in met or _is_optimized(leaf):
            raise TargetError(
                f"the loss depends on {_name_of(leaf)}, of shape {list(leaf.shape)}, which "
                f"hf.prepare does not know: workers would train it apart",
                hint="make it a part of the model, or give hf.prepare the list of all optimizers; "
                "a tensor that nobody trains needs no requires_grad",
            )
        met[leaf] = 1


def leaves_of(value: Any, answered: Collection[Any] | None = None) -> Iterator[Tensor]:
    """The tensors that the graph of a tensor (or several in a list) goes back to.

    Args:
        value: The tensors.
        answered: Nodes of the graph at which to stop; by default none.
    """
    ahead, seen = list(_nodes(value)), set(answered or ())
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        ahead += [source for source, _ in node.next_functions if source is not None]


def _nodes(value: Any) -> Iterator[Any]:
    for entry in value if isinstance(value, tuple | list) else [value]:
        if isinstance(entry, Tensor) and entry.grad_fn is not None:
            yield entry.grad_fn


def _is_optimized(leaf: Tensor) -> bool:
    """Whether some optimizer holds a tensor; it searches all objects, and few losses need it."""
    return any(
        parameter is leaf
        for found in gc.get_objects()
        if issubclass(type(found), torch.optim.Optimizer)
        for group in found.__dict__.get("param_groups", ())
        for parameter in group["params"]
    )


def _name_of(leaf: Tensor) -> str:
    """The parameter's name in a module; it searches all objects, so only errors use it."""
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for name, parameter in found.__dict__.get("_parameters", {}).items():
                if parameter is leaf:
                    return f"the {name} of a {type(found).__name__}"
    return "a parameter" if isinstance(leaf, nn.Parameter) else "a tensor"
