"""Environment variables of a worker that a level of determinism needs before torch is imported.

Pure functions without torch, because the launcher calls them.
"""

from collections.abc import Mapping

from ...devices.backend import DEVICES
from ...schema.launch import Determinism


def pins(level: Determinism) -> dict[str, str]:
    """Return the environment variables that a worker at this level must be started with."""
    if level == "none":
        return {}
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for backend in DEVICES.registered():
        fixed |= backend.pins(level)
    return fixed


def missing_pins(level: Determinism, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an environment made by another launcher lacks."""
    return {name: value for name, value in pins(level).items() if environment.get(name) != value}
