"""What every command shares: where output goes, the common flags, and how values resolve."""

import inspect
import json
import logging
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..formats.reports.grid import fitted_to
from ..schema.errors import FileError, ProblemError
from ..schema.spelling import nearest

ENVIRONMENT_PREFIX = "HETFLOW"
CONFIG_FILE = "hetflow.toml"
RARE = "rare:"
"""Before the panel of an option that only --help-all shows."""
HELP_ALL = "hetflow.help_all"
LONGEST_LINE = 2000  # characters of an error or a warning
_LONG_WORD = re.compile(r"\S{160,}")

OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result here, else to stdout.")
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
    line = _LONG_WORD.sub(lambda word: f"{word[0][:80]}...", line)
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


def emit(text: str) -> bool:
    """Write the result to stdout; a reader that has gone has seen enough.

    Returns:
        Whether the reader is still there.

    Raises:
        FileError: It cannot be written: a full disk behind it, say.
    """
    return _emitted(lambda: sys.stdout.write(text if text.endswith("\n") else text + "\n"))


def emit_bytes(content: bytes) -> bool:
    """Write bytes to stdout as they are; see ``emit``."""
    return _emitted(lambda: sys.stdout.buffer.write(content))


def _emitted(write: Callable[[], object]) -> bool:
    if getattr(sys, "stdout", None) is None:  # started with `>&-`
        raise FileError("stdout: is closed, so there is no place for the result")
    try:
        write()
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


class PanelCommand(TyperCommand):
    """Lists options by what they are for: the panels that they name, in order of appearance.

    Rare ones are shown by --help-all alone. Which variables set options is said once, at the end.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rare: list[Any] = []
        for parameter in self.params:
            parameter.show_envvar = False  # type: ignore[attr-defined]
            panel = getattr(parameter, "rich_help_panel", None) or ""
            if panel.startswith(RARE):
                parameter.rich_help_panel = panel.removeprefix(RARE) or None  # type: ignore[attr-defined]
                self.rare.append(parameter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments, and one for each panel."""
        shows_all = ctx.params.get("help_all") or ctx.meta.get(HELP_ALL)
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None or (parameter in self.rare and not shows_all):
                continue
            is_argument = parameter.param_type_name == "argument"
            named = getattr(parameter, "rich_help_panel", None) or "Options"
            panels.setdefault("Arguments" if is_argument else named, []).append(row)
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Say where options are set besides."""
        words = str(ctx.auto_envvar_prefix)
        table = words.removeprefix(f"{ENVIRONMENT_PREFIX}_").lower().replace("_", " ")
        formatter.write_paragraph()
        formatter.write_text(
            f"Each option is also read from {words}_<OPTION> in the environment, and from "
            f"[{table}] in {CONFIG_FILE}."
        )


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def register(app: typer.Typer, function: Callable[..., None], **options: Any) -> None:
    """Register a command and give it --quiet, --debug and --show-config."""
    context_settings = options.pop("context_settings", {})
    settings = {"help_option_names": ["-h", "--help"], **context_settings}
    name = options.get("name", "")
    if " " in name:  # the parser would look for a variable with a space in its name
        words = f"{ENVIRONMENT_PREFIX} {name}".upper().split()
        settings.setdefault("auto_envvar_prefix", "_".join(words))
    app.command(cls=PanelCommand, context_settings=settings, **options)(
        _with_common_flags(function)
    )


def _common(
    *,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the result and errors.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print every value and where it comes from; stop."),
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, callback=_help_all, help="Show rare options too."
        ),
    ] = False,
) -> None:
    """The options of every command."""


def _with_common_flags(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def command(context: typer.Context, **values: Any) -> None:
        Settings.quiet = values.pop("quiet")
        Settings.debug = values.pop("debug") or Settings.debug
        values.pop("help_all")
        Settings.record = None
        if values.pop("show_config"):
            emit(_shown_config(context, values))
            return
        sources = {name: context.get_parameter_source(name) for name in values}
        Settings.given = {name for name, source in sources.items() if _is_given(source)}
        with fitted_to(_most_characters()):
            function(**values)

    signature = inspect.signature(function)
    parameters = [
        inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        ),
        *[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in signature.parameters.values()],
        *inspect.signature(_common).parameters.values(),
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _is_given(source: Any) -> bool:
    return source is not None and source.name != "DEFAULT"


def _most_characters() -> int | None:
    """Width of the terminal that tables are for, or as $COLUMNS says; None in a pipe or a file."""
    is_asked = "COLUMNS" in os.environ or getattr(sys.stdout, "isatty", bool)()
    return shutil.get_terminal_size((0, 0)).columns or None if is_asked else None


def _shown_config(context: typer.Context, values: dict[str, Any]) -> str:
    words = f"{context.auto_envvar_prefix}_"
    names = {
        "COMMANDLINE": "flag",
        "ENVIRONMENT": "environment",
        "DEFAULT_MAP": f"file {config_path()}",
        "DEFAULT": "default",
    }
    rows = []
    for name, value in values.items():
        source = names.get(getattr(context.get_parameter_source(name), "name", ""), "default")
        if source == "environment":
            source += f" {words}{name.upper()}"
        shown = str(value) if isinstance(value, Path) else value
        rows.append(f"{name} = {shown!r}  ({source})")
    return "\n".join(rows)


def config_path() -> Path:
    """The file that values may come from: $HETFLOW_CONFIG, else ./hetflow.toml."""
    return Path(os.environ.get("HETFLOW_CONFIG", CONFIG_FILE))


def config_values(commands: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of the config file, one a command, with keys as option names.

    Args:
        commands: The parser's commands by name.

    Returns:
        By command, values under the names of its parameters.

    Raises:
        FileError: The file is not TOML, or names a command or an option that there is not.
    """
    path = config_path()
    if not path.is_file():
        if "HETFLOW_CONFIG" in os.environ:
            raise FileError(f"{path}: no such file", hint="HETFLOW_CONFIG names it")
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid TOML: {error}") from None
    values = {name: _values_of(path, name, table, commands) for name, table in tables.items()}
    for kind in ("solve split", "solve pipeline", "solve parallel"):  # [solve] counts for each
        values.setdefault(kind, values.get("solve", {}))
    return values


def _values_of(path: Path, name: str, table: Any, commands: Mapping[str, Any]) -> dict[str, Any]:
    """One table's values, under the names of the command's parameters."""
    if not isinstance(table, dict):
        raise FileError(f"{path}: {name} must be a table such as [solve]")
    if name not in commands:
        raise FileError(f"{path}: no command is called {name!r}", hint=_guess(name, commands))
    parameters: dict[str, str] = {}
    for parameter in commands[name].params:
        spellings = (parameter.name, *(option.lstrip("-") for option in parameter.opts))
        parameters |= {each.replace("-", "_"): parameter.name for each in spellings}
    unknown = [key for key in table if key.replace("-", "_") not in parameters]
    if unknown:
        known = [each.replace("_", "-") for each in parameters]
        message = f"{path}: [{name}] has no option {unknown[0]!r}"
        raise FileError(message, hint=_guess(unknown[0], known) or f"see `hetflow {name} --help`")
    return {parameters[key.replace("-", "_")]: value for key, value in table.items()}


def _guess(name: str, known: Iterable[str]) -> str | None:
    found = nearest(name, list(known))
    return f"did you mean {found!r}?" if found else None
