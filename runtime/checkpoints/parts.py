"""A checkpoint in parts: each worker of a pipeline writes its own part without waiting for others.

``step-000000120`` then holds ``part-0-of-3`` to ``part-2-of-3``. Each part is a folder as in
checkpoint.py, complete and with its own checksums (thesis 2.4.4). The checkpoint is complete when
all parts are there, undamaged, and of one run. The first worker that sees this creates the empty
file ``complete``: it tells a checkpoint that lost a part from one whose writers died. Parts use
the model's names and not the stages': together they are the state that a split plan saves.
"""

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...schema.errors import FileError, TargetError
from ...schema.options import option
from ..nested_tensors import mapped
from . import checkpoint
from .checkpoint import (
    PART,
    BrokenCheckpoint,
    Checkpoint,
    IncompleteCheckpoint,
    check_part,
    check_part_header,
    check_whole,
)

COMPLETE = "complete"  # an empty file: all parts have been there
_OWN = ("part", "registered_sha256")  # header fields that may differ between parts
_OF_ONE_PART = ("part", "num_parts", "run", "registered_sha256")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The share of a checkpoint that a worker needs.

    Attributes:
        parameters: Names of the worker's own parameters.
        buffers: Names of the buffers that it holds.
        stages: Which layers are on which ranks. If the checkpoint has the same, registered objects
            are read from the worker's own part.
        part: Number of the worker's own part, from 0.
        states: Names of the parameters whose optimizer state it keeps; None for all of its own.
    """

    parameters: Collection[str]
    buffers: Collection[str]
    stages: Any
    part: int
    states: Collection[str] | None = None


def digest_of(encoded: Any, tensors: list[Tensor]) -> str:
    """A digest of an encoded value, to see whether all workers hold the same."""
    digest = hashlib.sha256(json.dumps(encoded, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(checkpoint.bytes_of(tensor))
    return digest.hexdigest()


def write(
    folder: Path,
    header: dict[str, Any],
    encoded: Any,
    tensors: list[Tensor],
    broken: Collection[Path] = (),
) -> None:
    """Write one part; keep the ``KEPT`` newest complete checkpoints.

    Once all parts of the run are there, what another run left of the same step is removed: parts
    in another number, which this run could not use.

    The arguments are those of ``checkpoint.write``. The header has ``part`` and ``num_parts`` too,
    and ``run``, which is equal in all parts of one run.

    Raises:
        FileError: The disk is full, or the folder cannot be written.
    """
    whole = folder / checkpoint.name_of(header["step"])
    # No worker waits for another here: a part is whole by itself, so a slow disk on one host stops
    # no other. Whoever finds all parts there says so; two may, and the file is the same.
    own = _set_of(whole, header["num_parts"])
    checkpoint.write_folder(own[header["part"]], header, encoded, tensors)
    try:
        checkpoint.flush(folder)
        # Only now is it safe to remove the parts of another run: until all of this run are there,
        # those may be the only checkpoint of this step that anybody can read.
        if _is_of_one_run(own):
            for total, numbers in _numbers(whole).items():
                for number in numbers if total != len(own) else ():
                    checkpoint.discard(whole / f"part-{number}-of-{total}")
            (whole / COMPLETE).touch()
    except OSError as error:
        raise FileError(
            f"{whole}: the checkpoint was not written: {error.strerror}",
            hint="earlier checkpoints are untouched; free space or give another "
            f"{option('checkpoint')}",
        ) from None
    checkpoint.remove_old(
        folder, whole, lambda path: (path == whole or path not in broken) and is_complete(path)
    )


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has all parts of one run; only their headers are read."""
    try:
        parts = _parts_of(path)
        # A checkpoint that is whole (a split wrote it) has a manifest of its own and no parts.
        if not parts:
            checkpoint.read_manifest(path)
    except (BrokenCheckpoint, FileError):
        return False
    return _is_of_one_run(parts)


def _is_of_one_run(parts: list[Path]) -> bool:
    """Whether all these parts are there, and of one run; only their headers are read."""
    try:
        headers = [checkpoint.read_manifest(part)["header"] for part in parts]
        for part, header in zip(parts, headers, strict=True):
            check_part_header(part, header)
        _check_one_run(headers)
    except (BrokenCheckpoint, FileError):
        return False
    return True


def reader(
    wanted: Wanted | None = None, *, is_mapped: bool = False
) -> Callable[[Path], Checkpoint]:
    """Make a function that reads a whole checkpoint or one in parts: all of it, or what is wanted.

    With ``is_mapped`` tensors are views of the files (``checkpoint.read``).

    The function raises BrokenCheckpoint where a part is missing, cut short or changed;
    IncompleteCheckpoint where its writers died before all parts were written; and TargetError
    where registered objects belong to the workers of another plan.
    """

    def read(path: Path) -> Checkpoint:
        if _numbers(path):
            return _assembled(path, wanted, is_mapped=is_mapped)
        if path.is_dir() and not any(path.iterdir()):
            raise IncompleteCheckpoint("it has no part yet")
        found = checkpoint.read(path, is_mapped=is_mapped)
        check_whole(path, found.header, found.state)
        return found

    return read


def _parts_of(path: Path) -> list[Path]:
    """The folders of all parts, in order; an empty list where the checkpoint is whole."""
    numbers = _numbers(path)
    complete = [_set_of(path, total) for total in numbers if len(numbers[total]) == total]
    if complete:
        # With parts in two numbers, a run with another plan has written this step again, because it
        # could not use what it found. A set is as new as its last part, which completed it.
        times = [max(map(_written, parts)) for parts in complete]
        if times.count(max(times)) > 1:
            totals = " and of ".join(str(len(parts)) for parts in sorted(complete, key=len))
            raise BrokenCheckpoint(f"its parts of {totals} are equally old; remove one set")
        return complete[times.index(max(times))]
    if not numbers:
        return []
    # The file ``complete`` decides what is missing: with it, a part has been lost since, and the
    # user is told; without it, the writers died, and the checkpoint before is the last good one.
    total, there = max(numbers.items())
    missing = next(number for number in range(total) if number not in there)
    kind = BrokenCheckpoint if (path / COMPLETE).exists() else IncompleteCheckpoint
    raise kind(f"part-{missing}-of-{total} is missing")


def _set_of(path: Path, total: int) -> list[Path]:
    return [path / f"part-{number}-of-{total}" for number in range(total)]


def _written(part: Path) -> int:
    """When a part was written, in nanoseconds; 0 where it is broken."""
    try:
        return (part / "manifest.json").stat().st_mtime_ns
    except OSError:
        return 0


def _numbers(path: Path) -> dict[int, set[int]]:
    """The numbers of the parts on disk, by the number of parts that there should be."""
    numbers: dict[int, set[int]] = {}
    try:
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    except OSError as error:
        raise BrokenCheckpoint(f"{path.name}: {error.strerror}") from None
    for name in names:
        match = PART.match(name)
        if match and int(match[1]) < int(match[2]):
            numbers.setdefault(int(match[2]), set()).add(int(match[1]))
    return numbers


def _check_one_run(headers: list[dict[str, Any]]) -> None:
    if len({header["run"] for header in headers}) > 1:
        raise BrokenCheckpoint("its parts were written by different runs")
    for header in headers:
        for key, value in header.items():
            if key not in _OWN and value != headers[0][key]:
                raise BrokenCheckpoint(f"its parts differ in header.{key}")


def _assembled(path: Path, wanted: Wanted | None, *, is_mapped: bool) -> Checkpoint:
    """Join the parts; one is read at a time, so a worker holds one part and its own share."""
    headers: list[dict[str, Any]] = []
    registered: list[Any] = []
    state: dict[str, Any] = {}
    for part in _parts_of(path):
        try:
            # One part at a time: together they are the whole model, for which a worker of a
            # pipeline need not have the memory. What is wanted of a part is copied, so that the
            # rest is freed.
            found = checkpoint.read(part, is_mapped=is_mapped)
            check_part_header(part, found.header)
            check_part(part, found.header, found.state)
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"{part.name}: {error}") from None
        headers.append(found.header)
        registered.append(found.state.pop("registered"))
        _merge(state, found, wanted, Tensor.detach if is_mapped else Tensor.clone)
    _check_one_run(headers)
    # The headers list every parameter of the model, so a name that no part holds shows damage that
    # no checksum of a part can show.
    for name in wanted.parameters if wanted else headers[0]["parameters"]:
        if name in headers[0]["parameters"] and name not in state["parameters"]:
            raise BrokenCheckpoint(f"no part holds state.parameters.{name}")
    header = {key: value for key, value in headers[0].items() if key not in _OF_ONE_PART}
    state["registered"] = registered[_part_registered(path, headers, wanted)]
    return Checkpoint(path, header, state)


def _merge(
    state: dict[str, Any],
    part: Checkpoint,
    wanted: Wanted | None,
    taken: Callable[[Tensor], Tensor],
) -> None:
    """Add what is wanted of a part to the state; ``taken`` copies, so that a part can be freed."""
    new, order = part.state, part.header["optimizer_order"]
    names = wanted.parameters if wanted else None
    states = names if wanted is None or wanted.states is None else wanted.states
    if not state:
        state.update(new, parameters={}, buffers={"base": {}, "nodes": []})
        state["optimizer"] = new["optimizer"] and {**new["optimizer"], "state": {}}
        state["buffers"]["nodes"] = [{} for _ in new["buffers"]["nodes"]]
    for name, value in new["parameters"].items():
        if names is None or name in names:
            state["parameters"][name] = taken(value)
    for index, value in (new["optimizer"] or {"state": {}})["state"].items():
        if states is None or order[index] in states:
            state["optimizer"]["state"][index] = mapped(taken, value)
    if len(new["buffers"]["nodes"]) != len(state["buffers"]["nodes"]):
        raise BrokenCheckpoint("its parts differ in state.buffers.nodes")

    def kept(buffers: dict[str, Any]) -> Any:
        if wanted is None:
            return mapped(taken, buffers)
        return {name: taken(buffers[name]) for name in buffers if name in wanted.buffers}

    state["buffers"]["base"] |= kept(new["buffers"]["base"])
    for node, own in zip(state["buffers"]["nodes"], new["buffers"]["nodes"], strict=True):
        node |= kept(own)


def _part_registered(path: Path, headers: list[dict[str, Any]], wanted: Wanted | None) -> int:
    """Choose the part whose registered objects to take; any, where all are equal."""
    if len({header["registered_sha256"] for header in headers}) == 1:
        return 0
    # Where workers registered unlike values (each an average of its own parameters, say), nobody
    # can tell how to join them. With the same stages on the same ranks each takes its own back.
    is_as_it_was = wanted is not None and headers[0]["stages"] == wanted.stages
    if wanted is not None and is_as_it_was and wanted.part < len(headers):
        return wanted.part
    raise TargetError(
        f"{path}: what the script registers was not the same on all workers (an average of the "
        f"parameters?), so only the plan that wrote it can go on",
        hint=f"give that plan, or another {option('checkpoint')} folder",
    )
