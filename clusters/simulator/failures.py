"""Devices and whole servers that fail and come back, drawn from a seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from ..mechanisms.pool import Ints
from ..mechanisms.seats import DeviceLayout

# Where devices work for a smaller part of the time, a run is refused: it would take more than a
# hundred times as long as without failures, if it ended at all.
LEAST_UP = 0.01
_HOUR = 3600.0

Seats = Sequence[tuple[int, int, int]]  # device type, server, devices held there


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """``mean_seconds`` between failures of a device, each gone for ``repair_seconds``.

    ``server_mean_seconds`` is the same of a server, which takes all its devices with it. None:
    these never fail. ``layout`` says which devices are on one server; None: what the mechanism
    places jobs on, else each type is on one.

    Raises:
        ProblemError: Times that make no sense.
    """

    mean_seconds: float | None = None
    server_mean_seconds: float | None = None
    repair_seconds: float = 3600.0
    seed: int = 0
    layout: DeviceLayout | None = None

    def __post_init__(self) -> None:
        for what, mean in (("", self.mean_seconds), (" of a server", self.server_mean_seconds)):
            if mean is not None and not 0 < mean < math.inf:
                raise ProblemError(
                    f"the mean time between failures{what} must be > 0 s and finite, got {mean}"
                )
        if self.mean_seconds is None and self.server_mean_seconds is None:
            raise ProblemError("failures need a mean time between those of a device or a server")
        if not 0 <= self.repair_seconds < math.inf:
            raise ProblemError(
                f"a repair must take a finite time of >= 0 s, got {self.repair_seconds} s"
            )

    def refuse_hopeless(self, round_seconds: float = 0.0) -> None:
        """Refuse failures so frequent that a run would hardly ever end.

        A device that fails within ``round_seconds``, which a failure loses, does not count as up.

        Raises:
            InfeasibleError: Devices do useful work for less than ``LEAST_UP`` of the time.
        """
        part, words = 1.0, []
        for what, mean in (("device", self.mean_seconds), ("server", self.server_mean_seconds)):
            if mean is not None:
                part *= mean / (mean + self.repair_seconds) * math.exp(-round_seconds / mean)
                words.append(f"{mean / _HOUR:.4g} h between failures of a {what}")
        if part < LEAST_UP:
            raise InfeasibleError(
                f"devices would do useful work for {100 * part:.2g} % of the time "
                f"({', '.join(words)}, {self.repair_seconds / _HOUR:.4g} h of repair), below the "
                f"limit of {100 * LEAST_UP:g} %; make failures rarer or repairs shorter"
            )


class Fleet:
    """Which devices are down, by type and server, and until when; devices of a server are alike."""

    def __init__(self, layout: DeviceLayout, repair_seconds: float) -> None:
        self.layout, self.repair_seconds = layout, repair_seconds
        self._down: dict[tuple[int, int], list[float]] = {}
        self._servers_down: dict[int, float] = {}
        self.num_devices_failed = self.num_servers_failed = 0
        self._entries: dict[int, list[tuple[int, int]]] = {}
        for kind, row in enumerate(layout.servers):
            for place, number in enumerate(row):
                self._entries.setdefault(number, []).append((kind, place))

    def repair(self, now_seconds: float) -> None:
        """Bring back what has been repaired by now."""
        for entry, times in list(self._down.items()):
            self._down[entry] = [until for until in times if until > now_seconds]
            if not self._down[entry]:
                del self._down[entry]
        self._servers_down = {s: t for s, t in self._servers_down.items() if t > now_seconds}

    @property
    def next_repair_seconds(self) -> float:
        """The time of the next repair, in seconds; infinite while nothing is down."""
        times = [min(each) for each in self._down.values()] + list(self._servers_down.values())
        return min(times, default=math.inf)

    def standing(self) -> list[list[int]]:
        """Devices that work [types][servers]."""
        return [
            [size - len(self._down.get((kind, place), ())) for place, size in enumerate(row)]
            for kind, row in enumerate(self.layout.sizes)
        ]

    def servers_up(self) -> list[int]:
        """Numbers of the servers that did not fail as a whole, in order."""
        return sorted(self._entries.keys() - self._servers_down.keys())

    def fail_device(self, kind: int, place: int, now_seconds: float) -> None:
        """A device of a type on a server fails."""
        self._down.setdefault((kind, place), []).append(now_seconds + self.repair_seconds)
        self.num_devices_failed += 1

    def fail_server(self, number: int, now_seconds: float) -> list[tuple[int, int]]:
        """A server fails with all its devices; its (type, place) entries."""
        until = now_seconds + self.repair_seconds
        for kind, place in self._entries[number]:
            down = self._down.get((kind, place), [])
            up = self.layout.sizes[kind][place] - len(down)
            # A longer repair that is under way stays.
            self._down[kind, place] = [max(until, t) for t in down] + [until] * up
        self._servers_down[number] = until
        self.num_servers_failed += 1
        return self._entries[number]


class Failures:
    """Failures by rounds: exponential times between those of each, a fixed time to repair."""

    def __init__(self, options: FailureOptions, layout: DeviceLayout) -> None:
        self.options = options
        self.fleet = Fleet(layout, options.repair_seconds)
        self.random = np.random.default_rng((options.seed, 1))

    def standing(self, now_seconds: float) -> list[list[int]]:
        """Devices that work now [types][servers]."""
        self.fleet.repair(now_seconds)
        return self.fleet.standing()

    def strike(self, seats: Sequence[Seats], now_seconds: float, round_seconds: float) -> Ints:
        """Let servers and devices fail during a round; returns the holders they hit.

        ``seats`` [holders] says what each holds.

        Every device that works fails with the same chance, whatever job holds it.
        """
        held: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for holder, each in enumerate(seats):
            for kind, place, number in each:
                held.setdefault((kind, place), []).append((holder, number))
        hit = self._strike_servers(held, now_seconds, round_seconds)
        if self.options.mean_seconds is not None:
            # 1 - exp(-t / mean), exact for small chances too.
            chance = -math.expm1(-round_seconds / self.options.mean_seconds)
            for kind, row in enumerate(self.fleet.standing()):
                hit |= self._strike_devices(kind, row, chance, held, now_seconds)
        return np.array(sorted(hit), dtype=np.int64)

    def _strike_servers(
        self,
        held: dict[tuple[int, int], list[tuple[int, int]]],
        now_seconds: float,
        round_seconds: float,
    ) -> set[int]:
        if self.options.server_mean_seconds is None:
            return set()
        chance = -math.expm1(-round_seconds / self.options.server_mean_seconds)
        servers, hit = self.fleet.servers_up(), set[int]()
        for place in (self.random.random(len(servers)) < chance).nonzero()[0].tolist():
            for entry in self.fleet.fail_server(servers[place], now_seconds):
                hit.update(holder for holder, _ in held.get(entry, ()))
        return hit

    def _strike_devices(
        self,
        kind: int,
        row: list[int],
        chance: float,
        held: dict[tuple[int, int], list[tuple[int, int]]],
        now_seconds: float,
    ) -> set[int]:
        hit, devices = set[int](), sum(row)
        # How many in one draw, then which: quick for thousands of devices.
        failed = int(self.random.binomial(devices, chance))
        if not failed:
            return hit
        ends = np.cumsum(row)
        for device in self.random.choice(devices, size=failed, replace=False).tolist():
            place = int(np.searchsorted(ends, device, side="right"))
            offset = device - (int(ends[place]) - row[place])
            self.fleet.fail_device(kind, place, now_seconds)
            # Holders take a server's devices one after another.
            for holder, number in held.get((kind, place), ()):
                if offset < number:
                    hit.add(holder)
                    break
                offset -= number
        return hit


class FailureEvents:
    """Failures at their own seconds, for mechanisms that do not seat jobs on servers.

    The next failure is drawn anew when what is up changes; the exponential distribution has no
    memory, so each device and each server fails at its own rate. Devices that are up count server
    by server.
    """

    def __init__(self, options: FailureOptions, layout: DeviceLayout) -> None:
        self.options = options
        self.fleet = Fleet(layout, options.repair_seconds)
        self._random = np.random.default_rng((options.seed, 1))
        self.standing = self.fleet.standing()  # devices that work [types][servers]
        self._next = self._drawn(0.0)

    def _rates(self) -> tuple[float, float]:
        """Failures a second of all devices that are up, and of all servers."""
        device, server = self.options.mean_seconds, self.options.server_mean_seconds
        return (
            0.0 if device is None else sum(self.up()) / device,
            0.0 if server is None else len(self.fleet.servers_up()) / server,
        )

    def _drawn(self, after: float) -> float:
        rate = sum(self._rates())
        return after + self._random.exponential(1.0 / rate) if rate > 0 else math.inf

    @property
    def next_seconds(self) -> float:
        """The time of the next failure or repair, in seconds."""
        return min(self._next, self.fleet.next_repair_seconds)

    def up(self) -> list[int]:
        """Devices by type that work."""
        return [sum(row) for row in self.standing]

    def until(self, now_seconds: float) -> list[list[tuple[int, int]]]:
        """Let time pass; the (type, place among those up before) of each failure's devices."""
        hit = []
        while (then := self.next_seconds) <= now_seconds:
            if then < self._next:
                self.fleet.repair(then)
            else:
                hit.append(self._failed(then))
            self.standing = self.fleet.standing()
            self._next = self._drawn(then)
        return hit

    def _failed(self, then: float) -> list[tuple[int, int]]:
        of_devices, of_servers = self._rates()
        # A server or a device, in proportion to their rates.
        if self._random.random() * (of_devices + of_servers) < of_servers:
            servers = self.fleet.servers_up()
            number = servers[int(self._random.integers(len(servers)))]
            return [
                (kind, sum(self.standing[kind][:place]) + device)
                for kind, place in self.fleet.fail_server(number, then)
                for device in range(self.standing[kind][place])
            ]
        up = self.up()
        ends = np.cumsum(up)
        device = int(self._random.integers(sum(up)))
        kind = int(np.searchsorted(ends, device, side="right"))
        device -= int(ends[kind]) - up[kind]
        place = int(np.searchsorted(np.cumsum(self.standing[kind]), device, side="right"))
        self.fleet.fail_device(kind, place, then)
        return [(kind, device)]
