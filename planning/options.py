"""Options of a request for a plan: each field says which planners read it.

This is the one place that decides whether an option has an effect. An option that was given and
that no planner in question reads is refused, so a new field without readers cannot be given at all.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from ..schema.errors import ProblemError

Kind = Literal["split", "pipeline", "parallel"]
Planner = Literal["split", "milp", "waste", "pipeline", "repetitive", "parallel"]

SPLITS: tuple[Planner, ...] = ("split", "milp", "waste")
PIPELINES: tuple[Planner, ...] = ("pipeline", "repetitive")
ALL: tuple[Planner, ...] = (*SPLITS, *PIPELINES, "parallel")

_PLANS = {
    "split": "exact splits",
    "milp": "splits by the MILP",
    "waste": "splits by waste",
    "pipeline": "pipelines",
    "repetitive": "pipelines planned with --repetitive",
    "parallel": "parallel plans",
}
_CHOSEN_BY = {
    "split": "--strategy split",
    "milp": "--method cbc or highs",
    "waste": "--objective waste",
    "pipeline": "--strategy pipeline",
    "repetitive": "--strategy pipeline --schedule 2bw --repetitive",
    "parallel": "--strategy parallel",
}


@dataclass(frozen=True, slots=True)
class Option:
    """An option that was given: its flag, who reads its value, and what it does to a comparison.

    An option that ``narrows`` asks for something of the plan, such as a number of stages. Where
    several kinds of plans are compared, only those that read it stay. Other options say how some
    of the kinds are to be planned, and leave the comparison as it is.
    """

    flag: str
    read_by: tuple[Planner, ...]
    narrows: bool


def option(
    unset: Any,
    *read_by: Planner,
    flag: str = "",
    narrows: bool = True,
    values: Mapping[object, tuple[Planner, ...]] | None = None,
    open_values: Collection[object] = (),
) -> Any:
    """Return a field of a record of options.

    Args:
        unset: The value of an option that was not given.
        read_by: The planners that read the option.
        flag: Its flag, where that is not the field's name.
        narrows: Whether only kinds of plans that read the option are compared.
        values: Values that other planners read than the rest.
        open_values: Values that do not narrow, because they leave the choice to the planner.
    """
    said = {"read_by": read_by, "flag": flag, "narrows": narrows}
    return field(default=unset, metadata={**said, "values": values or {}, "open": open_values})


def given(record: Any, stated: Collection[str] = ()) -> Iterator[Option]:
    """Yield the options of a record, and of the records in it, that were given.

    Those are what differs from what is unset, and the fields in ``stated``.
    """
    for entry in fields(record):
        value = getattr(record, entry.name)
        if "read_by" in entry.metadata:
            if value != entry.default or entry.name in stated:
                yield _option(entry, value)
        elif is_dataclass(entry.type):
            yield from given(value, stated)


def _option(entry: "Field[Any]", value: object) -> Option:
    said = entry.metadata
    flag = said["flag"] or "--" + entry.name.replace("_", "-")
    if value is False:
        flag = flag.replace("--", "--no-", 1)
    if isinstance(value, str) or value in said["values"]:
        flag += f" {value}"
    narrows = said["narrows"] and value not in said["open"]
    return Option(flag, said["values"].get(value, said["read_by"]), narrows)


def refuse_unread(
    asked: Collection[Option], tried: Collection[Planner], why_no_others: str
) -> None:
    """Refuse an option that none of the planners that would be tried reads.

    Args:
        asked: The options that were given.
        tried: The planners of the kinds of plans in question.
        why_no_others: Why kinds of plans that read more options are not compared; may be empty.

    Raises:
        ProblemError: Names the option, who reads it, and what would make it count.
    """
    for one in asked:
        if not set(one.read_by) & set(tried):
            raise _unread(one, tried, why_no_others)


def _unread(one: Option, tried: Collection[Planner], why_no_others: str) -> ProblemError:
    message = f"{one.flag} is for {_plans(one.read_by)}: it has no effect on {_plans(tried, one)}"
    if why_no_others and not set(one.read_by) & set(SPLITS):
        return ProblemError(
            f"{message}, and {why_no_others}",
            hint="leave it out, or profile the layers (hetflow profile --layers)",
        )
    return ProblemError(message, hint=f"leave it out, or {_way(one.read_by, tried)}")


def _plans(planners: Collection[Planner], beside: Option | None = None) -> str:
    """Name the plans of several planners.

    All planners of a kind are named by the kind, and so is one alone if ``beside``, an option that
    it does not read, is read by no planner of that kind.
    """
    left, names = list(planners), []
    for whole, name in ((SPLITS, "splits"), (PIPELINES, "pipelines")):
        apart = beside is None or set(beside.read_by) & set(whole)
        if set(whole) <= set(left) or (set(whole) & set(left) and not apart):
            left = [planner for planner in left if planner not in whole]
            names.append(name)
    names += [_PLANS[planner] for planner in left]
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def _way(read_by: Collection[Planner], tried: Collection[Planner]) -> str:
    """What to change so that one of ``read_by`` is asked instead of ``tried``."""
    if "repetitive" in tried and "pipeline" in read_by:
        return "leave --repetitive out"
    if "pipeline" in tried and "repetitive" in read_by:
        return "add --repetitive --schedule 2bw"
    if "split" in read_by and set(tried) & {"milp", "waste"}:
        return "take the exact method and objective of splits"
    ways = []
    for planner in read_by:
        covered = planner in ("milp", "waste") and "split" in read_by
        if not covered and not (planner == "repetitive" and "pipeline" in read_by):
            ways.append(_CHOSEN_BY[planner])
    return "add " + " or ".join(ways)
