"""What a user may ask for: one record a verb, from which both doors are made."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module

from ..options import asked_of

_ROOMS = ("solve", "simulate", "rent", "launch", "profile", "files", "cluster")


def flag_of(name: str, value: str | bool | None = None, first: type | None = None) -> str:
    """Spell an option as a flag.

    Args:
        name: The field of a request record.
        value: Its value, if it shall be named too.
        first: The record whose flag counts before those of others.
    """
    flag = _known_flag(name, first)
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return flag if value is None else f"{flag} {value}"


def _known_flag(name: str, first: type | None) -> str:
    for record in (*([] if first is None else [first]), *_all_requests()):
        for asked in asked_of(record):
            if asked.name == name:
                return "--gpus" if name == "pool" else asked.option.flag_of(name)
    return "--" + name.replace("_", "-")


def _all_requests() -> Iterator[type]:
    for room in _ROOMS:
        for name, found in vars(import_module(f".{room}", __package__)).items():
            if name.endswith("Request") and is_dataclass(found):
                yield found  # type: ignore[misc]
