"""What a determinism level fixes before torch is imported: environment variables of a worker.

Pure, and without torch: the launcher calls it.
"""

from collections.abc import Mapping

from ..devices.backend import DEVICES
from ..schema.launch import Determinism


def pins(level: Determinism) -> dict[str, str]:
    """Environment variables that a worker at this level must be started with."""
    if level == "none":
        return {}
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for backend in DEVICES.registered():
        fixed |= backend.pins(level)
    return fixed


def missing_pins(level: Determinism, environment: Mapping[str, str]) -> dict[str, str]:
    """The pins that an environment does not have, where another launcher made it."""
    return {name: value for name, value in pins(level).items() if environment.get(name) != value}
