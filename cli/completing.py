"""What a shell completes beside commands and options: names of policies, schedules and devices."""

import json
import re
from contextlib import suppress
from typing import Any


def policies(incomplete: str) -> list[str]:
    """Names of allocation policies."""
    from ..solvers.allocation import all_policies

    return [name for name in sorted(all_policies()) if name.startswith(incomplete)]


def schedules(incomplete: str) -> list[str]:
    """Names of the schedules that can be planned, plug-ins' too."""
    from ..schema.schedule_traits import planned_schedules

    return [name for name in ("auto", *planned_schedules()) if name.startswith(incomplete)]


def schedulers(incomplete: str) -> list[str]:
    """Names of the simulator's mechanisms."""
    from ..clusters.simulator import SCHEDULERS

    return [name for name in SCHEDULERS.names() if name.startswith(incomplete)]


def pools(ctx: Any, incomplete: str) -> list[str]:
    """Pools of the device types that profiles are of: ``2xV100,P`` becomes ``2xV100,P100``.

    Args:
        ctx: What was typed so far; ``--profiles`` names the folder.
        incomplete: The pool as far as it was typed.
    """
    folder = ctx.params.get("profiles")
    types = set()
    if folder is not None:
        for path in folder.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                types.add(str(json.loads(path.read_text(encoding="utf-8"))["device_type"]))
    typed = re.match(r"(.*,)?(\d+x)?", incomplete)
    before = typed.group() if typed is not None else ""
    return [before + kind for kind in sorted(types) if kind.startswith(incomplete[len(before) :])]
