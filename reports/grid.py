"""How tables and numbers look, everywhere alike."""

from collections.abc import Sequence


def grid(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain table; numbers are printed as they are given."""
    from tabulate import tabulate

    return str(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds with a unit; unknown is a dash."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"


def mebibytes(size: int | None) -> str:
    """Bytes as MiB with a unit; unknown is a dash."""
    return "-" if size is None else f"{size / (1 << 20):,.1f} MiB"
