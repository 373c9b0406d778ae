"""Installs a plug-in as an installer does: its module and its metadata in a folder on the path."""

import importlib
import shutil
import sys
import tomllib
from pathlib import Path

from hetflow.schema.plugins import Registry

PLUGINS = Path(__file__).resolve().parents[2] / "examples" / "plugins"


def install(source: Path, site: Path) -> None:
    """Copy a plug-in's modules, and write the metadata that its pyproject.toml states.

    Args:
        source: The plug-in's folder.
        site: An existing folder that is, or will be, on ``sys.path``.
    """
    stated = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    project = stated["project"]
    for module in stated["tool"]["setuptools"]["py-modules"]:
        shutil.copy(source / f"{module}.py", site)
    groups = project["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    declare(site, project["name"], project["version"], "\n".join(lines))


def declare(site: Path, name: str, version: str, entry_points: str) -> None:
    """Write a distribution's metadata."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "entry_points.txt").write_text(entry_points + "\n", encoding="utf-8")
    importlib.invalidate_caches()


def forget(registry: Registry, *names: str, modules: tuple[str, ...] = ()) -> None:
    """Take plug-ins out again, so that the next test starts as from a new process."""
    for name in names:
        registry.remove(name)
    for module in modules:
        sys.modules.pop(module, None)
