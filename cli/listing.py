"""Commands that are listed by name, and imported and built when they are used.

Most of the time of a short command was spent on building the options of all others.
"""

import inspect
import json
import os
import shutil
import sys
import tomllib
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from ..formats.reports.grid import fitted_to
from ..schema.errors import FileError
from ..schema.spelling import did_you_mean
from .common import ENVIRONMENT_PREFIX, RARE, Settings, emit_either

CONFIG_FILE = "hetflow.toml"
HELP_ALL = "hetflow.help_all"


@dataclass(frozen=True)
class Listed:
    """A command as ``hetflow --help`` lists it.

    Args:
        where: Module of this package and function, as ``solve.solve_split``.
        short_help: What it does, in a line.
        settings: Settings of the parser, beside those of all commands.
    """

    where: str
    short_help: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class ListedGroup(TyperGroup):
    """The listed commands, those of one word (``solve``) and of two (``solve split``)."""

    listed: ClassVar[Mapping[str, Listed]]
    groups: ClassVar[Mapping[str, Sequence[str]]]
    """Heading -> the commands below it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(self.listed)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of two words where the first two make one, else as usual."""
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of the list."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list, which needs no command to be built."""
        width = max(map(len, self.listed))
        for title, names in self.groups.items():
            rows = [(name.ljust(width), self.listed[name].short_help) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)


class _Commands(UserDict[str, Any]):
    """The parser's commands by name; one that is looked up is built."""

    def __getitem__(self, name: str) -> Any:
        known = self.data[name]
        if isinstance(known, Listed):
            known = self.data[name] = _built(name, known)
        return known


def _built(name: str, listed: Listed) -> Any:
    module, function = listed.where.split(".")
    found = getattr(import_module(f".{module}", __package__), function)
    words = "_".join(f"{ENVIRONMENT_PREFIX} {name}".upper().split())
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    settings = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": words}
    alone.command(
        cls=PanelCommand,
        context_settings={**settings, **listed.settings},
        name=name,
        short_help=listed.short_help,
    )(with_common_flags(found))
    return typer.main.get_command(alone)


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


def _common(
    *,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the result and errors.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every value and where it comes from; stop.")
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, callback=_help_all, help="Show rare options too."
        ),
    ] = False,
) -> None:
    """The options of every command."""


def with_common_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command --quiet, --debug, --show-config and --help-all."""

    @wraps(function)
    def command(context: typer.Context, **values: Any) -> None:
        Settings.quiet = values.pop("quiet")
        Settings.debug = values.pop("debug") or Settings.debug
        values.pop("help_all")
        Settings.record = None
        if values.pop("show_config"):
            config = _config(context, values)
            lines = [f"{name} = {value!r}  ({source})" for name, (value, source) in config.items()]
            told = {name: {"value": value, "from": at} for name, (value, at) in config.items()}
            emit_either(bool(values.get("json")), told, "\n".join(lines))
            return
        sources = {name: context.get_parameter_source(name) for name in values}
        Settings.given = {
            name
            for name, source in sources.items()
            if getattr(source, "name", "DEFAULT") != "DEFAULT"
        }
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


def _most_characters() -> int | None:
    """Width of the terminal that tables are for, or as $COLUMNS says; None in a pipe or a file."""
    is_asked = "COLUMNS" in os.environ or getattr(sys.stdout, "isatty", bool)()
    return shutil.get_terminal_size((0, 0)).columns or None if is_asked else None


def _config(context: typer.Context, values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Each option's value, as JSON holds it, and where it comes from."""
    words = f"{context.auto_envvar_prefix}_"
    names = {
        "COMMANDLINE": "flag",
        "ENVIRONMENT": "environment",
        "DEFAULT_MAP": f"file {config_path()}",
        "DEFAULT": "default",
    }
    found = {}
    for name, value in values.items():
        source = names.get(getattr(context.get_parameter_source(name), "name", ""), "default")
        if source == "environment":
            source += f" {words}{name.upper()}"
        plain = json.loads(json.dumps(value, default=str))
        found[name] = (plain, source)
    return found


def config_path() -> Path:
    """The file that values may come from: $HETFLOW_CONFIG, else ./hetflow.toml."""
    return Path(os.environ.get("HETFLOW_CONFIG", CONFIG_FILE))


def config_values(commands: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of the config file, one a command, with keys as option names.

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
        raise FileError(
            f"{path}: no command is called {name!r}", hint=did_you_mean(name, commands) or None
        )
    parameters: dict[str, str] = {}
    for parameter in commands[name].params:
        spellings = (parameter.name, *(option.lstrip("-") for option in parameter.opts))
        parameters |= {each.replace("-", "_"): parameter.name for each in spellings}
    unknown = [key for key in table if key.replace("-", "_") not in parameters]
    if unknown:
        known = [each.replace("_", "-") for each in parameters]
        message = f"{path}: [{name}] has no option {unknown[0]!r}"
        see = f"see `hetflow {name} --help`"
        raise FileError(message, hint=did_you_mean(unknown[0], known, see))
    return {parameters[key.replace("-", "_")]: value for key, value in table.items()}
