"""Names of a package that are loaded when they are first used.

So `import hetflow` costs next to nothing, and a worker that needs a schedule loads no solver.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: dict[str, Any], where: Mapping[str, str], *also: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make what a package needs to load its names late.

    ::

        __getattr__, __dir__ = lazy_names(globals(), {"solve": ".api.solve"})

    Args:
        package: The package's ``globals()``, which keep what was loaded.
        where: For each name the module that has it, seen from the package: ``.api.solve``; the
            module itself where its last part is the name: ``.plugins``.
        also: Names that the package has anyway, for ``dir``.

    Returns:
        ``__getattr__`` and ``__dir__`` of the package (PEP 562).
    """

    def load(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        module = import_module(where[name], package["__name__"])
        is_module = where[name].lstrip(".") == name
        package[name] = module if is_module else getattr(module, name)
        return package[name]

    def names() -> list[str]:
        return sorted((*where, *also))

    return load, names
