"""Checkpoints that nobody's hetflow wrote: whole, checksummed, and wrong somewhere inside."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Steps = tuple[str | int, ...]

VALUES: list[Any] = [
    None, True, 0, -1, 1, 7, 1 << 62, 10**400, -(10**30), 0.5, float("nan"), float("inf"), "", "x",
    "float32", "\ud800", [], [[]], [-1], [10**30, 0], {}, {"x": 1}, {"tensor": 0}, {"tensor": -1},
    {"tensor": "x"}, {"list": 3}, {"dict": [[1]]}, {"counter": [["a", "b"]]}, {"tuple": []},
    {"dict": [[{"list": []}, 1]]}, {"dict": [["a", 1], ["a", 2]]},
]  # fmt: skip


def content_of(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint (or of a part), without its checksum."""
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())["manifest"]
    return manifest


def put(path: Path, manifest: Any) -> None:
    """Write a manifest with a checksum that is right."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    document = {"sha256": digest, "manifest": manifest}
    (path / "manifest.json").write_text(json.dumps(document))


def places(value: Any, at: Steps = ()) -> Iterator[Steps]:
    """Every place in a nest of dicts and lists, the nest itself first."""
    yield at
    if not isinstance(value, dict | list):
        return
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        yield from places(entry, (*at, key))


def changed(manifest: Any, at: Steps, how: Callable[[Any, str | int], None]) -> Any:
    """A copy in which ``how`` was done to the container of a place, and to the place's key."""
    made = [copy.deepcopy(manifest)]
    holder: Any = made
    for key in (0, *at[:-1]) if at else ():
        holder = holder[key]
    how(holder, at[-1] if at else 0)
    return made[0] if made else None


def replaced(value: Any) -> Callable[[Any, str | int], None]:
    def how(holder: Any, key: Any) -> None:
        holder[key] = value

    return how


def removed(holder: Any, key: Any) -> None:
    del holder[key]


def doubled(holder: Any, key: Any) -> None:
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}2"] = copy.deepcopy(holder[key])
