"""Records as tables of pandas, which is imported when a table is asked for."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import HetflowError

if TYPE_CHECKING:
    from pandas import DataFrame


def frame_of(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> "DataFrame":
    """A table with a row for each mapping and the columns in order.

    Args:
        rows: Values by column.
        columns: Names of all columns, also of a table without rows.

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
