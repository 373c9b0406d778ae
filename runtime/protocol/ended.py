"""What a worker leaves behind at its end, in the folder of the run's logs, and whose error it was.

- Two empty files say how far it has come. It makes the first one at the script's last line. From
  then on the worker ignores the signals that end a launch, and the launcher obeys none once every
  worker has made its file. It makes the second one when the last save and all exit functions are
  done too. Then the launch is done, even if SIGKILL ends worker or launcher before they can say so.
- A note, ``rank<name>.failed.json``, says how it failed, written before the others notice that it
  is gone. The failing process may be in any state, so writing validates nothing, and a note that is
  read may be incomplete.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from ...schema.errors import PeerLostError, TargetError

_FAILED = ".failed.json"


def ended_path(failure: Path) -> Path:
    """The first file of a worker whose failure note would be ``failure``."""
    return failure.with_name(failure.name.replace(_FAILED, ".ended"))


def left_path(failure: Path) -> Path:
    """The second file."""
    return failure.with_name(failure.name.replace(_FAILED, ".left"))


def have_all_left(logs: Path) -> bool:
    """Whether every worker that was ever started in a launch had nothing left to do."""
    started = [path.stem for path in logs.glob("rank*.out")]
    return "rank0" in started and all((logs / f"{name}.left").exists() for name in started)


def touch(path: Path) -> None:
    """Make one of these files."""
    with contextlib.suppress(OSError):  # a full disk: a signal then counts as during the script
        path.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote:
    """One worker's report of its own failure.

    ``at_seconds`` is the host's monotonic clock. ``lost_peer`` means that the worker failed only
    because another one was lost, ``timed_out`` that it waited for the other until the time limit.
    ``may_be_echo`` means that its own error may be a consequence of such a loss.
    """

    error: str = ""
    traceback: str = ""
    exit_code: int = 1
    hint: str | None = None
    # A worker without a note died suddenly, so its failure is hardly a consequence of others'.
    at_seconds: float = 0.0
    lost_peer: bool = False
    may_be_echo: bool = False
    timed_out: bool = False


_NOTHING = FailureNote()


def read_note(path: Path) -> FailureNote | None:
    """Read a worker's note; None if there is none or it is incomplete.

    Entries of a wrong type are ignored.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    entries: dict[str, Any] = {}
    for field in fields(FailureNote):
        value = found.get(field.name)
        expected = str if field.name == "hint" else type(getattr(_NOTHING, field.name))
        if expected is float and type(value) is int:
            value = float(value)
        if type(value) is expected:
            entries[field.name] = value
    return FailureNote(**entries)


# Tell whether an error is this worker's own, or follows from the loss of another or from a plan.
#
# The type of an error decides, and where it was raised. Nothing here imports torch.


_SINGLE_VALUE = "Expected more than 1 value per channel when training"


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective or message of the runtime found another worker gone (peers.py)."""
    return isinstance(error, PeerLostError)


def may_be_echo(error: BaseException) -> bool:
    """Whether an error of the script may follow from the loss of another worker.

    It may if it was raised by a collective that the script called itself, or while such an error
    was being handled. It still counts as the script's error; but where another worker failed too,
    that worker is to blame.
    """
    return any(isinstance(e, PeerLostError) or _is_of_an_exchange(e) for e in _with_causes(error))


def explained(error: BaseException) -> BaseException:
    """The error in one line, where it is torch's and a plan may be the reason: batch norm of one.

    Example:
        >>> explained(ValueError("Expected more than 1 value per channel when training")).message
        'a batch norm got one sample, of which there is no variance'
    """
    if not isinstance(error, ValueError) or not str(error).startswith(_SINGLE_VALUE):
        return error
    norm, found = "a batch norm", error.__traceback__
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(found))
    modules: list[Any] = [each["self"] for each in frames if "self" in each]
    modules = [module for module in modules if hasattr(module, "named_modules")]
    if modules:
        named = ((name, m) for outer in modules for name, m in outer.named_modules() if name)
        name = next((name for name, module in named if module is modules[-1]), "")
        norm = (
            f"layer {name} ({type(modules[-1]).__name__})" if name else type(modules[-1]).__name__
        )
    made = TargetError(
        f"{norm} got one sample, of which there is no variance",
        hint="let each virtual node, and a short last batch, have two samples or more: a larger "
        "batch, fewer virtual nodes, DataLoader(drop_last=True); or use GroupNorm, or "
        "SyncBatchNorm, whose batch is the global batch",
    )
    return made.with_traceback(found)


def forget_frames(error: BaseException) -> None:
    """Let go of what the functions held that an error came through, such as process groups."""
    for one in _with_causes(error):
        one.__traceback__ = None  # a group that a frame holds is not destroyed


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the errors that caused it, and those being handled when it was raised."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [e for e in (one.__cause__, one.__context__) if e is not None]


def _is_of_an_exchange(error: BaseException) -> bool:
    """Whether ``torch.distributed`` raised it."""
    # Errors of NCCL and of the store have types. gloo raises plain RuntimeErrors; they are known by
    # the function that raised them. One of the script's own ``work.wait()`` is not recognised.
    dist = sys.modules.get("torch.distributed")
    if dist is None or dist.__file__ is None or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    innermost: TracebackType | None = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    file = innermost.tb_frame.f_code.co_filename if innermost is not None else ""
    return Path(dist.__file__).parent in Path(file).parents
