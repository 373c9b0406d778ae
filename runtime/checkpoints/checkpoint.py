"""Checkpoints on disk: each is complete or absent, has checksums, and contains no code.

A checkpoint is a folder ``step-000000120`` with two files. ``tensors.bin`` holds the raw bytes of
all tensors one after another. ``manifest.json`` describes the tensors, holds everything else as
tagged JSON, and has the SHA-256 of both. The folder is written under a temporary name, flushed to
the disk and then renamed, so a crash leaves earlier checkpoints intact (VirtualFlow 7).
A pipeline's checkpoint is in parts; each part is such a folder (parts.py).
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import shutil
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ...devices.host import TORCH_DEVICE
from ...schema.errors import FileError, TargetError
from ...schema.options import option

# The valid contents of a checkpoint: every field is checked before it is used.
#
# A checksum shows that a file is as it was written, but not who wrote it. A checkpoint that does
# not have the form checked here is broken, like a torn file: it is named in a warning, and the
# checkpoint before it is used.

FORMAT = "hetflow.checkpoint/1"
ALIGNMENT = 64
MAX_NUMBER = (1 << 63) - 1
_MAX_DIMENSIONS = 64  # torch's limit for a tensor
DTYPES = {
    str(getattr(torch, name)).removeprefix("torch."): getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("uint8", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2"),
    )
}
PART = re.compile(r"^part-([0-9]+)-of-([0-9]+)$")
_BODY = {"schema", "header", "state", "tensors", "tensors_sha256", "tensors_bytes"}
_HEADER = {"virtual_nodes", "seed", "parameters", "step", "position"}
_NAMES = {"optimizer_order", "tied", "unsaved"}  # hetflow 0.1.0 wrote none, but parts the first
_PART_HEADER = {"part", "num_parts", "run", "stages", "optimizer_order", "registered_sha256"}
_STATE = {"parameters", "optimizer", "buffers", "registered", "last_weight"}
_PART_STATE = {"late_loss"}
_LATE_SUMS = 4  # the length of the sums in pipeline/synchronise.py


class BrokenCheckpoint(Exception):
    """A checkpoint was torn or changed; the message says how."""


class IncompleteCheckpoint(BrokenCheckpoint):
    """A checkpoint's writers died before all parts were there, so no job can resume from it."""


def shape_text(value: Tensor) -> str:
    """The dtype and shape of a tensor, for messages and for comparison."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def shapes_of(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """The dtype and shape of each parameter by name, for messages and for comparison."""
    return {name: shape_text(value) for name, value in parameters.items()}


def shape_difference(theirs: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Where two models' parameters differ first, by name, for messages; see ``shapes_of``."""
    for name in [*own, *theirs]:
        if theirs.get(name) != own.get(name):
            return (
                f"{name} is {theirs.get(name, 'absent')} there and {own.get(name, 'absent')} here"
            )
    return "the parameters stand in another order"


def check_body(body: Any) -> None:
    """Check the outer form of a manifest of ``FORMAT``: its tensors must fill their file exactly.

    Raises:
        BrokenCheckpoint: Names the first field that ``checkpoint.write`` would write otherwise.
    """
    _keys(body, "the manifest", _BODY)
    _kind_is(dict, body["header"], "header")
    _number(body["tensors_bytes"], "tensors_bytes")
    _kind_is(str, body["tensors_sha256"], "tensors_sha256")
    _kind_is(list, body["tensors"], "tensors")
    at = 0
    for number, entry in enumerate(body["tensors"]):
        at = _check_entry(entry, f"tensors[{number}]", at + -at % ALIGNMENT)
    if at != body["tensors_bytes"]:
        _broken("tensors_bytes", f"must be {at}, the end of the last tensor")


def _check_entry(entry: Any, where: str, at: int) -> int:
    """Check one tensor's entry, which must begin at byte ``at``; return the byte after its last."""
    _keys(entry, where, {"dtype", "shape", "offset", "bytes"})
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        _broken(f"{where}.dtype", "is no type of tensors")
    _numbers(entry["shape"], f"{where}.shape")
    size = DTYPES[entry["dtype"]].itemsize
    num_bytes: int = math.prod(entry["shape"]) * size
    # A length of 0 would hide others that no tensor can have: they make strides, too.
    most = math.prod(max(length, 1) for length in entry["shape"]) * size
    if most > MAX_NUMBER or len(entry["shape"]) > _MAX_DIMENSIONS:
        _broken(f"{where}.shape", "is larger than any tensor")
    for name, expected in (("offset", at), ("bytes", num_bytes)):
        _number(entry[name], f"{where}.{name}")
        if entry[name] != expected:
            _broken(f"{where}.{name}", f"must be {expected}")
    return at + num_bytes


def check_whole(path: Path, header: Any, state: Any) -> None:
    """Check header and state of a checkpoint that one worker wrote; see also ``check_part``.

    Raises:
        BrokenCheckpoint: Names the first field that a job would write otherwise.
    """
    _keys(header, "header", _HEADER, _NAMES)
    _check_header(header, path.name)
    _keys(state, "state", _STATE, _PART_STATE)
    _check_state(header, state)
    if state["parameters"].keys() != header["parameters"].keys():
        _broken("state.parameters", "must be all that header.parameters names")


def check_part_header(path: Path, header: Any) -> None:
    """Check the header of one part of a pipeline's checkpoint; ``path`` is the part's folder.

    Raises:
        BrokenCheckpoint: Names the first field that a job would write otherwise.
    """
    _keys(header, "header", _HEADER | _PART_HEADER, _NAMES)
    _check_header(header, path.parent.name)
    for name in ("part", "num_parts"):
        _number(header[name], f"header.{name}")
    if path.name != f"part-{header['part']}-of-{header['num_parts']}":
        _broken("header.part", "is not what the folder's name says")
    for name in ("run", "registered_sha256"):
        _kind_is(str, header[name], f"header.{name}")
    _kind_is(list, header["stages"], "header.stages")
    for stage in header["stages"]:
        if not (isinstance(stage, list) and [type(half) for half in stage] == [list, list]):
            _broken("header.stages", "must be pairs of layers and ranks")


def check_part(path: Path, header: Any, state: Any) -> None:
    """Check the state of one part whose header is checked; its tensors have the model's names.

    Raises:
        BrokenCheckpoint: Names the first field that a job would write otherwise.
    """
    _keys(state, "state", _STATE, _PART_STATE)
    _check_state(header, state)
    if isinstance(state["optimizer"], list):
        _broken("state.optimizer", "must be of one optimizer in a pipeline")
    optimizer = state["optimizer"] or {"state": {}, "param_groups": []}
    if sum(len(group["params"]) for group in optimizer["param_groups"]) != len(
        header["optimizer_order"]
    ):
        _broken("header.optimizer_order", "must name every parameter of the optimizer")
    if not all(isinstance(key, int) for key in optimizer["state"]):
        _broken("state.optimizer.state", "must be under the parameters' numbers")
    late = state.get("late_loss")
    if late is not None:
        _kind_is(list, late, "state.late_loss")
        if [type(value) for value in late] != [float] * _LATE_SUMS:
            _broken("state.late_loss", f"must be {_LATE_SUMS} numbers")


def _check_header(header: dict[str, Any], folder: str) -> None:
    _number(header["step"], "header.step")
    if folder != f"step-{header['step']:09d}":
        _broken("header.step", "is not what the folder's name says")
    _keys(header["position"], "header.position", {"call", "step", "length"})
    for name, value in header["position"].items():
        _number(value, f"header.position.{name}")
    _numbers(header["virtual_nodes"], "header.virtual_nodes", least=1)
    _number(header["seed"], "header.seed", least=-MAX_NUMBER)
    _kind_is(dict, header["parameters"], "header.parameters")
    for name, shape in header["parameters"].items():
        _kind_is(str, shape, f"header.parameters.{name}")
    for field, kind in (("optimizer_order", list), ("tied", dict), ("unsaved", list)):
        _kind_is(kind, header.get(field, kind()), f"header.{field}")
    for name in header.get("optimizer_order", ()):
        if not isinstance(name, str) or name not in header["parameters"]:
            _broken("header.optimizer_order", "must name parameters")
    for name in (*header.get("unsaved", ()), *chain(*header.get("tied", {}).items())):
        _kind_is(str, name, "header.tied and header.unsaved")


def _check_state(header: dict[str, Any], state: dict[str, Any]) -> None:
    shapes = header["parameters"]
    for name, value in _named_tensors(state["parameters"], "state.parameters").items():
        if shapes.get(name) != shape_text(value):
            _broken(f"state.parameters.{name}", f"must be {shapes.get(name, 'absent')}")
    _check_buffers(header, state["buffers"])
    _check_optimizers(state["optimizer"])
    _kind_is(list, state["registered"], "state.registered")
    weight = state["last_weight"]
    if weight is not None and not (isinstance(weight, float) and 0 <= weight < math.inf):
        _broken("state.last_weight", "must be a finite number or null")


def _check_buffers(header: dict[str, Any], buffers: Any) -> None:
    _keys(buffers, "state.buffers", {"base", "nodes"})
    base = _named_tensors(buffers["base"], "state.buffers.base")
    nodes = buffers["nodes"]
    _kind_is(list, nodes, "state.buffers.nodes")
    if nodes and len(nodes) != len(header["virtual_nodes"]):
        _broken("state.buffers.nodes", f"must be {len(header['virtual_nodes'])}")
    for number, own in enumerate(nodes):
        where = f"state.buffers.nodes[{number}]"
        for name, value in _named_tensors(own, where).items():
            if name not in base or shape_text(base[name]) != shape_text(value):
                _broken(f"{where}.{name}", "must be like the one in state.buffers.base")


def _check_optimizers(saved: Any) -> None:
    """Check optimizers in the form of setup.py: none is null, one a state, several a list."""
    if not isinstance(saved, list):
        if saved is not None:
            _check_optimizer(saved, "state.optimizer")
        return
    if len(saved) < 2:
        _broken("state.optimizer", "must be a list of several optimizers only")
    for number, optimizer in enumerate(saved):
        _check_optimizer(optimizer, f"state.optimizer[{number}]")


def _check_optimizer(optimizer: Any, where: str) -> None:
    _keys(optimizer, where, {"state", "param_groups"})
    _kind_is(list, optimizer["param_groups"], f"{where}.param_groups")
    numbers: list[Any] = []
    for group in optimizer["param_groups"]:
        _kind_is(dict, group, f"{where}.param_groups")
        _kind_is(list, group.get("params"), f"{where}.param_groups.params")
        numbers += group["params"]
    if [(type(number), number) for number in numbers] != [(int, n) for n in range(len(numbers))]:
        _broken(f"{where}.param_groups", "must number the parameters in order")
    _kind_is(dict, optimizer["state"], f"{where}.state")
    for key, values in optimizer["state"].items():
        if type(key) is int and 0 <= key < len(numbers):
            _kind_is(dict, values, f"{where}.state[{key}]")
        elif not isinstance(key, str):
            _broken(f"{where}.state", "must be under the parameters' numbers")


def _named_tensors(values: Any, where: str) -> dict[str, Tensor]:
    _kind_is(dict, values, where)
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            _broken(where, "must be tensors under names")
    found: dict[str, Tensor] = values
    return found


def _keys(
    value: Any, where: str, needed: Collection[str], more: Collection[str] = frozenset()
) -> None:
    _kind_is(dict, value, where)
    absent = [name for name in sorted(needed) if name not in value]
    if absent:
        _broken(f"{where}.{absent[0]}", "is absent")
    if len(value) > len(needed):
        unknown = [name for name in value if name not in needed and name not in more]
        if unknown:
            _broken(where, f"holds {str(unknown[0])[:40]!r}, which no checkpoint does")


def _kind_is(kind: type, value: Any, where: str) -> None:
    if not isinstance(value, kind):
        _broken(where, f"must be a {kind.__name__}, got {type(value).__name__}")


def _number(value: Any, where: str, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        _broken(where, f"must be a whole number from {least}")


def _numbers(values: Any, where: str, least: int = 0) -> None:
    _kind_is(list, values, where)
    for value in values:
        _number(value, where, least)


def _broken(where: str, rule: str) -> NoReturn:
    raise BrokenCheckpoint(f"{where} {rule}")


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
        # Copied here, in the caller's thread: the script goes on to change the tensor while another
        # thread writes it.
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
        # The order is the commit: tensors, then the manifest that has their checksum, both flushed;
        # then the folder is flushed, and only then gets its name. So a name is never there without
        # its content, whenever the power fails. In another order a reader could find a manifest of
        # unwritten tensors.
        entries, digest, size = _write_tensors(making / "tensors.bin", tensors)
        body = {"schema": FORMAT, "header": header, "state": encoded, "tensors": entries}
        body |= {"tensors_sha256": digest, "tensors_bytes": size}
        text = json.dumps({"sha256": _digest_of(body), "manifest": body}, indent=0)
        with (making / "manifest.json").open("wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
        flush(making)
        # A checkpoint of this name is left by a run that was set back to an earlier step. It goes
        # before the rename, which cannot replace a folder that is not empty; older checkpoints
        # cover the gap.
        if final.is_symlink():
            final.unlink()
        elif final.exists():
            shutil.rmtree(final)
        making.rename(final)
        # The name itself is lost with the power unless the folder above it is flushed too.
        flush(final.parent)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise FileError(
            f"{final}: the checkpoint was not written: {error.strerror or error}",
            hint="earlier checkpoints are untouched; free space or give another "
            f"{option('checkpoint')}",
        ) from None


def read(path: Path, *, is_mapped: bool = False) -> Checkpoint:
    """Read a checkpoint; verify its checksums and its form.

    With ``is_mapped`` tensors are views of the file, which nothing may write to.

    Raises:
        BrokenCheckpoint: Something is missing, cut short or changed.
        FileError: A later hetflow wrote it.
    """
    body = read_manifest(path)
    # A bytearray, because tensors are views of it: torch warns of memory that it may not write.
    file = path / "tensors.bin"
    data = _content(file, is_mapped=True) if is_mapped else bytearray(_content(file))
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


def _content(path: Path, *, is_mapped: bool = False) -> Any:
    """A file's bytes; mapped, as memory that no system counts as used: its pages are the disk's."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe would wait for ever
            raise BrokenCheckpoint(f"{path.name} is no file")
        if not is_mapped or not facts.st_size:
            return path.read_bytes()
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
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
    """Move all checkpoints into a new folder beside the coming ones: that; None if there were none.

    Raises:
        FileError: They cannot be moved.
    """
    old = found(folder)
    if not old:
        return None
    try:
        # Moved, not removed: who asks for a start from scratch by mistake loses nothing.
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


def _tensor_of(data: Any, entry: dict[str, Any]) -> Tensor:
    dtype = DTYPES[entry["dtype"]]
    if not entry["bytes"]:
        return torch.empty(entry["shape"], dtype=dtype)
    count = entry["bytes"] // dtype.itemsize
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry["offset"])
    return flat.reshape(entry["shape"])


def _digest_of(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def flush(folder: Path) -> None:
    """Flush a folder to the disk: a rename is durable only once its folder is flushed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
