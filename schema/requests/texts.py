"""How values of options are written as text, as the command line has them."""

from collections.abc import Iterable, Sequence

from ..errors import ProblemError
from ..options import option
from ..spelling import whole_number


def counts(text: str) -> list[int]:
    """Read ``4,8,16``; a ValueError says that a part is no whole number of at least 1."""
    found = [whole_number(part.strip()) for part in text.split(",")]
    if not all(found):
        raise ValueError(text)
    return [number for number in found if number]


def counts_of_models(text: str) -> int | dict[str, int]:
    """Read ``4``, or ``bert=4,gpt=8``; a ValueError says that it is neither."""
    parts = [part.partition("=") for part in text.split(",")]
    if "=" in text:
        return {name.strip(): counts(number)[0] for name, _, number in parts}
    (number,) = counts(text)
    return number


def window(text: str) -> tuple[int, int]:
    """Read ``4000:5000``; a ValueError says that it is none."""
    first, last = map(int, text.split(":"))
    if not 0 <= first < last:
        raise ValueError(text)
    return first, last


def names(given: Iterable[str]) -> dict[str, str]:
    """Read ``V100=tesla_v100``, several times.

    Raises:
        ProblemError: One has no equals sign, or nothing on a side of it.
    """
    found = {}
    for text in given:
        name, _, called = text.partition("=")
        if not name or not called:
            message = f"{option('names')} {text!r} is not TYPE=NAME"
            raise ProblemError(message, hint="write V100=tesla_v100")
        found[name] = called
    return found


def rates(given: Iterable[str]) -> dict[str, float]:
    """Read speeds of device types, ``V100=9.6``, several times.

    Raises:
        ProblemError: One has no number.
    """
    parts = [text.partition("=") for text in given]
    message = f"{option('rates')} must be such as V100=9.6"
    return {name: _number(value, "".join((name, equals, value)), message)
            for name, equals, value in parts}  # fmt: skip


def by_place(field: str, given: Sequence[str]) -> float | dict[str, float]:
    """Read one price for all machines, ``0.97``, or that of a zone or type, ``us-west-2a=0.97``.

    Raises:
        ProblemError: One has no number, or one price is for all zones and there are others.
    """
    flag = option(field)
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        found[name] = _number(value, text, f"{flag} must be a price or such as us-west-2a=0.97")
    if "" in found and len(given) > 1:
        raise ProblemError(f"{flag} must be one price for all zones, or ZONE=DOLLARS of each")
    return found.get("", found)


def machine_speeds(given: Iterable[str]) -> dict[str, float | str]:
    """Read speeds of machines, or their plans' files: ``p2.xlarge=0.2``, several times.

    Raises:
        ProblemError: One has no equals sign, or nothing on a side of it.
    """
    found: dict[str, float | str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ProblemError(
                f"{option('machine_speeds')} must be such as p2.xlarge=0.2 or p2.xlarge=plan.json, "
                f"got {text[:60]!r}"
            )
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found


def memory_reserve(text: str | None) -> int | None:
    """Read bytes, such as ``2GiB``; None if nothing is given.

    Raises:
        ProblemError: It is not an amount of memory.
    """
    from ..cluster import parse_memory

    if text is None or text == "0":
        return None if text is None else 0
    found = parse_memory(text)
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
