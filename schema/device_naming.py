"""The names of GPU types: from what their drivers call them, and what tells unlike GPUs apart.

A type's name is short, and the same on every host. Vendors give one name to unlike chips; where
that is known, the word that tells them apart is kept. Where GPUs on one host still share a name,
what differs (capability, multiprocessors, memory) is added to it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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
