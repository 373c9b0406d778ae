"""Rent machines for one training in real time: a policy decides, an engine launches.

The policy is the one that replays ask, at the start of each tick. The agent follows it. It starts
the training's launch on the machines that the policy wants, with the plan for as many. It lets the
launch save and end where the policy wants others or none. A machine that is announced to go saves
in time; one that goes without notice loses what was done since the last checkpoint.

Seconds are those of the market since the job's start. In a replay, the market runs faster than real
time, and the agent kills the launch on a machine that the market takes away. All that has to
survive the agent is its folder: started again, it goes on.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import floor
from pathlib import Path
from typing import Protocol

from ...runtime.protocol import environment
from ...schema import files
from ...schema.cluster import Cluster, ServerGroup
from ...schema.errors import FileError, HetflowError, LaunchError, ProblemError
from ...schema.frames import listed
from ...schema.market import RentAdvice, RentHeld, RentRun, RentState, held_text
from ...schema.plan import Plan
from ...schema.run import RunRecord
from ..engines.local import LocalEngine
from ..engines.protocol import (
    ENGINES,
    FIRST_STEP,
    OUTPUT,
    Engine,
    EngineDevice,
    Fate,
    RentingEngine,
    Work,
)
from .leases import CHECKPOINT, KILL_AFTER_SECONDS, last_words
from .store import RUN

RECORD = "rent_run.json"
"""In the agent's folder: what was held and paid so far."""
LAUNCHES = "launches"
_STEP = "step-"  # names a checkpoint's folder, before its step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Of each zone: spot machines that can be had, for how long that is so, and the price now."""

    available: Mapping[str, int]
    unchanged_seconds: Mapping[str, float]
    spot_dollars_per_hour: Mapping[str, float]


class Feed(Protocol):
    """What becomes known of a market."""

    def sight(self, tick: int) -> Sight:
        """What can be had at the start of a tick."""

    def goes_at(self, tick: int, zone: str, num_spot: int) -> float | None:
        """When some of the machines held in a tick are taken away; None: not in this tick."""

    def lost(self, zone: str, seconds: float) -> None:
        """A machine in a zone was lost, or could not be had, at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedFeed:
    """A window of the past: [zones][ticks] machines, and their prices where these move."""

    zones: tuple[str, ...]
    tick_seconds: float
    available: Sequence[Sequence[int]]
    spot_dollars_per_hour: Sequence[Sequence[float]] | None

    def sight(self, tick: int) -> Sight:
        """What could be had then; after the window's end, what was last there."""
        at = [min(tick, len(zone) - 1) for zone in self.available]
        there = list(zip(self.zones, self.available, at, strict=True))
        prices = self.spot_dollars_per_hour
        return Sight(
            available={name: zone[now] for name, zone, now in there},
            unchanged_seconds={
                name: self._ticks_so(zone, now) * self.tick_seconds for name, zone, now in there
            },
            spot_dollars_per_hour={}
            if prices is None
            else {name: zone[now] for name, zone, now in zip(self.zones, prices, at, strict=True)},
        )

    @staticmethod
    def _ticks_so(zone: Sequence[int], now: int) -> int:
        same = 0
        # Back to the last change, or to the window's start.
        while same < now and zone[now - same - 1] == zone[now]:
            same += 1
        return same

    def goes_at(self, tick: int, zone: str, num_spot: int) -> float | None:
        """The end of the tick, where the next one has fewer machines."""
        there = self.available[self.zones.index(zone)]
        goes = tick + 1 < len(there) and there[tick + 1] < num_spot
        return (tick + 1) * self.tick_seconds if goes else None

    def lost(self, zone: str, seconds: float) -> None:
        """The window says when machines go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealFeed:
    """A market whose machines are rented: a zone has all, but for a while after it lacked one."""

    zones: tuple[str, ...]
    tick_seconds: float
    retry_seconds: float
    num_machines: int = 1
    gone: dict[str, float] = field(default_factory=dict)

    def sight(self, tick: int) -> Sight:
        # Nobody tells what can be had: a zone counts as full but for a while after it lacked a
        # machine.
        """Zones in which no machine was lost, or refused, for a while."""
        now = tick * self.tick_seconds
        waits = {zone: now - self.gone.get(zone, -self.retry_seconds) for zone in self.zones}
        there = {
            zone: self.num_machines * (waits[zone] >= self.retry_seconds) for zone in self.zones
        }
        return Sight(available=there, unchanged_seconds={}, spot_dollars_per_hour={})

    def goes_at(self, tick: int, zone: str, num_spot: int) -> float | None:
        """Nobody says before."""

    def lost(self, zone: str, seconds: float) -> None:
        """Ask there no more for a while, from the next tick on."""
        self.gone[zone] = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedTraining:
    """What runs on a rented machine, and how it is saved.

    Attributes:
        folder: The agent's; it holds the checkpoints, and a folder for each launch.
        plans: Files of the plans for 1, 2, ... machines.
        script: The script and its arguments.
        directory: Where it runs.
        notice_seconds: So long before a machine is taken away it is announced.
        save_seconds: So long before it goes, a training begins to save; real seconds.
        grace_seconds: What a launch that was asked to end has for that; real seconds.
        move_dollars: Of a launch in another zone than the last one.
    """

    folder: Path
    plans: tuple[Path, ...]
    script: tuple[str, ...]
    directory: Path
    notice_seconds: float = 0.0
    save_seconds: float = 10.0
    grace_seconds: float = 30.0
    move_dollars: float = 0.0

    def work(
        self, folder: Path, every: int, num_machines: int, devices: tuple[EngineDevice, ...]
    ) -> Work:
        """A launch with a folder of its own, and so many steps between checkpoints."""
        command = (
            sys.executable, "-m", "hetflow", "launch", "--output", str(folder / RUN), "--force",
            "--checkpoint", str(self.folder / CHECKPOINT), "--checkpoint-every", str(every),
            "--determinism", "elastic", "--grace", str(self.grace_seconds),
            str(self.plans[num_machines - 1]), *self.script,
        )  # fmt: skip
        given = {environment.FIRST_STEP: str(folder / FIRST_STEP)}
        if len({device.server for device in devices}) > 1:
            # Machines meet each other by a secret that only they know.
            given[environment.TOKEN] = secrets.token_hex(16)
        return Work(
            folder=folder,
            command=command,
            directory=self.directory,
            devices=devices,
            environment=given,
        )


def saved_steps(folder: Path) -> int:
    """The step of the newest checkpoint that an agent's folder has."""
    names = []
    # The folder may not be there yet.
    with suppress(FileNotFoundError):
        names = os.listdir(folder / CHECKPOINT)
    steps = (name.removeprefix(_STEP) for name in names if name.startswith(_STEP))
    return max((int(step) for step in steps if step.isdigit()), default=0)


def machines_for(
    plans: Sequence[Plan], name: str
) -> tuple[Engine, tuple[tuple[EngineDevice, ...], ...]]:
    """An engine, and its devices for each plan; launches on this host end with this process.

    Raises:
        ProblemError: There is no such engine, it has too few devices, or it rents machines and
            plans are not for one, two, ... alike.
    """
    most: dict[str, int] = {}
    for plan in plans:
        for kind, number in plan.devices_by_type.items():
            most[kind] = max(number, most.get(kind, 0))
    pool = Cluster.of(most)
    # On this host launches end with the agent: nothing is left running and unpaid.
    if name == LocalEngine.name:
        engine: Engine = LocalEngine(pool, bound=True)
    else:
        factory = ENGINES.get(name)
        if len(plans) > 1 and getattr(factory, "rents", False):
            pool = _machines_alike(plans, pool)
        engine = factory(pool)
    found = {
        kind: [one for one in engine.devices() if one.device_type == kind and one.is_up]
        for kind in most
    }
    for kind, number in most.items():
        if len(found[kind]) < number:
            raise ProblemError(
                f"the plan needs {number} x {kind}; the engine {name} has {len(found[kind])}",
                hint="give a plan for the devices that it has",
            )
    return engine, tuple(
        tuple(one for kind, number in plan.devices_by_type.items() for one in found[kind][:number])
        for plan in plans
    )


def _machines_alike(plans: Sequence[Plan], pool: Cluster) -> Cluster:
    """A server for each machine, which has the devices of the plan for one."""
    machine = plans[0].devices_by_type
    for number, plan in enumerate(plans, start=1):
        if plan.devices_by_type != {kind: number * each for kind, each in machine.items()}:
            raise ProblemError(
                f"the plan for {number} machines is on {listed(plan.devices_by_type)}; a machine "
                f"has {listed(machine)}, as the first plan has it",
                hint="give plans for 1, 2, ... machines that are alike",
            )
    return replace(pool, servers=(ServerGroup(count=len(plans), devices=machine),))


def rents(engine: Engine) -> bool:
    """Whether the machines are real ones, which a market may take away."""
    return isinstance(engine, RentingEngine) and engine.rents


@dataclass(frozen=True, slots=True)
class Clock:
    """Real time, how to let it pass, and how much of it between two looks at a launch."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    look_seconds: float = 0.05


@dataclass(slots=True)
class _Lease:
    """A launch on a machine, and how far it is; in market seconds and steps."""

    folder: Path
    zone: str
    num_spot: int
    num_on_demand: int
    launched: float
    came_from: str | None
    began: float | None = None


@dataclass(slots=True, kw_only=True)
class Agent:
    """Rents machines for a training until it has ended, as a policy (``decide``) says.

    ``devices`` are of 1, 2, ... machines, ``speeds`` on 0, 1, ... of them in work seconds per
    second. ``num_ticks`` go to the deadline; a job that is late goes on with what it holds.
    ``record`` says what was done so far: it is new, or of an agent that was killed. ``tell`` is
    called with a line for each change.
    """

    training: RentedTraining
    engine: Engine
    devices: tuple[tuple[EngineDevice, ...], ...]
    feed: Feed
    decide: Callable[[RentState], RentAdvice]
    num_ticks: int
    tick_seconds: float
    record: RentRun
    speeds: tuple[float, ...] = (0.0, 1.0)
    tell: Callable[[str], None] = lambda line: None
    clock: Clock = field(default_factory=Clock)
    _lease: _Lease | None = None
    _zone: str | None = None
    _kept: tuple[int, int] = (0, 0)  # spot and on demand, of a launch that lost some
    _rate: float = 0.0  # dollars per hour of what is held
    _seen: tuple[int, float] = (0, 0.0)  # the newest checkpoint, and when it was first there

    def run(self) -> RentRun:
        """Rent until the training has ended.

        Raises:
            LaunchError: The training failed.
            HetflowError: A launch cannot be started, or the folder cannot be written.
        """
        self._take_over()
        try:
            while self.record.status == "running":
                # Ticks by the market's clock, whatever a tick took to do.
                tick = floor(self._now() / self.tick_seconds)
                self._take_away(tick)
                self._follow(tick)
                self._pass_tick(tick)
        finally:
            # Whatever ended the loop, nothing stays rented.
            if self._lease is not None:
                self._release("the agent ends")
        return self.record

    def _now(self) -> float:
        seconds = (self.clock.now() - self.record.started_seconds) * self.record.time_scale
        return max(seconds, 0.0)

    def _take_over(self) -> None:
        """Go on after an agent that was killed: its launch ended with it, and is paid a tick."""
        # The launch of an agent that was killed: it is asked to end before anything else is
        # rented.
        last_launch = self.training.folder / LAUNCHES / str(self.record.num_launches)
        while last_launch.exists() and self.engine.fate(last_launch).is_open:
            self.engine.stop(last_launch)
            self.clock.sleep(self.clock.look_seconds)
        self._seen = (saved_steps(self.training.folder), self._now())
        if self.record.held:
            last = self.record.held[-1]
            self._zone = next((row.zone for row in self.record.held[::-1] if row.zone), None)
            if last.zone is not None:
                # Nobody saw when it ended; a tick is the longest that it was not looked at.
                passed = min(self._now() - self.record.seconds, self.tick_seconds)
                row = self._row("the agent was killed")
                self._note(
                    dollars=self.record.dollars + last.dollars_per_hour * passed / 3600,
                    held=(*self.record.held, replace(row, at_seconds=self.record.seconds + passed)),
                )

    def _take_away(self, tick: int) -> None:
        """Kill the launch on a machine that is there no more, as its market would."""
        lease = self._lease
        if lease is None or lease.num_spot <= self.feed.sight(tick).available[lease.zone]:
            return
        # Counted before it is killed: what was done since the checkpoint is done again.
        done = self._steps_done()
        self._release("its machine was taken away", kill=True)
        self._kept = lease.num_spot, lease.num_on_demand
        repeated = max(0, round(done) - saved_steps(self.training.folder))
        self._note(
            num_preemptions=self.record.num_preemptions + 1,
            num_steps_repeated=self.record.num_steps_repeated + repeated,
        )

    def _follow(self, tick: int) -> None:
        """Ask the policy, and hold what it wants."""
        # After the deadline a job goes on with what it holds.
        if self.record.status != "running" or tick >= self.num_ticks and self._lease is not None:
            return
        sight = self.feed.sight(tick)
        lease = self._lease
        state = RentState(
            elapsed_seconds=min(tick, self.num_ticks - 1) * self.tick_seconds,
            work_left_seconds=self._work_left_seconds(),
            num_spot=self._kept[0] if lease is None else lease.num_spot,
            num_on_demand=self._kept[1] if lease is None else lease.num_on_demand,
            zone=self._zone,
            pending_seconds=self._pending_seconds(),
            available=dict(sight.available),
            unchanged_seconds=dict(sight.unchanged_seconds),
            spot_dollars_per_hour=dict(sight.spot_dollars_per_hour),
        )
        advice = self.decide(state)
        # What was held until now is paid at the old rate.
        self._pay()
        self._kept = 0, 0
        if advice.is_change and lease is not None:
            self._release(advice.reason)
        self._rate = advice.dollars_per_hour
        if advice.zone is not None and self._lease is None and self.record.status == "running":
            self._launch(advice)

    def _pass_tick(self, tick: int) -> None:
        """Wait until the tick ends; save in time where a machine is announced to go."""
        lease, end = self._lease, (tick + 1) * self.tick_seconds
        gone = None
        if lease is not None and lease.num_spot and self.training.notice_seconds > 0:
            gone = self.feed.goes_at(tick, lease.zone, lease.num_spot)
        if gone is not None:
            # Saving takes real time, so it begins that much earlier in the market's.
            save = min(self.training.save_seconds * self.record.time_scale, gone)
            self._wait(gone - min(self.training.notice_seconds, save))
            if lease is not None and self._lease is not None:
                self._release("its machine is announced to be taken away")
                self._kept = lease.num_spot, lease.num_on_demand
                self._note(num_preemptions=self.record.num_preemptions + 1)
        self._wait(end)
        self._pay()

    def _wait(self, until: float) -> None:
        """Let time pass, or until the launch has ended."""
        while (left := until - self._now()) > 0 and self.record.status == "running":
            if self._lease is not None and not self._look().is_open:
                self._settle("its machine is gone")
                return
            self.clock.sleep(min(self.clock.look_seconds, left / self.record.time_scale))

    def _look(self) -> Fate:
        """What the launch does, and how far it is."""
        lease = self._lease
        assert lease is not None
        fate = self.engine.fate(lease.folder)
        if lease.began is None and fate.state == "training":
            lease.began = self._now()
            took = lease.began - lease.launched
            self._note(longest_restart_seconds=max(took, self.record.longest_restart_seconds))
        saved = saved_steps(self.training.folder)
        # When a checkpoint was first seen: from there on work is estimated by the clock.
        if saved != self._seen[0]:
            self._seen = (saved, self._now())
        return fate

    def _steps_done(self) -> float:
        """Steps of the newest checkpoint, and those since then at the speed that was asked for."""
        saved, since = self._seen
        lease = self._lease
        if lease is None or lease.began is None:
            return float(saved)
        worked = self._now() - max(since, lease.began)
        worked *= self.speeds[lease.num_spot + lease.num_on_demand]
        more = worked * self.record.num_steps / self.record.work_seconds
        if self.record.checkpoint_every:
            # A checkpoint would have been seen by now.
            more = min(more, self.record.checkpoint_every)
        return min(saved + more, self.record.num_steps)

    def _work_left_seconds(self) -> float:
        left = 1 - self._steps_done() / self.record.num_steps
        # Never 0 while the launch runs: policies would let go of the machines.
        return max(left * self.record.work_seconds, 1.0)

    def _pending_seconds(self) -> float:
        lease = self._lease
        if lease is None or lease.began is not None:
            return 0.0
        return max(0.0, self.record.restart_seconds - (self._now() - lease.launched))

    def _launch(self, advice: RentAdvice) -> None:
        assert advice.zone is not None
        number = self.record.num_launches + 1
        folder = self.training.folder / LAUNCHES / str(number)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{error.filename}: {error.strerror}") from None
        moves = self._zone not in (None, advice.zone)
        # Before the launch: an agent that is killed now knows that it may be there.
        self._note(
            num_launches=number,
            num_moves=self.record.num_moves + moves,
            dollars=self.record.dollars + moves * self.training.move_dollars,
            held=(*self.record.held, self._row(advice.reason, advice)),
        )
        machines = advice.num_spot + advice.num_on_demand
        devices, every = self.devices[machines - 1], self.record.checkpoint_every
        work = self.training.work(folder, every, machines, devices)
        self.engine.start(replace(work, zone=advice.zone, is_spot=advice.num_spot > 0))
        self._lease = _Lease(
            folder, advice.zone, advice.num_spot, advice.num_on_demand, self._now(), self._zone
        )
        self._zone = advice.zone

    def _release(self, why: str, *, kill: bool = False) -> None:
        """Let the launch save and end, or end it at once; it is paid until then."""
        lease, asked = self._lease, self.clock.now()
        assert lease is not None
        while self._look().is_open:
            # Real seconds, as the launch saves in real time.
            spent = self.clock.now() - asked
            if kill or spent > self.training.grace_seconds + KILL_AFTER_SECONDS:
                self.engine.kill(lease.folder)
            else:
                self.engine.stop(lease.folder)
            self.clock.sleep(self.clock.look_seconds)
        self._settle(why, was_asked=True)

    def _settle(self, why: str, *, was_asked: bool = False) -> None:
        """A launch has ended: the training is done, was stopped, lost its machine, or failed."""
        lease = self._lease
        assert lease is not None
        fate = self._look()
        self._pay()
        self._lease, self._rate = None, 0.0
        record = None
        # A launch that was killed has no record, or half of one.
        with suppress(HetflowError, OSError):
            record = files.read(lease.folder / RUN / "run.json", RunRecord)
        if record is not None and record.status == "done":
            row = self._row("the training has ended")
            self._note(
                status="done",
                parameters_digest=record.parameters_digest,
                held=(*self.record.held, row),
            )
        elif was_asked:
            self._note(held=(*self.record.held, self._row(why)))
        # Nobody saw an exit code: its machine is gone, or never came.
        elif fate.exit_code is None:
            self.feed.lost(lease.zone, self._now())
            if not fate.has_begun:
                self._undo_move(lease)
            self._note(
                held=(*self.record.held, self._row(why if fate.has_begun else "none was there")),
                num_preemptions=self.record.num_preemptions + fate.has_begun,
            )
        else:
            said = last_words(lease.folder / OUTPUT, fate.exit_code)
            raise LaunchError(f"the training failed: {said}", exit_code=fate.exit_code)

    def _undo_move(self, lease: _Lease) -> None:
        """Nothing was moved to a machine that never came."""
        moved = lease.came_from not in (None, lease.zone)
        self._zone = lease.came_from
        self._note(
            num_moves=self.record.num_moves - moved,
            dollars=self.record.dollars - moved * self.training.move_dollars,
        )

    def _row(self, why: str, advice: RentAdvice | None = None) -> RentHeld:
        held = RentHeld(at_seconds=self._now(), why=why)
        if advice is not None:
            held = replace(
                held,
                num_spot=advice.num_spot,
                num_on_demand=advice.num_on_demand,
                zone=advice.zone,
                dollars_per_hour=advice.dollars_per_hour,
            )
        what = held_text(held.num_spot, held.num_on_demand, held.zone)
        self.tell(f"{held.at_seconds / 60:.1f} min: holds {what}: {why}")
        return held

    def _pay(self) -> None:
        """Pay for what is held until now."""
        now = self._now()
        owed = self._rate * (now - self.record.seconds) / 3600 if self._lease is not None else 0.0
        self._note(dollars=self.record.dollars + owed, seconds=now)

    def _note(self, **known: object) -> None:
        """Change the record, and write it: whoever starts the agent again goes on from it."""
        self.record = replace(self.record, **known)  # type: ignore[arg-type]
        files.write(self.training.folder / RECORD, self.record, force=True)
