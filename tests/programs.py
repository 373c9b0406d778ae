"""Start Python programs as ``subprocess`` does, from a preloaded process where that can be.

A fresh process spends seconds of CPU time on importing torch; a forked one next to nothing. One
preloaded process serves all tests of a pytest process, and the launches that they start: these find
it in ``HETFLOW_PRELOAD``. A program that it cannot run (not Python, or ``off``) starts afresh.
"""

import atexit
import io
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from hetflow.launcher.preload import VARIABLE, Forked, PreloadError, fork, serving

_lock = threading.Lock()
_stack: ExitStack | None = None


def preload() -> None:
    """Keep a preloaded process for the rest of this process, unless there is one already."""
    global _stack
    with _lock:
        if _stack is not None or os.environ.get(VARIABLE):
            return
        _stack = ExitStack()
        atexit.register(_stack.close)
        folder = _stack.enter_context(tempfile.TemporaryDirectory(prefix="hetflow-tests-"))
        socket = _stack.enter_context(serving(Path(folder), ["hetflow.cli.main"]))
        os.environ[VARIABLE] = str(socket)


class Program:
    """A forked process with ``Popen``'s methods; its pipes are text."""

    def __init__(self, forked: Forked, command: Sequence[str]) -> None:
        self._forked, self.args, self.pid = forked, command, forked.pid
        self.stdout, self.stderr = _as_text(forked.stdout), _as_text(forked.stderr)

    @property
    def returncode(self) -> int | None:
        """Its exit code, as of the last look."""
        return self._forked.returncode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forked, name)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read its pipes to their ends, and wait for its own."""
        read = {"stdout": "", "stderr": ""}

        def drain(name: str, stream: IO[str]) -> None:
            read[name] = stream.read()

        readers = [
            threading.Thread(target=drain, args=(name, stream), daemon=True)
            for name, stream in (("stdout", self.stdout), ("stderr", self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self._forked.wait(timeout)
        for reader in readers:
            reader.join()
        self._close()
        return read["stdout"], read["stderr"]

    def _close(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forked.wait()
        self._close()


def _as_text(stream: IO[bytes] | None) -> IO[str] | None:
    return None if stream is None else io.TextIOWrapper(stream, encoding="utf-8")


def start(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> "Program | subprocess.Popen[str]":
    """As ``subprocess.Popen(..., text=True)``."""
    preload()
    words = [str(word) for word in command]
    if env is not None:  # it may have been made before there was a preloaded process
        env = {VARIABLE: os.environ[VARIABLE], **env}
    try:
        return Program(fork(words, env, cwd, None, stdout, stderr), words)
    except PreloadError:
        return subprocess.Popen(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr, text=True)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> "subprocess.CompletedProcess[str]":
    """As ``subprocess.run(..., capture_output=True, text=True, check=False)``."""
    program = start(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = program.communicate(timeout=timeout)
    except BaseException:
        program.kill()
        program.communicate()
        raise
    assert program.returncode is not None
    return subprocess.CompletedProcess(command, program.returncode, out, err)
