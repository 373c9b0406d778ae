"""Checkpoints on disk: complete or not there, checksummed, and nothing in them is ever run.

A checkpoint is a folder ``step-000000120`` with two files. ``tensors.bin`` holds the raw bytes of
all tensors one after another; ``manifest.json`` says what they are, holds everything else as
tagged JSON, and the SHA-256 of both. The folder is written under another name, flushed to the
disk and renamed, so a crash leaves the earlier ones alone (Write-then-rename; VirtualFlow 7).
A pipeline's checkpoint is in parts, each of them such a folder (runtime/parts.py).
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..schema.errors import FileError, TargetError

FORMAT = "hetflow.checkpoint/1"
KEPT = 2
_ALIGNMENT = 64
_NAME = re.compile(r"^step-(\d{9,})$")
DTYPES = {
    str(getattr(torch, name)).removeprefix("torch."): getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("uint8", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2"),
    )
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read: a plain header (step, position, virtual nodes, ...) and the state."""

    path: Path
    header: dict[str, Any]
    state: Any


class BrokenCheckpoint(Exception):
    """It is torn or was changed; the message says how."""


def encode(value: Any, tensors: list[Tensor], at: str = "state") -> Any:
    """A nest of plain values as JSON; its tensors go to the list, on the host.

    Raises:
        TargetError: A value that is not plain data (a function, an object); says where.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().to("cpu", copy=True).contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(item, tensors, f"{at}[{n}]") for n, item in enumerate(value)]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = [[encode(k, tensors), encode(v, tensors, f"{at}.{k}")] for k, v in value.items()]
        return {kind: pairs}
    raise TargetError(
        f"{at} is a {type(value).__name__}, which is no plain data",
        hint="use numbers, strings, lists, tuples, dicts and tensors",
    )


def decode(value: Any, tensors: list[Tensor]) -> Any:
    """What ``encode`` made, as it was."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        items = [decode(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    pairs = {decode(k, tensors): decode(v, tensors) for k, v in content}
    return Counter(pairs) if kind == "counter" else pairs


def name_of(step: int) -> str:
    """The folder of the checkpoint after ``step`` global steps."""
    return f"step-{step:09d}"


def write(folder: Path, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> Path:
    """Write a checkpoint; afterwards it is complete on disk, or was never there.

    Keeps the ``KEPT`` newest and removes older ones.

    Args:
        folder: Where checkpoints are.
        header: Plain values; ``step`` names the checkpoint.
        encoded: The state, from ``encode``.
        tensors: Its tensors, on the host.

    Raises:
        FileError: The disk is full, or the folder cannot be written.
    """
    final = folder / name_of(header["step"])
    write_folder(final, header, encoded, tensors)
    for old in found(folder)[KEPT:]:
        if old != final:  # names that somebody planted may seem newer
            _discard(old)
    return final


def write_folder(final: Path, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> None:
    """Write a folder with a manifest and tensors: complete on disk afterwards, or never there.

    Raises:
        FileError: The disk is full, or the folder cannot be written.
    """
    # Nobody can foresee the name, and mkdir follows no link: where others can write to the folder,
    # what they plant there neither blocks a checkpoint nor leads it elsewhere.
    making = final.parent / f".making-{final.name}.{secrets.token_hex(8)}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f".making-{final.name}*"):
            _discard(left)
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
            hint="earlier checkpoints are untouched; free space or give another --checkpoint",
        ) from None


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every byte of it.

    Raises:
        BrokenCheckpoint: Something is missing, cut short or changed.
        FileError: It was written by a later hetflow.
    """
    body = read_manifest(path)
    try:
        data = bytearray((path / "tensors.bin").read_bytes())
    except OSError as error:
        raise BrokenCheckpoint(f"{Path(error.filename).name}: {error.strerror}") from None
    if len(data) != body["tensors_bytes"]:
        raise BrokenCheckpoint(f"tensors.bin has {len(data)} of {body['tensors_bytes']} bytes")
    if hashlib.sha256(data).hexdigest() != body["tensors_sha256"]:
        raise BrokenCheckpoint("tensors.bin does not match its checksum")
    tensors = [_tensor_of(data, entry) for entry in body["tensors"]]
    return Checkpoint(path, body["header"], decode(body["state"], tensors))


def read_manifest(path: Path) -> dict[str, Any]:
    """The verified manifest of a checkpoint, without its tensors; see ``read``."""
    try:
        document = json.loads((path / "manifest.json").read_bytes())
        body, digest = document["manifest"], document["sha256"]
    except OSError as error:
        raise BrokenCheckpoint(f"{Path(error.filename).name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BrokenCheckpoint("manifest.json is not complete") from None
    if _digest_of(body) != digest:
        raise BrokenCheckpoint("manifest.json does not match its checksum")
    if body["schema"] != FORMAT:
        raise FileError(f"{path}: must be {FORMAT}, got {body['schema']}")
    found: dict[str, Any] = body
    return found


def newest(
    folder: Path, read_one: Callable[[Path], Checkpoint] = read
) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a sentence for each broken one that is newer."""
    broken: list[str] = []
    for path in found(folder):
        try:
            return read_one(path), broken
        except BrokenCheckpoint as error:
            broken.append(f"{path} is broken ({error}); using the one before")
    return None, broken


def found(folder: Path) -> list[Path]:
    """Checkpoints by their names, the newest first."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.match(p.name))]
    return [path for _, path in sorted(named, reverse=True)]


def tidy(folder: Path) -> None:
    """Remove what writers left half done that were killed; call it where nobody writes."""
    for path in [*folder.glob(".making-*"), *folder.glob("step-*/.making-*")]:
        _discard(path)


def _discard(path: Path) -> None:
    """Remove a folder, or a link to one but not what it points at; what cannot go stays."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _write_tensors(path: Path, tensors: list[Tensor]) -> tuple[list[dict[str, Any]], str, int]:
    entries, digest, at = [], hashlib.sha256(), 0
    with path.open("wb") as stream:
        for tensor in tensors:
            padding = bytes(-at % _ALIGNMENT)
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
    """Make names in a folder last: a rename is only on disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
