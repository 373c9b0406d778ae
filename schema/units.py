"""The units of a model by which shared states are gathered, as planners and runtime name them."""

import re

_REPEATED = re.compile(r"(.*?(?:^|[._])\d+)(?:[._]|$)")


def unit_of(name: str) -> str:
    """The repeated layer that a layer or module is in, by its name; empty for the rest.

    ``blocks.3.attention`` is in ``blocks.3``.
    """
    found = _REPEATED.match(name)
    return found[1] if found else ""
