"""Cluster: servers, devices, links and prices; and the grammar of ``--gpus``."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from .errors import ProblemError
from .frames import Rows, Shown, fields_table, listed
from .options import option
from .records import Count, Name, PositiveBytes, PositiveDollars, PositiveRate, Seconds, record
from .spelling import did_you_mean

# The names of GPU types: from what their drivers call them, and what tells unlike GPUs apart.
#
# A type's name is short, and the same on every host. Vendors give one name to unlike chips; where
# that is known, the word that tells them apart is kept. Where GPUs on one host still share a name,
# what differs (capability, multiprocessors, memory) is added to it.


_VENDOR_WORDS = {"nvidia", "amd", "geforce", "tesla", "quadro", "graphics", "radeon", "instinct"}
_LEFT_OUT = re.compile(
    r"^(sxm\d*|pcie|hbm\d*e?|generation|gpu|\d+(\.\d+)?[gt]i?b)$",
    re.IGNORECASE,
)
_SPELLED = {
    "ti": "Ti", "super": "SUPER", "ada": "Ada", "laptop": "Laptop", "max-q": "MaxQ", "nvl": "NVL",
}  # fmt: skip
# From Hopper on, cards and modules of one name are unlike: the H100 PCIe has 114 of 132 units.
_UNLIKE_BY_FORM = re.compile(r"^G?[HB]\d{3}", re.IGNORECASE)
_DISTINCTION = re.compile(r"(Ada|Laptop|MaxQ|NVL|-?PCIe)$|-(sm\d+|\d+SM|\d+GB|SXM)$")
_FORM = re.compile(r"\b(PCIe|SXM)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What a driver says of a GPU. ``capability`` is the generation's, such as (8, 0)."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    memory_bytes: int

    @property
    def distinctions(self) -> tuple[str, str, str, str]:
        """What may be added to a name, in the order in which it is tried."""
        major, minor = self.capability
        gib = math.ceil(self.memory_bytes / 2**30)
        form = _FORM.search(self.name)
        how = "" if form is None else "-PCIe" if form[1].lower() == "pcie" else "-SXM"
        return f"-sm{major}{minor}", f"-{self.num_multiprocessors}SM", f"-{gib}GB", how


def device_type_name(name: str) -> str:
    """The type name of a device as its driver names it.

    ``Tesla V100-SXM2-16GB`` is ``V100``, ``NVIDIA GeForce RTX 2080 Ti`` is ``RTX2080Ti``,
    ``NVIDIA H200`` is ``H200``: vendor, form factor and memory are left out, the rest is joined.
    ``NVIDIA RTX 6000 Ada Generation`` is ``RTX6000Ada``, as the Quadro RTX 6000 is another chip.
    """
    # ROCm's name of one chip is "MI250X / MI250", or without blanks; parts of a chip are "1/2".
    name = re.split(r"\s*/\s*(?=[A-Za-z])", name)[0]
    words = [word for part in name.split() for word in re.split(r"-(?!Q\b)", part) if word]
    kept = [
        _SPELLED.get(word.lower(), word)
        for word in words
        if word.lower() not in _VENDOR_WORDS and not _LEFT_OUT.match(word)
    ]
    joined = re.sub(r"[^\w.+-]", "", "".join(kept))
    if _UNLIKE_BY_FORM.match(joined) and "pcie" in map(str.lower, words):
        joined += "PCIe"
    return joined if joined and joined[0].isalpha() else f"GPU{joined}"


def device_type_names(gpus: Sequence[GpuFacts]) -> list[str]:
    """The type name of each GPU of a host, in order: unlike GPUs have unlike names."""
    alike: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for gpu in gpus:
        alike[device_type_name(gpu.name)].add(gpu.distinctions)
    return [_told_apart(gpu, alike[device_type_name(gpu.name)]) for gpu in gpus]


def _told_apart(gpu: GpuFacts, among: set[tuple[str, ...]]) -> str:
    name = device_type_name(gpu.name)
    for index, own in enumerate(gpu.distinctions):
        if len(among) == 1:
            break
        if len({other[index] for other in among}) > 1:
            name += own
            among = {other for other in among if other[index] == own}
    return name


def former_name(device_type: str) -> str:
    """What a type was called before such words were kept: ``RTX6000`` for ``RTX6000Ada``."""
    name = device_type
    while found := _DISTINCTION.search(name):
        name = name[: found.start()]
    return name if name and name != "GPU" else device_type


def is_former_name(old: str, device_type: str, driver_name: str | None = None) -> bool:
    """Whether a file that says ``old`` means this type.

    Args:
        old: The type in the file.
        device_type: A type by today's names.
        driver_name: What the driver called the file's device, where the file says so.
    """
    if old.lower() == device_type.lower() or old.lower() != former_name(device_type).lower():
        return False
    if driver_name is None:
        return True
    today = device_type_name(driver_name)
    return device_type == today or device_type.startswith(f"{today}-")


Level = Literal["server", "rack", "zone", "pool"]
"""The smallest part of a pool that holds two devices, whose link joins them."""

_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NAME = r"[A-Za-z][\w.+-]*(?::[A-Za-z][\w.+-]*)?"
_MEMORY = r"\d+(?:\.\d+)?[KMGT]i?B"
_ITEM = re.compile(
    rf"^(?:(?P<times>\d+)[xX*])?(?P<name>{_NAME})(?::(?P<count>\d+))?(?::(?P<memory>{_MEMORY}))?$"
)
_SERVERS = re.compile(r"^(?P<times>\d+)[xX*]\((?P<inside>[^()]*)\)$")
_LISTED = re.compile(r"^GPU \d+: (?P<name>.+?)(?: \(UUID: [^)]*\))?$", re.MULTILINE)
_SLURM = re.compile(r"^(?:gres[/:])?gpu[:/](?P<rest>.*?)(?:\([^)]*\))?$")
_DRIVER = (
    r"^(?:(?P<times>\d+)\s*[xX*]\s*)?"
    r"(?P<name>(?:NVIDIA|Tesla|GeForce|Quadro|AMD)(?:[ _-][\w.+/-]+)+)"
    r"(?:\s*[:=]\s*(?P<count>\d+))?$"
)
_GIGABYTES = re.compile(r"(?<![\w.])(\d+)\s?GB\b", re.IGNORECASE)
MAX_DEVICES = 1_000_000  # in a pool; larger than any real pool, and safe from overflow
_GRAMMAR_HINT = "write for example 2xV100,8xP100, V100:2, V100:2:16GB or 4x(4xV100)"


@record
class DeviceType:
    """Memory, links and price of one device of a type; None if unknown."""

    memory_bytes: PositiveBytes | None = None
    dollars_per_hour: PositiveDollars | None = None


@record
class ServerGroup:
    """``count`` equal servers of one rack and zone, each with ``devices`` (type -> number).

    Groups that name the same ``rack`` of the same ``zone`` share it. Without a name, each group's
    servers are joined to all others by the next level's link.

    ``host_memory_bytes`` of each server's own memory are free for activations that its devices
    offload; None takes those of the host that was profiled.
    """

    count: Count
    devices: dict[str, Count]
    intra_bytes_per_second: PositiveRate | None = None
    host_memory_bytes: PositiveBytes | None = None
    rack: Name | None = None
    zone: Name | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProblemError("a server must hold at least one device")


@record
class Link:
    """The links of a ``level``, or an exception for the pair of types that they are ``between``.

    Without a level, an exception holds at every level.
    """

    bytes_per_second: PositiveRate
    latency_seconds: Seconds = 0.0
    level: Level | None = None
    between: tuple[Name, Name] | None = None

    def __post_init__(self) -> None:
        if self.level is None and self.between is None:
            raise ProblemError("a link needs a level, a pair of device types (between), or both")


@record
class Cluster(Shown):
    """A complete description of a pool. A flat pool is one server that holds every device.

    Of the ``links`` that hold for two devices the most special one counts (``link``). Levels above
    the server that none states have ``inter_bytes_per_second``. Files of ``hetflow.cluster/1``
    have no ``links``, racks or zones.

    Example:
        >>> import hetflow
        >>> hetflow.Cluster.parse("2xV100:16GB,8xP100").num_devices
        {'V100': 2, 'P100': 8}
    """

    schema: Literal["hetflow.cluster/1", "hetflow.cluster/2"] = "hetflow.cluster/1"
    device_types: dict[str, DeviceType]
    servers: tuple[ServerGroup, ...]
    inter_bytes_per_second: PositiveRate | None = None
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.servers:
            raise ProblemError("servers must hold at least one group")
        _check_links(self)
        for index, group in enumerate(self.servers):
            for name in group.devices:
                if name not in self.device_types:
                    raise ProblemError(
                        f"servers[{index}].devices: {name!r} is not in device_types"
                        + did_you_mean(name, self.device_types, before="; ")
                    )
        total = sum(self.num_devices.values())
        if total > MAX_DEVICES:
            raise ProblemError(f"the pool has {total} devices; at most {MAX_DEVICES}")

    @property
    def title(self) -> str:
        """The number of devices of each type, and of servers."""
        servers = f" on {self.num_servers} servers" if self.num_servers > 1 else ""
        return f"{listed(self.num_devices)}{servers}"

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each device type."""
        columns, kinds = fields_table(self.device_types.values(), DeviceType)
        rows = [
            {"device_type": name, "num_devices": self.num_devices.get(name, 0), **kind}
            for name, kind in zip(self.device_types, kinds, strict=True)
        ]
        return ["device_type", "num_devices", *columns], rows

    @property
    def num_devices(self) -> dict[str, int]:
        """Device type -> number over all servers, in order of first appearance."""
        total: Counter[str] = Counter()
        for group in self.servers:
            for name, number in group.devices.items():
                total[name] += group.count * number
        return dict(total)

    @property
    def num_servers(self) -> int:
        """Number of servers in all groups."""
        return sum(group.count for group in self.servers)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...] | None:
        """Number of devices of each type on each server that has it [types][servers].

        None for a flat pool, whose servers are not described.
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

    @property
    def dollars_per_hour(self) -> dict[str, float]:
        """The price of a device of each type that has one."""
        prices = {name: kind.dollars_per_hour for name, kind in self.device_types.items()}
        return {name: dollars for name, dollars in prices.items() if dollars}

    def common_width(self, device_type: str) -> int:
        """Devices of a type per server that has it; the greatest common divisor if unlike."""
        return gcd(*(g.devices[device_type] for g in self.servers if device_type in g.devices))

    def level(self, one: ServerGroup, other: ServerGroup) -> Level:
        """The smallest part of the pool that holds two servers, of these groups."""
        if one.zone != other.zone:
            return "pool"
        if one.rack is not None and one.rack == other.rack:
            return "rack"
        return "pool" if one.zone is None else "zone"

    def link(
        self, level: Level, types: tuple[str, str], server: ServerGroup | None = None
    ) -> Link | None:
        """The stated link between devices of two types that a level joins; None if none is.

        A link of the pair and the level comes first, then one of the pair, the server's own rate,
        one of the level, and between servers ``inter_bytes_per_second``.

        Args:
            level: That joins them.
            types: Of the two devices.
            server: At level ``server``, which one.
        """
        pairs = [link for link in self.links if link.between in (types, types[::-1])]
        exceptions = [link for link in pairs if link.level == level]
        exceptions += [link for link in pairs if link.level is None]
        if exceptions:
            return exceptions[0]
        own = None if server is None else server.intra_bytes_per_second
        if own is not None:
            return Link(level=level, bytes_per_second=own)
        for link in self.links:
            if link.level == level and link.between is None:
                return link
        rate = self.inter_bytes_per_second
        return Link(level=level, bytes_per_second=rate) if rate and level != "server" else None

    def shares_servers(self, device_type: str) -> bool:
        """Whether some server with this type has several devices, of any types."""
        return any(
            device_type in group.devices and sum(group.devices.values()) > 1
            for group in self.servers
        )

    def spelled_as(self, known: Iterable[str]) -> "Cluster":
        """Return the pool with each device type spelled like a known name that differs in case."""
        names = list(dict.fromkeys(known))
        spelling = {}
        for name in self.device_types:
            same = [other for other in names if other.lower() == name.lower()]
            spelling[name] = same[0] if name not in names and len(same) == 1 else name
        if len(set(spelling.values())) < len(spelling):
            return self  # the pool has both v100 and V100
        return replace(
            self,
            device_types={spelling[name]: kind for name, kind in self.device_types.items()},
            servers=tuple(
                replace(group, devices={spelling[name]: n for name, n in group.devices.items()})
                for group in self.servers
            ),
            links=tuple(
                link
                if link.between is None
                else replace(link, between=(spelling[link.between[0]], spelling[link.between[1]]))
                for link in self.links
            ),
        )

    def hourly_dollars(self, devices: Mapping[str, int]) -> float | None:
        """Return what so many devices of each type cost per hour; None if a price is unknown."""
        kinds = self.spelled_as(devices).device_types
        total = 0.0
        for name, number in devices.items():
            price = kinds[name].dollars_per_hour if name in kinds else None
            if price is None:
                return None
            total += price * number
        return total

    @property
    def server_numbers(self) -> tuple[tuple[int, ...], ...] | None:
        """Number of the server that each entry of ``sizes`` belongs to [types][servers]."""
        if self.num_servers == 1:
            return None
        each = [group.devices for group in self.servers for _ in range(group.count)]
        return tuple(
            tuple(number for number, devices in enumerate(each) if name in devices)
            for name in self.num_devices
        )

    @classmethod
    def of(cls, num_devices: Mapping[str, int]) -> "Cluster":
        """Return a flat pool of so many devices of each type."""
        if not num_devices:
            raise ProblemError("a pool must hold at least one device")
        return cls(
            device_types={name: DeviceType() for name in num_devices},
            servers=(ServerGroup(count=1, devices=dict(num_devices)),),
        )

    @classmethod
    def parse(cls, text: str, *, field: str = "pool") -> "Cluster":
        """Parse the text of a pool.

        ``2xV100,8xP100`` is a flat pool. ``2xV100`` may also be written ``V100:2``, or with the
        device's memory ``V100:2:16GB``. ``4x(4xV100)`` is four servers. A device name may contain
        one colon followed by a letter (``cpu:slow``). Entries may also be spelled as
        Slurm and drivers do (``gpu:v100:2``, ``Tesla V100-SXM2-16GB:2``), and the text may be
        what ``nvidia-smi -L`` printed.

        Args:
            text: The specification.
            field: The option that it was given by, for errors.

        Raises:
            ProblemError: The text does not follow the grammar, or a count is zero.
        """
        if not isinstance(text, str):
            raise ProblemError(f"text must be a string, got {text!r}")
        types: dict[str, DeviceType] = {}
        flat: Counter[str] = Counter()
        servers: list[ServerGroup] = []
        named = option(field, repr(text))
        for part in _split_outside_brackets(pool_text(text), named):
            match = _SERVERS.match(part)
            if match:
                inside: Counter[str] = Counter()
                for item in match["inside"].split(","):
                    _add_item(item.strip(), named, types, inside)
                servers.append(
                    ServerGroup(count=_positive(match["times"], part), devices=dict(inside))
                )
            else:
                _add_item(part, named, types, flat)
        if flat:
            servers.insert(0, ServerGroup(count=1, devices=dict(flat)))
        return cls(device_types=types, servers=tuple(servers))


def _check_links(pool: Cluster) -> None:
    """Refuse links that contradict each other, of unknown types, or in a file before /2."""
    named = [group for group in pool.servers if group.rack or group.zone]
    if pool.schema == "hetflow.cluster/1" and (pool.links or named):
        raise ProblemError("links, racks and zones need a newer schema; state hetflow.cluster/2")
    seen = set()
    for number, link in enumerate(pool.links):
        key = link.level, link.between and frozenset(link.between)
        if key in seen:
            raise ProblemError(f"links[{number}]: a second one for the same devices; keep one")
        seen.add(key)
        for name in link.between or ():
            if name not in pool.device_types:
                raise ProblemError(f"links[{number}].between: {name!r} is not in device_types")


def is_device_type(text: str) -> bool:
    """Whether a text is a valid name of one device type in ``--gpus``."""
    return re.fullmatch(_NAME, text) is not None


def parse_memory(text: str) -> int | None:
    """Parse ``16GB`` (or KB, MB, TB; powers of 1024) into bytes; None if it is not an amount.

    Raises:
        ProblemError: The amount is less than one byte.
    """
    return _bytes_of(text) if re.fullmatch(_MEMORY, text) else None


def _split_outside_brackets(text: str, named: str) -> list[str]:
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", text)]
    if not all(parts):
        raise ProblemError(f"{named}: an entry is empty", hint=_GRAMMAR_HINT)
    return parts


def _add_item(item: str, named: str, types: dict[str, DeviceType], into: Counter[str]) -> None:
    match = _ITEM.match(item)
    if not match or (match["times"] and match["count"]):
        raise ProblemError(f"{named}: cannot read {item!r}", hint=_GRAMMAR_HINT)
    memory = _bytes_of(match["memory"])
    known = types.get(match["name"])
    if known and memory and known.memory_bytes not in (None, memory):
        raise ProblemError(f"{named}: {match['name']} is given two memories; name them apart")
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


def is_listing(text: str) -> bool:
    """Whether a text is what ``nvidia-smi -L`` prints."""
    return _LISTED.match(text.lstrip()) is not None


def listed_pool(text: str) -> str:
    """Turn what ``nvidia-smi -L`` printed, on one host or on several, into ``--gpus`` text.

    Raises:
        ProblemError: A GPU is cut into MIG devices, which are no devices to plan for.
    """
    if re.search(r"^\s+MIG ", text, re.MULTILINE):
        raise ProblemError(
            "the list of `nvidia-smi -L` has MIG devices, parts of one GPU",
            hint="name the devices to plan for, such as 2xA100",
        )
    counted = Counter(match["name"] for match in _LISTED.finditer(text))
    return ",".join(_spelled(name, number) for name, number in counted.items())


def pool_text(text: str) -> str:
    """Rewrite entries that name devices as Slurm or their driver does; leave others as they are.

    Slurm writes ``gpu:v100:2``, ``gres/gpu:v100=2`` or ``gpu:nvidia_a100-sxm4-80gb:4``, drivers
    ``Tesla V100-SXM2-16GB``, Kubernetes ``Tesla-V100-SXM2-16GB``.
    """
    if is_listing(text):
        return listed_pool(text)
    return re.sub(r"[^,()]+(?:\(S:[^()]*\))?", _entry, text)


def _entry(match: re.Match[str]) -> str:
    entry = match[0].strip()
    slurm = _SLURM.match(entry)
    if slurm is not None:
        entry = slurm["rest"].replace("=", ":")
        if entry.isdecimal():
            raise ProblemError(
                f"{match[0].strip()!r} does not say of which type the GPUs are",
                hint="add it, such as gpu:v100:2",
            )
    driver = re.match(_DRIVER, entry, re.IGNORECASE if slurm else 0)
    if driver is None:
        return match[0] if slurm is None else entry
    return _spelled(driver["name"], int(driver["times"] or driver["count"] or 1))


def _spelled(name: str, number: int) -> str:
    name = name.replace("_", " ")
    memory = _GIGABYTES.search(name.replace("-", " "))
    return f"{device_type_name(name)}:{number}" + (f":{memory[1]}GB" if memory else "")
