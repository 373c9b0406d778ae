"""What holds for every test: examples to draw, signals, and who shares the two cores with whom."""

import atexit
import gc
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from hetflow.runtime.protocol.environment import pins
from hetflow.solvers import compiling
from hetflow.tests import profiles, programs

HERE = Path(__file__).parent

profiles.register()

# What a launch sets for workers on a CPU, at most levels of determinism too: programs of tests and
# workers that these start are then forked from one preloaded process, not each kind from its own.
for name, value in {**pins("elastic"), "PYTHONUNBUFFERED": "1"}.items():
    if name != "OMP_NUM_THREADS":  # ours is for who starts the tests to say
        os.environ.setdefault(name, value)

# pytest-xdist sets the width of its own terminal for its processes, and tables would fit into it.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# What each signal that a user stops a program with does by default, in Python.
_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}

# What pytest-xdist deals first, longest first: a file that takes minutes must not be the last one.
_LONGEST = (
    "measures",
    "tests/runtime/test_adapters.py",
    "tests/docs/test_commands.py",
    "tests/runtime/test_tensor.py",
    "tests/faults/test_campaign.py",
    "tests/gpu/test_planned_steps.py",
    "tests/solvers/pipeline/nested/test_solve.py",
    "tests/engines/test_ray.py",
    "tests/scheduler/test_live.py",
    "tests/scheduler/test_engines.py",
    "tests/fuzz/test_fuzz.py",
    "tests/launcher/test_resize.py",
    "tests/testing/test_gpus.py",
)


def _heed_signals() -> None:
    """Ignore none of them: all that the tests start would inherit that.

    SIGINT is ignored under nohup and in the background of a script, and each of them after a
    command that ran in this process and ignored what came too late to stop it.
    """
    for number, handler in _DEFAULTS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


_heed_signals()


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of ``-n 3`` fork programs from one preloaded process.

    The fast tests compile no solver: of a fresh checkout each process would do it, for 26 CPU s.
    """
    if config.getoption("markexpr") == "not slow":
        compiling.OFTEN = sys.maxsize
    if config.getoption("numprocesses", default=None) and not hasattr(config, "workerinput"):
        programs.share()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Leave what was imported and collected out of garbage collections, which took a second.

    Of a fresh checkout one process of ``-n 3`` compiles the tests, for 24 CPU seconds, and then the
    others collect them.
    """
    worker: dict[str, str] = getattr(session.config, "workerinput", {})
    done = Path(tempfile.gettempdir(), f"hetflow-collected-{worker.get('testrunuid')}")
    is_first, deadline = worker.get("workerid") == "gw0", time.monotonic() + 300
    if worker and not is_first and not list(HERE.glob("__pycache__/test_house.*.pyc")):
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        if is_first:
            done.touch()
            atexit.register(done.unlink, missing_ok=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """Heed signals again, and collect a file's garbage at its end; what stays is left out later.

    Else each walks all that the files before have imported and cached, soon for most of a second.
    """
    done = yield
    _heed_signals()
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One process of ``-n 3`` runs all that measures, so that two never measure each other.

    The longest files come first, then those of most tests.
    """
    if not config.getoption("loadgroup", default=False):  # in no process of xdist's
        return
    scopes = {}
    for item in items:
        scopes[item] = item.nodeid.partition("::")[0]
        if item.get_closest_marker("measures") is not None:
            scopes[item] = "measures"
            item.add_marker(pytest.mark.xdist_group("measures"))
            _name_group(item, "measures")
    number = Counter(scopes.values())
    ranks = {scope: rank for rank, scope in enumerate(_LONGEST)}

    def order(item: pytest.Item) -> tuple[int, int, str]:
        scope = scopes[item]
        return ranks.get(scope, len(ranks)), -number[scope], scope

    items.sort(key=order)


def _name_group(item: pytest.Item, group: str) -> None:
    """Write the group into the id, where xdist's scheduler reads it.

    pytest 9.2 keeps ids in another attribute than pytest-xdist 3.8 writes to, so that without this
    both processes would run tests of the group.
    """
    node = getattr(item, "_id", None)
    if node is not None:
        item._id = type(node).parse(f"{item.nodeid}@{group}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal whole files, so that what the tests of a file share is made once; and the group."""
    from xdist.scheduler.loadgroup import LoadGroupScheduling

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).partition("::")[0]

    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # they are in order
    return Files(config, log)
