"""Call functions when a script imports a module, so that nothing is imported before it is used."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function once a module is imported; at once if it is, as in a forked process."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after the import of a module."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function, self._is_asking = name, function, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the other finders do, and wrap its loader."""
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False  # a library may only ask whether another is there
        loader = spec.loader if spec is not None else None
        if spec is None or loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._function()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
