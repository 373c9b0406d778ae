"""Start Python programs as ``subprocess`` does, from a preloaded process where that can be.

A fresh process spends seconds of CPU time on importing torch; a forked one next to nothing. One
preloaded process serves all tests of a pytest process, and the launches that they start: these find
it in ``HETFLOW_PRELOAD``. A program that it cannot run (not Python, or ``off``) starts afresh.
"""

import atexit
import io
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any, Self
from unittest import mock

from hetflow.runtime.preload import VARIABLE, Forked, PreloadError, fork, serving

# What the programs of most tests import and build beside what workers need: they launch, and save.
COMMANDS = (
    "hetflow.cli.main",
    "hetflow.cli.launch",
    "hetflow.api.launch",
    "hetflow.planning.resize",
    "hetflow.runtime.launcher.controller",
    "hetflow.formats.reports.tables",
    "hetflow.schema.run:RunRecord",
    "torch.distributed.checkpoint",  # scripts of FSDP2 save by it
)

# The purpose of programs that run scripts of other libraries, and what these import for seconds.
LIBRARIES = (
    "libraries",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
    "trl",
    "lightning",
    "pytorch_lightning",
    "torchmetrics.classification",
)

# The purpose of workers with models of transformers, and what these and exporting them import.
TRANSFORMERS = (
    "transformers",
    "torch._export.non_strict_utils",
    "torch._functorch.aot_autograd",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.vit.modeling_vit",
)


_SHARED = "HETFLOW_TESTS_PRELOADED"  # sockets by purpose, as JSON


def share() -> None:
    """Let all pytest processes that this one starts fork from preloaded processes of its own.

    Each is started when it is first asked for.
    """
    purposes = ("",), ("software device",), LIBRARIES, TRANSFORMERS
    sockets = {purpose: preloaded(purpose, *modules) for purpose, *modules in purposes}
    os.environ[_SHARED] = json.dumps(sockets)


@cache
def preloaded(purpose: str = "", *modules: str) -> str:
    """The socket of a preloaded process, for ``HETFLOW_PRELOAD``: all pytest processes', or an own.

    One serves few environments, so programs for another ``purpose`` have one of their own, which
    may import other ``modules`` too.
    """
    shared: dict[str, str] = json.loads(os.environ.get(_SHARED, "{}"))
    if purpose in shared:
        return shared[purpose]
    # pyarrow, which transformers' Trainer imports, would start a thread, and then nothing can fork.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hetflow-tests-"))
    return str(stack.enter_context(serving(Path(folder), [*COMMANDS, *modules])))


class Program:
    """A forked process with ``Popen``'s methods; its pipes are text."""

    def __init__(self, forked: Forked, command: Sequence[str]) -> None:
        self._forked, self.args, self.pid = forked, command, forked.pid
        self.stdout, self.stderr = _as_text(forked.stdout), _as_text(forked.stderr)
        self._readers: list[_Reader] = []

    @property
    def returncode(self) -> int | None:
        """Its exit code, as of the last look."""
        return self._forked.returncode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forked, name)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read its pipes to their ends, and wait for its own; may be called again."""
        if not self._readers:
            self._readers = [_Reader(self.stdout), _Reader(self.stderr)]
        self._forked.wait(timeout)
        out, err = (reader.text() for reader in self._readers)
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.communicate()


class _Reader:
    """Reads one pipe to its end, beside whoever waits, and closes it."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream, self._text = stream, ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._stream is not None and not self._stream.closed:
            with self._stream:
                self._text = self._stream.read()

    def text(self) -> str:
        self._thread.join()
        return self._text


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
    words = [str(word) for word in command]
    environment = dict(os.environ if env is None else env)
    if VARIABLE not in environment:
        environment[VARIABLE] = preloaded()
    try:
        with mock.patch.dict(os.environ, {VARIABLE: environment[VARIABLE]}):
            forked = fork(words, environment, cwd, None, stdout, stderr)
    except PreloadError:
        return subprocess.Popen(
            words, env=environment, cwd=cwd, stdout=stdout, stderr=stderr, text=True
        )
    return Program(forked, words)


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


def _run_as_subprocess(
    command: Sequence[str | Path],
    *,
    check: bool,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    **_: object,
) -> "subprocess.CompletedProcess[str]":
    done = run(command, timeout=600.0, env=env, cwd=cwd)
    if check:
        done.check_returncode()
    return done


SUBPROCESS = SimpleNamespace(run=_run_as_subprocess, Popen=start, PIPE=subprocess.PIPE)
"""For a script that starts Python programs with ``subprocess``, in its place."""


def run_until_stopped(
    command: Sequence[str | Path],
    asks: Path,
    told: Path,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> "subprocess.CompletedProcess[str]":
    """The same for a program that gets SIGTERM as soon as a file is there; another says so.

    What it has started cannot send it: the parent of a forked process is its preloaded host.
    """
    program = start(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + timeout
        while not asks.exists() and program.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        program.terminate()
        told.touch()
        out, err = program.communicate(timeout=timeout)
    except BaseException:
        program.kill()
        program.communicate()
        raise
    assert program.returncode is not None
    return subprocess.CompletedProcess(command, program.returncode, out, err)
