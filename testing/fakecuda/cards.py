"""The GPUs that the software device can pose as, and the machine that the environment asks for.

``FAKECUDA=V100,V100:64MiB,A100/2`` is a machine of two V100 (one of 64 MiB) and an A100 cut into
two MIG slices.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 1 << 30
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
_ITEM = re.compile(r"(?P<card>[^:/]+)(?::(?P<size>\d+)(?P<unit>[KMG]iB)?)?(?:/(?P<slices>\d+))?")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as its driver names it. ``spec`` is its row in hetflow's table of devices."""

    name: str
    spec: str
    capability: tuple[int, int]
    num_multiprocessors: int
    memory_bytes: int
    pci_bus_id: int = 0
    uuid: str = ""


# Names and figures as in NVIDIA's and AMD's data sheets; memory as sold.
CARDS = {
    "P100": Card("Tesla P100-PCIE-16GB", "P100-PCIE-16GB", (6, 0), 56, 16 * GIB),
    "V100": Card("Tesla V100-SXM2-16GB", "V100-SXM2-16GB", (7, 0), 80, 16 * GIB),
    "T4": Card("Tesla T4", "T4-16GB", (7, 5), 40, 16 * GIB),
    "QuadroRTX6000": Card("Quadro RTX 6000", "QuadroRTX6000-24GB", (7, 5), 72, 24 * GIB),
    "RTX2080Ti": Card("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti-11GB", (7, 5), 68, 11 * GIB),
    "A100": Card("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", (8, 0), 108, 40 * GIB),
    "A40": Card("NVIDIA A40", "A40-48GB", (8, 6), 84, 48 * GIB),
    "A6000": Card("NVIDIA RTX A6000", "RTX-A6000-48GB", (8, 6), 84, 48 * GIB),
    "RTX3090": Card("NVIDIA GeForce RTX 3090", "RTX-3090-24GB", (8, 6), 82, 24 * GIB),
    "L4": Card("NVIDIA L4", "L4-24GB", (8, 9), 58, 24 * GIB),
    "L40S": Card("NVIDIA L40S", "L40S-48GB", (8, 9), 142, 48 * GIB),
    "RTX4090": Card("NVIDIA GeForce RTX 4090", "RTX-4090-24GB", (8, 9), 128, 24 * GIB),
    "RTX6000Ada": Card("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada-48GB", (8, 9), 142, 48 * GIB),
    "H100": Card("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB", (9, 0), 132, 80 * GIB),
    "H100PCIe": Card("NVIDIA H100 PCIe", "H100-PCIE-80GB", (9, 0), 114, 80 * GIB),
    "H200": Card("NVIDIA H200", "H200-SXM5-141GB", (9, 0), 132, 131 * GIB),
    "B200": Card("NVIDIA B200", "B200-SXM6-180GB", (10, 0), 148, 167 * GIB),
    "RTX5090": Card("NVIDIA GeForce RTX 5090", "RTX-5090-32GB", (12, 0), 170, 32 * GIB),
    "MI210": Card("AMD Instinct MI210", "MI210-64GB", (9, 0), 104, 64 * GIB),
    "MI250X": Card("AMD Instinct MI250X", "MI250X-64GB", (9, 0), 110, 64 * GIB),
    "MI300X": Card("AMD Instinct MI300X", "MI300X-192GB", (9, 4), 304, 192 * GIB),
}


def machine(environment: Mapping[str, str] = os.environ) -> list[Card]:
    """The devices of this host, of which a process may see some."""
    found: list[Card] = []
    host = environment.get("FAKECUDA_HOST", "host")
    for bus, item in enumerate(filter(None, environment.get("FAKECUDA", "V100").split(",")), 1):
        match = _ITEM.fullmatch(item.strip())
        if match is None or match["card"] not in CARDS:
            raise ValueError(f"FAKECUDA: {item!r} is no card; there are {', '.join(CARDS)}")
        card = CARDS[match["card"]]
        if match["size"]:
            card = replace(card, memory_bytes=int(match["size"]) * _UNITS[match["unit"] or ""])
        slices = int(match["slices"] or 0)
        for number in range(slices or 1):
            kind = "MIG" if slices else "GPU"
            made = replace(card, pci_bus_id=bus, uuid=f"{kind}-{host}-{bus}-{number}")
            if slices:
                size = card.memory_bytes // slices
                made = replace(made, memory_bytes=size, name=f"{card.name} MIG 1/{slices}")
            found.append(made)
    return found


def beside_tensors(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Bytes of a context, of a communicator, and of the segments in which tensors' memory comes."""
    said = environment.get("FAKECUDA_BESIDE_TENSORS")
    sizes = [re.fullmatch(r"(\d+)([KMG]iB)?", part) for part in (said or "0,0,1").split(",")]
    if len(sizes) != 3 or None in sizes:
        raise ValueError(f"FAKECUDA_BESIDE_TENSORS: {said!r}; write for example 300MiB,40MiB,2MiB")
    context, communicator, segment = (int(m[1]) * _UNITS[m[2] or ""] for m in sizes if m)
    return context, communicator, segment


def visible(environment: Mapping[str, str] = os.environ) -> list[Card]:
    """The devices that a process with this environment sees, in order.

    CUDA takes numbers, UUIDs and their beginnings, and stops at the first that is none. ROCm has a
    variable of its own, which comes before CUDA's.
    """
    cards = machine(environment)
    names = ["CUDA_VISIBLE_DEVICES"]
    if environment.get("FAKECUDA_PLATFORM") == "rocm":
        cards = _chosen(cards, environment.get("ROCR_VISIBLE_DEVICES"))
        names.insert(0, "HIP_VISIBLE_DEVICES")
    return _chosen(cards, next((environment[name] for name in names if name in environment), None))


def _chosen(cards: list[Card], said: str | None) -> list[Card]:
    if said is None:
        return cards
    found: list[Card] = []
    for item in (part.strip() for part in said.split(",")):
        if item.isdecimal():
            fitting = cards[int(item) : int(item) + 1]
        else:
            fitting = [card for card in cards if item and card.uuid.startswith(item)]
        if len(fitting) != 1:
            break
        found += fitting
    return found
