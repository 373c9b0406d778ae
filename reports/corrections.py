"""The measurements that runs changed in a profile, as a table."""

from ..schema.profile import Profile
from .grid import grid

_MOST_ROWS = 12


def corrections_table(profile: Profile) -> str:
    """The newest correction's values before and after; of many, only the largest changes."""
    name = f"{profile.model} on {profile.device_type}"
    entries = (profile.provenance or {}).get("corrections", ())
    if not entries:
        return f"{name}: unchanged"
    changes = entries[-1]["changes"]
    ranked = sorted(range(len(changes)), key=lambda index: (-_change(changes[index]), index))
    shown = [changes[index] for index in sorted(ranked[:_MOST_ROWS])]
    rows = [
        (entry["term"], _number(entry["before"]), _number(entry["after"]), _percent(entry))
        for entry in shown
    ]
    lines = [
        f"{name}: corrected by {', '.join(run['run'] for run in entries[-1]['runs'])}",
        grid(("term", "before", "after", "change"), rows),
    ]
    if len(changes) > len(shown):
        lines.append(f"and {len(changes) - len(shown)} smaller changes (provenance.corrections)")
    return "\n".join(lines)


def _change(entry: dict[str, float | None]) -> float:
    before, after = entry["before"], entry["after"]
    if not before or after is None:
        return float("inf")
    return abs(after / before - 1)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(entry: dict[str, float | None]) -> str:
    before, after = entry["before"], entry["after"]
    return "-" if not before or after is None else f"{100 * (after / before - 1):+.1f} %"
