"""Load the public names of a package when they are first used.

This keeps `import hetflow` fast, and a worker that needs a schedule does not load the solvers.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it; typing takes longer to import than this module
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(
    package: dict[str, Any], names_of: Mapping[str, str], *also: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the module functions by which a package loads its names on first use.

    ::

        __getattr__, __dir__ = lazy_names(globals(), {".api.files": "read write"})

    Args:
        package: The package's ``globals()``, in which loaded names are stored.
        names_of: Module, relative to the package (``.api.files``) -> the names that it has, with
            blanks between them. With the name that one has there if that is another
            (``.api.rent:rent``), or with a colon if the module itself is meant (``.plugins:``).
        also: Names that the package already has, for ``dir``.

    Returns:
        ``__getattr__`` and ``__dir__`` of the package (PEP 562).
    """
    where = {name: place for place, names in names_of.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        place, colon, other = where[name].partition(":")
        module = import_module(place, package["__package__"])
        package[name] = module if colon and not other else getattr(module, other or name)
        return package[name]

    def names() -> list[str]:
        return sorted((*where, *also))

    return load, names
