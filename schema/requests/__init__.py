"""What a user may ask for: one record a verb, from which both doors are made."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module

_ROOMS = ("allocate",)


def all_requests() -> Iterator[type]:
    """Yield the request records of all verbs."""
    for room in _ROOMS:
        for name, found in vars(import_module(f".{room}", __package__)).items():
            if name.endswith("Request") and is_dataclass(found):
                yield found  # type: ignore[misc]
