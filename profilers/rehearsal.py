"""Train some steps in the runtime's own loop, and report the times of each step's parts.

A rehearsal is what a launch does: the runtime's ``Job`` under a launch config of a split or of a
pipeline. It reads a real DataLoader, and updates in every step. It runs inside a measuring process,
alone or with others, and leaves no trace but trained values, so hundreds can follow one another.

Three kinds, by what is given: one worker alone; ``group``: the workers of one config, each in a
process of its own, which synchronise; ``beside``: several processes that each train a config of
one worker, at the same time and without exchanging anything.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ..devices.cpu import DEVICE_TYPE
from ..schema import files
from ..schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from .bench import Bench
from .exchange import StartingLine, process_group

if TYPE_CHECKING:
    from torch import Tensor

    from ..runtime.group import Place
    from ..runtime.job import Job
    from ..runtime.peers import SharedStore
    from .bench import SampleSource

_MOST_EXTRA_SECONDS = 60.0


def config_of(
    virtual_node_sizes: Sequence[Sequence[int]], *, device_type: str = DEVICE_TYPE
) -> LaunchConfig:
    """The launch config of a split, of [workers][virtual nodes] samples."""
    numbers = iter(range(sum(map(len, virtual_node_sizes))))
    workers = tuple(
        WorkerSlot(
            rank=rank,
            device_type=device_type,
            virtual_nodes=tuple(VirtualNode(index=next(numbers), batch_size=b) for b in sizes),
        )
        for rank, sizes in enumerate(virtual_node_sizes)
    )
    total = sum(map(sum, virtual_node_sizes))
    return LaunchConfig(model="model", global_batch_size=total, workers=workers)


def rehearse(
    bench: Bench,
    *,
    config: str,
    num_steps: int,
    warm_up_steps: int = 1,
    is_empty: bool = False,
    rank: int = 0,
    group: dict[str, Any] | None = None,
    beside: dict[str, Any] | None = None,
    measures_peak: bool = False,
    measures_held: bool = False,
) -> dict[str, Any]:
    """Train ``warm_up_steps``, which are dropped, and then ``num_steps``.

    Args:
        bench: The loaded workload.
        config: A launch config, as JSON text.
        num_steps: How many steps to tell of.
        warm_up_steps: The first lays out gradients and, once in a process, optimizer state.
        is_empty: Leave the model out: a pass is then what the runtime does for a virtual node.
            For splits only; nothing is updated.
        rank: Of this worker in the config.
        group: ``path`` of a file and ``backend``, where the config has several workers; the path
            is of this rehearsal only.
        beside: ``folder`` (of this rehearsal only), ``index`` and ``number`` of processes that
            train at the same time. They wait for each other in the last warm-up step, or in the
            first of all; later ones are made while all of them train.
        measures_peak: Start a new peak of memory before, which costs the first steps time.
        measures_held: Return unused memory after the last step, which costs later steps time.

    Returns:
        ``steps``: a ``StepTimes`` each, as JSON; ``no_loading``: why loading is not in them, or
        None. With ``measures_held`` also ``held_free_bytes``: what was free after the last step and
        not the system's again. With ``measures_peak`` also ``peak_memory_bytes`` and
        ``beside_bytes``, while the group is still there.
    """
    parsed = files.from_json(config, LaunchConfig, name="config")
    largest = max(node.batch_size for slot in parsed.workers for node in slot.virtual_nodes)
    source = bench.samples.source(largest)
    line = StartingLine(**beside) if beside is not None else None
    if measures_peak:
        bench.reset_peak()
    telling = line.told_of_failure() if line is not None else nullcontext()
    with telling, _meeting(bench, parsed, rank, group) as store:
        loop = _Loop(bench, _place(bench, parsed, rank, store), source, is_empty=is_empty)
        steps = loop.run(warm_up_steps, num_steps, line, measures_held=measures_held)
        peak: dict[str, Any] = {"held_free_bytes": loop.held_free_bytes} if measures_held else {}
        if measures_peak:
            peak["peak_memory_bytes"] = bench.peak_memory_bytes()
            peak["beside_bytes"] = bench.beside_bytes()
    return {"steps": steps, "no_loading": source.obstacle, **peak}


@contextmanager
def _meeting(
    bench: Bench, config: LaunchConfig, rank: int, group: dict[str, Any] | None
) -> Iterator["SharedStore | None"]:
    if group is None:
        yield None
        return
    with process_group(
        rank=rank, world_size=config.world_size, device=bench.device, **group
    ) as store:
        yield store


def _place(bench: Bench, config: LaunchConfig, rank: int, store: "SharedStore | None") -> "Place":
    import torch

    from ..runtime.group import Place
    from ..runtime.protocol.environment import Start

    start = Start(config=config, rank=rank, world_size=config.world_size, seed=config.seed)
    return Place(
        start=start,
        slot=config.workers[rank],
        device=torch.device(bench.device),
        rank=rank,
        world_size=config.world_size,
        store=store,
    )


class _Loop:
    """The script's loop over a job.

    Attributes:
        held_free_bytes: Memory that was free after the last step, and not the system's again; None
            where nobody asked, or it is not known.
    """

    def __init__(
        self, bench: Bench, place: "Place", source: "SampleSource", *, is_empty: bool
    ) -> None:
        self._bench, self._place, self._source = bench, place, source
        self._is_empty = is_empty
        self.held_free_bytes: int | None = None
        trained = [p for p in bench.model.parameters() if p.requires_grad]
        self._smallest = min(trained, key=lambda parameter: parameter.numel())

    def run(
        self,
        warm_up_steps: int,
        num_steps: int,
        line: StartingLine | None,
        *,
        measures_held: bool = False,
    ) -> list[dict[str, Any]]:
        """Train; the steps after the warm-up, as JSON."""
        from ..runtime.start import rehearsed

        config = self._place.start.config
        assert config is not None
        total = warm_up_steps + num_steps
        loader = self._source.loader(config.global_batch_size, total)
        with rehearsed(self._bench.model, (self._bench.optimizer,), self._place) as job:
            for number, batch in enumerate(job.batches(loader), start=1):
                if line is not None and number == max(1, warm_up_steps):
                    line.wait("ready")
                self._step(job, batch)
            steps = job.step_times[warm_up_steps:]
            if measures_held:
                self.held_free_bytes = self._bench.held_free_bytes()
            if line is not None:
                self._accompany(job, loader, line)
        return [step.as_json() for step in steps]

    def _step(self, job: "Job", batch: Any) -> None:
        optimizer = self._bench.optimizer
        if self._is_empty:
            job.backward(self._empty, batch)
        else:
            job.backward(self._loss, batch)
            optimizer.step()
        optimizer.zero_grad()

    def _loss(self, *parts: Any) -> "Tensor":
        loss: Tensor = self._bench.loss_of(self._source.batch_of(parts))
        return loss

    def _empty(self, *_: Any) -> "Tensor":
        """A loss that can be differentiated, and costs next to nothing."""
        return self._smallest.sum()

    def _accompany(self, job: "Job", loader: Any, line: StartingLine) -> None:
        """Keep training until the others are done: they are measured beside busy devices."""
        line.say("done")
        end = time.monotonic() + _MOST_EXTRA_SECONDS
        while True:
            for batch in job.batches(loader):
                if line.have_all("done") or time.monotonic() > end:
                    return
                self._step(job, batch)
