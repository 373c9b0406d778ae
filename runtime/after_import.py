"""Call functions when a script imports a module, so that nothing is imported before it is used."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
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


# Adapt a library when a script imports it.

# A library's module -> the adapter that runs once it is imported.
ADAPTED = {
    "torch": ".adapters.ddp",
    "torch.distributed.fsdp": ".adapters.ddp",
    "accelerate": ".adapters.accelerate",
    "datasets.distributed": ".adapters.accelerate",
    "transformers.trainer": ".adapters.transformers",
    "lightning.fabric": ".adapters.lightning",
    "lightning.pytorch": ".adapters.lightning",
    "lightning_fabric": ".adapters.lightning",
    "pytorch_lightning": ".adapters.lightning",
}


def install() -> None:
    """Adapt libraries as the script imports them; call it before the script runs."""
    for name, adapter in ADAPTED.items():
        after_import(name, partial(_adapt, adapter, name))


def _adapt(adapter: str, name: str) -> None:
    import_module(adapter, __package__).adapt(sys.modules[name])
