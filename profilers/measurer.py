"""The commanding side of the measuring process (``child``): start, ask, survive its death."""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, NoReturn

from ..schema.errors import TargetError
from ..schema.plan import PassTime
from .batch_curve import SizeResult
from .memory import says_out_of_memory
from .targets import Target
from .timing import RepeatPolicy, Timing

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ANSWER_SECONDS = 900.0


class OutOfMemory(Exception):
    """The child ran out of memory, or was killed for it."""


class Measurer:
    """A measuring process for one workload on one device. A context manager.

    Args:
        target: What to measure.
        device: A torch device, ``cpu`` or ``cuda:N``.
        memory_bytes: The device's memory; enforced on a CPU.
        optimizer: The optimizer where the workload brings none.
        answer_seconds: How long one batch size may take in all.
    """

    def __init__(
        self,
        target: Target,
        *,
        device: str,
        memory_bytes: int,
        optimizer: str,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.death: str | None = None
        self._load = {
            "target": target.text,
            "device": device,
            "memory_bytes": memory_bytes,
            "optimizer": optimizer,
        }
        self._answer_seconds = answer_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._unread = b""
        self._measured_any = False

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._errors.close()

    def measure(self, batch_size: int, policy: RepeatPolicy) -> SizeResult | None:
        """Measure one batch size; None where it does not fit the device's memory.

        Raises:
            TargetError: The workload is at fault, or gave no answer in time.
        """
        try:
            answer = self._ask_loaded(
                "measure", batch_size=batch_size, policy=dataclasses.asdict(policy)
            )
        except OutOfMemory:
            return None
        self._measured_any = True
        timing = Timing(**answer.pop("timing"))
        return SizeResult(timing=timing, **answer)

    def measure_update(self, batch_size: int, policy: RepeatPolicy) -> Timing:
        """Measure the optimizer's update.

        Raises:
            TargetError: The workload is at fault, or gave no answer in time.
        """
        asked = dataclasses.asdict(policy)
        return Timing(**self._ask_loaded("update", batch_size=batch_size, policy=asked))

    def hold(self, batch_size: int, passes: Sequence[PassTime], repeats: int) -> dict[str, Any]:
        """Run passes held to a table: ``seconds`` of each, and ``num_overruns``.

        Raises:
            TargetError: The workload is at fault, or gave no answer in time.
        """
        table = [[entry.batch_size, entry.step_seconds] for entry in passes]
        return self._ask_loaded("hold", batch_size=batch_size, passes=table, repeats=repeats)

    def _ask_loaded(self, operation: str, **values: Any) -> dict[str, Any]:
        if self._process is None:
            self._start()
            self.facts = self._ask({"operation": "load", **self._load})
        return self._ask({"operation": operation, **values})

    def _start(self) -> None:
        environment = os.environ | dict.fromkeys(_ONE_THREAD, "1")
        # -P: a torch.py in the user's current folder must not replace the real one.
        command = [sys.executable, "-P", "-m", f"{__package__}.child"]
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        requests, _ = self._pipes()
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
        except BrokenPipeError:
            self._raise_for_death()
        answer = json.loads(self._read_line())
        if "error" in answer:
            raise TargetError(answer["error"], hint=answer["hint"])
        if answer.get("out_of_memory"):
            # What it has left behind (a half-built graph, fragments) must not count later.
            self._stop()
            raise OutOfMemory
        facts: dict[str, Any] = answer["ok"]
        return facts

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the measuring process was not started")
        return process.stdin, process.stdout

    def _read_line(self) -> bytes:
        _, answers = self._pipes()
        end = time.monotonic() + self._answer_seconds
        pipe = answers.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._stop()
                raise TargetError(
                    f"the model gave no answer within {self._answer_seconds:.0f} s; gave up",
                    hint="profile smaller batches with --batch-sizes, or a smaller model",
                )
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                self._raise_for_death()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _raise_for_death(self) -> NoReturn:
        process = self._process
        code = process.wait() if process else 0
        self._stop()
        said = self._last_words()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        # After a size that fitted, dying of a signal at a larger one is running out of memory:
        # not every library checks what an allocation answers.
        if -code == signal.SIGKILL or says_out_of_memory(said) or (code < 0 and self._measured_any):
            self.death = how
            raise OutOfMemory
        raise TargetError(f"the measuring process died ({how}): {said or 'it said nothing'}")

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # a request was still unsent; nobody waits for its answer
