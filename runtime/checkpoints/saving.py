"""Save checkpoints to a disk and stop on request; any mapping of the virtual nodes can resume.

A checkpoint holds the parameters, the optimizers, every virtual node's buffers, the objects that
the script registered, and the position (restoring.py).
"""

import json
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...devices.backend import Mark, backend_of
from ...schema.errors import FileError, HetflowError, TargetError
from ...schema.options import command, option
from ..agreement.agreement import Agreement
from ..buffers import VirtualNodeBuffers
from ..engine import Runner, StepEngine
from ..finish import StopRequests, leave
from ..log import log
from ..protocol import handover
from ..protocol.handover import FOUND
from ..session import Session
from . import checkpoint, parts
from .checkpoint import (
    BrokenCheckpoint,
    Checkpoint,
    IncompleteCheckpoint,
    copy_to_host,
    shape_difference,
    shapes_of,
)
from .restoring import Progress, check_buffers, load_parameters

# Copy tensors to the host while the worker goes on.


class HostCopies:
    """Copy device tensors through pinned memory, in the order of the device's own work.

    Later changes of a tensor do not change its copy. The host does not wait for the device until
    someone reads the copies.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._arrive: list[tuple[torch.device, Mark]] = []

    def take(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the host; its values are valid after ``wait``."""
        if backend_of(tensor.device).is_host:
            return copy_to_host(tensor)
        source = tensor.detach().contiguous()
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copy.copy_(source, non_blocking=True)
        self._devices.add(tensor.device)
        return copy

    def close(self) -> None:
        """Mark the end of the copies. Call it in the thread that called ``take``."""
        self._arrive = [(device, backend_of(device).mark(device)) for device in self._devices]

    def wait(self) -> None:
        """Wait until all copies have arrived; any thread may call it."""
        for device, mark in self._arrive:
            backend_of(device).wait_for(mark)


_NONE = "none"  # stands for a checkpoint's name where there is none to resume from
_REFUSED = "checkpoints refused"


class OpenedFolders:
    """Give each job of a script a folder of its own, because a script may prepare several jobs."""

    jobs = 0


class Checkpoints:
    """The checkpoints of one job.

    Attributes:
        is_asked_for: Whether the user gave a folder, on a disk that all workers see. If not, parts
            go to the launch's own folder when the plan changes, and only then.
    """

    def __init__(
        self,
        session: Session,
        engine: StepEngine,
        progress: Progress,
        runner: Runner,
        agreement: Agreement,
    ) -> None:
        start = session.place.start
        self._session, self._engine, self._progress = session, engine, progress
        self._runner, self._agreement = runner, agreement
        # Under a pipeline each worker keeps a part of the state, so none can stay while others
        # join: all write their parts and leave, and the workers of the next plan go on from these.
        can_hand_over = engine.state.is_in_parts
        self._told = (
            session.place.store if can_hand_over else None
        )  # by keys of protocol/handover.py
        self._is_training = False
        handover_folder = start.handover_folder if can_hand_over else None
        self.is_asked_for = start.checkpoint_folder is not None
        folder = start.checkpoint_folder or handover_folder
        self.has_folder = folder is not None
        self._every = start.checkpoint_every if folder is not None else 0
        self._folder = folder or Path()
        if folder is not None:  # of a script's several jobs, each has a folder of its own
            number, OpenedFolders.jobs = OpenedFolders.jobs, OpenedFolders.jobs + 1
            self._folder = folder / f"job{number}" if number else folder
        self._writing: threading.Thread | None = None
        self._failed: Exception | None = None
        self._unwritten: list[int] = []  # steps whose checkpoints could not be written
        self._broken: set[Path] = set()
        found = self._agree()
        if found is None and can_hand_over and start.follows:
            raise TargetError(
                f"{self._folder}: there is no complete checkpoint to go on from",
                hint="the warnings above say what is wrong with those that are there",
            )
        if found is not None:
            progress.check(found)
            progress.go_on_from(found)
            session.watch.begin(session.num_steps)
            self._say(f"going on from {found.path} (step {session.num_steps})")

        def ask_to_stop() -> None:
            session.wants_stop = True

        asked_by = [signal.SIGTERM] if self.is_asked_for else []
        asked_by += [handover.SIGNAL] if handover_folder is not None else []
        self._stops = StopRequests(asked_by, ask_to_stop)

    def _agree(self) -> Checkpoint | None:
        """Let the first worker choose a checkpoint; the others read the same one."""
        place = self._session.place
        if not self.has_folder or place.is_outside:
            return None
        if place.rank == 0:
            return self._choose()
        assert place.store is not None
        # One worker chooses for all: if each looked by itself, a slow shared disk could show one
        # worker a newer checkpoint than another, and they would go on from unlike steps.
        name = place.store.get(FOUND)
        if name == _NONE:
            return None
        if name == _REFUSED:
            message, _, hint = place.store.get(_REFUSED).partition("\n")
            raise TargetError(message, hint=hint or None)
        try:
            return parts.reader(self._engine.state.wanted)(self._folder / name)
        except BrokenCheckpoint as error:
            raise FileError(
                f"{self._folder / name}: worker {place.rank} cannot read it: {error}",
                hint=f"give a {option('checkpoint')} folder that every worker sees",
            ) from None

    def _choose(self) -> Checkpoint | None:
        store = self._session.place.store
        try:
            found = self._newest()
        except HetflowError as error:
            if store is not None:  # else the others would wait until their time limit
                store.set(_REFUSED, f"{error.message}\n{error.hint or ''}")
                store.set(FOUND, _REFUSED)
            raise
        if store is not None:
            store.set(FOUND, found.path.name if found else _NONE)
        return found

    def _newest(self) -> Checkpoint | None:
        """The checkpoint to resume from; None to start at step 0."""
        folder = self._folder
        checkpoint.tidy(folder)
        if self._session.place.start.from_scratch and self.is_asked_for:
            aside = checkpoint.set_aside(folder)
            if aside is not None:
                self._say(f"starting from scratch; earlier checkpoints are kept in {aside}")
            return None
        found, broken = checkpoint.newest(folder, parts.reader(self._engine.state.wanted))
        lost = {p: e for p, e in broken.items() if not isinstance(e, IncompleteCheckpoint)}
        if found is None and lost:
            raise unusable(folder, lost, can_restart=self.is_asked_for)
        for path, error in broken.items():
            going_on = f"going on from {found.path.name}" if found else "starting at step 0"
            state = "was never complete" if path not in lost else "is broken"
            self._say(f"warning: {path} {state} ({error}); {going_on}")
        # Remembered, so that a broken checkpoint does not count as one of those that are kept: else
        # broken ones would push out the last that is good.
        self._broken = set(broken)
        return found

    def first_step(self, call: int, num_steps: int, length: int) -> int:
        """The step at which to start in an epoch; see ``Progress.first_step``."""
        first = self._progress.first_step(call, num_steps, length)
        if not self._progress.is_catching_up:
            self._tell_training()
        return first

    def _tell_training(self) -> None:
        """Tell the launch that the script has caught up with its state, or has ended."""
        if self._told is not None and not self._is_training:
            self._is_training = True
            self._told.add(handover.TRAINING, 1)

    def boundary(self) -> None:
        """After a complete step with its update: save if it is time, and stop if asked."""
        session = self._session
        if self._engine.all_stop:
            self._stop()
        if self._every and session.num_steps % self._every == 0:
            self.save(wait=False)

    def _stop(self) -> NoReturn:
        """Save and leave. At level ``static``, do not drain where an unstopped run would not."""
        session, folder = self._session, self._folder
        if self._told is not None and session.is_main:
            # When training paused. Only on one host does a plan change, so the launcher has the
            # same clock.
            self._told.set(handover.STOPPED_AT, str(time.monotonic()))
        if session.place.start.determinism == "none" or self._engine.is_drained:
            self.save(wait=True)
            self._say(f"asked to stop; saved {folder}, step {session.num_steps}")
        else:
            self._settle()
            self._say(f"asked to stop; a restart goes on from the newest in {folder}")
        leave(session)

    def save(self, *, wait: bool) -> None:
        """Write a checkpoint, while training goes on; call it on every worker.

        Workers that have diverged end here, so that bad state is not saved.

        With ``wait`` it is on disk afterwards.

        Raises:
            TargetError: A registered object cannot be saved.
            FileError: It could not be written, and ``wait`` is set.
        """
        # First drained and compared, then captured. A pipeline in flight would be saved between two
        # versions; and a state on which workers disagree must not replace a good checkpoint.
        self._engine.drain()
        self._agreement.compare(self._session.num_steps)
        # On every worker, also where another one writes: the shares of states are gathered here.
        state = self._engine.state.capture(self._progress.registered, self._runner.meet)
        if state is None:  # another worker writes it
            self._settle()
            self._failed = None
            return
        header = self._progress.header()
        tensors: list[Tensor] = []
        copies = HostCopies()
        encoded = checkpoint.encode(state, tensors, copy=copies.take)
        # The writer before is waited for only after this state was copied. Two at once would share
        # the disk, and checkpoints would come in another order than their steps.
        copies.close()
        self._settle()
        # A thread suffices: writing and hashing let go of the interpreter's lock. The launch's
        # fence (launcher/request.py) covers it too, because it is this process that holds it.
        work = threading.Thread(target=self._write, args=(header, encoded, tensors, copies))
        self._writing = work
        work.start()
        if wait:
            self._settle()
            if self._failed is not None:
                raise self._failed

    def finish(self) -> None:
        """Save the final state and wait until it is on disk; ``close`` raises if it is not."""
        self._tell_training()
        if not self.is_asked_for:
            return
        # A script that was started again after its last epoch has no step left, but may have
        # changed the model on its way (an evaluation, a warm-up). What was saved is its result.
        found = self._progress.found
        if found is not None:
            self._end_as_saved(found)
        if found is None or self._session.num_steps != found.header["step"]:
            self.save(wait=False)
        self._settle()
        if self._engine.state.is_in_parts:
            self._gather_unwritten()

    def _gather_unwritten(self) -> None:
        """Tell the first worker, whose messages are shown, what the others could not write."""
        session = self._session
        store, world_size = session.place.store, session.place.world_size
        if store is None:
            return
        if not session.is_main:
            told = {"steps": self._unwritten, "failed": self._failed is not None}
            store.set(f"unwritten/{session.rank}", json.dumps(told))
            return
        others = [json.loads(store.get(f"unwritten/{r}")) for r in range(1, world_size)]
        self._unwritten = sorted({*self._unwritten, *(s for told in others for s in told["steps"])})
        last = self._folder / checkpoint.name_of(session.num_steps)
        is_known = self._failed is not None or any(told["failed"] for told in others)
        if not is_known and not parts.is_complete(last):
            self._failed = FileError(
                f"{last}: only some of its {world_size} parts are there",
                hint=f"give a {option('checkpoint')} folder that every worker sees",
            )

    def _end_as_saved(self, found: Checkpoint) -> None:
        """Restore the checkpoint's state if no step was left to do, whatever the script did."""
        if self._runner.is_behind:
            return
        self._progress.restore()
        call, num_calls = found.header["position"]["call"], self._session.num_calls
        if call > num_calls:
            self._say(
                f"warning: {found.path} is of epoch {call}, and the script ends after "
                f"{num_calls}; the state is the checkpoint's"
            )

    def close(self) -> None:
        """End after the job has reported, and restore the earlier signal handlers.

        Raises:
            FileError: The last checkpoint is not on disk.
        """
        if self._unwritten and self._failed is None:
            steps = ", ".join(map(str, self._unwritten))
            self._say(
                f"warning: checkpoints could not be written after step {steps}; the last one is "
                f"on disk"
            )
        self._stops.close()
        if self._failed is not None:
            raise self._failed

    def abandon(self) -> None:
        """Save nothing more; a checkpoint that is being written is completed."""
        self._settle()
        self._stops.close()

    def _write(
        self, header: dict[str, Any], encoded: Any, tensors: list[Tensor], copies: HostCopies
    ) -> None:
        try:
            copies.wait()
            write = parts.write if self._engine.state.is_in_parts else checkpoint.write
            write(self._folder, header, encoded, tensors, self._broken)
            self._failed = None
            self._broken.discard(self._folder / checkpoint.name_of(header["step"]))
        except Exception as error:  # of any kind: the main thread raises it at the end
            self._failed = error
            self._unwritten.append(header["step"])
            log.warning(str(error))

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _say(self, sentence: str) -> None:
        """Tell the user a sentence; only the main worker prints it."""
        if self._session.is_main:
            log.info(sentence)


def unusable(
    folder: Path, broken: Mapping[Path, BrokenCheckpoint], *, can_restart: bool
) -> FileError:
    """The refusal to start at step 0 in a folder whose checkpoints cannot be read."""
    named = "; ".join(f"{path.name}: {error}" for path, error in broken.items())
    again = (
        f"give {option('from_scratch', True)} (HETFLOW_RESTART_FROM_SCRATCH=1) to start at step 0"
    )
    return FileError(
        f"{folder}: none of the checkpoints there can be used ({named})",
        hint=f"put a whole one there, or {again}, which keeps these" if can_restart else None,
    )


# The state of a checkpoint outside of a launch: in a plain model, and as torch's own state dicts.
#
# A checkpoint holds whole parameters under the model's own names, whatever plan wrote it. The model
# that gets them says what a plain state dict needs besides: which parameters are tied, and which
# buffers are saved at all. Where there is no model the checkpoint's header says it.


def load_weights(model: nn.Module, folder: Path | str) -> int:
    """Fill a model with the parameters and buffers of a checkpoint; no launch is needed.

    Afterwards ``model.state_dict()`` is plain, and so is what ``save_pretrained`` and
    ``safetensors.torch.save_model`` write. Virtual nodes' buffers are merged as by
    ``job.sync_buffers()``.

    Args:
        model: The model that was trained, built anew; on any device.
        folder: A ``--checkpoint`` folder, whose newest usable checkpoint is taken, or one
            checkpoint in it.

    Returns:
        The number of steps after which the checkpoint was written.

    Raises:
        FileError: There is no checkpoint, or none can be used; says why.
        TargetError: It is of another model; names the first difference.

    Example:
        >>> from torch import nn
        >>> from hetflow import runtime as hf
        >>> hf.load_weights(nn.Linear(2, 1), "nowhere")
        Traceback (most recent call last):
        hetflow.schema.errors.FileError: nowhere: there is no checkpoint...
    """
    found = _read(Path(folder))
    parameters = dict(model.named_parameters())
    theirs, own = found.header["parameters"], shapes_of(parameters)
    # A checkpoint of masters is loaded into the weights that run.
    on_meta = {name: parameter.detach().to("meta") for name, parameter in parameters.items()}
    wide = {name: p.float() if p.dtype.itemsize == 2 else p for name, p in on_meta.items()}
    if theirs not in (own, shapes_of(wide)):
        raise TargetError(
            f"{found.path} is of another model: {shape_difference(theirs, own)}",
            hint="build the model that was trained",
        )
    _fill_buffers(model, found)
    load_parameters(parameters, found.state["parameters"])
    steps: int = found.header["step"]
    return steps


def _fill_buffers(model: nn.Module, found: Checkpoint) -> None:
    """Fill a model's buffers with the virtual nodes' together."""
    sizes, state = found.header["virtual_nodes"], found.state["buffers"]
    nodes = state["nodes"] or [{} for _ in sizes]
    buffers = VirtualNodeBuffers(model, range(len(nodes)), sizes)
    check_buffers(found.path, state, buffers.all(), buffers.names)
    buffers.restore({**state, "nodes": nodes})
    buffers.install(buffers.merged(None))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The parameters and saved buffers of a checkpoint, each once, under the model's names.

    Returns:
        Views of the checkpoint's files, which nothing may write to; merged buffers are copies.

    Raises:
        FileError: As ``load_weights``; or there are parameters that are not the model's.
    """
    return _weights_of(_read(folder, is_mapped=True))


def state_dicts_of(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint under the keys of ``torch.distributed.checkpoint.state_dict``.

    Returns:
        ``model`` and ``optim`` as ``get_state_dict(model, optimizers)`` has them, the settings of
        ``optim`` also as with ``flatten_optimizer_state_dict``; ``registered``, the state dicts of
        what the script registered, in order; ``step``. Tensors are as those of ``weights_of``.

    Raises:
        FileError: As ``weights_of``; or nothing says which parameters an optimizer's states are of.
    """
    found = _read(folder, is_mapped=True)
    model, tied = _weights_of(found), found.header.get("tied", {})
    whole = {**found.state["parameters"], **found.state["buffers"]["base"]}
    absent = next((name for name in tied.values() if name not in whole), None)
    if absent is not None:
        raise FileError(f"{found.path}: is no usable checkpoint: header.tied names {absent[:80]}")
    model |= {_key(name): model.get(_key(of), whole[of]) for name, of in tied.items()}
    saved = found.state["optimizer"]
    several = saved if isinstance(saved, list) else [] if saved is None else [saved]
    held = [
        number for one in several for group in one["param_groups"] for number in group["params"]
    ]
    order = found.header.get("optimizer_order", ())
    if len(held) != len(order) or any(
        isinstance(key, str) for one in several for key in one["state"]
    ):
        raise FileError(
            f"{found.path}: does not say which parameters the states of its optimizer are of",
            hint="hetflow 0.1.0 wrote it? Then train a step from it; or write the weights alone",
        )
    states, groups, names = dict[str, Any](), list[dict[str, Any]](), iter(map(_key, order))
    for one in several:
        own = [next(names) for group in one["param_groups"] for _ in group["params"]]
        states |= {own[number]: state for number, state in one["state"].items()}
        groups += [{**g, "params": [own[n] for n in g["params"]]} for g in one["param_groups"]]
    optim = {"state": states, "param_groups": groups} if several else {}
    return {
        "model": model,
        "optim": optim,
        "registered": found.state["registered"],
        "step": found.header["step"],
    }


def _weights_of(found: Checkpoint) -> dict[str, Tensor]:
    header, state, holder = found.header, found.state, nn.Module()
    beside = next((name for name in header["parameters"] if _BESIDE.match(name)), None)
    if beside is not None:
        raise FileError(
            f"{found.path}: the optimizer holds parameters that are not the model's ({beside})",
            hint="put them into the model: no state dict of a model has others",
        )
    # A holder, because virtual nodes' buffers are merged in a model, whatever its modules are.
    holder._buffers.update({name: b.clone() for name, b in state["buffers"]["base"].items()})
    _fill_buffers(holder, found)
    unsaved, values = set(header.get("unsaved", ())), {**state["parameters"], **holder._buffers}
    return {_key(name): value for name, value in values.items() if name not in unsaved}


def _key(name: str) -> str:
    """A parameter's name without what wrappers of modules add, as torch's state dicts have it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


_BESIDE = re.compile(r"optimizers?(\[\d+\])?\.param_groups\[")  # as of setup.named_parameters


def _read(folder: Path, *, is_mapped: bool = False) -> Checkpoint:
    """The checkpoint, or the newest usable one of a folder of them."""
    read = parts.reader(is_mapped=is_mapped)
    if not checkpoint.found(folder) and folder.is_dir() and any(folder.iterdir()):
        try:
            return read(folder)
        except BrokenCheckpoint as error:
            raise FileError(f"{folder}: is no usable checkpoint: {error}") from None
    found, broken = checkpoint.newest(folder, read)
    if found is not None:
        return found
    if broken:
        raise unusable(folder, broken, can_restart=False)
    raise FileError(
        f"{folder}: there is no checkpoint",
        hint=f"give the folder of {command('launch', checkpoint=None)}",
    )
