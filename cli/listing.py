"""Commands that are listed by name, and imported and built when they are used.

Most of the time of a short command was spent on building the options of all others.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from .common import register


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


class _Commands(MutableMapping[str, Any]):
    """The parser's commands by name; one that is looked up is built."""

    def __init__(self, listed: Mapping[str, Listed]) -> None:
        self._known: dict[str, Any] = dict(listed)

    def __getitem__(self, name: str) -> Any:
        known = self._known[name]
        if isinstance(known, Listed):
            known = self._known[name] = _built(name, known)
        return known

    def __setitem__(self, name: str, command: Any) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:  # the inherited one would build it
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _built(name: str, listed: Listed) -> Any:
    module, function = listed.where.split(".")
    found = getattr(import_module(f".{module}", __package__), function)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    register(
        alone, found, name=name, short_help=listed.short_help, context_settings=listed.settings
    )
    return typer.main.get_command(alone)
