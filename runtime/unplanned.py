"""Refuse a training that hetflow was not asked to run, before its first update.

Libraries that train (transformers' Trainer, accelerate, Lightning) and scripts for torchrun read
the environment that hetflow gives its workers: RANK, WORLD_SIZE, MASTER_ADDR. So in a launch
they train without an error, but not under the plan: each worker takes whole batches of its own.
Other scripts train once on every worker, side by side.

Nothing here imports torch. A worker whose script does not use it starts at once.
"""

import functools
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..schema.errors import TargetError
from .after_import import after_import

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
