"""Messages between the controllers of one or several hosts, through the store."""

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...devices.cpu import base_type
from ...schema.errors import LaunchError
from ...schema.files import to_json
from ...schema.launch import LaunchConfig, Rendezvous, WorkerSlot
from ...schema.options import option
from ..protocol.environment import TOKEN, fingerprint_of
from ..protocol.handover import STOPPED_EXIT_CODE
from ..protocol.messages import Greeting, RankAnswer, Refused, answer_of, greeting_of
from ..protocol.record import WorkerReport
from .failures import Failure
from .mapping import assigned_slots, deal_slots
from .request import LaunchRequest
from .spawn import MeetingPoint, inventory
from .store import (
    LastGeneration,
    PatientStore,
    StorePart,
    Unreachable,
    behind,
    hold_store,
    interface_towards,
    join_store,
    listen,
    read_reports,
    shared_token,
)

BEAT_SECONDS = 1.0
ENDED_SECONDS = 30.0  # in which every host has seen a failure and ended its workers
SILENCE_SECONDS = 15.0  # after which a host counts as lost
# The same where a worker of this host has lost one of another: that is a second sign.
SILENCE_AFTER_A_LOSS_SECONDS = 8.0
# The same once the launch ends: little is lost by leaving a host that shows no sign of life.
SILENCE_AT_THE_END_SECONDS = 4.0
# How long a host whose worker only lost another waits for the cause: a lost host is known by then.
CAUSE_SECONDS = SILENCE_SECONDS + 5.0
FAREWELL_SECONDS = 10.0
JOIN_SECONDS = 10.0  # of one attempt: what answers may be a host 0 that has gone meanwhile
TOLD_AFTER_SECONDS = 1.0  # a host that waits for another says so then
_log = logging.getLogger("hetflow")

Watch = Callable[[], None]


class OneHost:
    """A launch on one host: the store on loopback, made while the workers start."""

    is_first = True

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self.token = secrets.token_hex(16)
        # Bound at once, so that workers know the port while torch, which makes the store, is
        # imported.
        self._socket = listen("127.0.0.1", 0)
        self._store: Any = None
        self._thread = threading.Thread(target=self._make_store, daemon=True)

    def join(self, watch: Watch) -> tuple[Sequence[WorkerSlot], MeetingPoint]:
        """All slots are this host's."""
        port = self._socket.getsockname()[1]
        return self._config.workers, MeetingPoint(address="127.0.0.1", port=port, interface="lo")

    def starting(self) -> None:
        """The workers are starting: import torch and make the store beside them."""
        self._thread.start()

    def _make_store(self) -> None:
        self._store = behind(self.token, hold_store(self._socket))

    def read(self, key: str) -> str | None:
        """What workers have left in the store; None where there is nothing, or no store yet."""
        store = self._store
        return store.get(key).decode() if store is not None and store.check([key]) else None

    def write(self, key: str, value: str) -> None:
        """Leave something for workers."""
        self._store.set(key, value)

    def failure_elsewhere(self) -> Failure | None:
        """None: there is no other host."""
        return None

    def tell_failure(self, failure: Failure) -> Failure:
        """No other host: this host's failure is the first."""
        return failure

    def tell_stop(self, number: int) -> None:
        """No other host to ask."""

    def stop_elsewhere(self, *, at_once: bool = False) -> int | None:
        """None: there is no other host."""
        return None

    def stop_behind(self, failure: Failure) -> int | None:
        """None: there is no other host."""
        return None

    def wait_until_saved(self, goes_on: Callable[[], bool], until: float) -> None:
        """No other host to wait for."""

    def wait_for_others(self, watch: Watch) -> Failure | None:
        """No other host to wait for."""
        return None

    def leave(self) -> None:
        """No other host to leave; a store that was never made needs no socket."""
        if self._thread.ident is None:
            self._socket.close()

    def reports(self, last: LastGeneration, *, wait: bool) -> list[WorkerReport]:
        """What the workers of the last generation measured."""
        if wait:
            self._thread.join()
        return [] if self._store is None else read_reports(self._store, last)


class SeveralHosts:
    """One of several hosts. Node 0 runs the store, assigns the slots, and collects reports."""

    def __init__(self, request: LaunchRequest, rendezvous: Rendezvous) -> None:
        self._request, self._config, self._place = request, request.config, rendezvous
        self._limit_seconds = request.timeout_seconds
        self.token = shared_token(os.environ)
        self._generation = 0
        self._names: dict[int, str] = {}
        self.is_first = rendezvous.node_rank == 0
        self._store: Any = None
        self._all: PatientStore | None = None
        self._last_look = self._last_stop = 0.0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._is_over = threading.Event()

    def join(self, watch: Watch) -> tuple[Sequence[WorkerSlot], MeetingPoint]:
        """Meet the other hosts; learn which slots are this host's.

        Raises:
            LaunchError: A host stays away, was started otherwise than host 0, or the devices do
                not suffice.
        """
        place = self._place
        address = place.host, place.port
        store = hold_store(listen(*address)) if self.is_first else self._connect(watch)
        self._all = PatientStore(behind(self.token, store), SILENCE_SECONDS)
        self._store = self._all.under("launcher")
        self._open = PatientStore(store, SILENCE_SECONDS).under("hetflow")
        # In this order: with another token no key would be found, and one waits in vain; of two
        # hosts with one rank the second must not speak; only who is accepted shows signs of life.
        self._check_token(watch)
        self._check_alone()
        # By a thread: the main one may wait for minutes, for a host or for its own workers'
        # imports.
        threading.Thread(target=self._beat, daemon=True).start()
        own = Greeting(
            host=socket.gethostname() or "unknown",
            hetflow=__version__,
            plan=_digest(to_json(replace(self._config, seed=0, determinism="none")).encode()),
            seed=self._config.seed,
            determinism=self._config.determinism,
            script=_digest(_script(self._request.command)),
            policy=self._request.policy,
            devices=place.devices if place.devices is not None else inventory(self._config),
        )
        self._store.set(f"agent/{place.node_rank}", to_json(own))
        if self.is_first:
            self._store.set("slots", to_json(self._deal(watch)))
        # Host 0 reads its own answer from the store like the others, so a refusal ends all in one
        # way.
        answer = answer_of(self._get("slots", "host 0's answer", watch))
        if isinstance(answer, Refused):
            raise LaunchError(answer.error)
        self._names = dict(enumerate(answer.hosts))
        mine = answer.slots[place.node_rank]
        interface = interface_towards(place.host, place.port)
        meeting = MeetingPoint(address=place.host, port=place.port, interface=interface)
        return [self._config.workers[rank] for rank in mine], meeting

    def _connect(self, watch: Watch) -> Any:
        """Join node 0's store; LaunchError for an unknown name, or if no rendezvous answered."""
        # Another thread does it: torch cannot be interrupted while it waits for an answer, which
        # never comes where another program listens on the port.
        place, said = self._place, [f"nothing listens on {self._endpoint}"]
        found: list[Any] = []
        try:
            socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:  # a name server that is away may come back
                raise LaunchError(
                    f"{option('rdzv_endpoint')} names {place.host}, which has no address: "
                    f"{error.strerror}"
                ) from None
        wait = _Wait(f"host 0 of {place.num_nodes} at {self._endpoint}", self._limit_seconds)
        is_over = threading.Event()

        def join() -> None:
            while not found and not is_over.is_set():
                try:
                    # Tried first by a plain connection: torch's store does not say whether the port
                    # is closed or its answer is late, and the user needs to know which.
                    socket.create_connection((place.host, place.port), timeout=2).close()
                    said[0] = f"what answers on {self._endpoint} is no rendezvous of a launch"
                    limit = self._limit_seconds
                    found.append(join_store(place.host, place.port, limit, JOIN_SECONDS))
                except ConnectionRefusedError:
                    said[0] = f"nothing listens on {self._endpoint}"
                    is_over.wait(0.2)
                except (OSError, RuntimeError):
                    is_over.wait(0.2)

        threading.Thread(target=join, daemon=True).start()
        try:
            while not found:
                watch()
                if not wait.goes_on():
                    raise LaunchError(
                        f"host 0 did not come within {self._limit_seconds:g} s: {said[0]}",
                        hint=f"start it with the same {option('rdzv_endpoint')}, on a port of its "
                        "own",
                    )
                time.sleep(0.02)
        finally:
            is_over.set()
        return found[0]

    @property
    def _endpoint(self) -> str:
        return f"{self._place.host}:{self._place.port}"

    def _check_alone(self) -> None:
        """Refuse to be a second host of one rank."""
        rank = self._place.node_rank
        own = f"{socket.gethostname()}, process {os.getpid()}"
        first = self._store.compare_set(f"rank/{rank}", "", own).decode()
        if first != own:
            self._store = None  # nothing that this host says must pass for the other's words
            raise LaunchError(
                f"{option('node_rank', rank)} is taken by {first}; this is {own}",
                hint=f"give each of the {self._place.num_nodes} hosts a rank of its own",
            )

    def _check_token(self, watch: Watch) -> None:
        """Refuse to meet hosts with another token: the keys of theirs would never come."""
        own = fingerprint_of(self.token)
        if self.is_first:
            self._open.set("token", own)
            return
        if self._wait_for(self._open, "token", "host 0's greeting", watch) != own.encode():
            self._open.set("refused", str(self._place.node_rank))
            raise self._other_token(self._place.node_rank)

    @staticmethod
    def _other_token(node: int) -> LaunchError:
        return LaunchError(
            f"host {node} was given another {TOKEN} than host 0",
            hint="give every host the same one, or none",
        )

    def _deal(self, watch: Watch) -> RankAnswer | Refused:
        agents = []

        def look() -> None:
            watch()
            if self._open.check(["refused"]):
                raise self._other_token(int(self._open.get("refused")))

        for node in range(self._place.num_nodes):
            try:
                agents.append(
                    greeting_of(
                        self._get(f"agent/{node}", f"host {node} of {self._place.num_nodes}", look),
                        node,
                    )
                )
            except LaunchError as error:
                return Refused(error=error.message)
        try:
            return dealt(self._config, agents)
        except LaunchError as error:
            return Refused(error=error.message)

    def _get(self, key: str, what: str, watch: Watch) -> bytes:
        return self._wait_for(self._store, key, what, watch)

    def _wait_for(self, store: StorePart, key: str, what: str, watch: Watch) -> bytes:
        wait = _Wait(what, self._limit_seconds)
        try:
            while not store.check([key]):
                watch()
                if not wait.goes_on():
                    raise LaunchError(f"{what} did not come within {self._limit_seconds:g} s")
                time.sleep(0.05)
        except Unreachable as error:
            raise LaunchError(self._lost(0, str(error)).error, exit_code=1) from None
        return store.get(key)

    def starting(self) -> None:
        """The store is there already."""

    def failure_elsewhere(self) -> Failure | None:
        """A failure that another host reported, or a host that fell silent."""
        now = time.monotonic()
        if now - self._last_look < BEAT_SECONDS:
            return None
        self._last_look = now
        try:
            # A failure that was told outranks silence: a host whose launch fails ends, and is
            # silent then.
            if self._store.check([self._failure]):
                return Failure.from_text(self._store.get(self._failure))
            return self.lost_host(SILENCE_SECONDS)
        except Unreachable as error:
            return self._lost(0, str(error))

    def _beat(self) -> None:
        """Show the others that this host is there, whatever its main thread waits for."""
        number = 0
        with contextlib.suppress(Unreachable):
            while not self._is_over.wait(BEAT_SECONDS if number else 0.0):
                number += 1
                self._store.set(f"beat/{self._place.node_rank}", str(number))

    def lost_host(self, silence_seconds: float) -> Failure | None:
        """The first host that has shown no sign of life for so long; node 0 alone can know.

        Raises:
            Unreachable: The host that is lost holds the store.
        """
        for node in range(1, self._place.num_nodes) if self.is_first else ():
            if (silent := self._silent_seconds(node)) > silence_seconds:
                return self._lost(node, f"its launcher gave no sign of life for {silent:.0f} s")
        return None

    def _silent_seconds(self, node: int) -> float:
        """For how long node 0 has seen no sign of life of a host that has not ended."""
        now, beat = time.monotonic(), f"beat/{node}"
        ends = (f"done/{node}", f"left/{node}")
        if not self._store.check([beat]) or any(self._store.check([end]) for end in ends):
            return 0.0
        # A beat is a number, no time: hosts' clocks differ. Node 0 notes by its own when it last
        # changed.
        seen = self._store.get(beat)
        if self._heard.get(node, (b"", 0.0))[0] != seen:
            self._heard[node] = (seen, now)
        return now - self._heard[node][1]

    def _wait_for_living(self, ends: Sequence[str], goes_on: Callable[[], bool]) -> None:
        """Node 0 waits until each host that shows signs of life has come to one of these ends."""
        others = range(1, self._place.num_nodes) if self.is_first else ()
        waiting = {node for node in others if self._store.check([f"rank/{node}"])}
        while waiting and goes_on():
            for node in list(waiting):
                has_ended = any(self._store.check([f"{end}/{node}"]) for end in ends)
                if has_ended or self._silent_seconds(node) > SILENCE_AT_THE_END_SECONDS:
                    waiting.remove(node)
            time.sleep(0.05 if waiting else 0.0)

    def _lost(self, node: int, how: str) -> Failure:
        place = self._place
        name = self._names.get(node) or (f"{place.host}:{place.port}" if node == 0 else "")
        return Failure(
            exit_code=1, error=f"host {node}{f' ({name})' if name else ''} was lost: {how}"
        )

    def tell_stop(self, number: int) -> None:
        """Have every host save and leave, for a signal that came here."""
        with contextlib.suppress(Unreachable):
            self._store.set("stop", str(number))

    def stop_elsewhere(self, *, at_once: bool = False) -> int | None:
        """The signal for which another host asks all to save and leave.

        Args:
            at_once: Ask the store now; else about once a second.
        """
        now = time.monotonic()
        if not at_once and now - self._last_stop < BEAT_SECONDS:
            return None
        self._last_stop = now
        with contextlib.suppress(Unreachable):
            if self._store.check(["stop"]):
                return int(self._store.get("stop"))
        return None

    def stop_behind(self, failure: Failure) -> int | None:
        """The signal on another host for which a worker has saved and left; None for a failure."""
        has_saved = failure.exit_code == STOPPED_EXIT_CODE
        return self.stop_elsewhere(at_once=True) if has_saved else None

    def wait_until_saved(self, goes_on: Callable[[], bool], until: float) -> None:
        """This host's workers have left; node 0 keeps the store until those of all have.

        Args:
            goes_on: Whether to wait on.
            until: Monotonic seconds of the end of the grace time; others began a little later.
        """
        with contextlib.suppress(Unreachable):
            self._store.set(f"saved/{self._place.node_rank}", "1")
            latest = until + 2 * BEAT_SECONDS
            self._wait_for_living(
                ("saved", "left"), lambda: goes_on() and time.monotonic() <= latest
            )

    @property
    def _failure(self) -> str:
        """The key of what ended the generation."""
        return f"failure/{self._generation}"

    @property
    def _again(self) -> str:
        """The key of whether there is a next one."""
        return f"again/{self._generation}"

    def read(self, key: str) -> str | None:
        """What workers have left in the store."""
        assert self._all is not None
        store = self._all.whole
        return store.get(key).decode() if store.check([key]) else None

    def starts_again(self, may: Callable[[], bool], watch: Watch) -> bool:
        """Whether all hosts start their workers anew; those of this host are gone.

        Args:
            may: Whether there may be one more try; node 0 asks it, once all are gone everywhere.
            watch: Raises where a signal came.
        """
        try:
            # Two rounds: all say that their workers are gone, then node 0 says go on. If hosts
            # started one by one, new workers of one would meet old workers of another, in the same
            # store.
            self._store.set(f"ended/{self._generation}/{self._place.node_rank}", "1")
            if self.is_first:
                answer = self._all_have_ended(watch) and may()
                self._store.set(self._again, "yes" if answer else "no")
            found = self._get(self._again, "node 0's answer", watch)
        except (LaunchError, Unreachable):
            return False
        if found == b"yes":
            self._generation += 1
        return found == b"yes"

    def why_not(self, cause: Failure) -> Failure:
        """Why the hosts do not start again; a lost host explains more than a lost worker."""
        try:
            return self.lost_host(SILENCE_AFTER_A_LOSS_SECONDS) or cause
        except Unreachable as error:
            return self._lost(0, str(error))

    def _all_have_ended(self, watch: Watch) -> bool:
        """Wait until no host has a worker of this generation; False where one is done already."""
        deadline = time.monotonic() + ENDED_SECONDS
        nodes = range(self._place.num_nodes)
        waiting = [f"ended/{self._generation}/{node}" for node in nodes]
        while not self._store.check(waiting):
            watch()
            # A host that is done has a finished training; the others cannot go on without its
            # workers.
            done = any(self._store.check([f"done/{node}"]) for node in nodes)
            if (
                self.lost_host(SILENCE_AFTER_A_LOSS_SECONDS) is not None
                or done
                or time.monotonic() > deadline
            ):
                return False
            time.sleep(0.05)
        return True

    def tell_failure(self, failure: Failure) -> Failure:
        """Stop every host. The first to tell wins, save that a cause outranks its echo."""
        if self._store is None:  # the hosts have not met
            return failure
        try:
            # Compared and set in one request, so that of two hosts that fail at once one is first.
            # Only a failure that outranks it may replace what stands there, so whoever reads late
            # sees the cause.
            told = Failure.from_text(self._store.compare_set(self._failure, "", failure.to_text()))
            if failure.precedence < told.precedence:
                self._store.set(self._failure, failure.to_text())
                return failure
            if failure.is_echo and told.is_echo:
                return self._better_cause(told)
            return told
        except Unreachable as error:
            return failure if not failure.is_echo else self._lost(0, str(error))

    def _better_cause(self, told: Failure) -> Failure:
        """An echo was told first; the cause is behind it, on whatever host, or is a lost host."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while told.is_echo and time.monotonic() < deadline:
            time.sleep(0.1)
            told = Failure.from_text(self._store.get(self._failure))
            lost = self.lost_host(SILENCE_AFTER_A_LOSS_SECONDS) if told.is_echo else None
            if lost is not None:
                self._store.set(self._failure, lost.to_text())
                return lost
        return told

    def wait_for_others(self, watch: Watch) -> Failure | None:
        """This host is done; node 0 keeps the store until all are."""
        try:
            self._store.set(f"done/{self._place.node_rank}", "1")
        except Unreachable as error:
            return self._lost(0, str(error))
        if not self.is_first:
            return None
        waiting = [f"done/{node}" for node in range(self._place.num_nodes)]
        while not self._store.check(waiting):
            watch()
            failure = self.failure_elsewhere()
            if failure is not None:
                return failure
            time.sleep(0.05)
        return None

    def leave(self) -> None:
        """Say goodbye. Node 0 keeps the store a little until the others have read why."""
        self._is_over.set()
        if self._store is None:
            return
        with contextlib.suppress(Unreachable):
            if self.is_first:
                # Hosts that wait for node 0's decision learn it before the store goes with this
                # process.
                self._store.set(self._again, "no")
            self._store.set(f"left/{self._place.node_rank}", "1")
            deadline = time.monotonic() + FAREWELL_SECONDS
            self._wait_for_living(("left",), lambda: time.monotonic() <= deadline)

    def reports(self, last: LastGeneration, *, wait: bool) -> list[WorkerReport]:
        """What the workers of the last generation measured; for node 0."""
        return [] if self._all is None else read_reports(self._all.whole, last)


Hosts = OneHost | SeveralHosts
"""The hosts of a launch, as this one's controller sees them."""


class _Wait:
    """A wait for another host: it is told once it is long, and has a limit."""

    def __init__(self, what: str, limit_seconds: float) -> None:
        self._what, self._limit_seconds = what, limit_seconds
        self._began, self._has_told = time.monotonic(), False

    def goes_on(self) -> bool:
        waited = time.monotonic() - self._began
        if waited > TOLD_AFTER_SECONDS and not self._has_told:
            self._has_told = True
            _log.warning(f"waiting for {self._what}, at most {self._limit_seconds:g} s")
        return waited <= self._limit_seconds


def _script(script: Sequence[str]) -> bytes:
    """The script's file, or the module's name; hosts may give other arguments."""
    return script[1].encode() if script[0] == "-m" else Path(script[0]).read_bytes()


def dealt(config: LaunchConfig, agents: Sequence[Greeting]) -> RankAnswer:
    """The slots of each host, where all hosts were started alike. Pure.

    Raises:
        LaunchError: They were not, or together they lack a device.
    """
    for node, agent in enumerate(agents):
        if agent.hetflow != agents[0].hetflow:
            raise LaunchError(
                f"host 0 ({agents[0].host}) runs hetflow {agents[0].hetflow}, host {node} "
                f"({agent.host}) {agent.hetflow}; install the same version on all"
            )
    if len({agent.plan for agent in agents}) > 1:
        raise LaunchError("the hosts were given different plans; give all the same file")
    for name in ("seed", "determinism"):
        given = [getattr(agent, name) for agent in agents]
        for node, value in enumerate(given):
            if value != given[0]:
                raise LaunchError(
                    f"host 0 was given --{name} {given[0]}, host {node} --{name} {value}; give "
                    "all the same"
                )
    for node, agent in enumerate(agents):
        if agent.script != agents[0].script:
            raise LaunchError(
                f"host {node} ({agent.host}) has another script than host 0 ({agents[0].host}); "
                "copy the same file to all"
            )
    if len({agent.policy for agent in agents}) > 1:
        raise LaunchError(
            f"give every host the same {option('on_failure')} and {option('checkpoint')}"
        )
    slots = deal_slots(config, [agent.devices for agent in agents])
    return RankAnswer(
        slots=tuple(tuple(ranks) for ranks in slots), hosts=tuple(agent.host for agent in agents)
    )


def expected_slots(config: LaunchConfig, place: Rendezvous) -> Sequence[WorkerSlot]:
    """This host's slots, if the other hosts give just what is left of the plan's devices.

    They stand in order of hosts: what is left is host 0's; to host 0, it is host 1's.

    Raises:
        LaunchError: The plan has no work for the devices of this host.
    """
    own = dict(place.devices if place.devices is not None else inventory(config))
    left, rest = dict(own), Counter[str]()
    for slot in config.workers_by_device:
        names = (slot.device_type, base_type(slot.device_type, config))
        name = next((name for name in names if left.get(name)), None)
        if name is None:
            rest[slot.device_type] += 1
        else:
            left[name] -= 1
    is_first = place.node_rank == 0
    devices = [own, dict(rest)] if is_first else [dict(rest), own]
    mine = assigned_slots(config, devices)[0][0 if is_first else 1]
    if not mine:
        named = ", ".join(f"{number}x{name}" for name, number in own.items()) or "none"
        raise LaunchError(f"the plan has no work for the devices of this host: {named}")
    return [config.workers[rank] for rank in mine]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
