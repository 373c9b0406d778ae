"""Start the workers of a launch: those of its first generation, and of every later one."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...schema import files
from ...schema.launch import LaunchConfig
from .devices import Seat, seat_workers
from .request import LaunchRequest
from .spawn import Entry, Meeting, NewGeneration, WorkerCommand, worker_commands
from .workers import Workers


def commands_of(
    request: LaunchRequest,
    seats: Sequence[Seat],
    meeting: Meeting,
    generation: NewGeneration | None = None,
) -> list[WorkerCommand]:
    """The commands of some workers of a launch."""
    handover = request.handover_folder
    return worker_commands(
        seats,
        request.script,
        folder=request.folder.resolve(),
        meeting=meeting,
        world_size=request.config.world_size,
        timeout_seconds=request.timeout_seconds,
        inherited=os.environ,
        determinism=request.config.determinism,
        seed=request.config.seed,
        checkpoint=request.checkpoint.resolve() if request.checkpoint else None,
        checkpoint_every=request.checkpoint_every,
        from_scratch=request.from_scratch,
        compare_every=request.compare_every,
        handover=handover.resolve() if handover is not None else None,
        generation=generation,
    )


class Starter:
    """Starts this host's workers, and knows which devices they hold."""

    def __init__(
        self, request: LaunchRequest, workers: Workers, meeting: Meeting, folder: Path
    ) -> None:
        self._request, self._workers = request, workers
        self._meeting, self._folder = meeting, folder
        self._seats: dict[str, Seat] = {}

    def first(self, seats: Sequence[Seat], watch: Callable[[], None]) -> None:
        """Start the workers of the plan."""
        commands = commands_of(self._request, seats, self._meeting)
        self._workers.wait_until_ready(commands, watch)
        self._workers.start(commands)
        self._seats = {str(seat.slot.rank): seat for seat in seats}

    def join(
        self,
        config: LaunchConfig,
        number: int,
        ranks: Mapping[str, int],
        joining: Sequence[str],
        restarted_at: int,
    ) -> None:
        """Start workers that join the running ones, on free devices.

        Raises:
            HetflowError: The machine lacks the devices.
        """
        self._start(config, number, ranks, joining, "join", restarted_at, self._held())

    def follow(self, config: LaunchConfig, number: int, ranks: Mapping[str, int]) -> None:
        """Start workers that wait for their turn, and then take over the devices of all others.

        Raises:
            HetflowError: The machine lacks the devices.
        """
        self._start(config, number, ranks, list(ranks), "follow", number, [])

    def restart(self, config: LaunchConfig, number: int, ranks: Mapping[str, int]) -> None:
        """Start workers that go on from the last checkpoint; those before are gone.

        Raises:
            HetflowError: The machine lacks the devices.
        """
        self._start(config, number, ranks, list(ranks), "restart", number, self._held())

    def _held(self) -> list[str]:
        """The devices of the workers that are there."""
        there = self._workers.lines()
        return [seat.device for name, seat in self._seats.items() if name in there]

    def _start(
        self,
        config: LaunchConfig,
        number: int,
        ranks: Mapping[str, int],
        names: Sequence[str],
        entry: Entry,
        restarted_at: int,
        held: Sequence[str],
    ) -> None:
        slots = [config.workers[ranks[name]] for name in names]
        seats = seat_workers(slots, config, held)
        path = self._folder / f"generation-{number}.json"
        files.write(path, config, force=True)
        by_rank = {ranks[name]: name for name in names}
        self._seats |= {by_rank[seat.slot.rank]: seat for seat in seats}
        generation = NewGeneration(
            number=number,
            config=path.resolve(),
            names=by_rank,
            entry=entry,
            restarted_at=restarted_at,
        )
        request = replace(self._request, config=config)
        self._workers.start(commands_of(request, seats, self._meeting, generation))
