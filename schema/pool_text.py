"""Pools as cluster tools spell them, in the grammar of ``Cluster.parse``.

Slurm writes ``gpu:v100:2``, ``gres/gpu:v100=2`` or ``gpu:nvidia_a100-sxm4-80gb:4``, drivers
``Tesla V100-SXM2-16GB``, Kubernetes ``Tesla-V100-SXM2-16GB``, and ``nvidia-smi -L`` a line a GPU.
"""

import re
from collections import Counter

from .device_naming import device_type_name
from .errors import ProblemError

_LISTED = re.compile(r"^GPU \d+: (?P<name>.+?)(?: \(UUID: [^)]*\))?$", re.MULTILINE)
_SLURM = re.compile(r"^(?:gres[/:])?gpu[:/](?P<rest>.*?)(?:\([^)]*\))?$")
_DRIVER = (
    r"^(?:(?P<times>\d+)\s*[xX*]\s*)?"
    r"(?P<name>(?:NVIDIA|Tesla|GeForce|Quadro|AMD)(?:[ _-][\w.+/-]+)+)"
    r"(?:\s*[:=]\s*(?P<count>\d+))?$"
)
_MEMORY = re.compile(r"(?<![\w.])(\d+)\s?GB\b", re.IGNORECASE)


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
    """Rewrite entries that name devices as Slurm or their driver does; leave others as they are."""
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
    memory = _MEMORY.search(name.replace("-", " "))
    return f"{device_type_name(name)}:{number}" + (f":{memory[1]}GB" if memory else "")
