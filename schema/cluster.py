"""Cluster: servers, devices, links and prices; and the ``--gpus`` grammar."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from .errors import ProblemError
from .records import (
    Count,
    PositiveBytes,
    PositiveDollars,
    PositiveRate,
    nearest,
    record,
    register_keys,
)

_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NAME = r"[A-Za-z][\w.+-]*(?::[A-Za-z][\w.+-]*)?"
_MEMORY = r"\d+(?:\.\d+)?[KMGT]i?B"
_ITEM = re.compile(
    rf"^(?:(?P<times>\d+)[xX*])?(?P<name>{_NAME})(?::(?P<count>\d+))?(?::(?P<memory>{_MEMORY}))?$"
)
_SERVERS = re.compile(r"^(?P<times>\d+)[xX*]\((?P<inside>[^()]*)\)$")
MAX_DEVICES = 1_000_000  # in a pool; far above what exists, far below what overflows
_GRAMMAR_HINT = "write for example 2xV100,8xP100, V100:2, V100:2:16GB or 4x(4xV100)"


@record
class DeviceType:
    """What one device of a type has and costs. Unknown is None."""

    memory_bytes: PositiveBytes | None = None
    dollars_per_hour: PositiveDollars | None = None


@record
class ServerGroup:
    """``count`` equal servers, each holding ``devices`` (type -> number)."""

    count: Count
    devices: dict[str, Count]
    intra_bytes_per_second: PositiveRate | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProblemError("a server must hold at least one device")


@record
class Cluster:
    """The whole truth about a pool. A flat pool is one server with every device."""

    schema: Literal["hetflow.cluster/1"] = "hetflow.cluster/1"
    device_types: dict[str, DeviceType]
    servers: tuple[ServerGroup, ...]
    inter_bytes_per_second: PositiveRate | None = None

    def __post_init__(self) -> None:
        if not self.servers:
            raise ProblemError("servers must hold at least one group")
        for index, group in enumerate(self.servers):
            for name in group.devices:
                if name not in self.device_types:
                    guess = nearest(name, list(self.device_types))
                    fix = f"; did you mean {guess!r}?" if guess else ""
                    raise ProblemError(
                        f"servers[{index}].devices: {name!r} is not in device_types{fix}"
                    )
        total = sum(self.num_devices.values())
        if total > MAX_DEVICES:
            raise ProblemError(f"the pool has {total} devices; at most {MAX_DEVICES}")

    @property
    def num_devices(self) -> dict[str, int]:
        """Devices of each type over all servers, types in order of first appearance."""
        total: Counter[str] = Counter()
        for group in self.servers:
            for name, number in group.devices.items():
                total[name] += group.count * number
        return dict(total)

    @property
    def num_servers(self) -> int:
        """Servers in all groups."""
        return sum(group.count for group in self.servers)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...] | None:
        """Devices of each type on each server that has it [types][servers].

        None for a flat pool, which has no servers to speak of.
        """
        if self.num_servers == 1:
            return None
        return tuple(
            tuple(
                group.devices[name]
                for group in self.servers
                for _ in range(group.count if name in group.devices else 0)
            )
            for name in self.num_devices
        )

    def shares_servers(self, device_type: str) -> bool:
        """Whether a server that holds this type holds several devices, of whatever types."""
        return any(
            device_type in group.devices and sum(group.devices.values()) > 1
            for group in self.servers
        )

    def spelled_as(self, known: Iterable[str]) -> "Cluster":
        """The same pool, each device type spelled as the one known name that differs in case."""
        names = list(dict.fromkeys(known))
        spelling = {}
        for name in self.device_types:
            same = [other for other in names if other.lower() == name.lower()]
            spelling[name] = same[0] if name not in names and len(same) == 1 else name
        if len(set(spelling.values())) < len(spelling):
            return self  # the pool itself tells v100 from V100
        return Cluster(
            device_types={spelling[name]: kind for name, kind in self.device_types.items()},
            servers=tuple(
                ServerGroup(
                    count=group.count,
                    devices={spelling[name]: n for name, n in group.devices.items()},
                    intra_bytes_per_second=group.intra_bytes_per_second,
                )
                for group in self.servers
            ),
            inter_bytes_per_second=self.inter_bytes_per_second,
        )

    @property
    def server_numbers(self) -> tuple[tuple[int, ...], ...] | None:
        """The number of the server that each entry of ``sizes`` is on [types][servers]."""
        if self.num_servers == 1:
            return None
        each = [group.devices for group in self.servers for _ in range(group.count)]
        return tuple(
            tuple(number for number, devices in enumerate(each) if name in devices)
            for name in self.num_devices
        )

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Read a ``--gpus`` specification.

        ``2xV100,8xP100`` is a flat pool; ``V100:2`` and ``V100:2:16GB`` are the same pool in
        other spellings, the last with a memory; ``4x(4xV100)`` is four servers. A device name
        may hold one colon followed by a letter (``cpu:slow``).

        Raises:
            ProblemError: The text does not follow the grammar, or a count is zero.
        """
        types: dict[str, DeviceType] = {}
        flat: Counter[str] = Counter()
        servers: list[ServerGroup] = []
        for part in _split_outside_brackets(text):
            match = _SERVERS.match(part)
            if match:
                inside: Counter[str] = Counter()
                for item in match["inside"].split(","):
                    _add_item(item.strip(), text, types, inside)
                servers.append(
                    ServerGroup(count=_positive(match["times"], part), devices=dict(inside))
                )
            else:
                _add_item(part, text, types, flat)
        if flat:
            servers.insert(0, ServerGroup(count=1, devices=dict(flat)))
        return cls(device_types=types, servers=tuple(servers))


def is_device_type(text: str) -> bool:
    """Whether a text can name one device type in ``--gpus``."""
    return re.fullmatch(_NAME, text) is not None


def parse_memory(text: str) -> int | None:
    """Bytes of ``16GB`` (or KB, MB, TB; powers of 1024); None where the text is no amount.

    Raises:
        ProblemError: It is less than one byte.
    """
    return _bytes_of(text) if re.fullmatch(_MEMORY, text) else None


def _split_outside_brackets(text: str) -> list[str]:
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", text)]
    if not all(parts):
        raise ProblemError(f"--gpus {text!r}: an entry is empty", hint=_GRAMMAR_HINT)
    return parts


def _add_item(item: str, text: str, types: dict[str, DeviceType], into: Counter[str]) -> None:
    match = _ITEM.match(item)
    if not match or (match["times"] and match["count"]):
        raise ProblemError(f"--gpus {text!r}: cannot read {item!r}", hint=_GRAMMAR_HINT)
    memory = _bytes_of(match["memory"])
    known = types.get(match["name"])
    if known and memory and known.memory_bytes not in (None, memory):
        raise ProblemError(
            f"--gpus {text!r}: {match['name']} is given two memories; name them apart"
        )
    if memory or not known:
        types[match["name"]] = DeviceType(memory_bytes=memory)
    into[match["name"]] += _positive(match["times"] or match["count"] or "1", item)


def _positive(text: str, item: str) -> int:
    number = int(text) if len(text) <= len(str(MAX_DEVICES)) + 1 else MAX_DEVICES + 1
    if number > MAX_DEVICES:
        raise ProblemError(f"{item[:60]!r}: at most {MAX_DEVICES} devices make a pool")
    if number < 1:
        raise ProblemError(f"{item!r}: a count must be at least 1", hint="leave the entry out")
    return number


def _bytes_of(text: str | None) -> int | None:
    if not text:
        return None
    digits, unit = re.fullmatch(r"([\d.]+)([KMGT])i?B", text).groups()  # type: ignore[union-attr]
    size = int(float(digits) * _SIZE_UNITS[unit])
    if size < 1:
        raise ProblemError(f"{text!r}: a memory must be at least one byte")
    return size


register_keys(DeviceType, ServerGroup, Cluster)
