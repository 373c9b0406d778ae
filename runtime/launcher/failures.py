"""Which worker failed first: the cause to show, not the failures that followed from it."""

import json
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from ...devices.collectives import NUM_LINES, find_abort
from ...schema.errors import LaunchError
from ...schema.records import adapter_of
from ..protocol.ended import FailureNote, read_note
from ..protocol.messages import faults_in

TAIL_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(FailureNote):
    """How one worker (or a whole launch, where ``rank`` is None) ended badly.

    ``stages`` are those that a pipeline's worker holds; ``why`` is why the controller ended it,
    where it did; ``sentence_of_ours`` is the whole story, where it takes more than this worker's.
    """

    exit_code: int  # stated, unlike a note's: what is read from another host must say both
    error: str
    rank: int | None = None
    device_type: str = ""
    host: str = ""
    log: str = ""
    interrupted: bool = False
    stages: tuple[int, ...] = ()
    why: str = ""
    sentence_of_ours: str | None = None

    @property
    def by_signal(self) -> bool:
        """Whether it was killed: nothing in the script stopped it."""
        return self.exit_code > 128 and self.exit_code - 128 in signal.valid_signals()

    @property
    def precedence(self) -> int:
        """The less, the rather it is what others followed from.

        An error of the script (or a death by a signal) comes first; then one that may be an echo,
        and an abort without a word; then a worker that says itself that it only lost another, or
        that NCCL's watchdog aborted for that.
        """
        if self.lost_peer:
            return 2
        aborted = self.exit_code == 128 + signal.SIGABRT and not self.traceback and not self.why
        return int(self.may_be_echo or aborted)

    @property
    def is_echo(self) -> bool:
        """Whether it may have followed from the loss of another worker."""
        return self.precedence > 0

    def sentence(self) -> str:
        """One line: the worker, how it ended, and its own error."""
        if self.sentence_of_ours is not None:
            return self.sentence_of_ours
        if self.rank is None:
            return self.error
        who = f"worker {self.rank} ({_staged(self.stages)}{self.device_type}"
        where = f" on {self.host})" if self.host and self.host != socket.gethostname() else ")"
        if self.why:
            return f"{who}{where} {self.why}"
        how = f"failed with exit code {self.exit_code}"
        if self.by_signal:
            how = f"was killed by {signal.Signals(self.exit_code - 128).name}"
        return f"{who}{where} {how}" + (f": {self.error}" if self.error else "")

    def to_text(self) -> str:
        """The failure as it travels through the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes | str) -> "Failure":
        """Read it back; a failure that cannot be read is one, too."""
        try:
            failure: Failure = adapter_of(cls).validate_json(text)
        except ValidationError as error:
            said = f"another host failed, and how cannot be read here: {faults_in(error)}"
            return cls(exit_code=1, error=said)
        return failure

    def as_error(self) -> LaunchError:
        """The error that ends the command, with the worker's own exit code."""
        hint = f"its whole output: {self.log}" if self.log else None
        unexplained = not (self.interrupted or self.why or self.sentence_of_ours)
        if self.exit_code == 128 + signal.SIGKILL and unexplained:
            hint = f"if you did not kill it, the host may be out of memory; {hint}"
        error = LaunchError(self.sentence(), hint=self.hint or hint, exit_code=self.exit_code)
        error.__cause__ = RemoteTraceback(self.traceback) if self.traceback else None
        return error


class RemoteTraceback(Exception):
    """A worker's traceback, for --debug."""


def silence(waiting: Failure, silent: Sequence[Failure]) -> Failure:
    """The message after a worker's wait timed out: names the silent workers."""
    names = " or ".join(f"worker {f.rank} ({_staged(f.stages)}{f.device_type})" for f in silent)
    who = f"worker {waiting.rank} ({_staged(waiting.stages)}{waiting.device_type})"
    error = f"{names} hangs: {who} waited for it in vain: {waiting.error}"
    # Another host may say that its workers waited; here is who they waited for.
    return replace(
        waiting, rank=None, error=error, log=silent[0].log, lost_peer=False, may_be_echo=True
    )


def _staged(stages: Sequence[int]) -> str:
    if not stages:
        return ""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}, "


def failure_of(
    rank: int, device_type: str, returncode: int, described: Path, log: Path, *, why: str = ""
) -> Failure:
    """The failure of one dead worker, from its exit status and what it wrote down.

    ``why`` is why the controller ended it, where it did.
    """
    code = 128 - returncode if returncode < 0 else returncode  # as a shell reports it
    own = read_note(described)
    if own is None and code == 128 + signal.SIGABRT and not why:
        found = find_abort(tail_of(log, NUM_LINES).splitlines())
        if found is not None:
            own = FailureNote(error=found.said, lost_peer=True, timed_out=found.timed_out)
    own = own or FailureNote()
    said = [line for line in tail_of(log).splitlines() if line.strip()]
    error = own.error or (said[-1].strip()[:300] if said else "")
    return Failure(
        **{**asdict(own), "exit_code": code, "error": error},
        rank=rank,
        device_type=device_type,
        host=socket.gethostname(),
        log=str(log),
        why=why,
    )


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others followed from."""
    return min(failures, key=lambda failure: (failure.precedence, failure.at_seconds))


def interruption(number: int, detail: str | None = None) -> Failure:
    """The launch was told to stop; ``detail`` is what went wrong on the way out."""
    name = signal.Signals(number).name
    rest = f"; {detail}" if detail else ""
    return Failure(
        exit_code=128 + number,
        error=f"interrupted by {name}; all workers are stopped{rest}",
        at_seconds=time.monotonic(),
        interrupted=True,
    )


def tail_of(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 64 * 1024))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
