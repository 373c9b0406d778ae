"""The scheduler itself: rounds on the wall clock (thesis 5.5, 5.6).

Each tick settles what became of leases, obeys what users asked for, decides if a decision is due,
and acts: it starts, resizes and stops launches. At the end of a round the policy decides which job
holds which devices in the next one. The lease of a job that keeps its devices is renewed, and its
training is not interrupted. A job that gets others on the same server is resized while it runs,
where engine and launch can do that. Any other that loses its devices is asked to save and end; the
next job starts on them when they are free. When no job holds a device, the next round begins at
once. When a device is idle beside a job that waits, the policy gives it away within the round, and
nobody moves. Policies under which jobs grow and shrink decide whenever a job comes or ends
(``sharing``).

A lease counts from its launch's first step: what it is charged and credited, and the rounds. It is
not moved before.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from ...schema.errors import FileError, HetflowError, ProblemError
from ...schema.options import option
from ...schema.plan import Plan
from ..engines.protocol import Engine, ResizingEngine, UnsuitableDevicesError
from ..mechanisms.allocators import most_devices
from ..mechanisms.round_state import RoundState, resumed, stored
from ..mechanisms.rounds import round_end
from ..mechanisms.seats import Seat
from . import leases
from .known_jobs import KnownJobs, Ledger
from .leases import Ended, Lease, due
from .occupancy import FIRST_SECONDS, LONGEST_SECONDS, Places, Rests, occupancy
from .plans import Rate, as_job, plan_on, rates_to
from .sharing import ClusterSettings, sharing_of
from .store import ClusterStore
from .submission import prospect

_log = logging.getLogger("hetflow")
MOST_FAILURES = 10
"""A job that failed so many times, one after another, is held."""
_ASKED = (130, 143)  # exit codes of a launch that was asked to stop, and saved
_USAGE = 2  # of a launch that makes no sense: it would make none the next time
_SHARED_BY = "shared_by"  # the policy that the shares in the state are of
_LOOK_SECONDS = 5.0  # between looks at devices that are down, while a job waits
_LONGEST_ROUND = 2.0  # lengths of a round: so far later first steps put its end off


class Scheduler:
    """One cluster; ``tick`` does what is due."""

    def __init__(self, store: ClusterStore, engine: Engine, settings: ClusterSettings) -> None:
        """Go on where the state is.

        Raises:
            ProblemError: The state is of other devices, or the policy does not fit.
        """
        self._store, self._engine, self._settings = store, engine, settings
        self._devices = {device.name: device for device in engine.devices()}
        self._places = Places(self._devices.values())
        self._sharing = sharing_of(settings, self._places)
        self._most_devices = most_devices(settings.policy)
        self._rests = Rests(store)
        self._round_ends: float | None = store.get("round_ends")
        self._round_began: float | None = store.get("round_began")
        self._has_news = True  # since the last decision
        # From the state, so a restart of the scheduler does not try again at once.
        self._failed = {  # jobs that failed: until when they wait
            row["job"]: row["ended"] + _wait_seconds(row["failures"])
            for row in store.rows(
                "SELECT job, failures, max(leases.ended) AS ended FROM leases JOIN jobs "
                "ON job = jobs.number WHERE failures AND jobs.state = 'queued' GROUP BY job"
            )
        }
        self._drained = set[str](store.get("drained") or ())  # as the last decision had it
        self._looked = -math.inf  # when devices were last asked for
        self._slowest_start = 0.0  # seconds that a launch took to its first step
        self._now = -math.inf
        names = sorted(self._devices)
        known = store.get("devices")
        if known not in (None, names):
            raise ProblemError(
                f"{store.folder}: its jobs are scheduled on other devices than "
                f"{', '.join(names)[:200]}",
                hint=f"start with the devices it was started with, or with a new {option('state')}",
            )
        self._known = KnownJobs(store, self._places.num_devices, settings.dollars_per_hour)
        self._ledger = Ledger(store, self._places, self._known)
        self._state = self._resumed()
        # Written only if it changed: others read it, and each write is a transaction.
        if known is None or store.get("inventory") != self._inventory():
            with store.transaction():
                store.set("devices", names)
                store.set("inventory", self._inventory())
                drainable = {d.device_type for d in self._devices.values()}
                drainable |= {d.server for d in self._devices.values()}
                store.set("drainable", sorted(drainable))

    def _inventory(self) -> list[list[object]]:
        """Name, type and server of each device, and whether it works, for those who look on."""
        return [
            [device.name, device.device_type, device.server, device.is_up]
            for device in self._devices.values()
        ]

    def _resumed(self) -> RoundState:
        # A state that another policy shared is shared anew; else running jobs keep their turn.
        document = self._store.get("rounds")
        if document is None:
            return RoundState.empty(self._known.pool(), self._places.servers)
        state = resumed(document, self._known.pool())
        state.changed |= self._store.get(_SHARED_BY) != self._settings.policy
        return state

    def _take_up_pool(self) -> None:
        """Go on in the pool as it is known now."""
        # Through its stored form, which knows columns by name: mixes may have come or gone.
        # A policy sees new rates when it next shares the pool: if it shared anew for these alone,
        # the time that jobs received would be counted from the start again and again.
        self._state = resumed(stored(self._state), self._known.pool())

    def tick(self, now: float) -> None:
        """Do what is due at a time, in seconds since the epoch.

        Time should be steady (``serve`` sees to that). If it was set back, what was to come is due
        as long from now on as it was at most. Nobody is charged for what has not been.

        Raises:
            FileError: The state cannot be written. What was not is forgotten only by a scheduler
                that begins anew.
            OSError: As FileError, of an engine's files.
        """
        # The first tick, or the clock was set back.
        if now < self._now or self._now == -math.inf:
            self._take_clock(now)
        self._now = now
        # In this order: what has ended frees devices, what users asked for changes jobs, then it
        # is decided who gets them.
        self._settle(now)
        for lease in leases.open_leases(self._store):
            if lease.goes_on and self._overdue(lease.job, now) is not None:
                with self._store.transaction():
                    leases.drop_planned(self._store, lease.job, now)
                    leases.ask_to_stop(self._store, lease, now)
        self._obey(now)
        self._hold_oversized(now)
        what = self._due_decision(now)
        if what is not None:
            self._decide_or_say(now, only_idle=what == "idle")
        try:
            self._act(now)
        # Also after an error: what began has begun.
        finally:
            self._note_progress(now)

    def _take_clock(self, now: float) -> None:
        """Go on by a clock that may be behind what the state says."""
        with self._store.transaction():
            leases.forget_future(self._store, now)
            self._rests.forget_future(now)
            self._ledger.forget_future(now)
            self._set_round(now, self._round_began, self._round_ends)
        latest = now + LONGEST_SECONDS
        self._failed = {job: min(until, latest) for job, until in self._failed.items()}

    def _set_round(self, now: float, began: float | None, ends: float | None) -> None:
        """Set when the round began and ends; neither is further off than it can be."""
        seconds = self._settings.rules.round_seconds
        self._round_began = None if began is None else min(began, now)
        self._round_ends = None if ends is None else min(ends, now + seconds)
        self._store.set("round_began", self._round_began)
        self._store.set("round_ends", self._round_ends)

    def _note_progress(self, now: float) -> None:
        """Record launches that have begun, and first steps, from which rounds count."""
        for lease in leases.open_leases(self._store):
            if lease.state not in ("running", "stopping") or lease.trained is not None:
                continue
            found = leases.note_progress(self._store, self._engine, lease, now)
            if found.trained is None:
                continue
            self._has_news |= self._sharing.moves_running_jobs  # it may be moved from now on
            self._warn_of_short_rounds(now - (lease.began or found.trained))
            if self._round_ends is not None and self._round_began is not None:
                seconds = self._settings.rules.round_seconds
                # The round counts from first steps, so it ends that much later, within limits.
                ends = min(now + seconds, self._round_began + _LONGEST_ROUND * seconds)
                if ends > self._round_ends:
                    with self._store.transaction():
                        self._set_round(now, self._round_began, ends)

    def _warn_of_short_rounds(self, start_seconds: float) -> None:
        seconds = self._settings.rules.round_seconds
        if start_seconds > max(seconds, 2.0 * self._slowest_start):  # once for each magnitude
            self._slowest_start = start_seconds
            _log.warning(
                f"a launch took {start_seconds:.0f} s to its first step, and a round lasts "
                f"{seconds:g} s: where jobs take turns they start more than they train; take "
                f"{option('round', math.ceil(10.0 * start_seconds))}"
            )

    def stop(self, now: float) -> bool:
        """Ask all jobs to save and end; whether all have.

        They stay in the queue, and go on when the cluster is started again.
        """
        self._settle(now)
        with self._store.transaction():
            for lease in leases.open_leases(self._store):
                leases.drop_planned(self._store, lease.job, now)
                leases.ask_to_stop(self._store, lease, now)
            self._set_round(now, None, None)
            self._ledger.pause_targets(self._state, now)  # until it is started again
        self._act(now)
        return not leases.open_leases(self._store)

    def _settle(self, now: float) -> None:
        """Record the leases that were resized or ended, and the new states of their jobs."""
        self._settle_resizes(now)
        started = [lease for lease in leases.open_leases(self._store)
                   if lease.state in ("running", "stopping")]  # fmt: skip
        looked = (leases.fate_of(self._store, self._engine, lease) for lease in started)
        # All are looked at first, then recorded in one transaction: a crash between leaves all of
        # it to the next tick.
        over = [ended for ended in looked if ended is not None]
        if not over:
            return
        # Time is counted before leases end, as they count only while they are open.
        with self._store.transaction():
            self._ledger.count_targets(self._state, now)
            self._ledger.count_leases(self._state, [ended.lease for ended in over], now)
            for ended in over:
                leases.end(
                    self._store, ended.lease, now, ended.exit_code, ended.measured_steps_per_second
                )
                self._known.learn(ended, self._types(ended.lease.devices))
                self._after(ended, now)
            self._has_news |= self._somebody_waits(leases.open_leases(self._store))
            self._save()

    def _settle_resizes(self, now: float) -> None:
        """Record what launches have answered that were asked for other devices."""
        asked = [lease for lease in leases.open_leases(self._store)
                 if lease.state == "running" and lease.resizing_to]  # fmt: skip
        for lease in asked:
            found = leases.resize_outcome(self._store, lease, now)
            if found is None:
                continue
            folder = leases.folder_of(self._store, lease)
            if found.state != "moved" and not self._engine.fate(folder).is_open:
                continue  # its launch ended before that: all is free
            with self._store.transaction():
                if found.state == "moved":
                    self._ledger.count_targets(self._state, now)
                    self._ledger.count_leases(self._state, [lease], now)
                    leases.move(self._store, lease, now, self._predicted(lease))
                    self._save()
                else:
                    self._stop_instead(lease, found, now)
            # The answer is taken away only after the record tells of it: a crash in between finds
            # it again.
            if found.state != "unknown":
                leases.forget_resize(self._store, lease)

    def _predicted(self, lease: Lease) -> float | None:
        """Steps per second on the devices that a lease was resized to."""
        try:
            return 1.0 / self._plan(lease.job, lease.resizing_to).predicted.step_seconds
        except HetflowError:  # its profiles are gone by now
            return None

    def _plan(self, job: int, devices: Sequence[str]) -> Plan:
        return plan_on(self._known.submission(job), self._types(devices))

    def _types(self, devices: Sequence[str]) -> Counter[str]:
        return Counter(self._devices[name].device_type for name in devices)

    def _stop_instead(self, lease: Lease, found: leases.ResizeOutcome, now: float) -> None:
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
            # A server on which a job ended well is no longer left alone.
            self._rests.forget(self._server_of(lease))
            self._leave(lease.job, now)
            store.change_job(
                lease.job, state="done", ended=now, reason=None, digest=ended.digest, wanted=None
            )
            return
        # It was asked to stop and saved, whatever its exit code says.
        asked = ended.exit_code in _ASKED or lease.state == "stopping"
        if not ended.has_begun and not asked:
            # It never ran: the server is at fault, not the job, so it counts as no failure of it.
            server = self._server_of(lease)
            seconds = self._rests.begin(server, now)
            reason = f"it could not begin on {server}, which is left alone for {seconds:.0f} s"
            _log.warning(f"job {lease.job}: {reason} ({ended.reason})")
            store.change_job(lease.job, state="queued", reason=f"{reason}: {ended.reason}")
            self._has_news = True
            return
        if (overdue := self._overdue(lease.job, now)) is not None:
            self._hold(lease.job, overdue, now)
            return
        if ended.has_begun:
            self._rests.forget(self._server_of(lease))
        # Failures in a row: a launch that was asked to stop had trained, so the count begins anew.
        store.run(
            "UPDATE jobs SET state = 'queued', reason = ?, "
            "failures = CASE WHEN ? THEN 0 ELSE failures + 1 END WHERE number = ?",
            None if asked and ended.exit_code in _ASKED else ended.reason, asked, lease.job,
        )  # fmt: skip
        [row] = store.rows("SELECT failures FROM jobs WHERE number = ?", lease.job)
        if row["failures"]:
            self._failed[lease.job] = now + _wait_seconds(row["failures"])
        if row["failures"] >= MOST_FAILURES or (row["failures"] and ended.exit_code == _USAGE):
            self._hold(lease.job, ended.reason or "it failed", now)

    def _overdue(self, job: int, now: float) -> str | None:
        """Why a job has to end by its time limit; None where it need not."""
        limit = self._known.submission(job).time_limit_seconds
        if limit is None or leases.held_seconds(self._store, job, now) <= limit:
            return None
        return f"its time limit of {limit:g} s is over; released, it has as much again"

    def _server_of(self, lease: Lease) -> str:
        """An engine starts a lease from one server, that of its first device."""
        return self._devices[lease.devices[0]].server

    def _hold(self, job: int, reason: str, now: float) -> None:
        self._leave(job, now)
        self._store.change_job(job, state="held", reason=reason, wanted=None)

    def _leave(self, job: int, now: float) -> None:
        """Remove a job from the rounds, and drop the lease planned for it."""
        leases.drop_planned(self._store, job, now)
        self._state.leave({str(job)})
        self._known.leave(job)
        self._has_news = True

    def _obey(self, now: float) -> None:
        """Carry out what users asked for: new jobs, cancellations, holds and releases."""
        wanting = self._store.rows("SELECT number, wanted FROM jobs WHERE wanted NOT NULL")
        if any(row["wanted"] == "release" for row in wanting):
            self._release(now)
        fresh = self._fresh(now)
        if not fresh and not wanting:
            return
        # Jobs that hold devices end their launch first; what users asked for is done when it is
        # over.
        open_ = {
            lease.job: lease for lease in leases.open_leases(self._store) if lease.holds_devices
        }
        # Planning may take longer than others wait for the state, so it comes before.
        rates = {job: self._rates_or_why(job) for job in fresh}
        with self._store.transaction():
            self._ledger.count_targets(self._state, now)
            self._admit(rates, now)
            for row in wanting:
                if row["wanted"] != "release":
                    self._grant(row["number"], row["wanted"], open_, now)
            self._save()

    def _release(self, now: float) -> None:
        """Let held jobs come anew: their failures and time limits count from now on."""
        with self._store.transaction():
            self._store.run(
                "UPDATE jobs SET state = 'submitted', reason = NULL, failures = 0, released = ? "
                "WHERE wanted = 'release' AND state = 'held'", now,
            )  # fmt: skip
            self._store.run("UPDATE jobs SET wanted = NULL WHERE wanted = 'release'")

    def _fresh(self, now: float) -> list[int]:
        """New jobs that no other one holds up; says of the others whom they wait for."""
        rows = self._store.rows("SELECT number, reason FROM jobs WHERE state = 'submitted'")
        found = []
        for row in rows:
            when, why = prospect(self._store, self._known.submission(row["number"]))
            if when == "now":
                found.append(row["number"])
            elif why != row["reason"]:
                with self._store.transaction():
                    if when == "never":
                        self._hold(row["number"], why, now)
                    else:
                        self._store.change_job(row["number"], reason=why)
        return found

    def _rates_or_why(self, job: int) -> tuple[Rate, ...] | HetflowError:
        """How fast a job is with each number of devices, or why it can never run."""
        asked, known = self._known.submission(job), [one.name for one in self._settings.entities]
        if asked.entity is not None and known and asked.entity not in known:
            return ProblemError(f"it belongs to {asked.entity!r}, which is none of the entities")
        try:
            rates = self._sharing.rates_of(asked)
        except HetflowError as error:
            return error
        why = self._oversize(rates[-1].scale_factor)
        return rates if why is None else ProblemError(why)

    def _oversize(self, num_devices: int) -> str | None:
        """Why the policy cannot serve a job of so many devices; None where it can."""
        most, policy = self._most_devices, self._settings.policy
        if most is None or num_devices <= most:
            return None
        return (
            f"it asks for {num_devices} devices, and {policy} gives a job {most} at most: submit "
            f"it with {option('devices', most)}, or start the cluster with another "
            f"{option('policy')}"
        )

    def _grant(self, job: int, wanted: str, open_: dict[int, Lease], now: float) -> None:
        store = self._store
        [row] = store.rows("SELECT state FROM jobs WHERE number = ?", job)  # it may be new
        state = row["state"]
        leases.drop_planned(store, job, now)
        lease = open_.get(job)
        if lease is not None:
            leases.ask_to_stop(store, lease, now)
            return  # it is done when the lease is over
        if wanted == "hold" and state in ("submitted", "queued"):
            self._hold(job, "held by its user", now)
        elif wanted == "cancel" and state in ("submitted", "queued", "held"):
            self._leave(job, now)
            store.change_job(job, state="cancelled", ended=now)
        store.change_job(job, wanted=None)

    def _admit(self, jobs: Mapping[int, tuple[Rate, ...] | HetflowError], now: float) -> None:
        """Let jobs into the rounds; hold those that can never run, with the reason."""
        found: dict[int, tuple[Rate, ...]] = {}
        for job, rates in jobs.items():
            if isinstance(rates, HetflowError):
                self._hold(job, rates.message, now)
            else:
                found[job] = rates
        if self._known.admit(found, {job.model for job in self._state.active.jobs}):
            self._take_up_pool()
        entering = []
        for job, rates in found.items():
            [row] = self._store.rows("SELECT submitted FROM jobs WHERE number = ?", job)
            entering.append(as_job(job, self._known.submission(job), row["submitted"], rates))
            self._store.change_job(job, state="queued", reason=None, throughput=rates_to(rates))
            self._failed.pop(job, None)
        if entering:
            self._state.admit(entering, self._settings.rules.head_start_seconds)
            self._has_news = True

    def _hold_oversized(self, now: float) -> None:
        """Hold jobs that the policy before let in and this one cannot; who runs saves first."""
        # Otherwise the policy would fail in every round, and no job would ever move.
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
            self._ledger.count_targets(self._state, now)
            for job, why in found.items():
                lease = open_.get(job)
                if lease is None:
                    self._hold(job, why, now)
                elif lease.goes_on:
                    leases.drop_planned(self._store, job, now)
                    leases.ask_to_stop(self._store, lease, now)
            self._save()

    def _due_decision(self, now: float) -> Literal["round", "idle"] | None:
        """Whether a round begins, or idle devices are given to those that wait."""
        if not len(self._state.active):
            return None
        if self._sharing.waits_for_rests and self._rests.resting(now):
            # What could not begin would only try the next server: some policies wait until one may
            # be tried again.
            return None
        if self._round_ends is None:
            # None has begun yet, or the last ended early.
            return "round"
        open_ = leases.open_leases(self._store)
        self._has_news |= self._rests.somebody_rose(now) or self._may_try_again(now)
        if not self._has_news and self._somebody_waits(open_):
            self._has_news = self._has_more_devices(now)
        # Only where jobs move, or none runs, does news end a round early.
        is_free = self._has_news and (self._sharing.moves_running_jobs or not open_)
        if now >= round_end(
            self._round_ends,
            free_seconds=now if is_free else math.inf,
            news_seconds=now if self._has_news else math.inf,
        ):
            return "round"
        # Within a round only idle devices are given away, and nobody moves.
        held = {name for lease in open_ for name in (*lease.devices, *lease.resizing_to)}
        is_idle = self._has_news and self._devices.keys() > held
        return "idle" if is_idle and self._somebody_waits(open_) else None

    def _may_try_again(self, now: float) -> bool:
        """Whether a job that failed has waited long enough."""
        before = len(self._failed)
        self._failed = {job: until for job, until in self._failed.items() if until > now}
        return len(self._failed) < before

    def _has_more_devices(self, now: float) -> bool:
        """Whether a device that was drained or down at the last decision can be used again."""
        if self._drained - set(self._store.get("drained") or ()):
            return True
        # Drained and released devices are in the state; those that are down are asked for now and
        # then.
        down = {name for name, device in self._devices.items() if not device.is_up}
        if not down or now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        with suppress(HetflowError):  # the batch system does not answer
            return any(one.is_up for one in self._engine.devices() if one.name in down)
        return False

    def _somebody_waits(self, open_: Sequence[Lease]) -> bool:
        """Whether a job has no device and no prospect of one; not one that has just failed."""
        served = {lease.job for lease in open_ if lease.state != "stopping"}
        served |= self._failed.keys()
        return any(int(job.id) not in served for job in self._state.active.jobs)

    def _decide_or_say(self, now: float, *, only_idle: bool) -> None:
        """Begin a round; if the policy fails, all jobs keep their devices for one more round."""
        try:
            self._decide(now, only_idle=only_idle)
        except FileError:
            raise
        except HetflowError as error:
            _log.warning(f"nobody moves in this round: {error.message}")
            # A decision that failed halfway has changed what is in memory.
            self._known.read_present()
            self._state = self._resumed()
            self._has_news = False
            with self._store.transaction():
                # Infinite ends are cut to a round from now.
                self._set_round(now, now, math.inf)

    def _decide(self, now: float, *, only_idle: bool) -> None:
        """Begin a round; or give what is idle to those that wait, within the round."""
        store = self._store
        self._devices = {device.name: device for device in self._engine.devices()}
        self._drained = set(store.get("drained") or ())
        open_ = leases.open_leases(store)
        with store.transaction():
            self._ledger.count_targets(self._state, now)
            self._ledger.count_leases(self._state, open_, now)
            if self._known.use_measured():
                self._take_up_pool()
            occupied = occupancy(
                open_, self._places, self._devices,
                drained=self._drained, resting=self._rests.resting(now),
                waiting=[job for job, until in self._failed.items() if until > now],
                only_idle=only_idle,
            )  # fmt: skip
            found = self._sharing.next_devices(self._state, self._known, occupied, now)
            self._plan_next(open_, {int(job): seat for job, seat in found.items() if seat}, now)
            self._has_news = False
            if not only_idle:
                self._set_round(now, now, math.inf)
            store.set("inventory", self._inventory())
            store.set(_SHARED_BY, self._settings.policy)
            self._save()

    def _plan_next(self, open_: Sequence[Lease], found: dict[int, Seat], now: float) -> None:
        """Renew leases; plan the next one of each job that gets other devices, or some at last."""
        # A launch that is asked to stop is no longer counted on.
        # A running lease beside a planned one is resized, and a stopping one makes room for it.
        started = [lease for lease in open_ if lease.goes_on]
        renewed = {
            lease.job
            for lease in started
            # It keeps what it has: its lease is renewed, and nobody disturbs the training.
            if not lease.resizing_to and found.get(lease.job) == self._places.seat(lease.devices)
        }
        settled = set(renewed)
        # Planned leases that do not fit the decision are dropped, those that do stay.
        for lease in open_:
            if lease.holds_devices:
                continue
            if lease.job in settled or found.get(lease.job) != self._places.seat(lease.devices):
                leases.drop_planned(self._store, lease.job, now)
            else:
                settled.add(lease.job)
        for lease in started:
            seat = found.get(lease.job)
            # Others end, or are resized once their next devices are free.
            if lease.job in renewed:
                continue
            if seat is None or not self._can_resize(lease, self._places.names(seat)):
                leases.ask_to_stop(self._store, lease, now)
        for job, seat in found.items():
            if job not in settled:
                leases.plan_lease(self._store, job, self._places.names(seat), now)

    def _can_resize(self, lease: Lease, names: Sequence[str]) -> bool:
        """Whether its launch may be asked to go over to other devices while it runs."""
        if lease.state != "running" or not isinstance(self._engine, ResizingEngine):
            return False
        if leases.user_of(self._store, lease.job) is not None:
            return False  # the request would lie in a folder that is another user's
        held, wanted = ([self._devices[name] for name in part] for part in (lease.held, names))
        if len({device.server for device in (*held, *wanted)}) > 1:
            return False
        return self._engine.can_resize(held, wanted)

    def _act(self, now: float) -> None:
        """Start leases whose devices are free, and pursue those that have to end."""
        # What fails is raised when all the others are done.
        trouble: FileError | OSError | None = None
        for act in self._due_acts(now):
            try:
                act()
            # The other acts are due all the same: a full disk of one must not stop them.
            except (FileError, OSError) as error:
                trouble = error
        if trouble is not None:
            raise trouble

    def _due_acts(self, now: float) -> Iterator[Callable[[], None]]:
        open_ = leases.open_leases(self._store)
        found = due(open_)
        for lease in open_:
            # A lease that was starting when a scheduler ended is started again: engines act at
            # most once for a lease.
            if lease.state == "stopping":
                grace_seconds = float(self._settings.grace_seconds)
                yield partial(leases.pursue, self._store, self._engine, lease, grace_seconds, now)
            elif lease.state == "starting":
                yield partial(self._start, lease, now)
            elif lease.resizing_to and not leases.is_launch_asked(self._store, lease):
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
        """Ask a launch to go over to free devices; again where it may not have been asked."""
        try:
            config = leases.resized_config(self._store, lease, self._plan(lease.job, devices))
        except HetflowError as error:
            self._give_up(lease, error.message, now)
            return
        if not lease.resizing_to:
            with self._store.transaction():
                # First the record, then the request: a crash in between asks once more, under the
                # same name.
                leases.ask_to_resize(self._store, lease, devices, now)
            lease = replace(lease, resizing_to=tuple(devices), resize_asked=now)
        leases.ask_launch(self._store, lease, config)

    def _give_up(self, lease: Lease, why: str, now: float) -> None:
        with self._store.transaction():
            self._stop_instead(lease, leases.ResizeOutcome("stayed", why), now)

    def _start(self, lease: Lease, now: float) -> None:
        try:
            leases.start(
                self._store, self._engine, self._devices, lease, self._known.submission(lease.job),
                self._settings.grace_seconds,
            )  # fmt: skip
        except UnsuitableDevicesError as error:  # the next round may find others
            with self._store.transaction():
                leases.end(self._store, lease, now)
                self._store.change_job(lease.job, state="queued", reason=error.message)
        except FileError:
            raise  # no fault of the job's: it starts when there is room
        except HetflowError as error:
            with self._store.transaction():
                leases.end(self._store, lease, now)
                self._hold(lease.job, error.message, now)
                self._save()

    def _save(self) -> None:
        self._store.set("rounds", stored(self._state))


def _wait_seconds(failures: int) -> float:
    """For how long a job that failed so often in a row is not tried again."""
    return min(FIRST_SECONDS * 2.0 ** (failures - 1), LONGEST_SECONDS)
