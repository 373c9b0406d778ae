"""Check the arguments of a public function against its annotations: their types and ranges.

A caller without a type checker then gets one sentence that names the argument, not a traceback
from deep inside. A range is stated as in a record: ``batch_size: Count``.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from numbers import Real
from pathlib import Path
from sys import modules
from types import NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin

from .errors import ProblemError
from .frames import Table, is_sequence, plain
from .options import Option, option
from .spelling import did_you_mean, nearest, shown

_PACKAGE = (__package__ or "").partition(".")[0]
KINDS = "schema.requests.kinds"
_MOST_KINDS = 6  # listed in one sentence
_WORDS: dict[Any, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    Path: "a Path",
    NoneType: "None",
    Table: "a DataFrame",
}
_BOUNDS = (
    ("gt", ">", operator.gt),
    ("ge", ">=", operator.ge),
    ("lt", "<", operator.lt),
    ("le", "<=", operator.le),
)


class Arguments:
    """What the arguments of a function, or the fields of a request record, may be.

    Args:
        called: The function or the record. Its annotations may be texts of names that its module,
            or ``schema.requests.kinds``, has.
        name: Name of the function, for errors, where a record is called in its place.

    Attributes:
        kinds: Argument -> its annotation.
    """

    def __init__(self, called: Callable[..., Any], name: str = "") -> None:
        self._called, self._name = called, name or called.__name__
        signature = inspect.signature(called)
        plain_ones = [p.replace(annotation=_written(p)) for p in signature.parameters.values()]
        self.signature = signature.replace(parameters=plain_ones)
        self._options: str | None = None
        self.kinds: dict[str, Any] = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._options = name
                for options in get_args(parameter.annotation):
                    self.kinds |= options.__annotations__
            else:
                self.kinds[name] = parameter.annotation

    def checked(self, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Check the arguments of a call. Those that are left at their defaults are right.

        Returns:
            The given arguments by name, with numbers and arrays of numpy replaced by Python's own.
            None counts as not given where the default says what is taken then.

        Raises:
            ProblemError: An argument is of the wrong type, out of its range, or none of the known
                choices.
            TypeError: An argument is missing, or there is no such argument.
        """
        for name in given:
            if name not in self.kinds:
                raise TypeError(
                    f"{self._name}() got an unexpected keyword argument {name!r}"
                    + did_you_mean(name, self.kinds, before="; ")
                )
        try:
            bound = self.signature.bind(
                *map(plain, args), **{name: plain(each) for name, each in given.items()}
            )
        except TypeError as error:
            raise TypeError(f"{self._name}() {error}") from None
        found = {}
        for name, value in (bound.arguments | bound.arguments.pop(self._options or "", {})).items():
            known = self.signature.parameters.get(name)
            default = None if known is None else known.default
            if value is None and default is not None and default is not inspect.Parameter.empty:
                continue
            if value is not default:
                self.check(name, value)
            found[name] = value
        return found

    def check(self, name: str, value: Any) -> None:
        """Check the value of one argument.

        Raises:
            ProblemError: It is of the wrong type, out of its range, or none of the known choices.
        """
        fault = fault_of(value, self.kind_of(name), option(name))
        if fault is not None:
            raise ProblemError(fault)

    def kind_of(self, name: str) -> Any:
        """Return the type of an argument, with the names in its annotation looked up."""
        kind = self.kinds[name]
        if isinstance(kind, ForwardRef):
            kind = kind.__forward_arg__
        if not isinstance(kind, str):
            return kind
        known = vars(modules[self._called.__module__])
        return eval(kind, known, _Kinds())  # the text is our own source code


class _Kinds(dict[str, Any]):
    """The types of ``schema.requests.kinds``, which are imported when a text names one."""

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(import_module(f"{_PACKAGE}.{KINDS}"), name)
        except AttributeError:
            raise KeyError(name) from None


def _written(parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter, without the ``Option`` of a request's field."""
    kind = parameter.annotation
    if get_origin(kind) is Annotated and isinstance(kind.__metadata__[0], Option):
        kind = get_args(kind)[0]
        kind = kind.__forward_arg__ if isinstance(kind, ForwardRef) else kind
    return kind


def fault_of(value: Any, kind: Any, name: str) -> str | None:
    """Say what is wrong with a value; None if it is of the kind."""
    members, within = list(_members(kind)), None
    for member in members:
        if not _is_a(value, member):
            continue
        fault = next(_faults_within(value, member, name), None)
        if fault is None:
            return None
        within = within or fault
    if within is not None:
        return within
    choices = [choice for member in members for choice in _choices(member)]
    rest = dict.fromkeys(_word(member) for member in members if not _choices(member))
    words = list(map(_quoted, choices)) + list(rest)
    if len(words) > max(_MOST_KINDS, len(choices)):
        words = [*words[:_MOST_KINDS], "another record"]
    rule = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    guess = (
        nearest(value, [c for c in choices if isinstance(c, str)])
        if isinstance(value, str)
        else None
    )
    ending = f"; did you mean {_quoted(guess)}?" if guess is not None else ""
    return f"{name} must be {rule}, got {shown(value)}{ending}"


def _members(kind: Any) -> Iterator[Any]:
    """The members of a union, also of those nested in it; else the kind itself."""
    if get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _plain(kind: Any) -> Any:
    """A kind without its range."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; of a container, without what it holds."""
    kind = _plain(kind)
    origin = get_origin(kind) or kind
    if origin is Any:
        return True
    if origin is None:
        return value is None
    if origin is Literal:
        return any(isinstance(value, type(c)) and value == c for c in get_args(kind))
    if origin is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (Sequence, tuple):
        return is_sequence(value)
    return isinstance(value, origin)


def _faults_within(value: Any, kind: Any, name: str) -> Iterator[str]:
    """The faults of a value of the right type: of a number's range, of what a container holds."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        rule = _broken_rule(value, kind)
        if rule is not None:
            yield f"{name} must be {rule}, got {shown(value)}"
        return
    if origin is tuple and ... not in inner:
        if len(value) != len(inner):
            yield f"{name} must hold {len(inner)} values, got {shown(value)}"
            return
        pairs = [(f"{name}[{i}]", entry, inner[i]) for i, entry in enumerate(value)]
    elif origin in (Sequence, tuple):
        pairs = [(f"{name}[{i}]", entry, inner[0]) for i, entry in enumerate(value)]
    elif origin in (Mapping, dict):
        pairs = [(f"a key of {name}", key, inner[0]) for key in value]
        pairs += [(f"{name}[{key!r}]", entry, inner[1]) for key, entry in value.items()]
    else:
        return
    for address, entry, wanted in pairs:
        fault = fault_of(entry, wanted, address)
        if fault is not None:
            yield fault


def _broken_rule(value: Any, kind: Any) -> str | None:
    is_finite = _plain(kind) is not float or _is_finite(value)
    for field in getattr(kind, "__metadata__", ()):
        for bound in field.metadata:
            for name, sign, is_kept in _BOUNDS:
                limit = getattr(bound, name, None)
                if limit is not None and not (is_finite and is_kept(value, limit)):
                    shown = f"{limit:g}" if isinstance(limit, float) else limit
                    return f"{sign} {shown}" + ("" if is_finite else " and finite")
    return None if is_finite else "finite"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _word(kind: Any) -> str:
    kind = _plain(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and ... not in inner:
        return f"a list of {len(inner)} values"
    if origin in (Sequence, tuple):
        words = map(_word, _members(inner[0]))
        each = [word.removeprefix("a ").removeprefix("an ") for word in words]
        if len(each) == 1:
            return f"a list of {each[0]}" + ("" if each[0][0].isupper() else "s")
        return f"a list of {', '.join(each[:-1])} or {each[-1]}"
    if origin in (Mapping, dict):
        return "a dict"
    if origin is Callable:
        return "a function"
    if kind in _WORDS:
        return _WORDS[kind]
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _quoted(choice: Any) -> str:
    return f'"{choice}"' if isinstance(choice, str) else repr(choice)
