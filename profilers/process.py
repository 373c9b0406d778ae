"""The parent's side of a measuring process (``child``): start it, ask it, survive its end.

Within ``started_like_workers`` it starts as a launch's worker does: forked from a preloaded process
where one can be had, with the same settings before its imports.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO, Any

from ..runtime.preload import VARIABLE, Forked, Preload
from ..schema import files
from ..schema.errors import TargetError
from ..schema.launch import LaunchConfig
from ..schema.options import option
from .rehearsal import config_of
from .targets import Target

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PRELOAD: ContextVar[Preload | None] = ContextVar("preload", default=None)
_LAST_BYTES = 16384
GROUP_ANSWER_SECONDS = 600.0
"""How long an answer of processes that measure together may take."""


@contextmanager
def started_like_workers() -> Iterator[None]:
    """For the body of a ``with`` statement: fork measuring processes, as ``HETFLOW_PRELOAD`` says.

    They end with the calling thread.
    """
    with Preload(os.environ.get(VARIABLE, "")) as preload:
        preload.prepare(_environment())  # it imports while the caller sets itself up
        before = _PRELOAD.set(preload)
        try:
            yield
        finally:
            _PRELOAD.reset(before)


def _environment(num_threads: int = 1) -> dict[str, str]:
    """What a launch sets for a worker on a CPU before torch is imported."""
    threads = dict.fromkeys(_THREADS, str(num_threads))
    return os.environ | threads | {"PYTHONUNBUFFERED": "1"}


def _start(environment: dict[str, str], errors: IO[bytes]) -> "subprocess.Popen[bytes] | Forked":
    # -P: a torch.py in the user's current folder must not replace the real one.
    command = [sys.executable, "-P", "-m", f"{__package__}.child"]
    preload = _PRELOAD.get()
    if preload is not None:
        preload.wait(environment, lambda: None)
        forked = preload.start(
            command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        if forked is not None:
            return forked
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
    )


class ChildDied(Exception):
    """The process ended before it answered.

    Args:
        code: Its exit code, as subprocess tells it (negative: the signal).
        words: The last lines it wrote to stderr.
    """

    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)
        self.code = code
        self.words = words

    @property
    def said(self) -> str:
        """The last line it wrote to stderr."""
        lines = self.words.splitlines()
        return lines[-1].strip()[:300] if lines else ""

    @property
    def how(self) -> str:
        """The signal's name, or the exit code."""
        return signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"


class Child:
    """One running measuring process. A context manager that leaves none behind.

    Args:
        environment: Variables to add; none that acts before or during imports (``preload``).
        num_threads: Of its arithmetic.
    """

    def __init__(self, environment: dict[str, str] | None = None, num_threads: int = 1) -> None:
        self._unread = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = _start(_environment(num_threads) | (environment or {}), self._errors)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def send(self, operation: str, **values: Any) -> None:
        """Ask for something; ``receive`` gives the answer.

        Raises:
            ChildDied: It has ended.
        """
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            raise ChildDied(self._process.wait(), self._last_words())
        try:
            pipe.write(json.dumps({"operation": operation, **values}).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise ChildDied(self._process.wait(), self._last_words()) from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for the answer to what was sent.

        Raises:
            ChildDied: It ended instead.
            MemoryError: The workload ran out of memory.
            TargetError: The workload is at fault, or gave no answer in time.
        """
        answer = json.loads(self._read_line(seconds))
        if "error" in answer:
            error = TargetError(answer["error"], hint=answer["hint"])
            error.add_note(f"In the measuring process:\n{answer['traceback']}")
            raise error
        if "out_of_memory" in answer:
            raise MemoryError
        facts: dict[str, Any] = answer["ok"]
        return facts

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                continue  # a request was still unsent; nobody waits for its answer
        self._errors.close()

    def _read_line(self, seconds: float) -> bytes:
        pipe = self._process.stdout
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            assert pipe is not None
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TargetError(
                    f"the model gave no answer within {seconds:.0f} s; gave up",
                    hint=f"profile smaller batches with {option('batch_sizes')}, or a smaller "
                    "model",
                )
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                raise ChildDied(self._process.wait(), self._last_words())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_BYTES))
        return self._errors.read().decode("utf-8", "replace").strip()


# Have measuring processes load a workload: a factory's, or a script that runs up to its loop.


@dataclass(frozen=True, slots=True)
class Loading:
    """What is loaded.

    Attributes:
        target: The workload.
        device_type: The type of the devices that train it.
        memory_bytes: A device's memory; enforced on a host's own.
        optimizer: The optimizer where the workload brings none.
        num_threads: Of its arithmetic on the host.
    """

    target: Target
    device_type: str
    memory_bytes: int
    optimizer: str
    num_threads: int

    def ask_alone(self, child: Child, device: str) -> None:
        """Have a process train by itself; its answer are facts about the workload."""
        if self.target.is_script:
            self._ask_script(child, device, config_of([[1]], device_type=self.device_type))
            return
        child.send(
            "load",
            target=self.target.text,
            device=device,
            memory_bytes=self.memory_bytes,
            optimizer=self.optimizer,
            num_threads=self.num_threads,
        )

    def ask_together(
        self, child: Child, device: str, *, rank: int, workers: int, port: int
    ) -> None:
        """Have a process be one worker of a script, which meet in a store at a port."""
        config = config_of([[1]] * workers, device_type=self.device_type)
        self._ask_script(child, device, config, rank=rank, port=port)

    def _ask_script(
        self,
        child: Child,
        device: str,
        config: LaunchConfig,
        *,
        rank: int = 0,
        port: int | None = None,
    ) -> None:
        values: dict[str, Any] = {"config": files.to_json(config), "rank": rank, "port": port}
        child.send(
            "script",
            script=[self.target.location, *self.target.arguments],
            device=device,
            memory_bytes=self.memory_bytes,
            few_samples=self.target.few_samples,
            **values,
        )
