"""Ways to damage a file or a value, each drawn from a ``random.Random``: the seed fixes all."""

import json
import random
from typing import Any

HOSTILE_STRINGS = (
    "",
    " ",
    "\x00",
    "a\nb",
    "\x1b[31mred",
    "../../../etc/passwd",
    "/dev/full",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    "__import__('os').system('touch pwned')",
    "{0.__class__}",
    "%s%n%x",
    "V100" * 5000,
    "\u202eV100",
    "\ud83d\ude80",
    "NaN",
    "-1",
    "1e309",
    "0x10",
    "1_0",
    "٣",
    "none",
    "true",
    "[]",
    "{}",
    "-",
    "--help",
    "@file",
    "*",
    "C:\\\\x",
    "a,b",
    "2xV100,",
    "0xV100",
    "999999999999999999999xV100",
    "-2xV100",
    "2xV100,2xV100",
    "4x(4x(4xV100))",
    "4x(4xV100",
    "V100:2:16",
    "V100:2:16GB:9",
    "x",
    "::",
    "0:0",
)
HOSTILE_NUMBERS: tuple[Any, ...] = (
    0, -0.0, -1, 1, 2, 0.5, -0.1, 1e-320, 1e-30, 1e30, 1e300, 1.7e308, 2**31, 2**53 + 1, 2**63,
    2**64, 10**30, 10**400, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, [None], [[]], {"": None}, [[[[[]]]]], [1, "a"], {"a": {"a": 1}},
)  # fmt: skip
_JUNK = (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"{",
    b"]",
    b'"',
    b",",
    b"-",
    b"\n\n",
    b"\t",
    b"\\u",
)


def value(draw: random.Random) -> Any:
    """A value that no reader hopes for."""
    return draw.choice(draw.choice((HOSTILE_STRINGS, HOSTILE_NUMBERS, HOSTILE_VALUES)))


def option(draw: random.Random) -> str:
    """A hostile value for an option of the command line (which can hold no NUL)."""
    found = draw.choice((draw.choice(HOSTILE_STRINGS), str(draw.choice(HOSTILE_NUMBERS))))
    return found.replace("\x00", "?")


def damage(content: bytes, draw: random.Random) -> bytes:
    """The content of a file, damaged once to three times, as text or as the JSON it holds."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            content = _damage_lines(content, draw)
            continue
        if not isinstance(document, dict | list) or draw.random() < 0.15:
            content = _damage_bytes(content, draw)
        elif draw.random() < 0.4:
            content = _dumped(_change_a_number(document, draw))
        else:
            content = _dumped(_damage_document(document, draw))
    return content


def _dumped(document: Any) -> bytes:
    # What the document may hold by now (NaN, lone surrogates, 10**400) is what readers must bear.
    return json.dumps(document, indent=1).encode("utf-8", "surrogatepass")


def _damage_bytes(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    end = min(len(content), at + draw.choice((1, 1, 4, 64)))
    return draw.choice(
        (
            content[:at],  # truncated
            content[:at] + content[end:],
            content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            content[:at] + draw.choice(_JUNK) + content[at:],
            content[:at] + content[at:end] * draw.choice((2, 50)) + content[end:],
            content + content,
            b"",
            draw.choice(_JUNK) + content,
            b"[" * 100_000,
        )
    )


def _damage_lines(content: bytes, draw: random.Random) -> bytes:
    """Damage text in lines of fields, such as a trace or a graph."""
    lines = content.split(b"\n")
    at = draw.randrange(len(lines))
    how = draw.randrange(6)
    if how == 0:
        return _damage_bytes(content, draw)
    if how == 1:
        del lines[at]
    elif how == 2:
        lines.insert(draw.randrange(len(lines) + 1), lines[at])
    elif how == 3:
        draw.shuffle(lines)
    else:
        separator = draw.choice((b"\t", b" ", b",", b"=", b"--"))
        fields = lines[at].split(separator)
        field = draw.randrange(len(fields))
        if how == 4:
            fields[field] = str(value(draw)).encode("utf-8", "surrogatepass")
        else:
            del fields[field]
        lines[at] = separator.join(fields)
    return b"\n".join(lines)


def _damage_document(document: Any, draw: random.Random) -> Any:
    """Change one place of a JSON document, any place as likely."""
    places = list(_places(document))
    if not places:
        return value(draw)
    holder, key = draw.choice(places)
    how = draw.randrange(8)
    if how <= 2:
        holder[key] = value(draw)
    elif how == 3:
        del holder[key]
    elif how == 4:
        other, other_key = draw.choice(places)
        holder[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict)
                                            else other[other_key]))  # fmt: skip
    elif how == 5 and isinstance(holder, dict):
        name = draw.choice(HOSTILE_STRINGS)
        holder[name] = holder.pop(key)
    elif how == 5:
        holder.append(holder[key])
    elif how == 6 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = holder[key] * draw.choice((-1, 0, 0.5, 2, 1000, 1e-9, 1e12, 1e200))
    elif how == 7 and isinstance(holder, list):
        draw.shuffle(holder)
    else:
        holder[key] = [holder[key]]
    return document


def _change_a_number(document: Any, draw: random.Random) -> Any:
    """Give one number another value that its type allows: what a reader may well let through."""
    places = [
        (holder, key)
        for holder, key in _places(document)
        if isinstance(holder[key], int | float) and not isinstance(holder[key], bool)
    ]
    if places:
        holder, key = draw.choice(places)
        factor = draw.choice((0, 0.5, 2, 3, 10, 1000, 1e-3, 1e-9, 1e6, 1e12, 1e100, 1e300))
        if isinstance(holder[key], int):
            holder[key] = int(min(float(min(holder[key], 10**40)) * factor, 1e40))
        else:
            holder[key] = holder[key] * factor
    return document


def _places(node: Any) -> "list[tuple[Any, Any]]":
    found: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting:
        holder = waiting.pop()
        entries = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, entry in entries:
            found.append((holder, key))
            if isinstance(entry, dict | list):
                waiting.append(entry)
    return found
