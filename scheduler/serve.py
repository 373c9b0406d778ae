"""A scheduler in the foreground, and how it is stopped."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ..engines.protocol import Engine
from ..engines.registry import ENGINES
from ..mechanisms.rounds.rules import RoundRules
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.files import from_json, to_json
from .loop import Scheduler, Settings
from .store import Store, lock

POLL_SECONDS = 0.1
_STOP, _STARTED_WITH = "stop", "started_with"


def serve(
    folder: Path,
    pool: Cluster,
    engine: str,
    settings: Settings,
    say: Callable[[str], None],
) -> None:
    """Schedule until somebody asks to stop.

    After ``request_stop`` all jobs save and end, and stay queued. After SIGTERM or ctrl-C jobs go
    on without a scheduler; the next one adopts them.

    Args:
        folder: Where the state is, or will be.
        pool: The devices.
        engine: The engine's name.
        settings: Policy, rounds and grace time.
        say: Called with what a person should know.

    Raises:
        HetflowError: Another scheduler is there, or the state cannot be read or written.
    """
    made = ENGINES.get(engine)(pool)
    store = Store.create(folder)
    with lock(folder):
        with store.transaction():
            store.set(_STARTED_WITH, _described(pool, engine, settings))
            store.set(_STOP, None)
        scheduler = Scheduler(store, made, settings)
        say(f"{len(made.devices())} devices on {engine}, policy {settings.policy}, state {folder}")
        with _interrupts() as interrupted:
            while not interrupted.is_set():
                if store.get(_STOP):
                    _drain_out(scheduler)
                    say("all jobs have saved and ended; those not done stay queued")
                    return
                scheduler.tick(time.time())
                interrupted.wait(POLL_SECONDS)
        say("jobs that run go on; start the cluster again to schedule them")


def request_stop(folder: Path) -> None:
    """Let all jobs save and end, then the scheduler; wait until it has ended.

    Where no scheduler runs, this process asks the jobs itself.

    Raises:
        HetflowError: No cluster was started there.
    """
    store = Store.open(folder)
    with store.transaction():
        store.set(_STOP, True)
    while True:
        try:
            held = lock(folder)
        except ProblemError:
            time.sleep(POLL_SECONDS)
            continue
        with held:
            if store.get(_STOP):
                with store.transaction():
                    store.set(_STOP, None)
                _drain_out(Scheduler(store, *_as_started(store)))
        return


def _drain_out(scheduler: Scheduler) -> None:
    while not scheduler.stop(time.time()):
        time.sleep(POLL_SECONDS)


def _described(pool: Cluster, engine: str, settings: Settings) -> dict[str, object]:
    rules = settings.rules
    return {
        "pool": to_json(pool),
        "engine": engine,
        "policy": settings.policy,
        "round_seconds": rules.round_seconds,
        "grace_seconds": settings.grace_seconds,
    }


def _as_started(store: Store) -> tuple[Engine, Settings]:
    known = store.get(_STARTED_WITH)
    pool = from_json(known["pool"], Cluster, name="the cluster's state")
    settings = Settings(
        policy=known["policy"],
        rules=RoundRules(round_seconds=known["round_seconds"], reset_seconds=0.0),
        grace_seconds=known["grace_seconds"],
    )
    return ENGINES.get(known["engine"])(pool), settings


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set when SIGINT or SIGTERM comes, so that a tick is never cut in two."""
    event = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # one that Python did not set
                signal.signal(number, handler)
