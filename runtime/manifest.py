"""The valid contents of a checkpoint: every field is checked before it is used.

A checksum shows that a file is as it was written, but not who wrote it. A checkpoint that does not
have the form checked here is broken, like a torn file: it is named in a warning, and the checkpoint
before it is used.
"""

import math
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

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


def check_file(path: Path) -> None:
    """Refuse anything but a regular file: reading a pipe would wait for ever.

    Raises:
        BrokenCheckpoint: The file is absent, or is no regular file.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise BrokenCheckpoint(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise BrokenCheckpoint(f"{path.name} is no file")


def check_body(body: Any) -> None:
    """Check the outer form of a manifest of ``FORMAT``: its tensors must fill their file exactly.

    Raises:
        BrokenCheckpoint: Names the first field that ``checkpoint.write`` would write otherwise.
    """
    _keys(body, "the manifest", _BODY)
    _a(dict, body["header"], "header")
    _number(body["tensors_bytes"], "tensors_bytes")
    _a(str, body["tensors_sha256"], "tensors_sha256")
    _a(list, body["tensors"], "tensors")
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
    _keys(header, "header", _HEADER)
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
    _keys(header, "header", _HEADER | _PART_HEADER)
    _check_header(header, path.parent.name)
    for name in ("part", "num_parts"):
        _number(header[name], f"header.{name}")
    if path.name != f"part-{header['part']}-of-{header['num_parts']}":
        _broken("header.part", "is not what the folder's name says")
    for name in ("run", "registered_sha256"):
        _a(str, header[name], f"header.{name}")
    _a(list, header["optimizer_order"], "header.optimizer_order")
    for name in header["optimizer_order"]:
        if not isinstance(name, str) or name not in header["parameters"]:
            _broken("header.optimizer_order", "must name parameters")
    _a(list, header["stages"], "header.stages")
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
        _a(list, late, "state.late_loss")
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
    _a(dict, header["parameters"], "header.parameters")
    for name, shape in header["parameters"].items():
        _a(str, shape, f"header.parameters.{name}")


def _check_state(header: dict[str, Any], state: dict[str, Any]) -> None:
    shapes = header["parameters"]
    for name, value in _named_tensors(state["parameters"], "state.parameters").items():
        if shapes.get(name) != shape_text(value):
            _broken(f"state.parameters.{name}", f"must be {shapes.get(name, 'absent')}")
    _check_buffers(header, state["buffers"])
    _check_optimizers(state["optimizer"])
    _a(list, state["registered"], "state.registered")
    weight = state["last_weight"]
    if weight is not None and not (isinstance(weight, float) and 0 <= weight < math.inf):
        _broken("state.last_weight", "must be a finite number or null")


def _check_buffers(header: dict[str, Any], buffers: Any) -> None:
    _keys(buffers, "state.buffers", {"base", "nodes"})
    base = _named_tensors(buffers["base"], "state.buffers.base")
    nodes = buffers["nodes"]
    _a(list, nodes, "state.buffers.nodes")
    if nodes and len(nodes) != len(header["virtual_nodes"]):
        _broken("state.buffers.nodes", f"must be {len(header['virtual_nodes'])}")
    for number, own in enumerate(nodes):
        where = f"state.buffers.nodes[{number}]"
        for name, value in _named_tensors(own, where).items():
            if name not in base or shape_text(base[name]) != shape_text(value):
                _broken(f"{where}.{name}", "must be like the one in state.buffers.base")


def _check_optimizers(saved: Any) -> None:
    """Check optimizers in the form of optimizers.py: none is null, one a state, several a list."""
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
    _a(list, optimizer["param_groups"], f"{where}.param_groups")
    numbers: list[Any] = []
    for group in optimizer["param_groups"]:
        _a(dict, group, f"{where}.param_groups")
        _a(list, group.get("params"), f"{where}.param_groups.params")
        numbers += group["params"]
    if [(type(number), number) for number in numbers] != [(int, n) for n in range(len(numbers))]:
        _broken(f"{where}.param_groups", "must number the parameters in order")
    _a(dict, optimizer["state"], f"{where}.state")
    for key, values in optimizer["state"].items():
        if type(key) is int and 0 <= key < len(numbers):
            _a(dict, values, f"{where}.state[{key}]")
        elif not isinstance(key, str):
            _broken(f"{where}.state", "must be under the parameters' numbers")


def _named_tensors(values: Any, where: str) -> dict[str, Tensor]:
    _a(dict, values, where)
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            _broken(where, "must be tensors under names")
    found: dict[str, Tensor] = values
    return found


def _keys(
    value: Any, where: str, needed: Collection[str], more: Collection[str] = frozenset()
) -> None:
    _a(dict, value, where)
    absent = [name for name in sorted(needed) if name not in value]
    if absent:
        _broken(f"{where}.{absent[0]}", "is absent")
    if len(value) > len(needed):
        unknown = [name for name in value if name not in needed and name not in more]
        if unknown:
            _broken(where, f"holds {str(unknown[0])[:40]!r}, which no checkpoint does")


def _a(kind: type, value: Any, where: str) -> None:
    if not isinstance(value, kind):
        _broken(where, f"must be a {kind.__name__}, got {type(value).__name__}")


def _number(value: Any, where: str, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        _broken(where, f"must be a whole number from {least}")


def _numbers(values: Any, where: str, least: int = 0) -> None:
    _a(list, values, where)
    for value in values:
        _number(value, where, least)


def _broken(where: str, rule: str) -> NoReturn:
    raise BrokenCheckpoint(f"{where} {rule}")
