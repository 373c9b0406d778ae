"""Load a checkpoint into the optimizers, the buffers and the registered objects of a job.

The checkpoint's form was checked before (checkpoint.py). Here its contents are checked against the
script's own objects. torch's optimizers and schedulers accept a state without looking at it
closely, and fail steps later, in the script's loop, for example on a moment of another shape.
"""

import copy
import gc
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...devices.backend import backend_of
from ...schema.errors import HetflowError, TargetError
from ...schema.options import option, told
from ..buffers import VirtualNodeBuffers
from ..engine import StateParts
from ..log import log
from ..session import Position, Session
from ..setup import probe_of
from ..unplanned import on_trial
from ..worker import ScriptRun
from .checkpoint import Checkpoint, shape_difference, shapes_of

# The errors that load_state_dict raises for a state of another object, or of none.
_MISFITS = (
    ValueError, KeyError, TypeError, RuntimeError, AttributeError, IndexError, OverflowError,
)  # fmt: skip
_HINT = "give the checkpoint's own script and model, or another {checkpoint} folder"


def check_buffers(
    path: Path, saved: dict[str, Any], own: Mapping[str, Tensor], needed: Collection[str]
) -> None:
    """Refuse buffers of another model."""
    theirs, ours = shapes_of(saved["base"]), shapes_of(own)
    for name in [*ours, *theirs]:
        there, here = theirs.get(name, "absent"), ours.get(name, "absent")
        is_unread = name not in theirs and name not in needed
        if there != here and not is_unread:
            raise TargetError(
                f"{path} is of another model: the buffer {name} is {there} there and {here} here",
                hint=told(_HINT),
            )


def load_parameters(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Load saved values into parameters, in place."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def load_optimizers(
    path: Path,
    optimizers: Sequence[torch.optim.Optimizer],
    loads: Sequence[Callable[[Any], object]],
    saved: Any,
) -> None:
    """Load the optimizers' states, and check that the optimizers can continue with them.

    ``loads`` are [optimizers] functions that load one state each, or a share of it. The saved
    states are from ``setup.state_of``, and the path is for error messages. Without optimizers
    nothing is loaded.

    Raises:
        TargetError: They belong to other optimizers, or to another number of them.
    """
    if not optimizers:
        return
    if saved is None:
        raise _misfit(path, "the optimizer", "it was saved without one")
    states = saved if isinstance(saved, list) else [saved]
    if len(states) != len(optimizers):
        raise TargetError(
            f"{path} holds the state of {len(states)} optimizer(s), the script has "
            f"{len(optimizers)}",
            hint="give hf.prepare the same optimizers in the same order, or another "
            f"{option('checkpoint')} "
            "folder",
        )
    for number, (optimizer, load, state) in enumerate(zip(optimizers, loads, states, strict=True)):
        name = f"optimizer {number + 1}" if len(optimizers) > 1 else "the optimizer"
        if not isinstance(optimizer, torch.optim.Optimizer):  # an object with its methods
            _load(path, name, load, state)
            continue
        before = [_settings(group) for group in optimizer.param_groups]
        _load(path, name, load, state)
        for index, (group, own) in enumerate(zip(optimizer.param_groups, before, strict=True)):
            where = f"{name}'s group {index}"
            for setting, value in own.items():
                if setting in optimizer.defaults and setting not in group:
                    raise _misfit(path, where, f"{setting} is absent")
                group.setdefault(setting, value)  # a setting that a scheduler has added since
            # After the load and not before it: optimizers may convert what older versions saved.
            differs = _difference(own, _settings(group)) or _fault_of_group(optimizer, group)
            if differs:
                raise _misfit(path, where, differs)


def load_registered(path: Path, number: int, thing: Any, saved: Any) -> None:
    """Load the state of an object that the script registered; ``number`` counts from 1.

    The state of torch's own objects must have the same kinds of values as before; other objects
    check their states themselves.

    Raises:
        TargetError: The object cannot take the state.
    """
    name = f"registered object {number} ({type(thing).__name__})"
    if _is_of_torch(thing):
        own = thing.state_dict()
        differs = _difference(own, saved)
        if differs is None and isinstance(thing, LRScheduler):
            differs = _changed_option(own, saved)
        if differs:
            raise _misfit(path, name, differs)
    _load(path, name, thing.load_state_dict, saved)
    fault = _fault_of_scheduler(thing) if isinstance(thing, LRScheduler) else None
    if fault:
        raise _misfit(path, name, fault)


def _fault_of_scheduler(scheduler: LRScheduler) -> str | None:
    """Say why a scheduler with its loaded state could not have made its last step."""
    given = inspect.signature(scheduler.step).parameters.values()
    needs = any(each.default is inspect.Parameter.empty for each in given)  # such as a metric
    if needs or not _is_of_torch(scheduler):
        return None
    # Without parameters, which a copy of the scheduler would copy with their memory.
    groups = [_settings(group) | {"params": []} for group in scheduler.optimizer.param_groups]
    stand_in = SimpleNamespace(param_groups=copy.deepcopy(groups), step=lambda: None)
    try:
        trial = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    except _MISFITS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the order of steps, which the trial sets
            # The last step and not the next one: a schedule that has ended takes no further step.
            _step_back(trial)
            trial.step()
    except (*_MISFITS, ArithmeticError, NameError, AssertionError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _step_back(scheduler: LRScheduler) -> None:
    """Make one step, also of the schedulers inside this one."""
    for part in getattr(scheduler, "_schedulers", ()):
        _step_back(part)
    if hasattr(scheduler, "last_epoch"):
        scheduler.last_epoch -= 1


def _load(path: Path, name: str, load: Callable[[Any], object], saved: Any) -> None:
    try:
        load(saved)
    except HetflowError:
        raise
    except _MISFITS as error:
        said = " ".join(str(error).split())[:200]
        raise _misfit(path, name, f"{type(error).__name__}: {said}") from error


def _misfit(path: Path, name: str, why: str) -> TargetError:
    return TargetError(f"{path}: {name} cannot take its state: {why}", hint=told(_HINT))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_of_torch(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] == "torch"


def _difference(own: Any, saved: Any, where: str = "state") -> str | None:
    """The path of a saved value of another kind than the present one; None where all fit."""
    kind, found = _kind(own), _kind(saved)
    if kind == "nothing" or (kind in ("flag", "str") and found == "nothing"):
        return None  # an option that is None, or may be
    if kind != found and (kind, found) != ("flag", "number"):
        return f"{where} is a {type(saved).__name__} there and a {type(own).__name__} here"
    if kind == "mapping":
        # A scheduler's outermost entries differ between versions of torch, also of inner ones.
        is_outermost = where == "state" or "_schedulers" in where
        if type(own) is dict and not is_outermost and own.keys() != saved.keys():
            return f"{where} has other entries there than here"
    elif isinstance(own, tuple) and len(own) != len(saved):
        return f"{where} has {len(saved)} entries there and {len(own)} here"
    found_there = (
        _difference(here, there, place) for place, here, there in _both(own, saved, where)
    )
    return next(filter(None, found_there), None)


def _both(own: Any, saved: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """The path of each entry that two nests have, with its values; none of what are no nests."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        yield from ((f"{where}.{key}", own[key], saved[key]) for key in own if key in saved)
    elif isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        for number, pair in enumerate(zip(own, saved, strict=False)):
            yield f"{where}[{number}]", *pair


def _changed_option(own: Any, saved: Any, where: str = "state") -> str | None:
    """The path of an option with which a scheduler was made otherwise than the saved one."""
    # A scheduler's flags are options and not progress, and it prepares for them when it is made:
    # OneCycleLR adds to the optimizer's groups what ``cycle_momentum`` needs.
    if _kind(own) == "flag":
        changed = _kind(saved) in ("flag", "number") and bool(saved) != own
        return f"{where} is {bool(saved)} there and {own} here" if changed else None
    if isinstance(own, Mapping):
        own = {k: v for k, v in own.items() if k == "_schedulers" or not str(k).startswith("_")}
    found = (_changed_option(here, there, place) for place, here, there in _both(own, saved, where))
    return next(filter(None, found), None)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return "number"
    if isinstance(value, Mapping):
        return "mapping"
    if isinstance(value, list | tuple):
        return "sequence"
    return type(value).__name__


def _fault_of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """Why one of torch's optimizers cannot continue with a group and its state; None if it can."""
    if group.get("capturable") and any(
        backend_of(parameter.device).is_host for parameter in group["params"]
    ):
        return "capturable is for parameters on an accelerator, and these are on the host"
    # By number of dimensions, on which alone the kind of state depends (Adafactor's): a model has
    # hundreds of parameters, of a few numbers of dimensions.
    expected: dict[int, dict[str, Any] | None] = {}
    for parameter in group["params"] if _is_of_torch(optimizer) else ():
        values = optimizer.state.get(parameter)
        if not values:
            continue
        dimensions = parameter.dim()
        try:
            if dimensions not in expected:
                expected[dimensions] = _state_after_a_step(optimizer, group, dimensions)
        except _MISFITS as error:
            return str(error)
        fault = _fault_of(values, expected[dimensions], parameter)
        if fault:
            return f"{fault}, for a parameter of shape {list(parameter.shape)}"
    return None


def _fault_of(values: Any, expected: dict[str, Any] | None, parameter: Tensor) -> str | None:
    """How a parameter's state differs from one after a step; None where it does not."""
    if expected is None:
        return None
    found = {name for name, value in values.items() if value is not None}
    if found != expected.keys():
        return f"it must hold {', '.join(map(str, expected)) or 'nothing'}"
    trial = _trial_shape(parameter.dim())
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            continue
        saved = values[name]
        if value.numel() == 1 and value.shape != trial:
            is_fit = _kind(saved) == "number"
        else:
            shape = _scaled(value.shape, trial, parameter.shape)
            is_fit = isinstance(saved, Tensor) and (shape is None or saved.shape == shape)
        if not is_fit:
            return f"{name} is of another shape"
    return None


def _scaled(shape: torch.Size, trial: torch.Size, real: torch.Size) -> torch.Size | None:
    """The expected shape of a state for the real parameter; None where the trial's tells none."""
    # Adafactor's factors have some of the parameter's dimensions, and 1 for the others.
    if len(shape) != len(trial) or any(
        own not in (1, to) for own, to in zip(shape, trial, strict=True)
    ):
        return None
    sizes = zip(shape, trial, real, strict=True)
    return torch.Size(1 if own != to else size for own, to, size in sizes)


def _trial_shape(num_dimensions: int) -> torch.Size:
    # Unlike sizes, none of them 1, so that each dimension of a state is known again.
    return torch.Size(range(2, 2 + num_dimensions))


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], num_dimensions: int
) -> dict[str, Any] | None:
    """The state that one of torch's optimizers keeps after a step; ValueError of bad settings."""
    probe, trial = probe_of(type(optimizer), group, _trial_shape(num_dimensions))
    try:
        with on_trial():
            probe.step()
    except (TypeError, RuntimeError):  # it needs a closure, or sparse gradients
        return None
    return {name: value for name, value in probe.state[trial].items() if value is not None}


def unregistered_copy(model: nn.Module, registered: Sequence[object]) -> str | None:
    """The type of a module with parameters like the model's that no checkpoint holds, if any.

    It searches all objects.
    """
    inside = [part for thing in registered for part in getattr(thing, "__dict__", {}).values()]
    held = [part for part in (model, *registered, *inside) if isinstance(part, nn.Module)]
    known = {id(module) for part in held for module in part.modules()}
    own = {id(parameter) for parameter in model.parameters()}
    shapes = [parameter.shape for parameter in model.parameters()]
    if not shapes:
        return None
    # ``type`` and not ``isinstance``, which would ask a proxy or a mock for its class.
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module) or id(found) in known:
            continue
        others = list(found.parameters()) if "_parameters" in found.__dict__ else []
        if [p.shape for p in others] == shapes and own.isdisjoint(map(id, others)):
            return type(found).__name__
    return None


# The progress of a job, and how a worker takes over the state of a checkpoint or of a worker.
#
# The position is the number of the call of ``job.batches``, and the steps done in it. A restarted
# script runs from its top. Epochs that are done give no batches. The first one that is not done
# continues at the position, with the state of that time; changes that the script's own code made on
# the way there are overwritten.


class Progress:
    """The position of one worker's script, and its part of the state.

    Attributes:
        found: The state to resume from; None once the script has reached its position.
    """

    def __init__(self, session: Session, parts: StateParts, buffers: VirtualNodeBuffers) -> None:
        self._session, self._parts, self._buffers = session, parts, buffers
        self._registered: list[Any] = []
        self._length = 0  # samples of the epoch's dataset
        self.found: Checkpoint | None = None

    @property
    def registered(self) -> tuple[Any, ...]:
        """The objects that the script registered, in order."""
        return tuple(self._registered)

    @property
    def is_catching_up(self) -> bool:
        """Whether the script has not yet reached the position of its state."""
        return self.found is not None

    def check(self, found: Checkpoint) -> None:
        """Refuse a checkpoint of another model or of other virtual nodes."""
        check_fits(found, self._parts.describe())
        buffers = self._buffers
        check_buffers(found.path, found.state["buffers"], buffers.all(), buffers.names)

    def go_on_from(self, found: Checkpoint) -> None:
        """Take a state that fits; the script then runs on to the state's position."""
        self.found = found
        self.restore()

    def restore(self) -> None:
        """Restore the state of ``found``."""
        found, session = self.found, self._session
        assert found is not None
        for optimizer in session.optimizers:
            # Else torch's schedulers warn that no step was taken, because epochs were skipped.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._parts.restore(found.path, found.state)
        session.num_steps = found.header["step"]
        position = found.header["position"]
        session.position = Position(position["call"], position["step"], session.num_steps)
        self._length = position["length"]
        for number in range(len(self._registered)):
            self._load_registered(found, number)

    def register(self, thing: Any) -> None:
        """Save and restore an object with ``state_dict`` and ``load_state_dict``."""
        self._registered.append(thing)
        if self.found is not None:
            self._load_registered(self.found, len(self._registered) - 1)

    def _load_registered(self, found: Checkpoint, number: int) -> None:
        saved = found.state["registered"]
        if number >= len(saved):
            raise TargetError(
                f"the script registers object {number + 1}, {found.path} has {len(saved)}",
                hint="register the same objects in the same order, or start with an empty folder",
            )
        load_registered(found.path, number + 1, self._registered[number], saved[number])

    def load_registered(self, states: Sequence[Any]) -> None:
        """Load the states that another worker's registered objects have."""
        for thing, state in zip(self._registered, states, strict=True):
            thing.load_state_dict(state)

    # The script's position

    def first_step(self, call: int, num_steps: int, length: int) -> int:
        """The step at which to start in the epoch of a call of ``job.batches``.

        It is ``num_steps``, those of the epoch, where the epoch is to be skipped. ``length`` counts
        the samples of the dataset.

        Raises:
            TargetError: The dataset's length has changed.
        """
        first = 0
        if self.found is not None:
            position = self.found.header["position"]
            if call < position["call"]:
                ScriptRun.skipped_epochs = True
                return num_steps
            if call == position["call"]:
                self._check_position(self.found, length, num_steps)
                self.restore()
                copy = unregistered_copy(self._session.model, self._registered)
                if copy is not None and self._session.is_main:
                    log.warning(
                        f"a copy of the model ({copy}) is not registered: if it follows the "
                        f"training, as an average of the weights does, this restart began it anew; "
                        f"call job.register(copy)"
                    )
                first = position["step"]
                # Saved after an epoch's last step: nothing of it is left, and a checkpoint before
                # the next step must say so.
                if first == num_steps:
                    self._session.position = Position(call + 1, 0, self._session.num_steps)
            self.found = None
        self._length = length
        return first

    def _check_position(self, found: Checkpoint, length: int, num_steps: int) -> None:
        """Check that the script reached the position of its state in the same way as before."""
        position, name = found.header["position"], found.path.name
        saved = found.state["registered"]
        if position["step"] and position["length"] != length:
            raise TargetError(
                f"the dataset has {length} samples, and had {position['length']} when {name} was "
                f"written in the middle of an epoch",
                hint=f"give the same dataset, or start with an empty {option('checkpoint')} folder",
            )
        if position["step"] > num_steps:
            raise TargetError(
                f"{name} was written after step {position['step']} of an epoch, which has "
                f"{num_steps} here",
                hint=f"give the same loader, or start with an empty {option('checkpoint')} folder",
            )
        if len(saved) > len(self._registered):
            raise TargetError(
                f"the script registers {len(self._registered)} object(s), {found.path} has "
                f"{len(saved)}",
                hint="register the same objects in the same order, or start with an empty folder",
            )

    def header(self) -> dict[str, Any]:
        """The header of the present state: what it belongs to, and its position."""
        session = self._session
        num_steps, (call, step, before) = session.num_steps, session.position
        position = {"call": call, "step": step + int(num_steps > before), "length": self._length}
        names = {id(parameter): name for name, parameter in session.parameters.items()}
        held = [p for o in session.optimizers for g in o.param_groups for p in g["params"]]
        return {
            **session.state_dict_names,
            "optimizer_order": [names[id(parameter)] for parameter in held],
            # A part's own has the whole optimizer's order; the worker's has its stages' parameters.
            **self._parts.describe(),
            "step": num_steps,
            "position": position,
        }


def check_fits(found: Checkpoint, own: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model or of other virtual nodes."""
    theirs = found.header
    differs = None
    if theirs["virtual_nodes"] != own["virtual_nodes"]:
        differs = (
            f"has virtual nodes of {_short(theirs['virtual_nodes'])} samples, this plan has "
            f"{_short(own['virtual_nodes'])}"
        )
    elif theirs["seed"] != own["seed"]:
        differs = f"was made with seed {theirs['seed']}, this run has {own['seed']}"
    elif theirs["parameters"] != own["parameters"]:
        differs = (
            f"is of another model: {shape_difference(theirs['parameters'], own['parameters'])}"
        )
    if differs:
        raise TargetError(
            f"{found.path} {differs}",
            hint="give the checkpoint's own model, plan and seed, or another "
            f"{option('checkpoint')} folder",
        )


def _short(sizes: list[int]) -> str:
    alike = len(set(sizes)) == 1
    return f"{len(sizes)} x {sizes[0]}" if alike else "+".join(str(size) for size in sizes)
