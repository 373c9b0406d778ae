"""Adapt libraries as a script imports them; refuse a training that hetflow was not asked to run.

Libraries that train (transformers' Trainer, accelerate, Lightning) and scripts for torchrun read
the environment that hetflow gives its workers: RANK, WORLD_SIZE, MASTER_ADDR. So in a launch they
train without an error, but not under the plan: each worker takes whole batches of its own. So those
that have an adapter are adapted, and others refused before their first update. Other scripts train
once on every worker, side by side.

Nothing here imports torch. A worker whose script does not use it starts at once.
"""

import functools
import gc
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from ..schema.errors import TargetError

# Call functions when a script imports a module, so that nothing is imported before it is used.


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function once a module is imported; at once if it is, as in a forked process."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after the import of a module."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function, self._is_asking = name, function, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the other finders do, and wrap its loader."""
        if name != self._name or self._is_asking:
            return None
        # ``find_spec`` asks all finders again, and this one must then stand aside.
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False  # a library may only ask whether another is there
        loader = spec.loader if spec is not None else None
        if spec is None or loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._function()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# Adapt a library when a script imports it.

# A library's module -> the adapter that runs once it is imported.
ADAPTED = {
    "torch": ".adapters.ddp",
    "torch.distributed.fsdp": ".adapters.ddp",
    "accelerate": ".adapters.accelerate",
    "datasets.distributed": ".adapters.accelerate",
    "transformers.trainer": ".adapters.transformers",
    "lightning.fabric": ".adapters.lightning",
    "lightning.pytorch": ".adapters.lightning",
    "lightning_fabric": ".adapters.lightning",
    "pytorch_lightning": ".adapters.lightning",
}


def install() -> None:
    """Adapt libraries as the script imports them; call it before the script runs."""
    for name, adapter in ADAPTED.items():
        after_import(name, partial(_adapt, adapter, name))


def _adapt(adapter: str, name: str) -> None:
    import_module(adapter, __package__).adapt(sys.modules[name])


HINT = (
    "call job = hf.prepare(model, optimizer), and train by a loop over job.batches(loader) with "
    "job.backward(function, batch), also in place of a library's trainer: docs/training.md, The "
    "five lines"
)
_LIBRARIES = ("torch", "hetflow")


_trials: list[None] = []
_went_back: list[None] = []  # filled once a backward pass has run


@contextmanager
def on_trial() -> Iterator[None]:
    """Step optimizers of hetflow's own in the body, to see what they do: nobody trains by them."""
    _trials.append(None)
    try:
        yield
    finally:
        _trials.pop()


def has_gone_back() -> bool:
    """Whether a backward pass has run in this worker, since ``Unplanned`` watches it."""
    return bool(_went_back)


def is_on_trial() -> bool:
    """Whether the optimizer that steps is one of hetflow's own."""
    return bool(_trials)


class Unplanned:
    """Watches a worker until its script calls ``hf.prepare``.

    Attributes:
        group_maker: Who made torch's default process group; None where nobody has.
    """

    def __init__(self) -> None:
        self.group_maker: str | None = None

    def watch(self) -> None:
        """Watch for the first update of an optimizer, from when torch is imported."""
        after_import("torch", self._install)

    def _install(self) -> None:
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self._stepping)
        for name in ("backward", "grad"):
            _note_calls(name)
        if not dist.is_available():
            return
        make = dist.init_process_group

        def init_process_group(*arguments: Any, **options: Any) -> Any:
            self.group_maker = self.group_maker or _caller(sys._getframe(1))
            return make(*arguments, **options)

        dist.init_process_group = init_process_group

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        if is_on_trial() or has_prepared():
            return
        if any(
            parameter.grad is not None for g in optimizer.param_groups for parameter in g["params"]
        ):
            raise self._refusal(f"{type(optimizer).__name__} steps, and")

    def check_end(self) -> None:
        """Refuse a script that has ended and has trained without an optimizer of torch's.

        Raises:
            TargetError: It never called ``hf.prepare``, and has run a backward pass.
        """
        if has_gone_back() and not has_prepared():
            raise self._refusal("there are gradients, and")

    def _refusal(self, why: str) -> TargetError:
        number = int(os.environ.get("WORLD_SIZE") or 1)
        batches = _batches()
        if number == 1:
            what = "so it would train without the plan's virtual nodes"
        elif self.group_maker is None:
            what = f"so {number} trainings would run side by side, each on {batches}"
        else:
            what = (
                f"so the {number} workers would train without the plan, in the process group that "
                f"{self.group_maker} made, each on {batches} of its own"
            )
        return TargetError(f"{why} the script has not called hf.prepare, {what}", hint=HINT)


def has_prepared() -> bool:
    """Whether the script has reached ``hf.prepare``."""
    group = sys.modules.get(f"{__package__}.group")
    return group is not None and bool(group.has_joined())


def _batches() -> str:
    """The batches of the script's loaders, for an error. It searches all objects."""
    loaders = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    sizes = {
        size
        for found in gc.get_objects()
        if issubclass(type(found), loaders)
        for holder in (found, getattr(found, "batch_sampler", None))
        if isinstance(size := getattr(holder, "batch_size", None), int)
    }
    return (
        f"whole batches (batch_size {' or '.join(map(str, sorted(sizes)))})"
        if sizes
        else ("whole batches")
    )


def _note_calls(name: str) -> None:
    """Note calls of a function of autograd's, which ``Tensor.backward`` and libraries use."""
    import torch

    original = getattr(torch.autograd, name)

    @functools.wraps(original)
    def noted(*arguments: Any, **options: Any) -> Any:
        if not _went_back:
            _went_back.append(None)
        return original(*arguments, **options)

    setattr(torch.autograd, name, noted)


def _caller(frame: FrameType | None) -> str:
    """The library that called torch, and the line of the script behind it."""
    library, line = "", ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "__main__":
            file = os.path.basename(frame.f_code.co_filename)
            line = f"{file}, line {frame.f_lineno}"
            break
        top = name.partition(".")[0]
        library = library or (top if top not in _LIBRARIES else "")
        frame = frame.f_back
    return f"{library} ({line})" if library and line else library or line or "the script"
