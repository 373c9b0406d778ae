"""The base of all records: frozen, typed, and validated the same way from code and from JSON.

Pydantic checks types and ranges and collects every fault. This module turns its faults into
hetflow's sentences with addresses (``$.batch_curve[3].step_seconds: must be > 0, got -0.1``).
"""

from collections.abc import Callable
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as _dataclass
from pydantic_core import ArgsKwargs

from .errors import ProblemError
from .frames import in_tuples, plain
from .spelling import did_you_mean, shown

T = TypeVar("T")

# Upper bounds are far above real values, and low enough that products do not overflow.
Count = Annotated[int, Field(ge=1, le=10**12)]
Index = Annotated[int, Field(ge=0, le=2**63 - 1)]
MOST_BYTES = 2**60
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
PositiveBytes = Annotated[int, Field(ge=1, le=MOST_BYTES)]
NonNegative = Annotated[float, Field(ge=0)]
"""A number without a unit, or with the unit that the field's docstring states."""
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
MeasuredSeconds = Annotated[float, Field(ge=0, le=1e12)]  # 30,000 years
PositiveMeasuredSeconds = Annotated[float, Field(gt=0, le=1e12)]
PositiveSeconds = Annotated[float, Field(gt=0)]
WaitSeconds = Annotated[float, Field(ge=0, le=1e8)]
"""Seconds that somebody waits: 3 years at most, which every clock and lock can count."""
PerSecond = Annotated[float, Field(ge=0)]
PositiveRate = Annotated[float, Field(gt=0)]
"""Bytes, steps or samples per second."""
Dollars = Annotated[float, Field(ge=0)]
PositiveDollars = Annotated[float, Field(gt=0)]
RentDollars = Annotated[float, Field(gt=0, le=1e9)]
"""The price of a machine for an hour; sums of such prices do not overflow."""
SpotDollars = Annotated[float, Field(ge=0, le=1e9)]
Ratio = Annotated[float, Field(ge=0, le=1e6)]
"""The quotient of two quantities of the same unit."""
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]

# Validators are built when they are first used (``adapter_of``): a command uses few of the records.
_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
_KNOWN_KEYS: set[str] = set()
"""Keys of all records that were imported, for "did you mean" suggestions."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only, validated dataclass.

    Building an instance with invalid values raises a ProblemError that lists every fault. Lists,
    and arrays and numbers of numpy, are taken for the tuples and numbers that they hold.
    """
    is_plain = cls.__repr__ is object.__repr__  # else it has, or inherits, a shorter one
    made: Any = _dataclass(frozen=True, slots=True, kw_only=True, repr=is_plain, config=_CONFIG)(
        cls
    )
    made.__init__ = _raising_problem_error(made)
    made.__signature__ = _FieldsSignature()
    _KNOWN_KEYS.update(made.__dataclass_fields__)
    return made  # type: ignore[no-any-return]


adapter_of: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""The validator of a record or of another type; each is built once, when it is first used."""


def _raising_problem_error(cls: type) -> Callable[..., None]:
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        validator = adapter_of(cls).validator
        try:
            try:
                validator.validate_python(ArgsKwargs(args, kwargs), self_instance=self)
            except ValidationError:
                values = in_tuples(plain(kwargs))
                validator.validate_python(ArgsKwargs(args, values), self_instance=self)
        except ValidationError as error:
            own = _own_refusal(error)
            if own is not None:
                raise ProblemError(own.message, hint=own.hint) from None
            raise ProblemError(f"{cls.__name__}: {'; '.join(faults_of(error))}") from None

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return __init__


class _FieldsSignature:
    """``inspect.signature`` of a record: its fields, as keywords."""

    def __get__(self, instance: object, cls: Any) -> Signature:
        return Signature(
            [
                Parameter(
                    name,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if field.is_required() else field.get_default(),
                    annotation=field.rebuild_annotation(),
                )
                for name, field in cls.__pydantic_fields__.items()
            ]
        )


def _own_refusal(error: ValidationError) -> ProblemError | None:
    """Return the ProblemError of the record's own ``__post_init__``, if it is the only fault."""
    first, *others = error.errors(include_url=False)
    cause = first.get("ctx", {}).get("error")
    if others or first["loc"] or not isinstance(cause, ProblemError):
        return None
    return cause


def faults_of(error: ValidationError) -> list[str]:
    """Format each fault as ``address: rule, got value``, in the order of the file."""
    return [f"{_address(f['loc'])}: {_sentence(f, error)}" for f in error.errors(include_url=False)]


def _address(location: tuple[int | str, ...]) -> str:
    parts = ["$"]
    for step in location:
        parts.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return "".join(parts)


_RULES = {
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "finite_number": "must be finite",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "dataclass_type": "must be an object",
    "union_tag_invalid": "kind must be one of {expected_tags}",
    "union_tag_not_found": "must have a kind",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be one printable line",
}


def _sentence(fault: Any, error: ValidationError) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "missing":
        return "missing; add it"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        key = str(fault["loc"][-1])
        missing = [
            str(f["loc"][-1])
            for f in error.errors(include_url=False)
            if f["type"] == "missing" and f["loc"][:-1] == fault["loc"][:-1]
        ]
        known = missing + sorted(_KNOWN_KEYS - {key})
        return f"unknown key; {did_you_mean(key, known, 'remove it')}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _RULES:
        return f"{_RULES[kind].format(**context)}, got {shown(fault['input'])}"
    if kind == "literal_error":
        return f"must be {context['expected']}, got {shown(fault['input'])}"
    return f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, got {shown(fault['input'])}"
