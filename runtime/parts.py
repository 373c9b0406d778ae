"""A checkpoint in parts: each worker of a pipeline writes its own and waits for no other.

``step-000000120`` then holds ``part-0-of-3`` to ``part-2-of-3``, each a folder as in
checkpoint.py, complete and checksummed by itself (thesis 2.4.4). The checkpoint is complete when
all parts are there, whole, and of one run. What they hold belongs to the model and not to the
stages: put together they are the state that a split plan saves.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..schema.errors import TargetError
from . import checkpoint
from .checkpoint import BrokenCheckpoint, Checkpoint

_PART = re.compile(r"^part-(\d+)-of-(\d+)$")
_OF_ONE_PART = ("part", "num_parts", "run", "registered_sha256")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker keeps of a checkpoint.

    ``parameters`` are the names of its own. ``stages`` says which layers are on which ranks: where
    it is as it was, things registered are read from the worker's own part, number ``part``.
    """

    parameters: Collection[str]
    stages: Any
    part: int


def digest_of(encoded: Any, tensors: list[Tensor]) -> str:
    """A digest of something encoded, to see whether all workers hold the same."""
    digest = hashlib.sha256(json.dumps(encoded, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(checkpoint.bytes_of(tensor))
    return digest.hexdigest()


def write(folder: Path, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> None:
    """Write one part; the ``KEPT`` newest complete checkpoints stay.

    Args:
        folder: Where checkpoints are.
        header: Plain values; ``step``, ``part``, ``num_parts`` and ``run``, by which the parts of
            one run know each other, name the part.
        encoded: The state, from ``encode``.
        tensors: Its tensors, on the host.

    Raises:
        FileError: The disk is full, or the folder cannot be written.
    """
    whole = folder / checkpoint.name_of(header["step"])
    name = f"part-{header['part']}-of-{header['num_parts']}"
    checkpoint.write_folder(whole / name, header, encoded, tensors)
    checkpoint.flush(folder)
    _remove_old(folder)


def _remove_old(folder: Path) -> None:
    """Whoever writes the last part of a checkpoint sees that it is complete."""
    num_complete = 0
    for path in checkpoint.found(folder):
        if num_complete == checkpoint.KEPT:
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            num_complete += bool(_headers(path))
        except BrokenCheckpoint:
            continue


def reader(wanted: Wanted | None = None) -> Callable[[Path], Checkpoint]:
    """Reads a checkpoint that is whole or in parts: all of it, or what is wanted.

    The function raises BrokenCheckpoint where a part is missing, cut short or changed, and
    TargetError where things registered are of another plan's workers.
    """

    def read(path: Path) -> Checkpoint:
        if _numbers(path):
            return _assembled(path, wanted)
        return checkpoint.read(path)

    return read


def _headers(path: Path) -> list[Path]:
    """The parts of a complete checkpoint, or the folder itself, by their headers only."""
    parts = _parts_of(path)
    if not parts:
        checkpoint.read_manifest(path)
        return [path]
    _check_one_run([checkpoint.read_manifest(part)["header"] for part in parts])
    return parts


def _parts_of(path: Path) -> list[Path]:
    """All parts, in order; none where the checkpoint is whole.

    Raises:
        BrokenCheckpoint: Some are missing.
    """
    numbers = _numbers(path)
    for total, there in numbers.items():
        if len(there) == total:
            return [path / f"part-{number}-of-{total}" for number in range(total)]
    if not numbers:
        return []
    total, there = max(numbers.items())
    missing = next(number for number in range(total) if number not in there)
    raise BrokenCheckpoint(f"part-{missing}-of-{total} is missing")


def _numbers(path: Path) -> dict[int, set[int]]:
    """The parts that are there, by how many there should be."""
    numbers: dict[int, set[int]] = {}
    for entry in path.iterdir() if path.is_dir() else ():
        if match := _PART.match(entry.name):
            numbers.setdefault(int(match[2]), set()).add(int(match[1]))
    return numbers


def _check_one_run(headers: list[dict[str, Any]]) -> None:
    if len({header["run"] for header in headers}) > 1:
        raise BrokenCheckpoint("its parts were written by different runs")


def _assembled(path: Path, wanted: Wanted | None) -> Checkpoint:
    """All parts, read one at a time so that a worker holds one and its own share at most."""
    headers: list[dict[str, Any]] = []
    registered: list[Any] = []
    state: dict[str, Any] = {}
    for part in _parts_of(path):
        try:
            found = checkpoint.read(part)
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"{part.name}: {error}") from None
        headers.append(found.header)
        registered.append(found.state.pop("registered"))
        _merge(state, found, wanted.parameters if wanted else None)
    _check_one_run(headers)
    header = {key: value for key, value in headers[0].items() if key not in _OF_ONE_PART}
    state["registered"] = registered[_part_registered(path, headers, wanted)]
    return Checkpoint(path, header, state)


def _merge(state: dict[str, Any], part: Checkpoint, names: Collection[str] | None) -> None:
    """Add what a part holds; tensors are copied out, so that its bytes can go."""
    new, order = part.state, part.header["optimizer_order"]
    if not state:
        state.update(new, parameters={}, buffers={"base": {}, "nodes": []})
        state["optimizer"] = new["optimizer"] and {**new["optimizer"], "state": {}}
        state["buffers"]["nodes"] = [{} for _ in new["buffers"]["nodes"]]
    for name, value in new["parameters"].items():
        if names is None or name in names:
            state["parameters"][name] = value.clone()
    for index, value in (new["optimizer"] or {"state": {}})["state"].items():
        if names is None or order[index] in names:
            state["optimizer"]["state"][index] = _cloned(value)
    state["buffers"]["base"] |= _cloned(new["buffers"]["base"])
    for node, own in zip(state["buffers"]["nodes"], new["buffers"]["nodes"], strict=True):
        node |= _cloned(own)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(entry) for entry in value)
    return value


def _part_registered(path: Path, headers: list[dict[str, Any]], wanted: Wanted | None) -> int:
    """Whose registered things to take: anyone's where they are equal, as schedulers are."""
    if len({header["registered_sha256"] for header in headers}) == 1:
        return 0
    if wanted is not None and headers[0]["stages"] == wanted.stages:
        return wanted.part
    raise TargetError(
        f"{path}: what the script registers was not the same on all workers (an average of the "
        f"parameters?), so only the plan that wrote it can go on",
        hint="give that plan, or another --checkpoint folder",
    )
