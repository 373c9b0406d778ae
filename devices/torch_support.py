"""What torch can do: the oldest version that training runs on, and precision on unlike GPUs.

Planning needs no torch. Training does, and an older one fails late: under 2.4.1 all workers of a
launch wait in the store for minutes.
"""

import re
from collections.abc import Mapping
from importlib import metadata

from ..schema.errors import HetflowError

OLDEST = (2, 9)
"""The oldest on which training has run; pyproject.toml declares the same."""


def check_torch(version: str) -> None:
    """Refuse a torch that is too old.

    Raises:
        HetflowError: It is older than OLDEST.
    """
    if is_too_old(version):
        oldest = ".".join(map(str, OLDEST))
        raise HetflowError(
            f"torch {version} is too old: training needs {oldest} or newer",
            hint=f"pip install 'torch>={oldest}'",
        )


def check_installed_torch() -> None:
    """Check the torch that is installed, without importing it; none at all is another error's."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    check_torch(version)


def is_too_old(version: str) -> bool:
    """Whether a version is older than OLDEST; one that cannot be read is not."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST


# Number formats that GPUs of unlike generations do not share, and what settles it.
#
# bfloat16 and TF32 came with Ampere (capability 8.0). Torch emulates bfloat16 on older GPUs, which
# is slower than float16. Unless told, it computes convolutions in TF32 on newer ones, so that one
# job's gradients are of two precisions.

_AMPERE = (8, 0)
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def capability_of(text: str | None) -> tuple[int, int] | None:
    """Read a compute capability such as ``7.0``; None where it is unknown."""
    major, point, minor = (text or "").partition(".")
    return (int(major), int(minor)) if point and major.isdigit() and minor.isdigit() else None


def emulated_bfloat16(capabilities: Mapping[str, str | None]) -> str | None:
    """Name the GPUs that emulate bfloat16, with what to do; None where none does.

    Args:
        capabilities: Compute capability of each device; None where there is none or it is unknown.
    """
    older, _ = _by_generation(capabilities)
    if not older:
        return None
    return (
        f"{', '.join(older)} emulate{'s' if len(older) == 1 else ''} bfloat16, which is slow: "
        "where the script uses it, say torch.autocast(..., dtype=torch.float16), with a GradScaler"
    )


def mixed_tf32(
    capabilities: Mapping[str, str | None], environment: Mapping[str, str]
) -> str | None:
    """Name GPUs of one job whose precision is unlike, with what to do; None where none is."""
    older, newer = _by_generation(capabilities)
    if not older or not newer or environment.get(TF32_OVERRIDE) == "0":
        return None
    verb = "computes" if len(newer) == 1 else "compute"
    return (
        f"{', '.join(newer)} {verb} convolutions in TF32, {', '.join(older)} in FP32: "
        f"set {TF32_OVERRIDE}=0 for FP32 on all"
    )


def _by_generation(capabilities: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """The devices before Ampere, and those from it on."""
    known = {name: capability_of(text) for name, text in sorted(capabilities.items())}
    older = [name for name, found in known.items() if found is not None and found < _AMPERE]
    newer = [name for name, found in known.items() if found is not None and found >= _AMPERE]
    return older, newer
