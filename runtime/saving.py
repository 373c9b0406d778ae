"""What a job saves and how it goes on: on any mapping of the same virtual nodes.

Saved are parameters, optimizer, every virtual node's buffers, what the script registered, and the
position: which call of ``job.batches``, how many of its steps. A script that is started again
runs from its top; epochs that are done give no batches, and the first that is not goes on where
it was, with the state as it was then (whatever the script's own code did on the way there).
"""

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..schema.errors import FileError, TargetError
from . import checkpoint, parts
from .checkpoint import Checkpoint
from .handover import STOPPED_EXIT_CODE
from .optimizers import load_state, state_of

if TYPE_CHECKING:
    from .job import Job


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
        self._failed: FileError | None = None
        self._found = self._agree()
        if self._found is not None:
            check_fits(self._found, self._describe())
            self._restore()
            say(job, f"going on from {self._found.path} (step {job.num_steps})")
        if self.has_folder and threading.current_thread() is threading.main_thread():
            for number in self._signals():
                signal.signal(number, self._asked_to_stop)

    def _agree(self) -> Checkpoint | None:
        """The first worker chooses; the others read the same one."""
        place = self._job._place
        if not self.has_folder or place.is_outside:
            return None
        if place.rank == 0:
            checkpoint.tidy(self._folder)
            found, broken = checkpoint.newest(self._folder, self._reader())
            for sentence in broken:
                say(self._job, f"warning: {sentence}")
            if place.store is not None:
                place.store.set("checkpoint", found.path.name if found else "none")
            return found
        assert place.store is not None
        name = place.store.get("checkpoint")
        if name == "none":
            return None
        try:
            return self._reader()(self._folder / name)
        except checkpoint.BrokenCheckpoint as error:
            raise FileError(
                f"{self._folder / name}: worker {place.rank} cannot read it: {error}",
                hint="give a --checkpoint folder that every worker sees",
            ) from None

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
                self._check_length(position, length)
                self._restore()
                first = position["step"]
                if first == num_steps:
                    self.epoch_done(call)
            self._found = None
        self._length = length
        return first

    def _check_length(self, position: dict[str, int], length: int) -> None:
        if position["step"] and position["length"] != length:
            raise TargetError(
                f"the dataset has {length} samples, and had {position['length']} when "
                f"{name_or_none(self._found)} was written in the middle of an epoch",
                hint="give the same dataset, or start with an empty --checkpoint folder",
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
            sys.exit(STOPPED_EXIT_CODE)
        if self._every and self._job.num_steps % self._every == 0:
            self.save(wait=False)

    def epoch_done(self, call: int) -> None:
        """The epoch gave all its batches."""
        self.entered(call + 1, 0)

    def save(self, *, wait: bool) -> None:
        """Write a checkpoint; call it on every worker. The first one writes, beside training.

        Workers that have parted end here, so that what they hold is not kept.

        Raises:
            TargetError: Something registered cannot be saved.
            FileError: It could not be written, where ``wait`` is set.
        """
        self._job.compare()
        state = self._state()
        if state is None:
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
        """Keep the final state, and wait until it is on disk."""
        if not self.has_folder:
            return
        if self._found is None or self._job.num_steps != self._found.header["step"]:
            self.save(wait=False)
        self._settle()

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
        checkpoint.write(self._folder, header, encoded, tensors)

    def _write(self, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> None:
        try:
            self._put(header, encoded, tensors)
            self._failed = None
        except FileError as error:
            self._failed = error
            say(self._job, f"warning: {error.message}")

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
        load_state(job._optimizers, state["optimizer"])

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
        self._registered[number].load_state_dict(saved[number])

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._job._totals.wants_stop = True


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


def name_or_none(found: Checkpoint | None) -> str:
    """The name of a checkpoint for a sentence."""
    return found.path.name if found is not None else "the checkpoint"


def shapes_of(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """What parameters a model has, for people and for comparison."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for name, value in parameters.items()
    }


def say(job: "Job", sentence: str) -> None:
    """Tell the user, once."""
    if job.is_main:
        sys.stderr.write(f"hetflow: {sentence}\n")
