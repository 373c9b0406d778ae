"""Registries of named things: the package's own, and those of plug-ins from outside the package.

A kind of thing (schedules, policies, exporters, ...) has one ``Registry``. The package's modules
register their things when they are imported. A plug-in is any installed distribution with an
entry point in the kind's group. The entry point's name is the thing's name. Its value is the
module (or an object in it) whose import registers the thing::

    [project.entry-points."hetflow.policies"]
    even_progress = "my_package.even_progress"

Nothing is imported before a name is requested, and then only what that name needs. So a broken
plug-in affects only those who use it.
"""

import os
import sys
from collections.abc import Callable
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from traceback import walk_tb
from typing import Any, Generic, TypeVar

from .errors import ProblemError
from .spelling import did_you_mean

T = TypeVar("T")

_PACKAGE = (__package__ or "").partition(".")[0]
_registries: "list[Registry[Any]]" = []


class Registry(Generic[T]):
    """The things of one kind, by name.

    Args:
        kind: What a thing of this kind is called in messages, such as ``schedule``.
        group: The entry-point group of its plug-ins, such as ``hetflow.schedules``.
        own: The package's own modules that register things, in the order of ``names``.
        is_optional: Whether a plug-in module of the group may register nothing in this registry.
    """

    def __init__(
        self, kind: str, *, group: str, own: tuple[str, ...], is_optional: bool = False
    ) -> None:
        self.kind, self.group = kind, group
        self._own, self.is_optional = own, is_optional
        self._entries: dict[str, tuple[str, T]] = {}
        self._has_own = False
        _registries.append(self)

    def add(self, name: str, entry: T, module: str) -> None:
        """Register a thing.

        Args:
            name: The name that users write.
            entry: The thing.
            module: The module that registers it (``__name__``).

        Raises:
            ProblemError: Another module has registered that name.
        """
        other = self._entries.get(name)
        if other is not None and other[0] != module:
            raise ProblemError(
                f"{self.kind} {name!r} is registered by {other[0]} and by {module}",
                hint="rename one of them",
            )
        self._entries[name] = module, entry
        self.__dict__.pop("registered", None)

    def adding(self, name: str) -> Callable[[T], T]:
        """Make a decorator that registers a function or class, and returns it unchanged.

        Raises:
            ProblemError: The name is taken; when the decorator is used.
        """

        def register(entry: T) -> T:
            self.add(name, entry, entry.__module__)
            return entry

        return register

    def remove(self, name: str) -> None:
        """Undo ``add``; does nothing if the name is not registered."""
        self._entries.pop(name, None)
        self.__dict__.pop("registered", None)

    def find(self, name: str) -> T | None:
        """Find a thing by name; None if neither the package nor a plug-in has it.

        Raises:
            ProblemError: Its plug-in cannot be loaded; the message names the distribution.
        """
        self._load_own()
        if name not in self._entries:
            for point in self._points():
                if point.name == name:
                    origin = f"plug-in {point.name!r} of {_distribution(point)} ({point.value})"
                    try:
                        point.load()
                    except Exception as error:  # a plug-in may raise anything
                        raise ProblemError(
                            f"{origin} cannot be loaded: {type(error).__name__}: {error}",
                            hint="fix or uninstall that distribution",
                        ) from error
                    if point.name not in self._entries and not self.is_optional:
                        raise ProblemError(
                            f"{origin} registers no {self.kind} {point.name!r}",
                            hint="give the entry point the name that the module registers",
                        )
        return self.loaded(name)

    def get(self, name: str) -> T:
        """Find a thing by name.

        Raises:
            ProblemError: The name is unknown (the message suggests a similar one), or its plug-in
                cannot be loaded.
        """
        entry = self._entries.get(name)
        if entry is not None:  # the fast path, for inner loops of solvers and steps
            return entry[1]
        found = self.find(name)
        if found is None:
            known = self.names()
            raise ProblemError(
                f"unknown {self.kind} {name!r}; known are {', '.join(known)}",
                hint=did_you_mean(
                    name, known, f"install the plug-in that has it (entry points {self.group})"
                ),
            )
        return found

    def names(self) -> tuple[str, ...]:
        """List all names, the package's own first, without loading any plug-in."""
        self._load_own()
        place = {module: index for index, module in enumerate(self._own)}
        registered = sorted(
            self._entries, key=lambda name: place.get(self._entries[name][0], len(place))
        )
        declared = sorted({point.name for point in self._points()} - self._entries.keys())
        return (*registered, *declared)

    def loaded(self, name: str) -> T | None:
        """Find a thing by name; None if it is unknown or in a plug-in that is not loaded yet."""
        found = self._entries.get(name)
        return None if found is None else found[1]

    @cached_property  # a worker asks in every pass
    def registered(self) -> tuple[T, ...]:
        """The package's own things and those of loaded plug-ins; loads no plug-in."""
        self._load_own()
        return tuple(entry for _, entry in self._entries.values())

    def all(self) -> tuple[T, ...]:
        """List every thing, in the order of ``names``; loads all plug-ins of the kind.

        Raises:
            ProblemError: A plug-in cannot be loaded.
        """
        return tuple(self.get(name) for name in self.names())

    def of_module(self, module: str) -> str | None:
        """Name what a plug-in's module, or another of its package, registered; else None."""
        package = module.partition(".")[0]
        if package == _PACKAGE:
            return None
        owners = {name: owner for name, (owner, _) in self._entries.items()}
        names = [name for name, owner in owners.items() if owner == module]
        names = names or [
            name for name, owner in owners.items() if owner.partition(".")[0] == package
        ]
        return f"{self.kind} {' or '.join(map(repr, names))}" if names else None

    def from_outside(self) -> tuple[str, ...]:
        """Name what modules outside the package registered; loads no plug-in."""
        return tuple(
            f"{self.kind} {name!r}"
            for name, (owner, _) in self._entries.items()
            if owner.partition(".")[0] != _PACKAGE
        )

    def _load_own(self) -> None:
        if not self._has_own:
            for module in self._own:
                import_module(module)
            self._has_own = True

    def _points(self) -> EntryPoints:
        return _entry_points(self.group, tuple(map(_state, sys.path)))


def _state(folder: str) -> tuple[str, int]:
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


@lru_cache(maxsize=32)  # reading the files of all distributions takes 5 ms, each time
def _entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read a group's entry points in ``sys.path``, again once a folder changes."""
    return entry_points(group=group)


def _distribution(point: EntryPoint) -> str:
    return "a local module" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def plug_in_of(error: BaseException) -> str | None:
    """Name the plug-in in whose code, or below it, an error was raised, with its file and line.

    Returns:
        Text such as ``policy 'even' (even.py, line 12)``; None if no plug-in had a part in it.
    """
    named = None
    registries = sorted(_registries, key=lambda registry: registry.is_optional)
    for frame, line in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        for registry in registries:
            found = registry.of_module(module)
            if found is not None:
                named = f"{found} ({frame.f_code.co_filename}, line {line})"
                break
    return named


def loaded_plug_ins() -> tuple[str, ...]:
    """Name what plug-ins registered in this process, such as ``policy 'even'``."""
    return tuple(name for registry in _registries for name in registry.from_outside())
