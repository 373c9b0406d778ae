"""Make the options of a command from a request record (``schema/requests``).

A command asks for a record: it gets one option a field, in the record's order, and is called with
what was given, under the record's names and in its units::

    @asks(AllocateRequest)
    def allocate(asked: Asked, output: OutputOption = None) -> None:
        allocation = hetflow.allocate(**asked)
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, get_args, get_origin

import typer

from ..schema import options, requests
from ..schema.arguments import Arguments
from ..schema.errors import ProblemError
from ..schema.options import asked_of, told
from ..schema.requests import texts
from . import completing
from .common import RARE, Settings, asked_pool

Asked = dict[str, Any]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Flag:
    """One option or argument of the parser."""

    name: str
    kind: Any
    default: Any
    shown: Any

    def parameter(self) -> inspect.Parameter:
        """The same as a parameter of the command's function."""
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[self.kind, self.shown],
        )


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


_RECORDS = (
    "Plan | Allocation | Path | str",
    "Profile | Path | str",
    "Plan | Path | str",
)
_NUMBERS = {
    "Count": Reading(int, range="x>=1"),
    "JobCount": Reading(int, range="1<=x<=10000000"),
    "Index": Reading(int, range="x>=0"),
    "int": Reading(int),
}
_NUMBERS |= dict.fromkeys(
    ("float", "Dollars", "Fraction", "PositiveRate", "PositiveSeconds"),
    Reading(float),
)
_NUMBERS |= {
    "GraceSeconds": Reading(int, range="1<=x<=100000000"),
    "HeartbeatSeconds": Reading(float, range="x>=0.5"),
    "RoundSeconds": Reading(float, range="x>=1"),
    "TimeoutSeconds": Reading(float, range="x>=1"),
    "WaitSeconds": Reading(float, range="x>=0"),
}
_PATHS = dict.fromkeys(
    ("Path", "Path | str", "Profiles", "JobsTable", "ThroughputsTable", *_RECORDS), Reading(Path)
) | dict.fromkeys(("Markets", "Windows", "Offers"), Reading(list[Path]))
_READINGS: dict[str, Reading] = {
    **_NUMBERS,
    **_PATHS,
    "str": Reading(str),
    "str | Path": Reading(str),
    "bool": Reading(bool),
    "Bytes": Reading(str, texts.memory_reserve),
    "Sequence[str]": Reading(list[str]),
    "Sequence[Path | str]": Reading(list[Path]),
    "str | Pool": Reading(str),
    "Mapping[str, float]": Reading(list[str], texts.rates),
    "Speeds": Reading(list[float], lambda speeds: (0.0, *speeds)),
    "SpotPrices": Reading(list[str], partial(texts.by_place, "spot_dollars_per_hour")),
    "OnDemandPrices": Reading(list[str], partial(texts.by_place, "on_demand_dollars_per_hour")),
    "MachineSpeeds": Reading(list[str], texts.machine_speeds),
    "Mapping[str, str]": Reading(list[str], texts.names),
    "Sequence[Count]": Reading(str, texts.counts, "whole numbers of at least 1, such as 4,8,16"),
    "Sequence[Count] | str": Reading(str),
    "Count | Mapping[str, Count]": Reading(
        str, texts.counts_of_models, "a whole number of at least 1"
    ),
    "SyncDevices": Reading(int, range="0<=x<=64"),
    "Sequence[float]": Reading(
        str, lambda text: list(map(float, text.split(","))), "numbers such as 2,4,5.6"
    ),
    "tuple[Index, Index]": Reading(str, texts.window, "FROM:TO such as 4000:5000"),
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
    flags: list[Flag] = []
    reads: list[tuple[str, Collection[str], Callable[[Values], Any]]] = []
    required = {asked.name for asked in asked_of(record) if asked.is_required} - set(optional)
    for asked in asked_of(record):
        if asked.name in optional:
            asked = replace(asked, is_required=False)
        readers = asked.option.read_by
        if asked.name in fixed or (only and readers and not set(readers) & set(only)):
            continue
        own = list(_flags(asked, only))
        flags += own
        reads.append((asked.name, [flag.name for flag in own], _reader(asked)))

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
        made = [flag.parameter() for flag in flags]
        made.sort(key=lambda each: not isinstance(each.annotation.__metadata__[0], _ARGUMENT))
        command.__signature__ = inspect.Signature([*made, *mine])  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = function.__name__, doc or function.__doc__
        command.__module__ = function.__module__
        return command

    return decorate


_ARGUMENT = type(typer.Argument())


def _text(kind: Any) -> str:
    """A type as it is written, without None."""
    if isinstance(kind, ForwardRef):
        kind = kind.__forward_arg__
    if not isinstance(kind, str):
        return kind.__name__ if isinstance(kind, type) else str(kind).replace(" | None", "")
    return kind.removesuffix(" | None")


def _flags(asked: options.Asked, only: Collection[str] | None) -> Iterator[Flag]:
    """The options of the parser for one field; a pool and an optimizer have two ways each."""
    said, text = asked.option, _text(asked.kind)
    with options.spelled_by(flag_of):
        words = told(said.help) + (f" [default: {told(said.default)}]" if said.default else "")
    if (reading := _READINGS.get(text)) is not None and reading.range:
        words += f" [{reading.range}]"
    panel = (RARE if said.rare else "") + said.panel or None
    shown: dict[str, Any] = {
        "help": words,
        "rich_help_panel": panel,
        "show_default": not said.default,
    }
    shown |= {"show_envvar": False}
    if said.metavar:
        shown["metavar"] = said.metavar
    if said.names:
        shown["autocompletion"] = getattr(completing, said.names)
    default = ... if asked.is_required else asked.default
    if said.argument:
        kind = _READINGS[text].kind
        kind, default = (
            (kind, inspect.Parameter.empty) if asked.is_required else (kind | None, None)
        )
        yield Flag(asked.name, kind, default, typer.Argument(**shown))
        return
    if text == "Pool":
        shown["autocompletion"] = completing.pools
        yield Flag("gpus", str | None, None, typer.Option("--gpus", **shown))
        shown = {**shown, "help": "Instead: a cluster's file, or `nvidia-smi -L`."}
        del shown["autocompletion"]
        yield Flag("cluster", Path | None, None, typer.Option("--cluster", **shown))
        return
    flag = said.flag_of(asked.name)
    parsed = flag.lstrip("-").replace("-", "_")  # also names its variable and its key in a file
    if text == "OptimizerState | str":
        yield Flag(parsed, str | None, None, typer.Option(flag, **shown))
        shown = {**shown, "help": "Instead: bytes that it keeps for each byte of weights; Adam: 2."}
        other = "--state-bytes-per-weight-byte"
        name = "state_bytes_per_weight_byte"
        yield Flag(name, float | None, None, typer.Option(other, **shown))
        return
    kind, choices = _kind(text, asked, only)
    if choices:
        shown.pop("metavar", None)
    if kind is bool:
        negative = flag.replace("--", "--no-", 1)
        is_switch = asked.default is False
        if not is_switch:
            shown["show_default"] = False
        yield Flag(
            parsed,
            bool if is_switch or asked.default is True else bool | None,
            asked.default,
            typer.Option(flag if is_switch else f"{flag}/{negative}", **shown),
        )
        return
    if not asked.is_required and (asked.default is None or asked.default == ()):
        kind, default = kind | None, None
    if default is ...:
        default = inspect.Parameter.empty
    elif isinstance(default, int | float) and said.unit == "hours":
        default = default / 3600
    elif isinstance(default, tuple):
        default = ",".join(map(str, default))
    elif text == "Bytes":
        default, shown["show_default"] = None, False
        kind = str | None
    yield Flag(parsed, kind, default, typer.Option(flag, **shown))


def _kind(text: str, asked: options.Asked, only: Collection[str] | None) -> tuple[Any, bool]:
    """The type that the parser reads, and whether it is a choice of words."""
    members = [asked.kind, *get_args(asked.kind)]
    for member in members:
        if get_origin(member) is Literal:
            said = asked.option.values
            words = tuple(
                word
                for word in get_args(member)
                if not only or word not in said or set(said[word]) & set(only)
            )
            return Literal[words], True
    return _READINGS[text].kind, False


def _reader(asked: options.Asked) -> Callable[[Values], Any]:
    text = _text(asked.kind)
    if text == "Pool":
        return lambda values: asked_pool(values["gpus"], values["cluster"])
    if text == "OptimizerState | str":
        return _optimizer
    reading = _READINGS.get(text, Reading(str))
    name, scale = asked.name, 3600 if asked.option.unit == "hours" else None

    def read(values: Values) -> Any:
        (value,) = values.values()
        if value is None or scale is not None:
            return None if value is None else value * scale
        try:
            return reading.read(value)
        except ProblemError:
            raise
        except ValueError:
            message = f"{flag_of(name)}: must be {reading.form}, got {value[:60]!r}"
            raise ProblemError(message) from None

    return read


def _optimizer(values: Values) -> Any:
    from ..schema.optimizer import asked_optimizer

    return asked_optimizer(*values.values())


def flag_of(name: str, value: str | bool | None = None) -> str:
    """Spell an option as a flag, first of the running command."""
    return requests.flag_of(name, value, Settings.record)
