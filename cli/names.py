"""Options whose values are names in a registry, plug-ins included."""

from collections.abc import Callable

import typer


def one_of(
    names: Callable[[], tuple[str, ...]], knows: Callable[[str], bool]
) -> Callable[..., str]:
    """A check of an option's value that looks names up when one is given, so that help is quick.

    Args:
        names: All names, for the error; loads no plug-in.
        knows: Whether a name can be taken; may load the plug-in that has it.
    """

    def check(value: str) -> str:
        if not knows(value):
            known = ", ".join(map(repr, names()))
            raise typer.BadParameter(f"{value!r} is not one of {known}.")
        return value

    return check
