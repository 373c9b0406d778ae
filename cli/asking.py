"""Make the options of a command from a request record (``schema/requests``).

A command asks for a record: it gets one option a field, in the record's order, and is called with
what was given, under the record's names and in its units::

    @asks(AllocateRequest)
    def allocate(asked: Asked, output: OutputOption = None) -> None:
        allocation = hetflow.allocate(**asked)
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, get_args, get_origin

import typer

from ..schema import options, requests
from ..schema.arguments import Arguments
from ..schema.errors import ProblemError
from ..schema.options import asked_of, option, told
from ..schema.spelling import whole_number
from .common import RARE, Settings, asked_pool

Asked = dict[str, Any]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """How the command line reads values of a type.

    Args:
        kind: The type that the parser reads.
        read: Returns the field's value, from what the parser read. A ValueError says that it is
            none.
        form: What a value must be, for errors.
        range: The numbers that the help names. The record's type refuses others, in one sentence
            for both doors.
    """

    kind: Any
    read: Callable[[Any], Any] = lambda value: value
    form: str = ""
    range: str = ""


def _counts(text: str) -> list[int]:
    """Read ``4,8,16``; a ValueError says that a part is no whole number of at least 1."""
    found = [whole_number(part.strip()) for part in text.split(",")]
    if not all(found):
        raise ValueError(text)
    return [number for number in found if number]


def _counts_of_models(text: str) -> int | dict[str, int]:
    """Read ``4``, or ``bert=4,gpt=8``; a ValueError says that it is neither."""
    parts = [part.partition("=") for part in text.split(",")]
    if "=" in text:
        return {name.strip(): _counts(number)[0] for name, _, number in parts}
    (number,) = _counts(text)
    return number


def _window(text: str) -> tuple[int, int]:
    """Read ``4000:5000``; a ValueError says that it is none."""
    first, last = map(int, text.split(":"))
    if not 0 <= first < last:
        raise ValueError(text)
    return first, last


def _names(given: Iterable[str]) -> dict[str, str]:
    """Read ``V100=tesla_v100``, several times."""
    found = {}
    for text in given:
        name, _, called = text.partition("=")
        if not name or not called:
            message = f"{option('names')} {text!r} is not TYPE=NAME"
            raise ProblemError(message, hint="write V100=tesla_v100")
        found[name] = called
    return found


def _rates(given: Iterable[str]) -> dict[str, float]:
    """Read speeds of device types, ``V100=9.6``, several times."""
    parts = [text.partition("=") for text in given]
    message = f"{option('rates')} must be such as V100=9.6"
    return {name: _number(value, "".join((name, equals, value)), message)
            for name, equals, value in parts}  # fmt: skip


def _by_place(field: str, given: Sequence[str]) -> float | dict[str, float]:
    """Read one price for all machines, ``0.97``, or that of a zone or type, ``us-west-2a=0.97``."""
    flag = option(field)
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        found[name] = _number(value, text, f"{flag} must be a price or such as us-west-2a=0.97")
    if "" in found and len(given) > 1:
        raise ProblemError(f"{flag} must be one price for all zones, or ZONE=DOLLARS of each")
    return found.get("", found)


def _machine_speeds(given: Iterable[str]) -> dict[str, float | str]:
    """Read speeds of machines, or their plans' files: ``p2.xlarge=0.2``, several times."""
    found: dict[str, float | str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ProblemError(
                f"{option('machine_speeds')} must be such as p2.xlarge=0.2 or p2.xlarge=plan.json, "
                f"got {text[:60]!r}"
            )
        found[name] = value
        with suppress(ValueError):
            found[name] = float(value)
    return found


def _memory_reserve(text: str) -> int:
    """Read bytes, such as ``2GiB``."""
    from ..schema.cluster import parse_memory

    found = 0 if text == "0" else parse_memory(text)
    if found is None:
        raise ProblemError(
            f"{option('memory_reserve_bytes')} {text!r}: is not an amount of memory",
            hint="write for example 2GiB",
        )
    return found


def _number(value: str, text: str, message: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ProblemError(f"{message}, got {text[:60]!r}") from None


_PATHS = (
    "Path", "Path | str", "Profiles", "JobsTable", "ThroughputsTable", "Profile | Path | str",
    "Plan | Path | str", "Plan | Allocation | Path | str",
)  # fmt: skip
_READINGS: dict[str, Reading] = {
    **dict.fromkeys(_PATHS, Reading(Path)),
    **dict.fromkeys(("Markets", "Windows", "Offers"), Reading(list[Path])),
    **dict.fromkeys(
        ("float", "Dollars", "Fraction", "PositiveRate", "PositiveSeconds"), Reading(float)
    ),
    "Count": Reading(int, range="x>=1"),
    "JobCount": Reading(int, range="1<=x<=10000000"),
    "Index": Reading(int, range="x>=0"),
    "int": Reading(int),
    "GraceSeconds": Reading(int, range="1<=x<=100000000"),
    "HeartbeatSeconds": Reading(float, range="x>=0.5"),
    "RoundSeconds": Reading(float, range="x>=1"),
    "TimeoutSeconds": Reading(float, range="x>=1"),
    "WaitSeconds": Reading(float, range="x>=0"),
    "str": Reading(str),
    "str | Path": Reading(str),
    "bool": Reading(bool),
    "Bytes": Reading(str, _memory_reserve),
    "Sequence[str]": Reading(list[str]),
    "Sequence[Path | str]": Reading(list[Path]),
    "str | Pool": Reading(str),
    "Mapping[str, float]": Reading(list[str], _rates),
    "Speeds": Reading(list[float], lambda speeds: (0.0, *speeds)),
    "SpotPrices": Reading(list[str], partial(_by_place, "spot_dollars_per_hour")),
    "OnDemandPrices": Reading(list[str], partial(_by_place, "on_demand_dollars_per_hour")),
    "MachineSpeeds": Reading(list[str], _machine_speeds),
    "Mapping[str, str]": Reading(list[str], _names),
    "Sequence[Count]": Reading(str, _counts, "whole numbers of at least 1, such as 4,8,16"),
    "Sequence[Count] | str": Reading(str),
    "Count | Mapping[str, Count]": Reading(str, _counts_of_models, "a whole number of at least 1"),
    "SyncDevices": Reading(int, range="0<=x<=64"),
    "Sequence[float]": Reading(
        str, lambda text: list(map(float, text.split(","))), "numbers such as 2,4,5.6"
    ),
    "tuple[Index, Index]": Reading(str, _window, "FROM:TO such as 4000:5000"),
}


def asks(
    record: type,
    *,
    only: Collection[str] | None = None,
    doc: str | None = None,
    optional: Collection[str] = (),
    **fixed: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a request record.

    Args:
        record: The request record.
        only: Planners; options that none of these reads are left out.
        doc: The command's help, where that is not the function's.
        optional: Fields that the record needs and some ways of the command do not.
        fixed: Fields that the command decides, so that there is no option.

    Returns:
        A decorator for the command. Its first argument gets the options that were given, under the
        record's names; its other arguments are options of its own.
    """
    flags: list[inspect.Parameter] = []
    reads: list[tuple[str, Collection[str], Callable[[Values], Any]]] = []
    required = {asked.name for asked in asked_of(record) if asked.is_required} - set(optional)
    for asked in asked_of(record):
        if asked.name in optional:
            asked = replace(asked, is_required=False)
        readers = asked.option.read_by
        if asked.name in fixed or (only and readers and not set(readers) & set(only)):
            continue
        own = list(_flags(asked, only, record))
        flags += own
        reads.append((asked.name, [flag.name for flag in own], _reader(asked)))
    flags.sort(key=lambda each: not isinstance(each.annotation.__metadata__[0], _ARGUMENT))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            Settings.record = record
            given, arguments = dict(fixed), Arguments(record)
            for name, names, read in reads:
                if name in required or Settings.given.intersection(names):
                    value = given[name] = read({each: values[each] for each in names})
                    if value is not None:
                        arguments.check(name, value)
            own = {name: value for name, value in values.items() if name in kept}
            function(given, **own)

        kept = dict(list(inspect.signature(function).parameters.items())[1:])
        mine = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in kept.values()]
        command.__signature__ = inspect.Signature([*flags, *mine])  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = function.__name__, doc or function.__doc__
        command.__module__ = function.__module__
        return command

    return decorate


def _named(registry: str, incomplete: str) -> list[str]:
    """Names of allocation policies, schedules or the simulator's mechanisms, plug-ins' too."""
    names: Iterable[str]
    if registry == "policies":
        from ..solvers.allocation import all_policies

        names = sorted(all_policies())
    elif registry == "schedules":
        from ..schema.schedule import planned_schedules

        names = ("auto", *planned_schedules())
    else:
        from ..clusters.simulator.cases import SCHEDULERS

        names = SCHEDULERS.names()
    return [name for name in names if name.startswith(incomplete)]


def _pools(ctx: Any, incomplete: str) -> list[str]:
    """Pools of the device types that profiles are of: ``2xV100,P`` becomes ``2xV100,P100``."""
    folder = ctx.params.get("profiles")
    types = set()
    if folder is not None:
        for path in folder.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                types.add(str(json.loads(path.read_text(encoding="utf-8"))["device_type"]))
    typed = re.match(r"(.*,)?(\d+x)?", incomplete)
    before = typed.group() if typed is not None else ""
    return [before + kind for kind in sorted(types) if kind.startswith(incomplete[len(before) :])]


_ARGUMENT = type(typer.Argument())


def _text(kind: Any) -> str:
    """A type as it is written, without None."""
    if isinstance(kind, ForwardRef):
        kind = kind.__forward_arg__
    if not isinstance(kind, str):
        return kind.__name__ if isinstance(kind, type) else str(kind).replace(" | None", "")
    return kind.removesuffix(" | None")


def _flags(
    asked: options.Asked, only: Collection[str] | None, record: type
) -> Iterator[inspect.Parameter]:
    """The options of the parser for one field; a pool and an optimizer have two ways each."""
    said, text = asked.option, _text(asked.kind)
    reading = _READINGS.get(text)
    with options.spelled_by(partial(requests.flag_of, first=record)):
        words = told(said.help) + (f" [default: {told(said.default)}]" if said.default else "")
    shown: dict[str, Any] = {
        "help": words + (f" [{reading.range}]" if reading is not None and reading.range else ""),
        "rich_help_panel": (RARE if said.rare else "") + said.panel or None,
        "show_default": not said.default,
        "metavar": said.metavar or None,
        "autocompletion": None,
    }
    if text == "Pool":
        shown["autocompletion"] = _pools
    elif said.names:
        shown["autocompletion"] = lambda incomplete: _named(said.names, incomplete)
    none: Any = inspect.Parameter.empty
    if said.argument:
        kind = _READINGS[text].kind
        kind, default = (kind, none) if asked.is_required else (kind | None, None)
        yield _parameter(asked.name, kind, default, typer.Argument(**shown))
        return
    flag = said.flag_of(asked.name)
    if text == "Pool":
        yield _parameter("gpus", str | None, None, typer.Option("--gpus", **shown))
        shown |= {"help": "Instead: a cluster's file, or `nvidia-smi -L`.", "autocompletion": None}
        yield _parameter("cluster", Path | None, None, typer.Option("--cluster", **shown))
        return
    if text == "OptimizerState | str":
        yield _parameter(_parsed(flag), str | None, None, typer.Option(flag, **shown))
        flag = "--state-bytes-per-weight-byte"
        shown["help"] = "Instead: bytes that it keeps for each byte of weights; Adam: 2."
        yield _parameter(_parsed(flag), float | None, None, typer.Option(flag, **shown))
        return
    kind, default = None, asked.default
    for member in (asked.kind, *get_args(asked.kind)):
        if get_origin(member) is Literal:
            read_by = {word: said.values.get(word) for word in get_args(member)}
            chosen = [w for w, by in read_by.items() if not (only and by) or set(by) & set(only)]
            kind, shown["metavar"] = Literal[tuple(chosen)], None
            break
    kind = _READINGS[text].kind if kind is None else kind
    flags = (flag, said.other) if said.other else (flag,)
    if asked.is_required:
        default = none
    elif kind is bool:
        if default is not False:
            flags, shown["show_default"] = (f"{flag}/{flag.replace('--', '--no-', 1)}",), False
        kind = bool | None if default is None else bool
    elif default is None or default == ():
        kind, default = kind | None, None
    elif isinstance(default, int | float) and said.unit == "hours":
        default = default / 3600
    elif isinstance(default, tuple):
        default = ",".join(map(str, default))
    elif text == "Bytes":
        kind, default, shown["show_default"] = str | None, None, False
    yield _parameter(_parsed(flag), kind, default, typer.Option(*flags, **shown))


def _parsed(flag: str) -> str:
    """The name of a flag's parameter, of its variable, and of its key in a file."""
    return flag.lstrip("-").replace("-", "_")


def _parameter(name: str, kind: Any, default: Any, shown: Any) -> inspect.Parameter:
    annotation = Annotated[kind, shown]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _reader(asked: options.Asked) -> Callable[[Values], Any]:
    """What makes a field's value of the values of its flags."""
    text, name = _text(asked.kind), asked.name
    reading = _READINGS.get(text, Reading(str))

    def read(values: Values) -> Any:
        if text == "Pool":
            return asked_pool(values["gpus"], values["cluster"])
        if text == "OptimizerState | str":
            from ..schema.optimizer import asked_optimizer

            return asked_optimizer(*values.values())
        (value,) = values.values()
        if value is None:
            return None
        if asked.option.unit == "hours":
            return value * 3600
        try:
            return reading.read(value)
        except ProblemError:
            raise
        except ValueError:
            message = f"{flag_of(name)}: must be {reading.form}, got {value[:60]!r}"
            raise ProblemError(message) from None

    return read


def flag_of(name: str, value: str | bool | None = None) -> str:
    """Spell an option as a flag, first of the running command."""
    return requests.flag_of(name, value, Settings.record)
