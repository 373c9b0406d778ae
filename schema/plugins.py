"""Things known by name: the package's own, and those of plug-ins from outside the package.

A kind of thing (schedules, policies, exporters, ...) has one ``Registry``. Its own things are in
modules that register them when they are imported. A plug-in is any installed distribution with an
entry point in the kind's group: the entry point's name is the thing's name, its value the module
(or an object in it) whose import registers the thing::

    [project.entry-points."hetflow.policies"]
    even_progress = "my_package.even_progress"

Nothing is imported before a name is asked for, and then only what that name needs, so a
broken plug-in hurts only those who ask for it.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from .errors import ProblemError
from .spelling import nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """The things of one kind, by name.

    Args:
        kind: What one of them is called in messages, such as ``schedule``.
        group: The entry-point group of its plug-ins, such as ``hetflow.schedules``.
        own: The package's own modules that register some, in the order of ``names``.
        is_optional: Whether a module that an entry point of the group names may register none.
    """

    def __init__(
        self, kind: str, *, group: str, own: tuple[str, ...], is_optional: bool = False
    ) -> None:
        self.kind, self.group = kind, group
        self._own, self._is_optional = own, is_optional
        self._entries: dict[str, tuple[str, T]] = {}
        self._has_own = False

    def add(self, name: str, entry: T, module: str) -> None:
        """Register a thing.

        Args:
            name: What users call it.
            entry: The thing.
            module: The module that defines it.

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

    def remove(self, name: str) -> None:
        """Undo ``add``; a name that is not registered is left as it is."""
        self._entries.pop(name, None)

    def find(self, name: str) -> T | None:
        """The thing of a name; None where neither the package nor a plug-in has it.

        Raises:
            ProblemError: The plug-in that has it cannot be loaded; names the distribution.
        """
        entry = self._entries.get(name)
        if entry is not None:  # asked for in solvers' inner loops
            return entry[1]
        self._load_own()
        if name not in self._entries:
            for point in self._points():
                if point.name == name:
                    self._load(point)
        return self.loaded(name)

    def get(self, name: str) -> T:
        """The thing of a name.

        Raises:
            ProblemError: There is none; says which name is close. Or its plug-in is broken.
        """
        found = self.find(name)
        if found is None:
            known = self.names()
            guess = nearest(name, known)
            raise ProblemError(
                f"unknown {self.kind} {name!r}; known are {', '.join(known)}",
                hint=f"did you mean {guess!r}?"
                if guess
                else f"install the plug-in that has it (entry points {self.group})",
            )
        return found

    def names(self) -> tuple[str, ...]:
        """All names: the package's own first, in its order; no plug-in is loaded for that."""
        self._load_own()
        place = {module: index for index, module in enumerate(self._own)}
        registered = sorted(
            self._entries, key=lambda name: place.get(self._entries[name][0], len(place))
        )
        declared = sorted({point.name for point in self._points()} - self._entries.keys())
        return (*registered, *declared)

    def loaded(self, name: str) -> T | None:
        """The thing of a name, unless it is a plug-in's that was not loaded yet."""
        found = self._entries.get(name)
        return None if found is None else found[1]

    def registered(self) -> tuple[T, ...]:
        """The package's own things and those of plug-ins that were asked for; looks for none."""
        self._load_own()
        return tuple(entry for _, entry in self._entries.values())

    def all(self) -> tuple[T, ...]:
        """Every thing, in the order of ``names``; loads all plug-ins of the kind."""
        return tuple(self.get(name) for name in self.names())

    def _load_own(self) -> None:
        if not self._has_own:
            for module in self._own:
                import_module(module)
            self._has_own = True

    def _points(self) -> Iterator[EntryPoint]:
        yield from entry_points(group=self.group)

    def _load(self, point: EntryPoint) -> None:
        origin = f"plug-in {point.name!r} of {_distribution(point)} ({point.value})"
        try:
            point.load()
        except Exception as error:  # somebody else's module: whatever it raises is its own fault
            raise ProblemError(
                f"{origin} cannot be loaded: {type(error).__name__}: {error}",
                hint="fix or uninstall that distribution",
            ) from error
        if point.name not in self._entries and not self._is_optional:
            raise ProblemError(
                f"{origin} registers no {self.kind} {point.name!r}",
                hint="give the entry point the name that the module registers",
            )


def _distribution(point: EntryPoint) -> str:
    return "a local module" if point.dist is None else f"{point.dist.name} {point.dist.version}"
