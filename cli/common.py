"""What every command shares: where output goes, the common flags, and how values resolve."""

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..schema.errors import FileError, ProblemError

ENVIRONMENT_PREFIX = "HETFLOW"
RARE = "rare:"  # before the panel of an option that only --help-all shows
LONGEST_LINE = 2000  # characters of an error or a warning

OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result here, else to stdout.")
]
ReportOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the whole report here.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")]


class Settings:
    """What concerns the whole process. The command line sets it once."""

    debug = False
    quiet = False
    given: set[str] = set()
    """Options of the running command that were given, by a flag, the environment or a file."""
    record: type | None = None
    """The request record of the running command, whose flags its errors name."""


def one_line(text: str) -> str:
    """A message as one printable line of sane length, whatever file or option it quotes.

    Control characters (an escape sequence in a JSON file, say) are shown, not obeyed.
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    line = re.sub(r"\S{160,}", lambda word: f"{word[0][:80]}...", line)
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}... (cut)"


def say(text: str) -> None:
    """Write on stderr; a full disk or a closed pipe behind it does not end the work."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")


def note(message: str) -> None:
    """Tell a person something on stderr; silent in a pipe and under --quiet."""
    if sys.stderr.isatty() and not Settings.quiet:
        say(message)


def warn(message: str) -> None:
    """Warn on stderr, also in a pipe: a result that needs the warning must not lose it."""
    if not Settings.quiet:
        say(f"hetflow: warning: {one_line(message)}")


class _Lines(logging.Handler):
    """What the library says, as the lines that commands write themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write warnings as ``warn`` does, what is below them as ``note`` does."""
        tell = warn if record.levelno >= logging.WARNING else note
        tell(record.getMessage())


@contextmanager
def library_speaks() -> Iterator[None]:
    """While a command runs, what goes to the logger ``hetflow`` becomes lines on stderr."""
    logger = logging.getLogger("hetflow")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [_Lines()], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def shows_progress() -> bool:
    """Whether a person may be looking at a progress bar."""
    return sys.stderr.isatty() and not Settings.quiet


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr with the seconds so far and what is being done; else nothing.

    Yields:
        Says what is being done.
    """
    if not shows_progress():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        # How much work there is turns out on the way, so the bar pulses.
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


def emit(content: str | bytes) -> bool:
    """Write the result to stdout, text with an end of line; a reader that has gone has seen enough.

    Returns:
        Whether the reader is still there.

    Raises:
        FileError: It cannot be written: a full disk behind it, say.
    """
    if getattr(sys, "stdout", None) is None:  # started with `>&-`
        raise FileError("stdout: is closed, so there is no place for the result")
    try:
        if isinstance(content, bytes):
            sys.stdout.buffer.write(content)
        else:
            sys.stdout.write(content if content.endswith("\n") else content + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            message = f"stdout: the result could not be written: {error.strerror}"
            raise FileError(message, hint="make room, or send it elsewhere") from None
        return False
    return True


def emit_json(document: Any) -> bool:
    """Write the result as the one JSON document on stdout; see ``emit``."""
    return emit(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))


def emit_either(is_json: bool, document: Any, text: str | Callable[[], str]) -> None:
    """Write the result as one JSON document, or as text for a person; see ``emit``."""
    if is_json:
        emit_json(document)
    else:
        emit(text if isinstance(text, str) else text())


def emit_file(value: Any, output: Path | None, *, force: bool, json: bool = False) -> None:
    """Write a record to a file; to stdout where no file is named, or ``json`` asks for it too."""
    from ..schema import files

    if output is not None:
        files.write(output, value, force=force)
    if output is None or json:
        emit(files.to_json(value))


def asked_pool(gpus: str | None, cluster: Path | None) -> str | Path:
    """What ``--gpus`` or ``--cluster`` names; exactly one of them.

    Raises:
        ProblemError: None or both are given.
    """
    if gpus is not None and cluster is not None:
        raise ProblemError("--gpus and --cluster both name a pool", hint="give one of them")
    named = gpus if gpus is not None else cluster
    if named is None:
        raise ProblemError("no pool is given", hint="add --gpus 2xV100,8xP100 or --cluster FILE")
    return Path("/dev/stdin") if cluster == Path("-") else named


def price_text(dollars_per_hour: float, machine: str) -> str:
    """The price of a device of a type, and the machine whose share it is."""
    return f"{dollars_per_hour:.4g} $ per device and hour, {machine}"
