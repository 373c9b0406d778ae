"""A measuring process (``child``) seen from outside: start it, ask it, survive its death."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, Any

from ..schema.errors import TargetError

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LAST_BYTES = 16384
GROUP_ANSWER_SECONDS = 600.0
"""How long an answer of processes that measure together may take."""


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
        environment: Variables to add.
        num_threads: Of its arithmetic.
    """

    def __init__(self, environment: dict[str, str] | None = None, num_threads: int = 1) -> None:
        self._unread = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            # -P: a torch.py in the user's current folder must not replace the real one.
            [sys.executable, "-P", "-m", f"{__package__}.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | dict.fromkeys(_THREADS, str(num_threads)) | (environment or {}),
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
                    hint="profile smaller batches with --batch-sizes, or a smaller model",
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
