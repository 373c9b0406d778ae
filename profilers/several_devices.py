"""Measuring processes of one workload on several devices of a type, which train at once."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..devices.backend import DeviceRequest
from ..devices.collectives import LOOPBACK
from ..devices.local import pinned_worker
from ..runtime.measurements import StepTimes
from ..schema import files
from ..schema.errors import HetflowError
from ..schema.launch import LaunchConfig
from .process import GROUP_ANSWER_SECONDS, Child, ChildDied, Loading
from .rehearsal import config_of
from .targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPeak:
    """The most memory of any worker that synchronises, in bytes.

    ``beside_bytes`` is what no allocator of tensors holds of its device; None on a CPU.
    """

    peak_bytes: int
    beside_bytes: int | None = None


class Crew:
    """A worker for each device. A context manager; its processes start when first needed."""

    def __init__(
        self, target: Target, request: DeviceRequest, num_workers: int, optimizer: str
    ) -> None:
        self._request, self.num_workers = request, num_workers
        self._loading = Loading(
            target=target,
            device_type=request.local.device_type,
            memory_bytes=request.local.memory_bytes,
            optimizer=optimizer,
            num_threads=request.local.num_threads,
        )
        self._children: list[Child] = []
        self._synchronising: list[Child] = []
        self._store: Child | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_meetings = 0

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def backend(self) -> str:
        """What the workers exchange over."""
        return self._request.local.backend.collective

    @property
    def is_of_script(self) -> bool:
        """Whether they train in a script's own loop, of one pass a step."""
        return self._loading.target.is_script

    def beside(
        self, sizes: Sequence[int], *, num_steps: int, is_empty: bool = False
    ) -> list[list[StepTimes]]:
        """Train on all devices at once without synchronising; returns the steps of each worker.

        Raises:
            MemoryError: It does not fit.
            ChildDied: A process ended.
            TargetError: The workload is at fault.
        """
        config, folder = config_of([sizes]), self._meeting_place()
        folder.mkdir()
        answers = self._rehearse(
            config,
            [
                {"beside": {"folder": str(folder), "index": index, "number": self.num_workers}}
                for index in range(self.num_workers)
            ],
            num_steps=num_steps,
            is_empty=is_empty,
        )
        return _steps_of(answers)

    def together(self, config: LaunchConfig, *, num_steps: int) -> list[list[StepTimes]]:
        """Train one config on all devices, which synchronise; raises as ``beside``."""
        return _steps_of(self._rehearse(config, self._in_group(config), num_steps=num_steps))

    def together_with_held(
        self, config: LaunchConfig, *, num_steps: int
    ) -> tuple[list[list[StepTimes]], list[int | None]]:
        """Run as ``together`` does; also [workers] the bytes free after the last step, but held.

        They are the system's again then, which costs the next steps time.
        """
        answers = self._rehearse(
            config, self._in_group(config), num_steps=num_steps, measures_held=True
        )
        return _steps_of(answers), [answer["held_free_bytes"] for answer in answers]

    def peak_together(self, config: LaunchConfig, *, num_steps: int) -> GroupPeak:
        """The most memory of any worker in such a training; raises as ``beside``."""
        answers = self._rehearse(
            config, self._in_group(config), num_steps=num_steps, measures_peak=True
        )
        beside = [a["beside_bytes"] for a in answers if a["beside_bytes"] is not None]
        return GroupPeak(
            peak_bytes=max(answer["peak_memory_bytes"] for answer in answers),
            beside_bytes=max(beside, default=None),
        )

    def _in_group(self, config: LaunchConfig) -> list[dict[str, Any]]:
        """What each worker of a config needs to meet the others."""
        group = {"path": str(self._meeting_place()), "backend": self.backend}
        return [{"group": group, "rank": rank} for rank in range(config.world_size)]

    def exchange(
        self, *, batch_size: int, budget_seconds: float, measures_messages: bool
    ) -> list[dict[str, Any]]:
        """What each worker answers to ``exchange.exchange``; raises as ``beside``."""
        folder = self._meeting_place()
        folder.mkdir()
        return self._ask(
            "exchange",
            [{"rank": rank} for rank in range(self.num_workers)],
            world_size=self.num_workers,
            folder=str(folder),
            backend=self.backend,
            batch_size=batch_size,
            budget_seconds=budget_seconds,
            measures_messages=measures_messages,
        )

    def _rehearse(
        self, config: LaunchConfig, asked: list[dict[str, Any]], **named: Any
    ) -> list[dict[str, Any]]:
        text = files.to_json(config)
        return self._ask("rehearse", asked, config=text, warm_up_steps=0, **named)

    def _ask(
        self, operation: str, asked: list[dict[str, Any]], **named: Any
    ) -> list[dict[str, Any]]:
        """Have the first workers do the same, each with values of its own; their answers."""
        try:
            workers = self._workers_for(asked)[: len(asked)]
            for worker, values in zip(workers, asked, strict=True):
                worker.send(operation, **values, **named)
            return self._answers(workers)
        except BaseException:
            # The others may wait for the one that failed.
            self.release()
            raise

    @staticmethod
    def _answers(workers: Sequence[Child]) -> list[dict[str, Any]]:
        """All answers. If one worker ran out of memory, raise that, not the end of the others."""
        answers: list[dict[str, Any]] = []
        failures: list[Exception] = []
        for worker in workers:
            try:
                answers.append(worker.receive(GROUP_ANSWER_SECONDS))
            except (HetflowError, ChildDied, MemoryError) as error:
                failures.append(error)
        if failures:
            raise next((e for e in failures if isinstance(e, MemoryError)), failures[0])
        return answers

    def _workers_for(self, asked: list[dict[str, Any]]) -> list[Child]:
        """The workers that do it: those of a script meet once, when they start."""
        if self.is_of_script and "group" in asked[0]:
            self._start_synchronising()
            return self._synchronising
        self.start()
        return self._children

    def start(self) -> None:
        """Start the processes, which takes seconds, and load the workload in each; once.

        Raises:
            ChildDied, HetflowError, MemoryError: One of them failed.
        """
        if self._children:
            return
        for index in range(self.num_workers):
            child, device = self._started(index)
            self._children.append(child)
            self._loading.ask_alone(child, device)
        self._answers(self._children)

    def _start_synchronising(self) -> None:
        """Start a script's workers that synchronise, beside those that do not."""
        if self._synchronising:
            return
        self._store = Child()
        self._store.send("store")
        port = self._store.receive(GROUP_ANSWER_SECONDS)["port"]
        for rank in range(self.num_workers):
            child, device = self._started(rank)
            self._synchronising.append(child)
            self._loading.ask_script(child, device, rank=rank, workers=self.num_workers, port=port)
        self._answers(self._synchronising)

    def _started(self, index: int) -> tuple[Child, str]:
        local = self._request.local
        pinned = pinned_worker(local, index)
        child = Child(LOOPBACK | pinned.environment, num_threads=local.num_threads)
        return child, pinned.device

    def _meeting_place(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hetflow-crew-")
        self._num_meetings += 1
        return Path(self._folder.name) / str(self._num_meetings)

    def release(self) -> None:
        """End the processes."""
        store = [] if self._store is None else [self._store]
        for child in (*self._children, *self._synchronising, *store):
            child.stop()
        self._children, self._synchronising, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _steps_of(answers: Sequence[dict[str, Any]]) -> list[list[StepTimes]]:
    return [[StepTimes.of_json(step) for step in answer["steps"]] for answer in answers]
