"""The parent's side of a measuring process (``child``): start it, ask it, survive its end.

Within ``started_like_workers`` it starts as a launch's worker does: forked from a preloaded process
where one can be had, with the same settings before its imports.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from ..devices.backend import says_out_of_memory
from ..devices.cpu import DEVICE_TYPE
from ..runtime.measurements import StepTimes
from ..runtime.preload import VARIABLE, Forked, Preload, PreloadError, fork
from ..schema import files
from ..schema.errors import TargetError
from ..schema.layers import PassMoment
from ..schema.options import Activations, option
from ..schema.plan import PassTime
from ..schema.profile import BatchPoint
from .batch_curve import SizeResult
from .rehearsal import config_of
from .targets import Target
from .timing import RepeatPolicy, RepeatTiming

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
    pipe = subprocess.PIPE
    streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": errors}
    preload = _PRELOAD.get()
    if preload is not None:
        preload.wait(environment, lambda: None)
        forked = preload.start(command, environment, **streams)
        if forked is not None:
            return forked
    else:
        with suppress(PreloadError):  # one process: no reason to preload, but that may be done
            return fork(command, environment, **streams)
    return subprocess.Popen(command, env=environment, **streams)


def _waited_seconds(process: int) -> float:
    """How long a process has waited for a core so far; 0 where the system does not say."""
    try:
        text = Path(f"/proc/{process}/schedstat").read_text(encoding="ascii")
        return int(text.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


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

        Args:
            seconds: The longest it may take, without the time in which it waited for a core.

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
        pipe, number = self._process.stdout, self._process.pid
        # Where others keep the cores busy, the same answer takes many times as long.
        end = time.monotonic() - _waited_seconds(number) + seconds
        while b"\n" not in self._unread:
            assert pipe is not None
            left = end - time.monotonic() + _waited_seconds(number)
            ready, _, _ = select.select([pipe], [], [], max(0.0, left))
            if not ready and left > 0:
                continue  # it waited for a core meanwhile
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What is loaded, and for which devices; a host's own memory is held to ``memory_bytes``."""

    target: Target
    memory_bytes: int
    optimizer: str  # where the workload brings none
    device_type: str = DEVICE_TYPE
    num_threads: int = 1  # of its arithmetic on the host

    def ask_alone(self, child: Child, device: str) -> None:
        """Have a process train by itself; its answer are facts about the workload."""
        if self.target.is_script:
            self.ask_script(child, device)
            return
        child.send(
            "load",
            target=self.target.text,
            device=device,
            memory_bytes=self.memory_bytes,
            optimizer=self.optimizer,
            num_threads=self.num_threads,
            blocks=self.target.blocks,
        )

    def ask_script(
        self, child: Child, device: str, *, rank: int = 0, workers: int = 1, port: int | None = None
    ) -> None:
        """Have a process be one worker of a script; several meet in a store at a port."""
        config = config_of([[1]] * workers, device_type=self.device_type)
        child.send(
            "script",
            script=[self.target.location, *self.target.arguments],
            device=device,
            memory_bytes=self.memory_bytes,
            few_samples=self.target.few_samples,
            config=files.to_json(config),
            rank=rank,
            port=port,
        )


# Measure batch sizes in a process that may run out of memory, and is then replaced.


ANSWER_SECONDS = 900.0
_Answer = TypeVar("_Answer")


class Measurer:
    """Measures one workload on one device. A context manager.

    Each method raises TargetError where the workload is at fault, or gives no answer in time.
    """

    def __init__(
        self,
        loading: Loading,
        *,
        device: str,
        environment: Mapping[str, str] | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.death: str | None = None
        self.no_loading: str | None = None
        self._loading = loading
        self._device = device
        self._environment = dict(environment or {})
        self._answer_seconds = answer_seconds
        self._child: Child | None = None
        self._measured_any = False

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def load(self) -> dict[str, Any]:
        """Start the process, if there is none, and load the workload; the facts about it.

        Raises:
            MemoryError: It does not fit the device's memory.
        """
        self._guarded(lambda child: None)
        return self.facts

    def measure(
        self, batch_size: int, policy: RepeatPolicy, *, activations: Activations = "kept"
    ) -> SizeResult | None:
        """Measure one batch size; None where it does not fit the device's memory."""
        asked = dataclasses.asdict(policy)
        try:
            how = {} if self._loading.target.is_script else {"activations": activations}
            answer = self._ask("measure", batch_size=batch_size, policy=asked, **how)
        except MemoryError:
            # What it has left behind (a half-built graph, fragments) must not count later.
            self.release()
            return None
        self._measured_any = True
        moments = tuple(PassMoment(**moment) for moment in answer.pop("moments"))
        timing = RepeatTiming(**answer.pop("timing"))
        return SizeResult(timing=timing, moments=moments, **answer)

    def rehearse(
        self, sizes: Sequence[int], *, num_steps: int, is_empty: bool = False
    ) -> list[list[StepTimes]]:
        """Train steps with virtual nodes of these sizes; the steps of the one worker.

        Raises:
            MemoryError: They do not fit the device's memory.
        """
        try:
            answer = self._ask(
                "rehearse",
                config=files.to_json(config_of([sizes])),
                num_steps=num_steps,
                warm_up_steps=0,
                is_empty=is_empty,
            )
        except MemoryError:
            self.release()
            raise
        self.no_loading = answer["no_loading"]
        return [[StepTimes.of_json(step) for step in answer["steps"]]]

    def optimizer_state(self, batch_size: int) -> dict[str, Any]:
        """Count what the optimizer keeps after a step; see ``Bench.optimizer_state``."""
        return self._ask("optimizer_state", batch_size=batch_size)

    def base_memory(self, batch_size: int) -> int | None:
        """What the process holds without a model; it is spent by this, the next one is new.

        Returns:
            Bytes; None where the kernel does not tell, or where the group that is joined for it
            does not fit beside the model.
        """
        try:
            found: int | None = self._ask("base_memory", batch_size=batch_size)["bytes"]
        except MemoryError:
            found = None
        self.release()
        return found

    def hold(self, batch_size: int, passes: Sequence[PassTime], repeats: int) -> dict[str, Any]:
        """Run passes held to a table: ``seconds`` of each, and ``num_overruns``."""
        table = [[entry.batch_size, entry.step_seconds] for entry in passes]
        return self._ask("hold", batch_size=batch_size, passes=table, repeats=repeats)

    def measure_layers(self, microbatch_size: int, repeats: int) -> dict[str, Any]:
        """Profile the model's layers; see ``layers.measure_layers``.

        Raises:
            TargetError: The model cannot be cut into layers, or the microbatch does not fit.
        """
        try:
            return self._ask("layers", microbatch_size=microbatch_size, repeats=repeats)
        except MemoryError:
            raise TargetError(
                f"a microbatch of {microbatch_size} does not fit", hint="take a smaller one"
            ) from None

    def _ask(self, operation: str, **values: Any) -> dict[str, Any]:
        def ask(child: Child) -> dict[str, Any]:
            child.send(operation, **values)
            return child.receive(self._answer_seconds)

        return self._guarded(ask)

    def _guarded(self, ask: Callable[[Child], _Answer]) -> _Answer:
        """Ask the process, which is started where there is none; explain its death."""
        try:
            if self._child is None:
                self._child = Child(self._environment, num_threads=self._loading.num_threads)
                self._loading.ask_alone(self._child, self._device)
                self.facts = self._child.receive(self._answer_seconds)
            return ask(self._child)
        except ChildDied as death:
            self.release()
            raise self._explained(death) from None
        except TargetError:
            if self._loading.target.is_script:  # it has ended
                self.release()
            raise

    def _explained(self, death: ChildDied) -> Exception:
        """Running out of memory where the death looks like it, else the model's own fault."""
        by_signal = death.code < 0
        killed = death.code == -signal.SIGKILL  # by the kernel, as a rule
        # After a size that fitted, dying of a signal at a larger one is running out of memory: not
        # every library checks what an allocation answers.
        if killed or says_out_of_memory(death.said) or (by_signal and self._measured_any):
            self.death = death.how
            return MemoryError()
        words = death.said or "it said nothing"
        error = TargetError(f"the measuring process died ({death.how}): {words}")
        error.add_note(f"The measuring process said:\n{death.words}")
        return error

    def release(self) -> None:
        """End the process and free what it holds; the next measurement starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()


# Emulated device types: the CPU at a stated fraction of its speed.
#
# The arithmetic is real and runs in a real process; each forward + backward pass is held to a
# fixed time, table time = CPU pass time / speed (runtime.emulation). A fixed time from a table is
# steady under load, where sleeping in proportion to the time just taken, CPU quotas and nice are
# not (benchmarks/emulation_stability.py). Only the passes are stretched: the update and the
# synchronisation take the CPU's own time.

STEADY_SECONDS = 0.01
_MAX_SIZES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSize:
    """What holding gave at one size: the table's time, the measured one, and missed deadlines."""

    batch_size: int
    table_seconds: float
    measured: RepeatTiming
    num_overruns: int

    @property
    def error(self) -> float:
        """(measured - table) / table of the median."""
        return self.measured.median_seconds / self.table_seconds - 1


def stretched(base: Sequence[BatchPoint], speed: float) -> tuple[BatchPoint, ...]:
    """The curve of a device at ``speed`` times the base device's speed; memory is the same."""
    return tuple(
        BatchPoint(
            batch_size=point.batch_size,
            step_seconds=point.step_seconds / speed,
            peak_memory_bytes=point.peak_memory_bytes,
        )
        for point in base
    )


def verify(
    measurer: Measurer, table: Sequence[BatchPoint], budget_seconds: float
) -> tuple[HeldSize, ...]:
    """Run held passes for real at a few sizes of the table and see how long they take."""
    chosen = sizes_to_verify(table, budget_seconds)
    passes = [
        PassTime(batch_size=point.batch_size, step_seconds=point.step_seconds) for point in table
    ]
    share = budget_seconds / len(chosen)
    held = []
    for point in chosen:
        repeats = max(3, min(20, int(share / point.step_seconds)))
        answer = measurer.hold(point.batch_size, passes, repeats)
        held.append(
            HeldSize(
                batch_size=point.batch_size,
                table_seconds=point.step_seconds,
                measured=RepeatTiming.of(answer["seconds"]),
                num_overruns=answer["num_overruns"],
            )
        )
    return tuple(held)


def sizes_to_verify(table: Sequence[BatchPoint], budget_seconds: float) -> list[BatchPoint]:
    """Up to three sizes spread over those that are steady and affordable; at least one."""
    share = budget_seconds / _MAX_SIZES
    usable = [p for p in table if STEADY_SECONDS <= p.step_seconds <= share / 5]
    if not usable:
        usable = [min(table, key=lambda p: abs(p.step_seconds - STEADY_SECONDS))]
    picks = {0, len(usable) // 2, len(usable) - 1}
    return [usable[index] for index in sorted(picks)]


def as_provenance(held: Sequence[HeldSize], speed: float) -> dict[str, Any]:
    """The verification as it stands in a profile's provenance."""
    return {
        "emulated": True,
        "method": "each pass is held to table time = CPU pass time / speed",
        "stated_speed": speed,
        "held_passes": [
            {
                "batch_size": size.batch_size,
                "table_seconds": size.table_seconds,
                "measured": asdict(size.measured),
                "measured_speed": speed / (1 + size.error),
                "error": size.error,
                "overruns": size.num_overruns,
            }
            for size in held
        ],
        "worst_error": max((abs(size.error) for size in held), default=None),
    }
