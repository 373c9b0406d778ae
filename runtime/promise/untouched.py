"""Call a script's function without lasting effects, as far as Python can see them.

What the function can reach is looked at before the call and put back afterwards: variables
that it shares with its surroundings, lists, dicts and counters in them, and plain objects. So are
modules with their buffers and modes, and generators of random numbers. Files and prints are not.
"""

import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..buffers import buffers_apart

Undo = Callable[[], object]
_MOST_THINGS = 20_000
_MOST_ENTRIES = 1_000  # of one container that are looked into
_MOST_BYTES = 1 << 20  # of a tensor
_CONTAINERS = (list, dict, set, deque)
_LEFT_ALONE = (
    type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex, bool,
    type(None), Dataset, DataLoader, torch.optim.Optimizer, torch.dtype, torch.device,
)  # fmt: skip
_FOREIGN = (
    "torch", "numpy", "builtins", "logging", "unittest", "pytest", "_pytest",
    "threading", "queue", "multiprocessing", "concurrent", "asyncio", "weakref",
)  # fmt: skip
_OURS = __name__.rsplit(".", 2)[0]  # the runtime
_MISSING = object()


class Untouched:
    """What a function can reach, and how to put it back."""

    def __init__(self, function: Any, model: nn.Module) -> None:
        self._undo: list[Undo] = []
        self._streams: list[Undo] = []  # generators of random numbers
        self._modules: list[nn.Module] = []
        self._seen: dict[int, Any] = {}  # holds what was met, so that no identity is used again
        self._ahead: list[Any] = [function, model]
        while self._ahead and len(self._seen) < _MOST_THINGS:
            self._meet(self._ahead.pop())

    @contextmanager
    def calling(self, *, training: bool, leaves: bool = False) -> Iterator[None]:
        """Call the function in the body, with all its modules in one mode.

        Args:
            training: Whether modules that train do so in the body.
            leaves: Leave what the body writes to the next call, if it ends well; random streams
                and buffers are put back nevertheless.
        """
        modes = [(module, module.training) for module in self._modules]
        with buffers_apart(self._modules):
            for module in self._modules:
                # Not by ``eval()``: some modules merge weights there.
                module.training = module.training and training
            is_done = False
            try:
                yield
                is_done = True
            finally:
                for undo in self._streams if leaves and is_done else [*self._undo, *self._streams]:
                    undo()
                for module, mode in modes:
                    module.training = mode

    def _meet(self, thing: Any) -> None:
        if isinstance(thing, _LEFT_ALONE) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            self._meet_tensor(thing)
        elif isinstance(thing, nn.Module):
            self._modules.append(thing)
            self._meet_attributes(thing)
        elif isinstance(thing, _CONTAINERS):
            self._meet_container(thing)
        elif isinstance(thing, tuple):
            self._ahead += thing[:_MOST_ENTRIES]
        elif isinstance(thing, partial):
            self._ahead += [thing.func, thing.args, thing.keywords]
        elif isinstance(thing, types.MethodType):
            self._ahead += [thing.__func__, thing.__self__]
        elif isinstance(thing, types.FunctionType):
            self._meet_function(thing)
        elif isinstance(thing, torch.Generator):
            state = thing.get_state()
            self._streams.append(partial(thing.set_state, state))
        elif isinstance(thing, np.random.Generator):
            numbers, held = thing.bit_generator.state, thing.bit_generator
            self._streams.append(lambda: setattr(held, "state", numbers))
        elif isinstance(thing, random.Random):
            python = thing.getstate()
            self._streams.append(lambda: thing.setstate(python))
        elif hasattr(thing, "__dict__") and not _is_foreign(type(thing).__module__):
            self._meet_attributes(thing)

    def _meet_tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or tensor.is_inference():
            return
        if tensor.numel() * tensor.element_size() > _MOST_BYTES:
            return
        value = tensor.detach().clone()

        def undo() -> None:
            if not torch.equal(tensor.detach(), value):
                with torch.no_grad():
                    tensor.copy_(value)

        self._undo.append(undo)

    def _meet_container(self, container: Any) -> None:
        kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
        before: Any = kind(container)

        def undo() -> None:
            if _is_as_before(container, before):
                return
            container.clear()
            if isinstance(container, dict):
                dict.update(container, before)
            elif isinstance(container, set):
                container.update(before)
            else:
                container.extend(before)

        self._undo.append(undo)
        if len(before) <= _MOST_ENTRIES:
            self._ahead += before.values() if isinstance(before, dict) else before

    def _meet_attributes(self, thing: Any) -> None:
        held = vars(thing)
        before = dict(held)

        def undo() -> None:
            for name in [name for name in held if name not in before]:
                del held[name]
            for name, value in before.items():
                if held.get(name, _MISSING) is not value:
                    held[name] = value

        self._undo.append(undo)
        is_module = isinstance(thing, nn.Module)
        own = ("_parameters", "_buffers")  # kept apart: by ``calling``, or not written by a call
        self._ahead += [v for name, v in before.items() if not (is_module and name in own)]

    def _meet_function(self, function: types.FunctionType) -> None:
        if _is_foreign(function.__module__):
            return
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                value = cell.cell_contents
                self._undo.append(partial(setattr, cell, "cell_contents", value))
                self._ahead.append(value)
        names, outside = _names_in(function.__code__), function.__globals__
        for name in names & outside.keys():
            value = outside[name]

            def undo(name: str = name, value: Any = value) -> None:
                if outside.get(name, _MISSING) is not value:
                    outside[name] = value

            self._undo.append(undo)
            self._ahead.append(value)
        self._ahead += [function.__defaults__, function.__kwdefaults__, vars(function)]


def _is_as_before(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return bool(container == before)
    one, other = container, before
    if isinstance(container, dict):
        if any(a is not b for a, b in zip(container.keys(), before.keys(), strict=True)):
            return False
        one, other = container.values(), before.values()
    return all(a is b for a, b in zip(one, other, strict=True))


def _names_in(code: types.CodeType) -> set[str]:
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_foreign(module: Any) -> bool:
    if not isinstance(module, str):
        return False
    return module.split(".")[0] in _FOREIGN or module.startswith(f"{_OURS}.")
