"""Read and write all hetflow files.

Reading is strict and never evaluates code; writing is atomic.
"""

import dataclasses
import functools
import json
import operator
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from .errors import FileError, ProblemError
from .options import option
from .records import adapter_of, faults_of
from .schedule import traits
from .spelling import nearest

if TYPE_CHECKING:
    from .cluster import Cluster
    from .jobs import Allocation, Jobs, Throughputs
    from .launch import LaunchConfig, ResizeAnswer, ResizeRequest
    from .market import Market, OddsReport, PriceReport, RentAdvice, RentReport, RentRun, RentState
    from .plan import Plan
    from .profile import Profile
    from .run import RunRecord
    from .simulation import SimulationRun

    # All record classes that a hetflow file may hold.
    Record = (
        Profile
        | Cluster
        | Plan
        | LaunchConfig
        | RunRecord
        | Jobs
        | Throughputs
        | Allocation
        | SimulationRun
        | Market
        | RentReport
        | RentState
        | RentAdvice
        | RentRun
        | PriceReport
        | OddsReport
    )

R = TypeVar("R")

# The record classes by a file's ``schema``, as module and class. A class is imported when a file
# needs it.
RECORDS: dict[str, tuple[str, str]] = {
    "hetflow.profile/1": ("profile", "Profile"),
    "hetflow.cluster/1": ("cluster", "Cluster"),
    "hetflow.cluster/2": ("cluster", "Cluster"),
    "hetflow.plan/1": ("plan", "Plan"),
    "hetflow.plan/2": ("plan", "Plan"),
    "hetflow.launch/1": ("launch", "LaunchConfig"),
    "hetflow.run/1": ("run", "RunRecord"),
    "hetflow.jobs/1": ("jobs", "Jobs"),
    "hetflow.throughputs/1": ("jobs", "Throughputs"),
    "hetflow.allocation/1": ("jobs", "Allocation"),
    "hetflow.simulation/1": ("simulation", "SimulationRun"),
    "hetflow.market/1": ("market", "Market"),
    "hetflow.rent/1": ("market", "RentReport"),
    "hetflow.rent_state/1": ("market", "RentState"),
    "hetflow.rent_advice/1": ("market", "RentAdvice"),
    "hetflow.rent_run/1": ("market", "RentRun"),
    "hetflow.rent_prices/1": ("market", "PriceReport"),
    "hetflow.odds/1": ("market", "OddsReport"),
}
MAX_FILE_BYTES = 256 << 20


def __getattr__(name: str) -> object:
    if name == "Record":
        return functools.reduce(operator.or_, map(record_class, RECORDS))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def record_class(schema: str) -> type:
    """Import the record class of a file's ``schema``, which must be in ``RECORDS``."""
    module, name = RECORDS[schema]
    found: type = getattr(import_module(f".{module}", __package__), name)
    return found


def to_json(value: object) -> str:
    """Encode a record as JSON text: keys in order of the fields, without unset optional keys."""
    return json.dumps(to_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_plain(value: object) -> Any:
    """Convert a record to dicts and lists, as they are in its file."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not _is_unset(field, getattr(value, field.name))
        }
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    return value


def _is_unset(field: "dataclasses.Field[Any]", value: object) -> bool:
    optional = field.default is not dataclasses.MISSING and field.name != "schema"
    return optional and (value is None or value == ())


def from_json(text: str, expected: type[R], *, name: str = "input") -> R:
    """Decode one record.

    Args:
        text: The JSON text.
        expected: The record class that the caller needs.
        name: Name of the text in errors, usually the path.

    Raises:
        FileError: The text is not JSON, has another schema, or has faults; all faults are reported
            at once.
    """
    data = _parse(text, name)
    _check_schema(data, expected, name)
    try:
        data = _with_newer_plans(data, name)
        if '"recompute"' in text and '"state_share_bytes"' in text:
            data = _with_activations(data)
        found: R = adapter_of(expected).validate_json(json.dumps(data))
    except ValidationError as error:
        faults = faults_of(error)
        raise FileError(f"{name}: {'; '.join(faults)}") from None
    return found


def _parse(text: str, name: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise FileError(f"{name}: key {key!r} appears twice; keep one")
            seen[key] = value
        return seen

    try:
        data = json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise FileError(
            f"{name}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}",
            hint="the file may be truncated; write it again",
        ) from None
    except RecursionError:
        raise FileError(f"{name}: nested too deeply to be a hetflow file") from None
    except ValueError:
        raise FileError(f"{name}: holds a whole number of thousands of digits") from None
    if not isinstance(data, dict):
        raise FileError(f"{name}: $: must be an object, got {type(data).__name__}")
    return data


def _with_newer_plans(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert plans of the older form: the file, or what its record repeats of one."""
    plan = data.get("plan")
    if data.get("schema") != "hetflow.plan/1":
        newer = isinstance(plan, dict) and _with_newer_plans(plan, name)
        return {**data, "plan": newer} if newer else data
    kind = data.get("kind")
    if kind not in _OLD_KINDS:
        known = ", ".join(_OLD_KINDS)
        if kind is None:
            raise FileError(f"{name}: $.kind: missing; add one of {known}")
        raise FileError(f"{name}: $.kind: must be one of {known}, got {str(kind)[:60]!r}")
    return _converted(data)


def _with_activations(value: Any) -> Any:
    """Where workers share states, earlier files say ``recompute`` of their ``activations``."""
    if isinstance(value, list):
        return list(map(_with_activations, value))
    if not isinstance(value, dict):
        return value
    found = {key: _with_activations(entry) for key, entry in value.items()}
    if "state_share_bytes" in found and found.pop("recompute", None):
        found["activations"] = "recomputed"
    return found


def _check_schema(data: dict[str, Any], expected: type, name: str) -> None:
    fields: dict[str, Any] = expected.__dataclass_fields__  # type: ignore[attr-defined]
    wanted, found = str(fields["schema"].default), data.get("schema")
    if found is None:
        raise FileError(f'{name}: $.schema: missing; add "schema": "{wanted}"')
    if RECORDS.get(str(found), ("", ""))[1] != expected.__name__ and found != wanted:
        guess = nearest(str(found), list(RECORDS))
        fix = f"; did you mean {guess!r}?" if guess and str(found) not in RECORDS else ""
        raise FileError(f"{name}: $.schema: must be {wanted!r}, got {str(found)[:60]!r}{fix}")


def read(path: Path, expected: type[R]) -> R:
    """Read one record of a known class from a file.

    Raises:
        FileError: The file is missing, unreadable, too large, or has faults.
    """
    return from_json(read_text(path), expected, name=str(path))


def read_plan(path: Path) -> "Plan":
    """Read a plan.

    Raises:
        FileError: The file is missing, unreadable, too large, has faults, or is not a plan.
    """
    from .plan import Plan

    return read(path, Plan)


def read_any(path: Path) -> "Record":
    """Read a hetflow file of any schema.

    Raises:
        FileError: The file is missing, unreadable, too large, has faults, or is not a hetflow file.
    """
    text = read_text(path)
    found = str(_parse(text, str(path)).get("schema"))
    if found not in RECORDS:
        raise FileError(
            f"{path}: $.schema: must be one of {', '.join(RECORDS)}, got {found[:60]!r}"
        )
    record: Record = from_json(text, record_class(found), name=str(path))
    return record


def read_text(path: Path) -> str:
    """Read a text file or a pipe.

    Raises:
        FileError: The file is missing, unreadable, too large, or not UTF-8.
    """
    with reading(path):
        if path.is_dir():
            raise FileError(f"{path}: is a folder, not a file")
        with path.open("rb") as stream:  # the size of a pipe is not known beforehand
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise FileError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; not a hetflow file")
        return content.decode("utf-8").replace("\r\n", "\n")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in hetflow's words why a text file cannot be read.

    Raises:
        FileError: It is missing, unreadable, or not UTF-8.
    """
    try:
        yield
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise FileError(f"{path}: not a text file") from None
    except (OSError, ValueError) as error:  # a name that holds a NUL is a ValueError
        raise FileError(f"{path}: cannot be read: {_reason(error)}") from None


def read_profiles(folder: Path) -> "tuple[Profile, ...]":
    """Read every profile in a folder (``*.json``), sorted by model and device type.

    Raises:
        FileError: The folder does not exist, holds no profile, or holds one with faults.
    """
    from .profile import Profile

    if folder.is_file():
        return (read(folder, Profile),)
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder", hint="run `hetflow profile` first")
    profiles = [read(path, Profile) for path in sorted(folder.glob("*.json"))]
    if not profiles:
        raise FileError(f"{folder}: holds no profiles", hint="run `hetflow profile -o` into it")
    return tuple(sorted(profiles, key=lambda p: (p.model, p.device_type)))


def check_writable(path: Path, *, force: bool) -> None:
    """Check that a file can be written, before the work whose result goes there.

    Raises:
        FileError: The file exists and ``force`` is off, it is a device or a pipe, which a rename
            would take the place of, or its folder cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise FileError(f"{path}: is no regular file", hint="name one, or write to stdout")
        if path.exists() and not force:
            raise FileError(
                f"{path}: exists already", hint=f"give {option('force', True)} to overwrite it"
            )
        folder = path.parent
        if not folder.is_dir():
            raise FileError(f"{folder}: no such folder", hint="create it first")
        if path.is_dir() or not os.access(folder, os.W_OK):
            raise FileError(f"{path}: cannot be written")
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        raise FileError(f"{path}: cannot be written: {_reason(error)}") from None


def check_outputs(*paths: Path | None, force: bool) -> None:
    """Say before the work what would keep its outputs from being written.

    Raises:
        FileError: A file is in the way, or its folder cannot be written.
        ProblemError: Two outputs are one file.
    """
    named = [path for path in paths if path is not None]
    for path in named:
        check_writable(path, force=force)
    for number, path in enumerate(named):
        if path.absolute() in [other.absolute() for other in named[:number]]:
            raise ProblemError(f"{path}: two outputs have this name", hint="name each once")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def made_folder(folder: Path, mode: int = 0o777) -> Iterator[None]:
    """Make a folder, and those above it, before the work whose result goes there.

    If the work fails or is interrupted, the folders made here are removed again, unless they hold
    something by then.

    Raises:
        FileError: The folder cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        try:
            folder.mkdir(mode, parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{folder}: cannot be made: {error.strerror}") from None
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):  # not empty, or never made
                each.rmdir()
        raise


def write_text(path: Path, text: str, *, force: bool = False) -> None:
    """Write a text file atomically: a crash leaves either no new file or all of it."""
    write_bytes(path, text.encode("utf-8"), force=force)


def write_bytes(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file atomically: a synced temporary file in its folder, then one rename."""
    check_writable(path, force=force)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be written: {_reason(error)}") from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def write(
    path: Path, value: "Record | ResizeRequest | ResizeAnswer", *, force: bool = False
) -> None:
    """Write one record as JSON, atomically.

    Raises:
        FileError: The file exists and ``force`` is off, or it cannot be written.
    """
    write_text(path, to_json(value), force=force)


# Plans of the older form, ``hetflow.plan/1``, which had three kinds, each with fields of its own.
#
# Only the form is changed. What is unknown or has the wrong type is handed on as it is, so that the
# record refuses it.

Fields = dict[str, Any]

_OF_REPLICAS = ("num_replicas", "device_type", "first_device", "devices", "memory_bytes")


def _converted(plan: Fields) -> Fields:
    """Return a plan of the older form, as its file has it, in the newer one."""
    found = {key: value for key, value in plan.items() if key != "kind"}
    found["schema"] = "hetflow.plan/2"
    if found.get("objective") == "step":
        found["objective"] = "step_seconds"
    try:
        return _OLD_KINDS[plan["kind"]](found)
    except (
        TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, ProblemError
    ):  # fmt: skip
        return found  # not as that form has it: the record says what it misses


def _split(plan: Fields) -> Fields:
    found = {**plan, **_whole_model(plan["groups"])}
    del found["groups"]
    others = [{**other, **_whole_model(other["groups"])} for other in plan.get("alternatives", ())]
    found["alternatives"] = [_without(other, "groups") for other in others]
    return found


def _whole_model(groups: list[Fields]) -> Fields:
    replicas = []
    for group in groups:
        replicas.append(
            {
                **_without(group, "num_devices", "device_batch_size"),
                "num_replicas": group["num_devices"],
                "samples": group["num_devices"] * group["device_batch_size"],
            }
        )
    return {
        "stages": [{"replicas": replicas}],
        "microbatch_size": max(each["virtual_node_batch_size"] for each in replicas),
        "num_microbatches": sum(each["num_replicas"] * each["virtual_nodes"] for each in replicas),
    }


def _pipeline(plan: Fields) -> Fields:
    number, size = plan["microbatches"], plan["microbatch_size"]
    held = [(stage["device_type"], stage["first_device"]) for stage in plan["stages"]]
    found = _without(plan, "microbatches", "recompute")
    found["num_microbatches"] = number
    if traits(plan["schedule"]).is_chunked:
        found["num_model_chunks"] = held.count(held[0])
    found["stages"] = [
        {
            **_without(stage, *_OF_REPLICAS),
            "recompute": "full" if plan["recompute"] else "none",
            "replicas": [
                {
                    **{key: stage[key] for key in _OF_REPLICAS if key in stage},
                    "samples": plan["global_batch_size"],
                    "virtual_nodes": -(-number // stage["num_replicas"]),
                    "virtual_node_batch_size": size,
                }
            ],
        }
        for stage in plan["stages"]
    ]
    found.setdefault("objective", "bottleneck")
    found.setdefault("workers", "at_most")
    return found


def _parallel(plan: Fields) -> Fields:
    found = _with_passes(plan, plan["global_batch_size"])
    found["alternatives"] = [
        _with_passes(other, plan["global_batch_size"]) for other in plan.get("alternatives", ())
    ]
    return found


def _with_passes(plan: Fields, batch: int) -> Fields:
    """Return a plan or an alternative whose replicas state their passes and their memory."""
    number, size = plan["num_microbatches"], plan["microbatch_size"]
    passes = {"virtual_nodes": number, "virtual_node_batch_size": size}
    fullest = plan["predicted"]["memory_bytes"]
    return {
        **plan,
        "predicted": _without(plan["predicted"], "memory_bytes"),
        "num_microbatches": -(-batch // size),
        "stages": [
            {**stage, "replicas": list(_replicas(stage["replicas"], passes, fullest.get(str(n))))}
            for n, stage in enumerate(plan["stages"])
        ],
    }


def _replicas(groups: list[Fields], passes: Fields, fullest: int | None) -> Iterator[Fields]:
    for group in groups:
        known = {"memory_bytes": fullest} if fullest is not None and len(groups) == 1 else {}
        yield {**known, **group, **passes}


def _without(fields: Fields, *names: str) -> Fields:
    return {key: value for key, value in fields.items() if key not in names}


_OLD_KINDS = {"split": _split, "pipeline": _pipeline, "parallel": _parallel}
