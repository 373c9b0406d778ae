"""What a job saves and how it goes on: on any mapping of the same virtual nodes.

Saved are parameters, optimizer, every virtual node's buffers, what the script registered, and the
position: which call of ``job.batches``, how many of its steps. A script that is started again
runs from its top; epochs that are done give no batches, and the first that is not goes on where
it was, with the state as it was then (whatever the script's own code did on the way there).
"""

import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..protocol.handover import FOUND, STOPPED_EXIT_CODE
from ..schema.errors import FileError, HetflowError, TargetError
from . import checkpoint, parts
from .checkpoint import Checkpoint
from .group import complete
from .manifest import BrokenCheckpoint, IncompleteCheckpoint, shape_text
from .optimizers import state_of
from .restoring import check_buffers, load_optimizers, load_registered
from .stopping import StopRequests
from .telling import log

if TYPE_CHECKING:
    from .job import Job


_NONE = "none"  # what workers go on from, where there is no checkpoint
_REFUSED = "checkpoints refused"


class _Opened:
    """A script may prepare several jobs: each has a folder of its own."""

    jobs = 0


class Checkpoints:
    """The checkpoints of one job.

    Args:
        job: The job; its model and optimizer are in place.
        folder: Where checkpoints are; on a disk that all workers see. None keeps the position
            only, for workers that come while the others train.
        every: Steps between checkpoints that come by themselves; 0 means none.
    """

    def __init__(self, job: "Job", folder: Path | None, every: int) -> None:
        number, _Opened.jobs = _Opened.jobs, _Opened.jobs + 1
        self._job, self.has_folder = job, folder is not None
        self._every = every if folder is not None else 0
        folder = folder or Path()
        self._folder = folder / f"job{number}" if number else folder
        self._registered: list[Any] = []
        self._call, self._step, self._steps_before, self._length = 0, 0, 0, 0
        self._writing: threading.Thread | None = None
        self._failed: Exception | None = None
        self._unwritten: list[int] = []  # steps whose checkpoints could not be written
        self._broken: set[Path] = set()
        self._found = self._agree()
        if self._found is not None:
            check_fits(self._found, self._describe())
            self._check_buffers(self._found)
            self._restore()
            say(job, f"going on from {self._found.path} (step {job.num_steps})")
        self._stops = StopRequests(self._signals() if self.has_folder else [], self._ask_to_stop)

    def _agree(self) -> Checkpoint | None:
        """The first worker chooses; the others read the same one."""
        place = self._job._place
        if not self.has_folder or place.is_outside:
            return None
        if place.rank == 0:
            return self._choose()
        assert place.store is not None
        name = place.store.get(FOUND)
        if name == _NONE:
            return None
        if name == _REFUSED:
            message, _, hint = place.store.get(_REFUSED).partition("\n")
            raise TargetError(message, hint=hint or None)
        try:
            return self._reader()(self._folder / name)
        except BrokenCheckpoint as error:
            raise FileError(
                f"{self._folder / name}: worker {place.rank} cannot read it: {error}",
                hint="give a --checkpoint folder that every worker sees",
            ) from None

    def _choose(self) -> Checkpoint | None:
        store = self._job._place.store
        try:
            found = self._newest()
        except HetflowError as error:
            if store is not None:  # else the others wait until their time limit
                store.set(_REFUSED, f"{error.message}\n{error.hint or ''}")
                store.set(FOUND, _REFUSED)
            raise
        if store is not None:
            store.set(FOUND, found.path.name if found else _NONE)
        return found

    def _newest(self) -> Checkpoint | None:
        """What to go on from; None to start at step 0.

        Raises:
            FileError: There are checkpoints, and none is of use.
        """
        job, folder = self._job, self._folder
        checkpoint.tidy(folder)
        if job._place.start.from_scratch and self.is_asked_for:
            aside = checkpoint.set_aside(folder)
            if aside is not None:
                say(job, f"starting from scratch; earlier checkpoints are kept in {aside}")
            return None
        found, broken = checkpoint.newest(folder, self._reader())
        lost = {p: e for p, e in broken.items() if not isinstance(e, IncompleteCheckpoint)}
        if found is None and lost:
            raise unusable(folder, lost, can_restart=self.is_asked_for)
        for path, error in broken.items():
            going_on = f"going on from {found.path.name}" if found else "starting at step 0"
            state = "was never complete" if path not in lost else "is broken"
            say(job, f"warning: {path} {state} ({error}); {going_on}")
        self._broken = set(broken)
        return found

    def _check_buffers(self, found: Checkpoint) -> None:
        slots = self._job._buffers.slots
        own = {slot.name: slot.base for slot in slots} or dict(self._job._model.named_buffers())
        check_buffers(found.path, found.state["buffers"], own)

    @property
    def is_asked_for(self) -> bool:
        """Whether the user gave the folder."""
        return self.has_folder

    def _signals(self) -> list[signal.Signals]:
        """By which all workers are asked to save and leave."""
        return [signal.SIGTERM]

    @property
    def is_catching_up(self) -> bool:
        """Whether the script has not come to where its state is from."""
        return self._found is not None

    def go_on_from(self, found: Checkpoint) -> None:
        """Take another worker's state; the script runs on to its position.

        Raises:
            TargetError: It is of another model.
        """
        check_fits(found, self._describe())
        self._found = found
        self._restore()

    def register(self, thing: Any) -> None:
        """Save and restore an object with ``state_dict`` and ``load_state_dict``."""
        self._registered.append(thing)
        if self._found is not None:
            self._load_registered(len(self._registered) - 1)

    def first_step(self, call: int, num_steps: int, length: int) -> int:
        """Where to start in the epoch of a call of ``job.batches``; ``num_steps`` to leave it out.

        Raises:
            TargetError: The dataset's length is not what it was.
        """
        first = 0
        if self._found is not None:
            position = self._found.header["position"]
            if call < position["call"]:
                return num_steps
            if call == position["call"]:
                self._check_position(position, length, num_steps)
                self._restore()
                first = position["step"]
                if first == num_steps:
                    self.epoch_done(call)
            self._found = None
        self._length = length
        return first

    def _check_position(self, position: dict[str, int], length: int, num_steps: int) -> None:
        """The script has come to where its state is from; does it stand there as it stood?"""
        assert self._found is not None
        name, saved = self._found.path.name, self._found.state["registered"]
        if position["step"] and position["length"] != length:
            raise TargetError(
                f"the dataset has {length} samples, and had {position['length']} when {name} was "
                f"written in the middle of an epoch",
                hint="give the same dataset, or start with an empty --checkpoint folder",
            )
        if position["step"] > num_steps:
            raise TargetError(
                f"{name} was written after step {position['step']} of an epoch, which has "
                f"{num_steps} here",
                hint="give the same loader, or start with an empty --checkpoint folder",
            )
        if len(saved) > len(self._registered):
            raise TargetError(
                f"the script registers {len(self._registered)} object(s), {self._found.path} has "
                f"{len(saved)}",
                hint="register the same objects in the same order, or start with an empty folder",
            )

    def entered(self, call: int, step: int) -> None:
        """The script has a batch now."""
        self._call, self._step, self._steps_before = call, step, self._job.num_steps

    def boundary(self, call: int, step: int) -> None:
        """A step is complete, with the optimizer's part. Saves if it is time; stops if asked."""
        self.entered(call, step)
        if self.has_folder and self._job._totals.all_stop:
            self.save(wait=True)
            say(self._job, f"asked to stop; saved {self._folder}, step {self._job.num_steps}")
            self.leave()
        if self._every and self._job.num_steps % self._every == 0:
            self.save(wait=False)

    def leave(self) -> NoReturn:
        """Stop, as asked, after the script's own handlers of the signal have had their turn."""
        complete(self._job._place.device)
        self._job._finished = True  # nothing more is to be done when the interpreter ends
        self._stops.pass_on()
        sys.exit(STOPPED_EXIT_CODE)

    def epoch_done(self, call: int) -> None:
        """The epoch gave all its batches."""
        self.entered(call + 1, 0)

    def save(self, *, wait: bool) -> None:
        """Write a checkpoint; call it on every worker. The first one writes, beside training.

        Workers that have diverged end here, so that what they hold is not kept.

        Raises:
            TargetError: Something registered cannot be saved.
            FileError: It could not be written, where ``wait`` is set.
        """
        self._job.compare()
        state = self._state()
        if state is None:  # it is another worker's to write, also what this one could not
            self._settle()
            self._failed = None
            return
        header = self._header()
        tensors: list[Tensor] = []
        encoded = checkpoint.encode(state, tensors)
        self._settle()
        work = threading.Thread(target=self._write, args=(header, encoded, tensors))
        self._writing = work
        work.start()
        if wait:
            self._settle()
            if self._failed is not None:
                raise self._failed

    def _header(self) -> dict[str, Any]:
        """What is saved, and where it stands."""
        done = int(self._job.num_steps > self._steps_before)
        position = {"call": self._call, "step": self._step + done, "length": self._length}
        return {**self._describe(), "step": self._job.num_steps, "position": position}

    def describe(self, buffers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Header and state as they are now, with all virtual nodes' buffers."""
        return self._header(), self._with(buffers)

    def finish(self) -> None:
        """Keep the final state, and wait until it is on disk; ``close`` says where it is not."""
        if not self.has_folder:
            return
        self._end_as_saved()
        if self._found is None or self._job.num_steps != self._found.header["step"]:
            self.save(wait=False)
        self._settle()

    def _end_as_saved(self) -> None:
        """Where nothing was left to do, the end is the checkpoint's, whatever the script did."""
        job = self._job
        if self._found is None or (job._member is not None and job._member.is_behind):
            return
        self._restore()
        call = self._found.header["position"]["call"]
        if call > job._calls:
            say(
                job,
                f"warning: {self._found.path} is of epoch {call}, and the script ends after "
                f"{job._calls}; the state is the checkpoint's",
            )

    def close(self) -> None:
        """The job is over and has reported: signals go where they went before it.

        Raises:
            FileError: The last checkpoint is not on disk.
        """
        if self._unwritten and self._failed is None:
            steps = ", ".join(map(str, self._unwritten))
            say(
                self._job,
                f"warning: checkpoints could not be written after step {steps}; the last one is "
                f"on disk",
            )
        self._stops.close()
        if self._failed is not None:
            raise self._failed

    def _describe(self) -> dict[str, Any]:
        """What must be the same where a run goes on; see ``check_fits``."""
        job = self._job
        return {
            "virtual_nodes": list(job._batch_sizes),
            "seed": job._seed,
            "parameters": shapes_of(job._parameters),
        }

    def _reader(self) -> Callable[[Path], Checkpoint]:
        """Reads one checkpoint."""
        return parts.reader()

    def _state(self) -> dict[str, Any] | None:
        """What to write; called on every worker. None on a worker that does not write."""
        job = self._job
        buffers = job._meeting(
            lambda: job._buffers.capture(job._place_of_nodes, job._place.distributed)
        )
        return self._with(buffers) if job.is_main else None

    def _with(self, buffers: dict[str, Any]) -> dict[str, Any]:
        job = self._job
        return {
            "parameters": dict(job._parameters),
            "optimizer": state_of(job._optimizers),
            "buffers": buffers,
            "registered": [thing.state_dict() for thing in self._registered],
            "last_weight": job._totals.last_weight,
        }

    def _put(self, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> None:
        """Write to the disk."""
        checkpoint.write(self._folder, header, encoded, tensors, self._broken)

    def _write(self, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> None:
        try:
            self._put(header, encoded, tensors)
            self._failed = None
            self._broken.discard(self._folder / checkpoint.name_of(header["step"]))
        except Exception as error:  # whatever it is: the main thread raises it at the end
            self._failed = error
            self._unwritten.append(header["step"])
            log.warning(str(error))

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _restore(self) -> None:
        assert self._found is not None
        self._restore_trained(self._found.state)
        self._restore_rest(self._found.state)

    def _restore_trained(self, state: dict[str, Any]) -> None:
        job = self._job
        with torch.no_grad():
            for name, parameter in job._parameters.items():
                parameter.copy_(state["parameters"][name])
        self._load_optimizers([o.load_state_dict for o in job._optimizers], state["optimizer"])

    def _load_optimizers(self, loads: Sequence[Callable[[Any], object]], saved: Any) -> None:
        path = self._found.path if self._found is not None else Path("the running job")
        load_optimizers(path, self._job._optimizers, loads, saved)

    def adopt(self, state: dict[str, Any]) -> None:
        """Take another worker's parameters, optimizer and what is registered, as they are now."""
        self._restore_trained(state)
        for thing, saved in zip(self._registered, state["registered"], strict=True):
            thing.load_state_dict(saved)

    def _restore_rest(self, state: dict[str, Any]) -> None:
        """All but parameters and optimizer, of which a worker may hold a part only."""
        assert self._found is not None
        job = self._job
        for optimizer in job._optimizers:
            # Else torch's schedulers warn that no step was taken, in epochs that are left out.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        job._buffers.restore(state["buffers"])
        if job._member is not None:
            job._member.mirror.reset(state["buffers"])
        job._totals.last_weight = state["last_weight"]
        job.num_steps = self._found.header["step"]
        position = self._found.header["position"]
        self.entered(position["call"], position["step"])
        self._length = position["length"]
        for number in range(len(self._registered)):
            self._load_registered(number)

    def _load_registered(self, number: int) -> None:
        assert self._found is not None
        saved = self._found.state["registered"]
        if number >= len(saved):
            raise TargetError(
                f"the script registers object {number + 1}, {self._found.path} has {len(saved)}",
                hint="register the same objects in the same order, or start with an empty folder",
            )
        load_registered(self._found.path, number + 1, self._registered[number], saved[number])

    def _ask_to_stop(self) -> None:
        self._job._totals.wants_stop = True


def unusable(
    folder: Path, broken: Mapping[Path, BrokenCheckpoint], *, can_restart: bool
) -> FileError:
    """The refusal to start at step 0 beside checkpoints that cannot be read."""
    named = "; ".join(f"{path.name}: {error}" for path, error in broken.items())
    again = "give --restart-from-scratch (HETFLOW_RESTART_FROM_SCRATCH=1) to start at step 0"
    return FileError(
        f"{folder}: none of the checkpoints there can be used ({named})",
        hint=f"put a whole one there, or {again}, which keeps these" if can_restart else None,
    )


def check_fits(found: Checkpoint, own: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model or of other virtual nodes; say what differs.

    Raises:
        TargetError: In one line, the first difference.
    """
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
        differs = f"is of another model: {_difference(theirs['parameters'], own['parameters'])}"
    if differs:
        raise TargetError(
            f"{found.path} {differs}",
            hint="give the checkpoint's own model, plan and seed, or another --checkpoint folder",
        )


def _difference(theirs: dict[str, str], own: dict[str, str]) -> str:
    for name in [*own, *theirs]:
        if theirs.get(name) != own.get(name):
            return (
                f"{name} is {theirs.get(name, 'absent')} there and {own.get(name, 'absent')} here"
            )
    return "the parameters stand in another order"


def _short(sizes: list[int]) -> str:
    alike = len(set(sizes)) == 1
    return f"{len(sizes)} x {sizes[0]}" if alike else "+".join(str(size) for size in sizes)


def shapes_of(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """What parameters a model has, for people and for comparison."""
    return {name: shape_text(value) for name, value in parameters.items()}


def say(job: "Job", sentence: str) -> None:
    """Tell the user, once."""
    if job.is_main:
        log.info(sentence)
