"""An option of a verb: what is said of it once, and how each door spells it.

A verb's request record (``schema/requests``) states each option once: its type and default, and an
``Option`` with its help and who reads it. The command line and the Python functions are made from
the records. Code that raises an error names the field, by ``option``, and never a flag::

    raise ProblemError(f"{option('objective', 'waste')} needs maxP")

On the command line this reads ``--objective waste needs maxP``, in Python ``objective="waste" needs
maxP``.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

# The words that users choose between: types of values in requests and in files.


Placement = Literal["consolidated", "unconsolidated", "mixed"]
OnFailure = Literal["stop", "shrink", "replace"]
Strategy = Literal["auto", "split", "pipeline", "parallel"]
Method = Literal["exact", "cbc", "highs"]
AnyObjective = Literal["step_seconds", "waste", "bottleneck"]
CostModelName = Literal["profiled", "closed-form", "measured"]
StageCost = Literal["ring", "thesis", "published"]
Shard = Literal["optimizer", "gradients", "all"]
"""Which states the replicas of a stage share; each includes those before it (ZeRO 5)."""
Activations = Literal["kept", "recomputed", "offloaded"]
"""What becomes of repeated layers' activations until they go back: offloaded is to the host."""
AnyShard = Literal["auto", "none", "optimizer", "gradients", "all"]


Precision = Literal["float32", "tf32", "float16", "bfloat16"]


_REFERENCE = re.compile(r"\{([a-z_]+)(?:=([^}]*))?\}")
_PARTS = {
    "cluster": "pool",
    "quick": 'effort="quick"',
    "state_bytes_per_weight_byte": "optimizer=OptimizerState(...)",
    "thorough": 'effort="thorough"',
}
"""Flags that the command line has beside a field's own -> what takes their place in Python."""
_MAPPINGS = ("names", "rates", "spot_dollars_per_hour")  # ``--rate V100=2`` is ``{"V100": 2}``


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is said of a field of a request.

    Texts name other options as ``{num_stages}`` or ``{objective=waste}``; see ``told``.

    Args:
        help: What it does, in a sentence or two, for both doors.
        python: What Python takes besides, for its documentation alone.
        flag: Its flag, if that is not the field's name.
        other: Another flag for it, such as ``-o``.
        unit: ``hours`` if the command line takes hours where the field has seconds.
        argument: Whether the command line takes it by its place instead of by a flag.
        metavar: What stands for its value in ``--help``.
        panel: Heading in ``--help``.
        rare: Whether only ``--help-all`` shows it.
        default: What is taken if it is left out, where the field's default does not say it.
        names: The registry that its values are names of, for completion: ``policies``.
        read_by: The planners or policies that read it; empty if all do.
        values: Values that others read than the rest.
        open_values: Values that ask for nothing, because they leave the choice to the planner.
        narrows: Whether only kinds of plans that read it are compared.
        recorded: Whether a plan that it restricts states it.
    """

    help: str
    python: str = ""
    flag: str = ""
    other: str = ""
    unit: str = ""
    argument: bool = False
    metavar: str = ""
    panel: str = ""
    rare: bool = False
    default: str = ""
    names: str = ""
    read_by: tuple[str, ...] = ()
    values: Mapping[object, tuple[str, ...]] = field(default_factory=dict)
    open_values: tuple[object, ...] = ()
    narrows: bool = True
    recorded: bool = False

    def flag_of(self, name: str) -> str:
        """The flag of the field ``name``."""
        if self.unit == "hours" and not self.flag:
            name = name.replace("_seconds", "_hours")
        return self.flag or "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A field of a request record: its name, its type as written, its default, its ``Option``."""

    name: str
    kind: Any
    default: Any
    is_required: bool
    option: Option


@cache
def asked_of(record: type) -> tuple[Asked, ...]:
    """Return the options of a request record, in order."""
    return tuple(_asked_of(record))


def _asked_of(record: type) -> Iterator[Asked]:
    for entry in fields(record):
        if get_origin(entry.type) is not Annotated:
            continue  # what a door adds
        kind, said = get_args(entry.type)[:2]
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        yield Asked(
            name=entry.name,
            kind=kind,
            default=None if default is MISSING else default,
            is_required=default is MISSING,
            option=said,
        )


def _in_python(name: str, value: str | bool | None) -> str:
    part, name = name, _PARTS.get(name, name)
    if value and "(...)" in name:
        return name.replace("...", f"{part}={value}")
    if value is None or not name.isidentifier():
        return name
    if name in _MAPPINGS and not isinstance(value, bool) and "=" in value:
        key, _, each = value.partition("=")
        return f'{name}={{"{key}": {_quoted(each)}}}'
    if isinstance(value, bool) or value[:1] in "'\"{[" or value.isupper() or _is_number(value):
        return f"{name}={value}"
    return f"{name}=" + "|".join(map(_quoted, value.split("|")))


def _quoted(word: str) -> str:
    return word if word.isupper() or word == "..." or _is_number(word) else f'"{word}"'


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", word) is not None


Spelling = Callable[[str, str | bool | None], str]
_doors: list[tuple[Spelling, str]] = [(_in_python, ", ")]  # the program's caller is the last one


def option(name: str, value: object = None) -> str:
    """Spell an option as the caller knows it.

    Args:
        name: The field of the request.
        value: Its value, if it shall be named too: a bool sets a switch; a text in capitals, such
            as ``FILE``, stands for a value.

    Returns:
        ``--num-stages 3`` or ``num_stages=3``.
    """
    plain = value if value is None or isinstance(value, bool) else str(value)
    return _doors[-1][0](name, plain)


def options(**values: object) -> str:
    """Spell several options that go together: ``--repetitive --schedule 2bw``."""
    return _doors[-1][1].join(option(name, value) for name, value in values.items())


def command(verb: str, **values: object) -> str:
    """Spell a call of a verb: ``hetflow profile --layers`` or ``hetflow.profile(layers=True)``."""
    said = options(**values)
    return f"hetflow {verb} {said}" if speaks_flags() else f"hetflow.{verb}({said})"


def told(text: str) -> str:
    """Spell the options in a text: ``with {objective=waste}`` or ``leave {gap} out``."""
    joined = text.replace("} {", "}" + _doors[-1][1] + "{")
    return _REFERENCE.sub(lambda found: option(found[1], _value(found[2])), joined)


def _value(text: str | None) -> str | bool | None:
    return {"True": True, "False": False}.get(text or "", text)


def speaks_flags() -> bool:
    """Whether the caller is the command line."""
    return _doors[-1][1] == " "


def speak(spelling: Spelling, between: str = " ") -> None:
    """From now on, spell options by ``spelling``; see ``spelled_by``."""
    _doors.append((spelling, between))


@contextmanager
def spelled_by(spelling: Spelling, between: str = " ") -> Iterator[None]:
    """While this context lasts, spell options by ``spelling`` instead of as in Python.

    Args:
        spelling: Returns an option's text, from its name and its value.
        between: What stands between options that go together.
    """
    speak(spelling, between)
    try:
        yield
    finally:
        _doors.pop()
