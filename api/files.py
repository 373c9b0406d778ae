"""``hetflow.read`` and ``hetflow.write``; also arguments given as a record or as its file."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..schema import files
from ..schema.errors import FileError
from .calls import checks

# A plan is made and checked without jobs and markets, which take as long to import as the rest.
if TYPE_CHECKING:
    from ..planning.market_prices import DevicePrice
    from ..schema.cluster import Cluster
    from ..schema.files import Record
    from ..schema.jobs import Allocation, Jobs, JobsTable, Throughputs, ThroughputsTable
    from ..schema.market import Market, Markets
    from ..schema.plan import Plan


def markets_of(given: "Markets") -> "tuple[Market, ...]":
    """Return markets as records; files may be of any form of market data that is known.

    Raises:
        FileError: A file is missing, of no known form, or has faults.
    """
    from ..formats.importers.recognise import read_markets
    from ..schema.market import Market

    return read_markets([given] if isinstance(given, Market | Path | str) else given)


def priced_pool(
    pool: "Cluster", market: "Markets | None", at: str | None, *, spot: bool | None = None
) -> "tuple[Cluster, dict[str, DevicePrice]]":
    """Return a pool with the prices of markets, and the offers that give them.

    Raises:
        ProblemError: A time or a kind of prices is given without a market, or a device type has no
            such price at that time.
        FileError: A file is missing, of no known form, or has faults.
    """
    from ..planning import market_prices

    return market_prices.priced_pool(
        pool, None if market is None else markets_of(market), at, spot=spot
    )


@checks
def read(path: Path | str) -> "Record":
    """Read any hetflow file; the file's ``schema`` key states its format.

    Returns:
        The record in the file.

    Raises:
        FileError: The file is missing, is not a hetflow file, or has faults; the message lists all
            faults.

    Example:
        >>> import hetflow, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> hetflow.write(folder / "pool.json", hetflow.Cluster.parse("2xV100,8xP100"))
        >>> hetflow.read(folder / "pool.json").num_devices
        {'V100': 2, 'P100': 8}
    """
    return files.read_any(Path(path))


@checks
def write(path: Path | str, record: "Record", *, force: bool = False) -> None:
    """Write a record as JSON, atomically: a failed write leaves no partial file.

    Args:
        path: The file to write.
        record: A profile, cluster, plan, allocation, run record, ...
        force: Whether to overwrite an existing file.

    Raises:
        FileError: The file exists and ``force`` is off, or it cannot be written.

    Example:
        >>> import hetflow, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "pool.json"
        >>> hetflow.write(path, hetflow.Cluster.parse("V100"))
        >>> hetflow.write(path, hetflow.Cluster.parse("P100"), force=True)
    """
    files.write(Path(path), record, force=force)


def plan_of(given: "Plan | Path | str") -> "Plan":
    """Return a plan, reading it from its file if needed.

    Raises:
        FileError: The file is missing, has faults, or holds no plan.
    """
    from ..schema.plan import Plan

    found = files.read_any(Path(given)) if isinstance(given, Path | str) else given
    if not isinstance(found, Plan):
        raise FileError(f"{given}: must be hetflow.plan/2, got {found.schema}")
    return found


def claim_of(given: "Plan | Allocation | Path | str") -> "Plan | Allocation":
    """Return a plan or an allocation, reading it from its file if needed.

    Raises:
        FileError: The file is missing, has faults, or holds neither.
    """
    from ..schema.jobs import Allocation
    from ..schema.plan import Plan

    found = files.read_any(Path(given)) if isinstance(given, Path | str) else given
    if not isinstance(found, Plan | Allocation):
        raise FileError(
            f"{given}: must be hetflow.plan/2 or hetflow.allocation/1, got {found.schema}"
        )
    return found


def jobs_of(given: "JobsTable") -> "Jobs":
    """Return jobs, reading them from a table, or from a file of any supported format, if needed.

    Raises:
        FileError: The file is missing, or the file or table has faults.
    """
    from ..formats.importers.csv_tables import read_jobs_table
    from ..formats.importers.recognise import read_jobs
    from ..schema.jobs import Jobs

    if isinstance(given, Jobs):
        return given
    return read_jobs(Path(given)) if isinstance(given, Path | str) else read_jobs_table(given)


def throughputs_of(given: "ThroughputsTable", *, pairs: bool) -> "Throughputs":
    """Return throughputs, reading them from a table or a file of any supported format if needed.

    Args:
        given: Throughputs, their table, or their file.
        pairs: Whether to read the throughputs of pairs of models too.

    Raises:
        FileError: The file is missing, or the file or table has faults.
    """
    from ..formats.importers.csv_tables import read_throughputs_csv
    from ..formats.importers.recognise import read_throughputs
    from ..schema.jobs import Throughputs

    if isinstance(given, Throughputs):
        return given
    if isinstance(given, Path | str):
        return read_throughputs(Path(given), pairs=pairs)
    return read_throughputs_csv(given)
