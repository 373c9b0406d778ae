"""Convert records to pandas tables; pandas is imported only when a table is made."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import HetflowError

if TYPE_CHECKING:
    from pandas import DataFrame


def frame_of(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> "DataFrame":
    """Build a pandas table with one row per mapping.

    Args:
        rows: Column -> value, for each row.
        columns: Names of all columns, in order; used even if there are no rows.

    Raises:
        HetflowError: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise HetflowError(
            "tables need pandas, which is not installed", hint="pip install pandas"
        ) from None
    return pandas.DataFrame(list(rows), columns=list(columns))
