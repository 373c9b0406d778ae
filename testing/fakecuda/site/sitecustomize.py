"""Put the software CUDA device into each Python process that imports torch.

Python imports this file by itself where its folder is on PYTHONPATH. Torch remembers whether there
is CUDA, so the device has to be there before torch runs.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


class _BeforeTorch(MetaPathFinder):
    """Finds torch once, and wraps its loader."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(name)
        if found is None or found.loader is None:
            return None
        loader: Any = found.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            cuda = _package()
            cuda.load()
            run(module)
            cuda.install()

        loader.exec_module = exec_module
        return found


def _package() -> Any:
    spec = importlib.util.spec_from_file_location(
        "fakecuda", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["fakecuda"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module("fakecuda.cuda")


sys.meta_path.insert(0, _BeforeTorch())
