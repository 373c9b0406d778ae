"""Gradient synchronisation and links between local devices (VirtualFlow 5.1.2)."""

from typing import TYPE_CHECKING, Any

from ..schema.profile import Sync
from .batch_curve import Curve
from .devices import DeviceRequest
from .targets import Target

if TYPE_CHECKING:
    from .profile import ProfileOptions


def measure_sync(
    target: Target, request: DeviceRequest, options: "ProfileOptions", curve: Curve
) -> tuple[Sync | None, dict[str, Any]]:
    """Synchronisation is not measured yet: a profile without it predicts none."""
    return None, {"skipped": "not measured"}
