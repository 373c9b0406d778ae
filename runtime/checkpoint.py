"""Checkpoints on disk: each is complete or absent, has checksums, and contains no code.

A checkpoint is a folder ``step-000000120`` with two files. ``tensors.bin`` holds the raw bytes of
all tensors one after another. ``manifest.json`` describes the tensors, holds everything else as
tagged JSON, and has the SHA-256 of both. The folder is written under a temporary name, flushed to
the disk and then renamed, so a crash leaves earlier checkpoints intact (VirtualFlow 7).
A pipeline's checkpoint is in parts; each part is such a folder (runtime/parts.py).
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..devices.host import TORCH_DEVICE
from ..schema.errors import FileError, TargetError
from ..schema.options import option
from .manifest import ALIGNMENT, DTYPES, FORMAT, BrokenCheckpoint, check_body, check_file

KEPT = 2
_MOST_DIGITS = 40  # of a whole number; numpy's random states have 128 bits
MAX_DEPTH = 200  # of nested values, well below Python's recursion limit
_NAME = re.compile(r"^step-([0-9]{9,})$")
_NESTS = ("list", "tuple", "dict", "counter")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read: a plain header (step, position, virtual nodes, ...) and the state."""

    path: Path
    header: dict[str, Any]
    state: Any


def copy_to_host(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host. Waits for the tensor's device."""
    return tensor.detach().to(TORCH_DEVICE, copy=True).contiguous()


def encode(
    value: Any,
    tensors: list[Tensor],
    at: str = "state",
    depth: int = 0,
    *,
    copy: Callable[[Tensor], Tensor] = copy_to_host,
) -> Any:
    """Encode nested plain values as JSON; their tensors are appended to a list, on the host.

    Args:
        value: The nested values.
        tensors: Tensors are appended here, in the order in which they are met.
        at: Path of the value, for error messages.
        depth: Nesting depth of the value.
        copy: Makes a tensor's copy on the host.

    Returns:
        The JSON value; each tensor is a reference by number.

    Raises:
        TargetError: A value that is not plain data (a function, an object); says where.
    """
    if depth > MAX_DEPTH:
        raise TargetError(f"{at[:80]}...: is a nest of more than {MAX_DEPTH} values in another")
    depth += 1
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(copy(value))
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        items = enumerate(value)
        return {kind: [encode(i, tensors, f"{at}[{n}]", depth, copy=copy) for n, i in items]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = [
            [encode(k, tensors), encode(v, tensors, f"{at}.{k}", depth, copy=copy)]
            for k, v in value.items()
        ]
        return {kind: pairs}
    raise TargetError(
        f"{at} is a {type(value).__name__}, which is no plain data",
        hint="use numbers, strings, lists, tuples, dicts and tensors",
    )


def decode(value: Any, tensors: list[Tensor]) -> Any:
    """Decode what ``encode`` made.

    Raises:
        BrokenCheckpoint: ``encode`` could not have made this.
    """
    rest = iter(range(len(tensors)))
    found = _decoded(value, tensors, rest)
    if next(rest, None) is not None:
        raise BrokenCheckpoint("it has tensors that its state does not name")
    return found


def _decoded(value: Any, tensors: list[Tensor], rest: Iterator[int], depth: int = 0) -> Any:
    """Decode one value. Each tensor must occur once, in order, so that no two share memory."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > MAX_DEPTH:
        raise BrokenCheckpoint("its state is nested too deeply")
    if not isinstance(value, dict) or len(value) != 1:
        raise BrokenCheckpoint("its state holds what is neither a value nor a nest of values")
    ((kind, content),) = value.items()
    if kind == "tensor":
        number = next(rest, None)
        if number is None or type(content) is not int or content != number:
            raise BrokenCheckpoint("its state does not name its tensors in order")
        return tensors[number]
    if kind not in _NESTS or not isinstance(content, list):
        raise BrokenCheckpoint(f"its state holds a {str(kind)[:40]!r}, which is no nest of values")
    if kind in ("list", "tuple"):
        items = [_decoded(item, tensors, rest, depth + 1) for item in content]
        return items if kind == "list" else tuple(items)
    return _mapping(kind, content, tensors, rest, depth + 1)


def _mapping(
    kind: str, content: list[Any], tensors: list[Tensor], rest: Iterator[int], depth: int
) -> Any:
    pairs: dict[Any, Any] = {}
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BrokenCheckpoint(f"its state holds a {kind} that is not made of pairs")
        key, entry = (_decoded(half, tensors, rest, depth) for half in pair)
        if not _is_key(key) or key in pairs:
            raise BrokenCheckpoint(f"its state holds a {kind} with a key that cannot be one")
        pairs[key] = entry
    if kind == "dict":
        return pairs
    if not all(isinstance(number, int | float) for number in pairs.values()):
        raise BrokenCheckpoint("its state holds a counter of what are no numbers")
    return Counter(pairs)


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(_is_key(item) for item in key)
    return key is None or isinstance(key, bool | int | float | str)


def name_of(step: int) -> str:
    """The folder name of the checkpoint after ``step`` global steps."""
    return f"step-{step:09d}"


def write(
    folder: Path,
    header: dict[str, Any],
    encoded: Any,
    tensors: list[Tensor],
    broken: Collection[Path] = (),
) -> Path:
    """Write a checkpoint: afterwards it is complete on disk, or it is absent.

    Keeps the ``KEPT`` newest usable checkpoints and removes older ones.

    Args:
        folder: The folder of all checkpoints.
        header: Plain values; ``step`` names the checkpoint.
        encoded: The state, from ``encode``.
        tensors: The state's tensors, on the host.
        broken: Checkpoints known to be unusable; they do not count as kept.

    Raises:
        FileError: The disk is full, or the folder cannot be written.
    """
    final = folder / name_of(header["step"])
    write_folder(final, header, encoded, tensors)
    remove_old(folder, final, lambda path: path == final or path not in broken)
    return final


def write_folder(final: Path, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> None:
    """Write a folder with a manifest and tensors: afterwards it is complete on disk, or absent.

    Raises:
        FileError: The disk is full, or the folder cannot be written.
    """
    # The name is random, and mkdir follows no link. So where others can write to the folder,
    # nothing they create there can block a checkpoint or redirect it.
    making = final.parent / f".making-{final.name}.{secrets.token_hex(8)}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f".making-{final.name}*"):
            discard(left)
        making.mkdir()
        entries, digest, size = _write_tensors(making / "tensors.bin", tensors)
        body = {"schema": FORMAT, "header": header, "state": encoded, "tensors": entries}
        body |= {"tensors_sha256": digest, "tensors_bytes": size}
        text = json.dumps({"sha256": _digest_of(body), "manifest": body}, indent=0)
        _write_flushed(making / "manifest.json", text.encode())
        flush(making)
        if final.is_symlink():
            final.unlink()
        elif final.exists():
            shutil.rmtree(final)
        making.rename(final)
        flush(final.parent)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise FileError(
            f"{final}: the checkpoint was not written: {error.strerror or error}",
            hint="earlier checkpoints are untouched; free space or give another "
            f"{option('checkpoint')}",
        ) from None


def read(path: Path) -> Checkpoint:
    """Read a checkpoint; verify its checksums and its form.

    Raises:
        BrokenCheckpoint: Something is missing, cut short or changed.
        FileError: A later hetflow wrote it.
    """
    body = read_manifest(path)
    data = bytearray(_content(path / "tensors.bin"))
    if len(data) != body["tensors_bytes"]:
        raise BrokenCheckpoint(f"tensors.bin has {len(data)} of {body['tensors_bytes']} bytes")
    if hashlib.sha256(data).hexdigest() != body["tensors_sha256"]:
        raise BrokenCheckpoint("tensors.bin does not match its checksum")
    tensors = [_tensor_of(data, entry) for entry in body["tensors"]]
    return Checkpoint(path, body["header"], decode(body["state"], tensors))


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # near a float's range or beyond: torch fails in a later step
        raise BrokenCheckpoint(f"manifest.json holds a whole number of {len(digits)} digits")
    return int(digits)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint's manifest, without its tensors.

    Raises:
        BrokenCheckpoint: It is missing, cut short or changed.
        FileError: A later hetflow wrote it.
    """
    try:
        document = json.loads(_content(path / "manifest.json"), parse_int=_whole)
        body, digest = document["manifest"], document["sha256"]
        is_as_written = _digest_of(body) == digest
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BrokenCheckpoint("manifest.json is not complete") from None
    if not is_as_written:
        raise BrokenCheckpoint("manifest.json does not match its checksum")
    schema = body.get("schema") if isinstance(body, dict) else None
    if isinstance(schema, str) and schema != FORMAT and schema.startswith("hetflow.checkpoint/"):
        raise FileError(f"{path}: must be {FORMAT}, got {schema[:40]}")
    if schema != FORMAT:
        raise BrokenCheckpoint(f"manifest.json is not of {FORMAT}")
    check_body(body)
    found: dict[str, Any] = body
    return found


def _content(path: Path) -> bytes:
    check_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenCheckpoint(f"{path.name}: {error.strerror}") from None


def newest(
    folder: Path, read_one: Callable[[Path], Checkpoint] = read
) -> tuple[Checkpoint | None, dict[Path, BrokenCheckpoint]]:
    """Find the newest usable checkpoint, and the fault of each newer one.

    Raises:
        FileError: The folder cannot be read, or a later hetflow wrote a checkpoint in it.
    """
    broken: dict[Path, BrokenCheckpoint] = {}
    for path in found(folder):
        try:
            return read_one(path), broken
        except BrokenCheckpoint as error:
            broken[path] = error
    return None, broken


def found(folder: Path) -> list[Path]:
    """The paths of all checkpoints by their names, newest first.

    Raises:
        FileError: The folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror}") from None
    named = [(int(match[1]), folder / name) for name in names if (match := _NAME.match(name))]
    return [path for _, path in sorted(named, reverse=True)]


def remove_old(folder: Path, final: Path, is_good: Callable[[Path], bool]) -> None:
    """Remove all that is older than the ``KEPT`` newest usable checkpoints, except ``final``."""
    num_good = 0
    for path in found(folder):
        if num_good == KEPT:
            if path != final:  # a folder that someone else put there may have a newer name
                discard(path)
        else:
            num_good += is_good(path)


def set_aside(folder: Path) -> Path | None:
    """Move all checkpoints into a new folder beside the coming ones.

    Returns:
        The new folder; None if there were no checkpoints.

    Raises:
        FileError: They cannot be moved.
    """
    old = found(folder)
    if not old:
        return None
    try:
        number = next(n for n in count(1) if not (folder / f"before-{n}").exists())
        aside = folder / f"before-{number}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        flush(folder)
    except OSError as error:
        raise FileError(
            f"{folder}: the checkpoints there cannot be set aside: {error.strerror}",
            hint=f"give another {option('checkpoint')} folder",
        ) from None
    return aside


def tidy(folder: Path) -> None:
    """Remove partial files of killed writers. Call it while no checkpoint is being written."""
    for path in [*folder.glob(".making-*"), *folder.glob("step-*/.making-*")]:
        discard(path)


def discard(path: Path) -> None:
    """Remove a folder, or a link but not its target; ignore what cannot be removed."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _write_tensors(path: Path, tensors: list[Tensor]) -> tuple[list[dict[str, Any]], str, int]:
    entries, digest, at = [], hashlib.sha256(), 0
    with path.open("wb") as stream:
        for tensor in tensors:
            padding = bytes(-at % ALIGNMENT)
            data = bytes_of(tensor)
            at += len(padding)
            kind = str(tensor.dtype).removeprefix("torch.")
            shape = list(tensor.shape)
            entries.append({"dtype": kind, "shape": shape, "offset": at, "bytes": len(data)})
            for chunk in (padding, data):
                digest.update(chunk)
                stream.write(chunk)
            at += len(data)
        stream.flush()
        os.fsync(stream.fileno())
    return entries, digest.hexdigest(), at


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a dense tensor on the host."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _tensor_of(data: bytearray, entry: dict[str, Any]) -> Tensor:
    dtype = DTYPES[entry["dtype"]]
    if not entry["bytes"]:
        return torch.empty(entry["shape"], dtype=dtype)
    count = entry["bytes"] // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry["offset"])
    return flat.reshape(entry["shape"])


def _digest_of(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def flush(folder: Path) -> None:
    """Flush a folder to the disk: a rename is durable only once its folder is flushed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
