"""The scheduler itself: rounds on the wall clock (thesis 5.5, 5.6).

At the end of a round the mechanism decides which job holds which devices in the next round. The
lease of a job that keeps its devices is renewed, and its training is not interrupted. A job that
gets others on the same server is resized while it runs, where engine and launch can do that. Any
other that loses its devices is asked to save and end; the next job starts on them when they are
free. Between rounds the scheduler records leases that ended or were resized, and carries out what
users asked for. When no job holds a device, the next round begins at once.

Under weighted fair sharing (``mechanisms.elastic``), and under EasyScale's schedulers
(``mechanisms.easyscale``), jobs grow and shrink within the range that they state. There a decision
is due at once when a job comes or ends, and at the end of each round for what became of devices.
Under every other policy such a job holds the most of its range.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ..engines.protocol import Engine, EngineDevice, ResizingEngine, UnsuitableDevicesError
from ..mechanisms import easyscale, elastic
from ..mechanisms.allocators.named import PolicyAllocator, allocator_named, most_devices
from ..mechanisms.allocators.shares import Allocator
from ..mechanisms.cluster.layout import Layout
from ..mechanisms.cluster.pool import Pool
from ..mechanisms.cluster.seats import Device, Seat
from ..mechanisms.rounds.assign import next_round
from ..mechanisms.rounds.decide import receive, round_end
from ..mechanisms.rounds.rules import RoundRules
from ..mechanisms.rounds.state import RoundState
from ..mechanisms.rounds.stored import resumed, stored
from ..schema.errors import FileError, HetflowError, InfeasibleError, ProblemError
from ..schema.files import Plan, from_json
from ..schema.jobs import Entity, Job, ModelThroughput
from . import leases, resizes
from .leases import Ended, Lease
from .measured import Ratios, corrected, note, ratio_on, ratios_of
from .plans import Rate, as_job, kind_of, plan_on, rates_from, rates_of, rates_to, together
from .rests import Rests
from .store import Store
from .submission import Submission
from .transitions import due
from .wishes import rates_and_wish, wish_of

_log = logging.getLogger("hetflow")
MOST_FAILURES = 10
"""A job that failed so many times, one after another, is held."""
_STARTED = ("starting", "running")  # and not asked to stop
_ASKED = (130, 143)  # exit codes of a launch that was asked to stop, and saved
_USAGE = 2  # of a launch that makes no sense: it would make none the next time
_AIMED = "aimed"  # until when shares were counted
_SHARED_BY = "shared_by"  # the policy that the shares in the state are of
_LEAST_STEPS = 1.0  # left of a job that is not done, whatever was predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a live cluster is run. ``grace_seconds`` is what a job has to save in.

    ``policy`` is one of allocation, ``elastic``, or one of ``easyscale.VARIANTS``. ``entities`` are
    the tree that jobs may name a node of, and ``dollars_per_hour`` the price of a device by type.
    """

    policy: str = "las"
    rules: RoundRules = field(default_factory=RoundRules)
    grace_seconds: int = 30
    entities: tuple[Entity, ...] = ()
    dollars_per_hour: Mapping[str, float] = field(default_factory=dict)


def _pool_of(rates: Iterable[Rate], num_devices: dict[str, int], settings: Settings) -> Pool:
    throughputs = together(rates)
    return Pool(
        throughputs=throughputs,
        num_devices=num_devices,
        dollars_per_hour=dict(settings.dollars_per_hour),
        uses_mixes=bool(throughputs.mixes),
    )


def check_settings(settings: Settings, devices: Collection[EngineDevice]) -> None:
    """Check that a policy can share the devices of a cluster, before a state is made for it.

    Raises:
        ProblemError: There is no such policy, it does not fit the devices, or it needs prices or
            entities that are not given.
    """
    if (policy := _policy_for(devices, settings)) is None:
        return
    # It shares the devices among one job, to see whether it can.
    num_devices = dict(Counter(device.device_type for device in devices))
    rate = ModelThroughput(model="any", steps_per_second=dict.fromkeys(num_devices, 1.0))
    rounds = RoundState.empty(_pool_of([rate], num_devices, settings))
    rounds.admit([Job(id="any", model="any", steps=1.0)], 0.0)
    policy.alone.allocate(rounds.active, 0.0)


class Scheduler:
    """One cluster; ``tick`` does what is due."""

    def __init__(self, store: Store, engine: Engine, settings: Settings) -> None:
        """Go on where the state is.

        Args:
            store: The state; no other scheduler may use it.
            engine: Where jobs run.
            settings: How.

        Raises:
            ProblemError: The state is of other devices, or the policy does not fit.
        """
        self._store, self._engine, self._settings = store, engine, settings
        self._devices = {device.name: device for device in engine.devices()}
        self._policy = _policy_for(self._devices.values(), settings)
        self._variant = easyscale.VARIANTS.get(settings.policy)
        self._most_devices = most_devices(settings.policy)
        self._places = _Places(tuple(self._devices.values()))
        self._is_alone = settings.policy == elastic.NAME and self._places.servers is None
        self._rests = Rests(store)
        self._submissions: dict[int, Submission] = {}
        self._rates: dict[tuple[str, int], Rate] = {}
        self._numbers: dict[str, tuple[int, ...]] = {}  # of devices that each job can hold
        self._wishes: dict[str, easyscale.Wish] = {}
        self._ratios: dict[str, Ratios] = {}  # of kinds of jobs, as they are asked for
        self._has_measured = False  # what no decision has seen
        self._round_ends: float | None = store.get("round_ends")
        self._has_news = True  # since the last decision
        names = sorted(self._devices)
        known = store.get("devices")
        if known not in (None, names):
            raise ProblemError(
                f"{store.folder}: its jobs are scheduled on other devices than "
                f"{', '.join(names)[:200]}",
                hint="start with the devices it was started with, or with a new --state",
            )
        self._state = self._resumed()
        if known is None or store.get("inventory") != self._inventory():
            with store.transaction():
                store.set("devices", names)
                store.set("inventory", self._inventory())
                drainable = {d.device_type for d in self._devices.values()}
                drainable |= {d.server for d in self._devices.values()}
                store.set("drainable", sorted(drainable))

    @property
    def _no_mixes(self) -> str | None:
        """Why no job can have devices of several types here; None where it can."""
        if len({device.server for device in self._devices.values()}) > 1:
            return "jobs get devices of several types only where all devices are on one server"
        if self._policy is None or not isinstance(self._policy.mixing, PolicyAllocator):
            return f"{self._settings.policy} gives a job devices of one type"
        return None

    def _inventory(self) -> list[list[object]]:
        """Name, type and server of each device, and whether it works, for those who look on."""
        return [
            [device.name, device.device_type, device.server, device.is_up]
            for device in self._devices.values()
        ]

    def _resumed(self) -> RoundState:
        for row in self._store.rows(
            "SELECT number, throughput FROM jobs WHERE state IN ('queued', 'running')"
        ):
            rates = rates_from(row["throughput"])
            self._rates |= {(rate.model, rate.scale_factor): rate for rate in rates}
            self._numbers[str(row["number"])] = tuple(rate.scale_factor for rate in rates)
        document = self._store.get("rounds")
        if document is None:
            return RoundState.empty(self._pool(), self._places.servers)
        state = resumed(document, self._pool())
        state.changed |= self._store.get(_SHARED_BY) != self._settings.policy
        return state

    def _pool(self) -> Pool:
        rates = (corrected(rate, self._ratios_of(rate.model)) for rate in self._rates.values())
        return _pool_of(rates, self._places.num_devices, self._settings)

    def _ratios_of(self, kind: str) -> Ratios:
        if kind not in self._ratios:
            self._ratios[kind] = ratios_of(self._store, kind)
        return self._ratios[kind]

    def _learn(self, ended: Ended) -> None:
        """Let the next decision know how fast a job was."""
        asked, lease = self._submission(ended.lease.job), ended.lease
        types = {self._devices[name].device_type for name in lease.devices}
        measured = ended.measured_steps_per_second
        if note(self._store, kind_of(asked), types, lease.predicted_steps_per_second, measured):
            self._has_measured = True

    def _use_measured(self) -> None:
        """Decide by what was measured from now on.

        A policy sees it when it next shares the pool: if it shared anew for that alone, the time
        that jobs received would be counted from the start again and again.
        """
        if self._has_measured:
            self._has_measured = False
            self._ratios.clear()
            self._wishes.clear()
            self._state = resumed(stored(self._state), self._pool())

    def _submission(self, job: int) -> Submission:
        if job not in self._submissions:
            [row] = self._store.rows("SELECT submission FROM jobs WHERE number = ?", job)
            self._submissions[job] = from_json(row["submission"], Submission, name=f"job {job}")
        return self._submissions[job]

    def tick(self, now: float) -> None:
        """Do what is due at a time, in seconds since the epoch.

        Raises:
            FileError: The state cannot be written. What was not is forgotten only by a scheduler
                that begins anew.
            OSError: As FileError, of an engine's files.
        """
        self._settle(now)
        self._obey(now)
        self._hold_oversized(now)
        if self._is_due(now):
            self._decide_or_say(now)
        self._act(now)

    def stop(self, now: float) -> bool:
        """Ask all jobs to save and end; whether all have.

        They stay in the queue, and go on when the cluster is started again.
        """
        self._settle(now)
        with self._store.transaction():
            for lease in leases.open_leases(self._store):
                leases.drop_planned(self._store, lease.job, now)
                leases.ask_to_stop(self._store, lease, now)
            self._store.set("round_ends", None)
            self._aim(now)
            self._store.set(_AIMED, None)  # nobody is to get anything until it is started again
        self._round_ends = None
        self._act(now)
        return not leases.open_leases(self._store)

    def _settle(self, now: float) -> None:
        """Record the leases that were resized or ended, and the new states of their jobs."""
        self._settle_resizes(now)
        started = [lease for lease in leases.open_leases(self._store)
                   if lease.state in ("running", "stopping")]  # fmt: skip
        looked = (leases.fate_of(self._store, self._engine, lease) for lease in started)
        over = [ended for ended in looked if ended is not None]
        if not over:
            return
        with self._store.transaction():
            self._aim(now)
            self._credit([ended.lease for ended in over], now)
            for ended in over:
                leases.end(
                    self._store, ended.lease, now, ended.exit_code, ended.measured_steps_per_second
                )
                self._learn(ended)
                self._after(ended, now)
            self._save()

    def _settle_resizes(self, now: float) -> None:
        """Record what launches have answered that were asked for other devices."""
        asked = [lease for lease in leases.open_leases(self._store)
                 if lease.state == "running" and lease.resizing_to]  # fmt: skip
        for lease in asked:
            found = resizes.outcome(self._store, lease, now)
            if found is None:
                continue
            folder = leases.folder_of(self._store, lease)
            if found.state != "moved" and self._engine.fate(folder).state != "running":
                continue  # its launch ended before that: all is free
            with self._store.transaction():
                if found.state == "moved":
                    self._aim(now)
                    self._credit([lease], now)
                    leases.move(self._store, lease, now, self._predicted(lease))
                    self._save()
                else:
                    self._stop_instead(lease, found, now)
            if found.state != "unknown":
                resizes.forget(self._store, lease)

    def _predicted(self, lease: Lease) -> float | None:
        """Steps per second on the devices that a lease was resized to."""
        try:
            return 1.0 / self._plan(lease.job, lease.resizing_to).predicted.step_seconds
        except HetflowError:  # its profiles are gone by now
            return None

    def _plan(self, job: int, devices: Sequence[str]) -> Plan:
        types = Counter(self._devices[name].device_type for name in devices)
        return plan_on(self._submission(job), types)

    def _stop_instead(self, lease: Lease, found: resizes.Outcome, now: float) -> None:
        """Let a job that was not resized save, and start on its next devices."""
        if found.state == "stayed":
            leases.stay(self._store, lease)
            if leases.planned_devices(self._store, lease.job) == lease.devices:  # decided meanwhile
                leases.drop_planned(self._store, lease.job, now)
                return
        _log.warning(f"job {lease.job}: stopped and started again, not resized: {found.detail}")
        leases.ask_to_stop(self._store, lease, now)

    def _after(self, ended: Ended, now: float) -> None:
        lease, store = ended.lease, self._store
        if ended.exit_code == 0:
            self._rests.forget(self._server_of(lease))
            self._leave(lease.job, now)
            store.run(
                "UPDATE jobs SET state = 'done', ended = ?, reason = NULL, digest = ?, "
                "wanted = NULL WHERE number = ?", now, ended.digest, lease.job,
            )  # fmt: skip
            return
        asked = ended.exit_code in _ASKED or lease.state == "stopping"
        if not ended.has_begun and not asked:
            self._rest(ended, now)
            return
        if ended.has_begun:
            self._rests.forget(self._server_of(lease))
        store.run(
            "UPDATE jobs SET state = 'queued', reason = ?, "
            "failures = CASE WHEN ? THEN 0 ELSE failures + 1 END WHERE number = ?",
            None if asked and ended.exit_code in _ASKED else ended.reason, asked, lease.job,
        )  # fmt: skip
        [row] = store.rows("SELECT failures FROM jobs WHERE number = ?", lease.job)
        if row["failures"] >= MOST_FAILURES or (row["failures"] and ended.exit_code == _USAGE):
            self._hold(lease.job, ended.reason or "it failed", now)

    def _rest(self, ended: Ended, now: float) -> None:
        """Let a job whose launch could not begin wait for its turn, and the server rest."""
        server = self._server_of(ended.lease)
        seconds = self._rests.begin(server, now)
        reason = f"it could not begin on {server}, which is left alone for {seconds:.0f} s"
        _log.warning(f"job {ended.lease.job}: {reason} ({ended.reason})")
        self._store.run(
            "UPDATE jobs SET state = 'queued', reason = ? WHERE number = ?",
            f"{reason}: {ended.reason}", ended.lease.job,
        )  # fmt: skip
        self._has_news = True

    def _server_of(self, lease: Lease) -> str:
        """An engine starts a lease from one server, that of its first device."""
        return self._devices[lease.devices[0]].server

    def _hold(self, job: int, reason: str, now: float) -> None:
        self._leave(job, now)
        self._store.run(
            "UPDATE jobs SET state = 'held', reason = ?, wanted = NULL WHERE number = ?",
            reason, job,
        )  # fmt: skip

    def _leave(self, job: int, now: float) -> None:
        """Remove a job from the rounds, and drop the lease planned for it."""
        leases.drop_planned(self._store, job, now)
        self._state.leave({str(job)})
        self._submissions.pop(job, None)
        self._numbers.pop(str(job), None)
        self._wishes.pop(str(job), None)
        self._has_news = True

    def _obey(self, now: float) -> None:
        """Carry out what users asked for: new jobs, cancellations, holds and releases."""
        fresh = self._store.rows("SELECT number FROM jobs WHERE state = 'submitted'")
        wanting = self._store.rows("SELECT number, state, wanted FROM jobs WHERE wanted NOT NULL")
        if not fresh and not wanting:
            return
        open_ = {
            lease.job: lease for lease in leases.open_leases(self._store) if lease.holds_devices
        }
        released = [row for row in wanting if row["wanted"] == "release" and row["state"] == "held"]
        # Planning may take longer than others wait for the state, so it comes before.
        rates = {row["number"]: self._rates_or_why(row["number"]) for row in (*fresh, *released)}
        with self._store.transaction():
            self._aim(now)
            self._admit({row["number"]: rates[row["number"]] for row in fresh}, now)
            for row in wanting:
                self._grant(row["number"], row["wanted"], open_, rates, now)
            self._save()

    def _rates_or_why(self, job: int) -> tuple[Rate, ...] | HetflowError:
        """How fast a job is with each number of devices, or why it can never run."""
        asked, known = self._submission(job), [one.name for one in self._settings.entities]
        if asked.entity is not None and known and asked.entity not in known:
            return ProblemError(f"it belongs to {asked.entity!r}, which is none of the entities")
        try:
            rates = self._rates_of(asked)
        except HetflowError as error:
            return error
        why = self._oversize(rates[-1].scale_factor)
        return rates if why is None else ProblemError(why)

    def _grant(
        self,
        job: int,
        wanted: str,
        open_: dict[int, Lease],
        rates: Mapping[int, tuple[Rate, ...] | HetflowError],
        now: float,
    ) -> None:
        store = self._store
        [row] = store.rows("SELECT state FROM jobs WHERE number = ?", job)  # it may be new
        state = row["state"]
        if wanted == "release":
            if state == "held":
                store.run("UPDATE jobs SET failures = 0 WHERE number = ?", job)
                self._admit({job: rates[job]}, now)
            store.run("UPDATE jobs SET wanted = NULL WHERE number = ?", job)
            return
        leases.drop_planned(store, job, now)
        lease = open_.get(job)
        if lease is not None:
            leases.ask_to_stop(store, lease, now)
            return  # it is done when the lease is over
        if wanted == "hold" and state == "queued":
            self._hold(job, "held by its user", now)
        elif wanted == "cancel" and state in ("queued", "held"):
            self._leave(job, now)
            store.run("UPDATE jobs SET state = 'cancelled', ended = ? WHERE number = ?", now, job)
        store.run("UPDATE jobs SET wanted = NULL WHERE number = ?", job)

    def _admit(self, jobs: Mapping[int, tuple[Rate, ...] | HetflowError], now: float) -> None:
        """Let jobs into the rounds; hold those that can never run, with the reason."""
        found: dict[int, tuple[Rate, ...]] = {}
        for job, rates in jobs.items():
            if isinstance(rates, HetflowError):
                self._hold(job, rates.message, now)
            else:
                found[job] = rates
        self._know(rate for rates in found.values() for rate in rates)
        entering = []
        for job, rates in found.items():
            [row] = self._store.rows("SELECT submitted FROM jobs WHERE number = ?", job)
            entering.append(as_job(job, self._submission(job), row["submitted"], rates))
            self._numbers[str(job)] = tuple(rate.scale_factor for rate in rates)
            self._store.run(
                "UPDATE jobs SET state = 'queued', reason = NULL, throughput = ? WHERE number = ?",
                rates_to(rates), job,
            )  # fmt: skip
        if entering:
            self._state.admit(entering, self._settings.rules.head_start_seconds)
            self._has_news = True

    def _rates_of(self, asked: Submission) -> tuple[Rate, ...]:
        """How fast a new job is; HetflowError says why it can never run."""
        places = self._places
        if self._policy is None and self._variant is None:
            try:
                return rates_of(asked, places.largest)
            except InfeasibleError as error:
                where = "" if self._is_alone else "; all devices of a job are on one server"
                raise InfeasibleError(f"{error.message}{where}", hint=error.hint) from None
        if self._variant is None:
            return rates_of(asked, places.num_devices, self._no_mixes)
        return rates_and_wish(asked, places.num_devices, places.layout, self._variant)[0]

    def _hold_oversized(self, now: float) -> None:
        """Hold jobs that the policy before let in, and this one cannot; those that run save first.

        Otherwise the policy would fail in every round, and no job would ever move.
        """
        found = {
            int(job.id): why
            for job in self._state.active.jobs
            if (why := self._oversize(job.scale_factor)) is not None
        }
        if not found:
            return
        open_ = {
            lease.job: lease for lease in leases.open_leases(self._store) if lease.holds_devices
        }
        with self._store.transaction():
            self._aim(now)
            for job, why in found.items():
                lease = open_.get(job)
                if lease is None:
                    self._hold(job, why, now)
                elif lease.state in _STARTED:
                    leases.drop_planned(self._store, job, now)
                    leases.ask_to_stop(self._store, lease, now)
            self._save()

    def _oversize(self, num_devices: int) -> str | None:
        """Why a job of so many devices cannot be scheduled; None where it can."""
        most = self._most_devices
        if most is None or num_devices <= most:
            return None
        return (
            f"it asks for {num_devices} devices, and {self._settings.policy} gives a job {most} at "
            f"most: submit it with --devices {most}, or start the cluster with another --policy"
        )

    def _know(self, rates: Iterable[Rate]) -> None:
        """Add throughputs to the pool's; those of jobs that are gone are forgotten."""
        new = {(one.model, one.scale_factor): one for one in rates}
        if new.items() <= self._rates.items():
            return
        here = {job.model for job in self._state.active.jobs}
        self._rates = {key: one for key, one in self._rates.items() if key[0] in here} | new
        self._state = resumed(stored(self._state), self._pool())

    def _is_due(self, now: float) -> bool:
        if not len(self._state.active):
            return False
        if self._is_alone and self._rests.resting(now):
            return False  # it is the only server: all its jobs would have to stop
        if self._round_ends is None:
            return True
        self._has_news |= self._rests.somebody_rose(now)
        # Fair sharing moves devices between jobs that hold some.
        is_free = self._has_news and (self._policy is None or not leases.open_leases(self._store))
        return now >= round_end(
            self._round_ends,
            free_seconds=now if is_free else math.inf,
            news_seconds=now if self._has_news else math.inf,
        )

    def _aim(self, now: float) -> None:
        """Count the device-seconds that the policy's shares gave jobs since this was done last."""
        since, active = self._store.get(_AIMED), self._state.active
        self._store.set(_AIMED, now)
        if since is None or not len(active):
            return
        devices = active.share.sum(axis=0) * active.scale
        self._store.run_each(
            "UPDATE jobs SET target_seconds = target_seconds + ? WHERE number = ?",
            [
                (held * max(0.0, now - since), int(job.id))
                for job, held in zip(active.jobs, devices.tolist(), strict=True)
                if held
            ],
        )

    def _credit(self, given: Sequence[Lease], now: float) -> None:
        """Count the time that leases had since they were counted last."""
        places = {job.id: place for place, job in enumerate(self._state.active.jobs)}
        for lease in given:
            place = places.get(str(lease.job))
            if lease.started is not None and place is not None:
                self._credit_at(place, lease, lease.started, now)

    def _credit_at(self, place: int, lease: Lease, started: float, now: float) -> None:
        active = self._state.active
        seconds = max(0.0, now - max(started, lease.credited or started))
        kinds = Counter(kind for kind, _, _ in self._places.seat(lease.devices))
        rate = self._receive(place, kinds, seconds)
        active.left[place] = max(_LEAST_STEPS, active.left[place] - seconds * rate)
        leases.credit(self._store, lease, now)

    def _receive(self, place: int, kinds: Counter[int], seconds: float) -> float:
        """Count the time that a job had on devices of each type; its steps per second there."""
        active, pool = self._state.active, self._state.pool
        job, number = active.jobs[place], kinds.total()
        if (column := self._column(place, kinds)) is None:
            for kind, part in kinds.items():
                self._count(place, kind, seconds * part / number)
            wish = self._wish(job.id)
            counts = tuple(kinds[kind] for kind in range(len(pool.types)))
            return wish.rate(counts) if isinstance(wish, easyscale.Elastic) else 0.0
        self._count(place, column, seconds)
        if number in self._numbers.get(job.id, ()):
            return float(pool.rate(replace(job, scale_factor=number))[column])
        return float(active.rate[column, place])

    def _column(self, place: int, kinds: Counter[int]) -> int | None:
        """Where policies see these devices of a job; None for several types within its range."""
        try:
            column = self._state.pool.column_of(kinds)
        except ProblemError:
            return None
        alike = len(kinds) == 1 or self._state.active.rate[column, place] > 0
        return column if alike else None

    def _count(self, place: int, column: int, seconds: float) -> None:
        receive(self._state, np.array([column]), np.array([place]), np.array([seconds]))
        self._state.active.held[column, place] += seconds

    def _decide_or_say(self, now: float) -> None:
        """Begin a round; if the policy fails, all jobs keep their devices for one more round."""
        try:
            self._decide(now)
        except FileError:
            raise
        except HetflowError as error:
            _log.warning(f"nobody moves in this round: {error.message}")
            self._state = self._resumed()  # as it was before
            self._has_news = False
            self._round_ends = now + self._settings.rules.round_seconds

    def _decide(self, now: float) -> None:
        """Begin a round."""
        store, rules = self._store, self._settings.rules
        self._devices = {device.name: device for device in self._engine.devices()}
        open_ = leases.open_leases(store)
        with store.transaction():
            self._aim(now)
            self._credit(open_, now)
            self._use_measured()
            found = self._chosen(open_, now)
            self._plan_next(open_, {int(job): seat for job, seat in found.items()}, now)
            self._has_news = False
            self._round_ends = now + rules.round_seconds
            store.set("round_ends", self._round_ends)
            store.set("inventory", self._inventory())
            store.set(_SHARED_BY, self._settings.policy)
            self._save()

    def _chosen(self, open_: Sequence[Lease], now: float) -> dict[str, Seat]:
        """The devices of each job that runs from now on."""
        sizes, down, held = self._places.sizes, self._down(now), self._held(open_)
        if self._variant is not None:
            return easyscale.next_devices(
                self._state, {job.id: self._wish(job.id) for job in self._state.active.jobs}, now,
                variant=self._variant, layout=self._places.layout, down=down,
                held=self._decided(open_), kept=self._kept(open_, now),
            )  # fmt: skip
        if self._policy is None:
            return elastic.next_shares(
                self._state, self._numbers, now, sizes=sizes, down=down, held=held,
                kept=self._kept(open_, now),
            )  # fmt: skip
        allocator = self._policy.for_pool(self._state.pool)
        rules = replace(self._settings.rules, fills_idle=not allocator.leaves_idle)
        found = next_round(self._state, allocator, now, rules, sizes=sizes, down=down, held=held)
        return {**found, **self._kept(open_, now)}

    def _wish(self, job: str) -> easyscale.Wish:
        if job not in self._wishes:
            asked = self._submission(int(job))
            ratios = self._ratios_of(kind_of(asked))
            rates = [corrected(one, ratios) for key in self._numbers[job]
                     if (one := self._rates.get((kind_of(asked), key)))]  # fmt: skip
            self._wishes[job] = wish_of(
                asked, rates, list(self._places.num_devices), partial(ratio_on, ratios)
            )
        return self._wishes[job]

    def _kept(self, open_: Sequence[Lease], now: float) -> dict[str, Seat]:
        """The devices of jobs that run on a server that rests: only new launches avoid it."""
        resting, drained = self._rests.resting(now), set(self._store.get("drained") or ())
        kept = {}
        for lease in open_:
            names = lease.resizing_to or lease.devices
            devices = [self._devices[name] for name in names]
            if (
                lease.state in _STARTED
                and any(device.server in resting for device in devices)
                and all(device.is_up for device in devices)
                and not any(drained & {device.server, device.device_type} for device in devices)
            ):
                kept[str(lease.job)] = self._places.seat(names)
        return kept

    def _held(self, open_: Sequence[Lease]) -> dict[str, Seat]:
        """The devices of jobs that run, or are about to; in a resize those after it."""
        planned = {lease.job: lease.devices for lease in open_ if not lease.holds_devices}
        running = {lease.job: lease.resizing_to or lease.devices for lease in open_
                   if lease.state in _STARTED}  # fmt: skip
        return {str(job): self._places.seat(names) for job, names in (planned | running).items()}

    def _decided(self, open_: Sequence[Lease]) -> dict[str, Seat]:
        """The devices of jobs by the last decision, also where a resize has to wait for others."""
        planned = {str(lease.job): self._places.seat(lease.devices)
                   for lease in open_ if not lease.holds_devices}  # fmt: skip
        return self._held(open_) | planned

    def _plan_next(self, open_: Sequence[Lease], found: dict[int, Seat], now: float) -> None:
        """Renew leases; plan the next one of each job that gets other devices, or some at last.

        A running lease beside a planned one is resized, and a stopping one makes room for it.
        """
        started = [lease for lease in open_ if lease.state in _STARTED]
        renewed = {
            lease.job
            for lease in started
            if not lease.resizing_to and found.get(lease.job) == self._seat(lease)
        }
        settled = set(renewed)
        for lease in open_:
            if lease.holds_devices:
                continue
            if lease.job in settled or found.get(lease.job) != self._seat(lease):
                leases.drop_planned(self._store, lease.job, now)
            else:
                settled.add(lease.job)
        for lease in started:
            seat = found.get(lease.job)
            if lease.job in renewed:
                continue
            if seat is None or not self._can_resize(lease, self._places.names(seat)):
                leases.ask_to_stop(self._store, lease, now)
        for job, seat in found.items():
            if job not in settled:
                leases.plan_lease(self._store, job, self._places.names(seat), now)

    def _seat(self, lease: Lease) -> Seat:
        return self._places.seat(lease.devices)

    def _can_resize(self, lease: Lease, names: Sequence[str]) -> bool:
        """Whether its launch may be asked to go over to other devices while it runs."""
        if lease.state != "running" or not isinstance(self._engine, ResizingEngine):
            return False
        held, wanted = ([self._devices[name] for name in part] for part in (lease.held, names))
        if len({device.server for device in (*held, *wanted)}) > 1:
            return False
        return self._engine.can_resize(held, wanted)

    def _down(self, now: float) -> list[Device]:
        drained = set(self._store.get("drained") or ()) | self._rests.resting(now)
        return [
            self._places.device(device.name)
            for device in self._devices.values()
            if not device.is_up or drained & {device.server, device.device_type}
        ]

    def _act(self, now: float) -> None:
        """Start leases whose devices are free, and pursue those that have to end.

        What fails is raised when all the others are done.
        """
        trouble: FileError | OSError | None = None
        for act in self._due_acts(now):
            try:
                act()
            except (FileError, OSError) as error:
                trouble = error
        if trouble is not None:
            raise trouble

    def _due_acts(self, now: float) -> Iterator[Callable[[], None]]:
        open_ = leases.open_leases(self._store)
        found = due(open_)
        for lease in open_:
            if lease.state == "stopping":
                grace_seconds = float(self._settings.grace_seconds)
                yield partial(leases.pursue, self._store, self._engine, lease, grace_seconds, now)
            elif lease.state == "starting":
                yield partial(self._start, lease, now)
            elif lease.resizing_to and not resizes.is_asked(self._store, lease):
                yield partial(self._ask, lease, lease.resizing_to, now)
        for lease in found.begin:
            leases.begin(self._store, lease, now)
            yield partial(self._start, lease, now)
        for lease, planned in found.resize:
            yield partial(self._ask, lease, planned.devices, now)
        for lease in found.stop:
            yield partial(
                self._give_up, lease, "others wait for its devices, and it for theirs", now
            )

    def _ask(self, lease: Lease, devices: Sequence[str], now: float) -> None:
        """Ask a launch to go over to devices that are free; ask again where it may not have been.

        Raises:
            FileError: The request, or the state, cannot be written.
        """
        try:
            config = resizes.mapping(self._store, lease, self._plan(lease.job, devices))
        except HetflowError as error:
            self._give_up(lease, error.message, now)
            return
        if not lease.resizing_to:
            with self._store.transaction():
                leases.ask_to_resize(self._store, lease, devices, now)
            lease = replace(lease, resizing_to=tuple(devices), resize_asked=now)
        resizes.ask(self._store, lease, config)

    def _give_up(self, lease: Lease, why: str, now: float) -> None:
        with self._store.transaction():
            self._stop_instead(lease, resizes.Outcome("stayed", why), now)

    def _start(self, lease: Lease, now: float) -> None:
        try:
            leases.start(
                self._store, self._engine, self._devices, lease, self._submission(lease.job),
                self._settings.grace_seconds,
            )  # fmt: skip
        except UnsuitableDevicesError as error:  # the next round may find others
            with self._store.transaction():
                leases.end(self._store, lease, now)
                self._store.run(
                    "UPDATE jobs SET state = 'queued', reason = ? WHERE number = ?",
                    error.message, lease.job,
                )  # fmt: skip
        except FileError:
            raise  # no fault of the job's: it starts when there is room
        except HetflowError as error:
            with self._store.transaction():
                leases.end(self._store, lease, now)
                self._hold(lease.job, error.message, now)
                self._save()

    def _save(self) -> None:
        self._store.set("rounds", stored(self._state))


@dataclass(frozen=True, slots=True)
class _Policy:
    """A policy of rounds; LAS has a faster form while no job is on several types at once."""

    alone: Allocator
    mixing: Allocator

    @classmethod
    def named(cls, name: str, entities: tuple[Entity, ...]) -> "_Policy":
        alone = allocator_named(name, others=(elastic.NAME, *easyscale.VARIANTS), entities=entities)
        mixing = allocator_named(name, columns=True, entities=entities)
        if alone.shares_space:
            raise ProblemError(f"{name} puts two jobs on a device, which a live cluster does not")
        # One of each class, which remembers what it saw.
        return cls(alone, alone if type(mixing) is type(alone) else mixing)

    def for_pool(self, pool: Pool) -> Allocator:
        return self.mixing if pool.uses_mixes else self.alone


def _policy_for(devices: Collection[EngineDevice], settings: Settings) -> _Policy | None:
    """The policy of a cluster's rounds; None where decisions do not wait for the end of a round.

    Raises:
        ProblemError: As ``check_settings``.
    """
    if settings.policy == elastic.NAME:
        _refuse_several_types(devices)
        return None
    if settings.policy in easyscale.VARIANTS:
        return None
    return _Policy.named(settings.policy, settings.entities)


def _refuse_several_types(devices: Collection[EngineDevice]) -> None:
    """Weighted fair sharing counts devices alone."""
    types = sorted({device.device_type for device in devices})
    if len(types) > 1:
        raise ProblemError(
            f"{elastic.NAME} shares devices of one type, the cluster has {', '.join(types)[:200]}",
            hint="start with one type, or take easyscale or a policy of `hetflow allocate`",
        )


class _Places:
    """Devices by name, and as mechanisms count them: (type, server, number there)."""

    def __init__(self, devices: tuple[EngineDevice, ...]) -> None:
        self.num_devices = dict(Counter(device.device_type for device in devices))
        rows: dict[str, dict[str, list[str]]] = {name: {} for name in self.num_devices}
        for device in devices:
            rows[device.device_type].setdefault(device.server, []).append(device.name)
        self.sizes = tuple(
            tuple(len(names) for names in servers.values()) for servers in rows.values()
        )
        self._name = {
            (kind, place, number): name
            for kind, servers in enumerate(rows.values())
            for place, names in enumerate(servers.values())
            for number, name in enumerate(names)
        }
        self._device = {name: device for device, name in self._name.items()}
        servers = list(dict.fromkeys(device.server for device in devices))
        self.layout = Layout(
            self.sizes, tuple(tuple(map(servers.index, row)) for row in rows.values())
        )

    @property
    def largest(self) -> dict[str, int]:
        """Devices of each type on the server that has most of them."""
        return {name: max(row) for name, row in zip(self.num_devices, self.sizes, strict=True)}

    @property
    def servers(self) -> tuple[tuple[int, ...], ...] | None:
        """Devices of each type on each server; None where placement does not count."""
        return self.sizes if any(len(row) > 1 for row in self.sizes) else None

    def device(self, name: str) -> Device:
        return self._device[name]

    def seat(self, names: tuple[str, ...]) -> Seat:
        return tuple(sorted(self._device[name] for name in names))

    def names(self, seat: Seat) -> list[str]:
        return [self._name[device] for device in seat]
