"""Write plain values as YAML that every YAML 1.1 and 1.2 reader gives back exactly."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = "str | int | bool | Mapping[str, Value] | Sequence[Value]"

# A word that no version of YAML takes for a number, a date, a boolean or null.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_PLAIN = re.compile("y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
# Lines that stand in a block as they are: printable ASCII, none beginning with a blank or ending
# with one.
_LINES = re.compile(r"(?:(?:[!-~](?:[ -~]*[!-~])?)(?:\n(?: *[!-~](?:[ -~]*[!-~])?)?)*)\n")
_SHORT = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


def yaml_text(*documents: Value) -> str:
    """Write documents, separated by ``---``."""
    return "---\n".join("\n".join(_lines(document, "")) + "\n" for document in documents)


def _lines(value: Value, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", entry, indent)
    elif not isinstance(value, str) and isinstance(value, Sequence) and value:
        for entry in value:
            yield from _item(entry, indent)
    else:
        yield indent + _scalar(value)


def _item(value: Value, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        first, *others = _lines(value, indent + "  ")
        yield f"{indent}- {first[len(indent) + 2 :]}"
        yield from others
    else:
        yield from _entry(f"{indent}-", value, indent)


def _entry(head: str, value: Value, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        yield from _lines(value, indent + "  ")
    elif isinstance(value, str) and _LINES.fullmatch(value) and not value.endswith("\n\n"):
        yield f"{head} |"
        for line in value[:-1].split("\n"):
            yield f"{indent}  {line}" if line else ""
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{}"
    if not isinstance(value, str):
        return "[]"
    if _PLAIN.fullmatch(value) and not _NOT_PLAIN.fullmatch(value):
        return value
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
