"""Start data-loading workers, and replace one that does not start.

A data worker is forked from a process that has other threads: gloo's, autograd's, the control
channel's. Under load, a child may never return from ``os.fork``: CPython 3.11 takes the lock of its
thread list there, and another thread may have held it when the process was copied. The loader
would then wait for ever. So each child reports that Python code runs in it. A child that does not
report is replaced, which is safe: no code of the script has run in it yet.
"""

import logging
import multiprocessing
import os
import select
import signal
from multiprocessing import popen_fork, util
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any

PATIENCE_SECONDS = 5.0
ATTEMPTS = 6
_log = logging.getLogger("hetflow")


def context_of(num_workers: int, wanted: Any) -> Any:
    """Choose how a loader starts its workers.

    Args:
        num_workers: The loader's number of workers; 0 starts none.
        wanted: The loader's ``multiprocessing_context``; None is the process's default.

    Returns:
        ``wanted``, or a context that forks workers and checks that they start.
    """
    if num_workers == 0:
        return wanted
    if wanted is None:
        method = multiprocessing.get_start_method(allow_none=True)
        method = method or multiprocessing.get_all_start_methods()[0]
    else:
        method = wanted.get_start_method() if isinstance(wanted, BaseContext) else wanted
    return _SeenContext() if method == "fork" else wanted


class _SeenPopen(popen_fork.Popen):
    def _launch(self, process_obj: Any) -> None:
        """Do what the standard library's method does, with ``_fork`` in place of ``os.fork``."""
        code = 1
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        self.pid = _fork()
        if self.pid == 0:
            try:
                os.close(parent_r)
                os.close(parent_w)
                code = process_obj._bootstrap(parent_sentinel=child_r)
            finally:
                os._exit(code)
        os.close(child_w)
        os.close(child_r)
        self.finalizer = util.Finalize(self, _close, (parent_r, parent_w))
        self.sentinel = parent_r


class _SeenProcess(ForkProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_fork.Popen:
        return _SeenPopen(process_obj)


class _SeenContext(ForkContext):
    Process = _SeenProcess


def _fork() -> int:
    """Call ``os.fork``; fork again where a child does not report in time.

    Raises:
        OSError: No child started.
    """
    for _ in range(ATTEMPTS):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, b".")
            os.close(writing)
            os.close(reading)
            return 0
        os.close(writing)
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        try:
            # A child that dies at once closes the pipe; the loader itself reports such a death.
            if poll.poll(PATIENCE_SECONDS * 1000):
                return pid
        finally:
            os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _log.warning(
            "data worker %d did not start within %g s; starting another", pid, PATIENCE_SECONDS
        )
    raise OSError(
        f"no data worker started within {ATTEMPTS * PATIENCE_SECONDS:g} s; is this host out of"
        " memory or processes?"
    )


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
