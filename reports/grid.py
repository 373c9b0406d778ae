"""The common format of tables and numbers."""

from collections.abc import Sequence


def grid(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain-text table; numbers are printed as given. A column without a name has no rule."""
    from tabulate import tabulate

    table = str(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
    head, rule, *body = table.split("\n")
    rules = [
        dashes if name else " " * len(dashes)
        for name, dashes in zip(headers, rule.split("  "), strict=True)
    ]
    return "\n".join([head, "  ".join(rules).rstrip(), *body])


def milliseconds(seconds: float | None) -> str:
    """Seconds as text in milliseconds; a dash where unknown."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"


def mebibytes(size: int | None) -> str:
    """Bytes as text in MiB; a dash where unknown."""
    return "-" if size is None else f"{size / (1 << 20):,.1f} MiB"
