"""The request of a launch, and the folder that it writes to."""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...schema.errors import FileError, LaunchError, TargetError
from ...schema.launch import LaunchConfig
from ...schema.options import OnFailure, option
from ...schema.plan import Plan
from ...schema.requests.launch import LaunchingRequest
from ..protocol.control import is_running

RUNS_FOLDER = "hetflow-runs"
MOST_NAMES = 10_000  # default folders of launches of one model in one second
HANDOVER = "handover"  # a pipeline's parts while its plan changes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest(LaunchingRequest):
    """One launch: what was asked for, with the plan read and lowered, and the folder chosen."""

    plan: Plan
    config: LaunchConfig
    folder: Path
    checkpoint: Path | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """What stands after ``python``: ``(file.py, args...)`` or ``("-m", module, args...)``."""
        return (str(self.script), *self.arguments)

    @property
    def handover_folder(self) -> Path | None:
        """Where a pipeline on one host writes its parts when its plan changes; None elsewhere."""
        changes_plan = self.rendezvous is None and self.config.pipeline is not None
        return self.folder / HANDOVER if changes_plan else None

    @property
    def policy(self) -> OnFailure:
        """The action when a worker dies, with the default resolved."""
        if self.on_failure is not None:
            return self.on_failure
        if self._bound is None:
            return "shrink"
        return "replace" if self.checkpoint is not None else "stop"

    @property
    def _bound(self) -> str | None:
        """Why workers cannot join or leave one by one; None for a split on one host."""
        if self.config.pipeline is not None:
            return "pipeline"
        if self.config.shard is not None and not self.config.redundancy:
            return "plan whose devices share states"
        return None if self.rendezvous is None else "launch on several hosts"

    def __post_init__(self) -> None:
        what = self._bound
        if what is None or self.on_failure in ("stop", None):
            return
        if self.on_failure == "shrink":
            raise TargetError(
                f"a {what} cannot go on without a worker that dies",
                hint=f"give {option('on_failure', 'replace')}: all start again from the last "
                f"{option('checkpoint')}",
            )
        if self.checkpoint is None:
            raise TargetError(
                f"a {what} starts again from a checkpoint, and has none to start from",
                hint=f"give {option('checkpoint', 'DIR')} too, and "
                f"{option('checkpoint_every', 'N')}",
            )


def check_script(script: tuple[str, ...]) -> None:
    """Refuse a script that is not there, before anything starts.

    Raises:
        TargetError: No script, no such file, or ``-m`` without a module.
    """
    if not script:
        raise TargetError("no script to launch", hint="hetflow launch PLAN SCRIPT [ARGS...]")
    if script[0] == "-m":
        if len(script) < 2:
            raise TargetError("-m needs the name of a module")
        return
    if script[0].startswith("-"):
        raise TargetError(
            f"expected a script after the plan, got {script[0]!r}",
            hint="hetflow's own options stand before the plan",
        )
    if not Path(script[0]).is_file():
        raise TargetError(f"{script[0]}: no such script")


def check_checkpoints(request: LaunchRequest) -> None:
    """Refuse checkpoints that have no folder to go to, before anything starts.

    Raises:
        TargetError: An interval without a folder.
        FileError: The folder is a file.
    """
    if request.checkpoint is None:
        if request.from_scratch:
            raise TargetError(
                f"{option('from_scratch')} sets the checkpoints of a folder aside, and "
                "there is none",
                hint=f"give {option('checkpoint', 'DIR')} too",
            )
        if request.checkpoint_every:
            raise TargetError(
                f"{option('checkpoint_every', request.checkpoint_every)} needs a folder",
                hint=f"give {option('checkpoint', 'DIR')} too",
            )
    elif request.checkpoint.exists() and not request.checkpoint.is_dir():
        raise FileError(
            f"{request.checkpoint}: is no folder", hint=f"give another {option('checkpoint')}"
        )


def default_folder(model: str) -> Path:
    """``hetflow-runs/<model>-<time>``, or the next such name that is free now."""
    return next(folder for folder in _default_folders(model) if not folder.exists())


@contextmanager
def run_folder(given: Path | None, model: str) -> Iterator[Path]:
    """The folder of a launch; a default one is made at once, so that no other launch takes it.

    It goes again where the launch wrote nothing.

    Raises:
        FileError: The default folder cannot be made.
    """
    if given is not None:
        yield given
        return
    for folder in _default_folders(model):
        try:
            folder.mkdir(parents=True)
            break
        except (FileExistsError, FileNotFoundError):
            continue  # taken; or another launch that wrote nothing has just removed the parent
        except OSError as error:
            raise FileError(f"{folder}: cannot be made: {error.strerror}") from None
    else:
        raise FileError(
            f"{RUNS_FOLDER}: no folder can be made there", hint=f"give {option('folder')}"
        )
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds the run
            folder.rmdir()
            folder.parent.rmdir()


def _default_folders(model: str) -> Iterator[Path]:
    """Names for a run that starts now, with nothing in them that a file system minds."""
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", model).strip("._") or "model"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    first = Path(RUNS_FOLDER) / f"{safe[:80]}-{stamp}"
    yield first
    for number in range(2, MOST_NAMES):
        yield first.with_name(f"{first.name}-{number}")


def check_folder(folder: Path, *, force: bool) -> None:
    """Refuse a run folder that holds something already, unless forced.

    Raises:
        FileError: It is a file, or not empty and ``force`` is off.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not force):
        raise FileError(
            f"{folder}: exists already",
            hint=f"give {option('force', True)}, or another {option('folder')}",
        )


def check_idle(folder: Path) -> None:
    """Refuse the folder of a launch that runs, which would lose its logs and its control.

    Raises:
        FileError: A launch runs there.
    """
    if is_running(folder):
        raise FileError(f"{folder}: a launch runs there", hint=f"give another {option('folder')}")


def make_folder(folder: Path) -> None:
    """Make the run's folder with empty ``logs``; an earlier run's record and logs go.

    Raises:
        FileError: It cannot be made.
    """
    try:
        (folder / "run.json").unlink(missing_ok=True)
        for old in ("logs", HANDOVER):
            shutil.rmtree(folder / old, ignore_errors=True)
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise FileError(f"{folder}: cannot be made: {error.strerror}") from None


# Keep two launches of one checkpoint folder apart.
#
# A launch locks a file in the folder, and every worker inherits the descriptor. The kernel releases
# the lock when the last process that holds it is gone. So a launcher that was killed does not open
# the folder to a new launch while one of its workers still runs.

POLL_SECONDS = 0.05
TOLD_AFTER_SECONDS = 1.0


class Fence:
    """One host's hold of a checkpoint folder; in a folder that is None there is nothing to hold.

    Args:
        folder: The checkpoint folder.
        node_rank: Rank of this host. The hosts of a launch share the folder, so each has its lock.
    """

    def __init__(self, folder: Path | None, node_rank: int = 0) -> None:
        self._path = None if folder is None else folder / f".launch-{node_rank}.lock"
        self.descriptor: int | None = None

    def close_behind(
        self, timeout_seconds: float, watch: Callable[[], None], warn: Callable[[str], None]
    ) -> None:
        """Wait until every process of the launch before is gone, and keep others out from now on.

        Raises:
            FileError: The folder cannot be written.
            LaunchError: The launch before was still there after the longest wait.
        """
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FileError(f"{self._path.parent}: cannot be written: {error.strerror}") from None
        # Asked again and again, not waited for in the kernel: meanwhile signals are to be obeyed.
        began, has_told = time.monotonic(), False
        while not self._is_locked():
            watch()
            waited = time.monotonic() - began
            if waited > timeout_seconds:
                raise LaunchError(
                    f"{self._path.parent}: another launch{self._holder()} still used these "
                    f"checkpoints after {timeout_seconds:g} s",
                    hint=f"end it first, give another {option('checkpoint')}, or wait longer with "
                    f"{option('timeout_seconds')}",
                )
            if waited > TOLD_AFTER_SECONDS and not has_told:
                has_told = True
                warn(
                    f"{self._path.parent}: waiting until the workers of another "
                    f"launch{self._holder()} are gone"
                )
            time.sleep(POLL_SECONDS)
        with suppress(OSError):  # a full disk: then a message names no process
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)

    def _is_locked(self) -> bool:
        assert self.descriptor is not None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def _holder(self) -> str:
        assert self.descriptor is not None
        pid = os.pread(self.descriptor, 20, 0).decode(errors="replace")
        return f" (launcher: process {pid})" if pid.isdigit() else ""

    def __enter__(self) -> "Fence":
        return self

    def __exit__(self, *_: object) -> None:
        """The launch is over: let the next one in once the workers are gone too."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
