"""``hetflow.read`` and ``hetflow.write``; what verbs take as a record or as its file."""

from pathlib import Path

from ..importers.jobs_files import read_jobs, read_throughputs
from ..schema import files
from ..schema.errors import FileError
from ..schema.files import Plan, Record
from ..schema.jobs import Jobs, Throughputs
from .naming import names_arguments


def read(path: Path | str) -> Record:
    """Read any hetflow file; its ``schema`` says what it is.

    Args:
        path: The file.

    Raises:
        FileError: It is missing, of no format of ours, or has faults; all are named at once.

    Example:
        >>> import hetflow, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> hetflow.write(folder / "pool.json", hetflow.Cluster.parse("2xV100,8xP100"))
        >>> hetflow.read(folder / "pool.json").num_devices
        {'V100': 2, 'P100': 8}
    """
    return files.read_any(Path(path))


@names_arguments()
def write(path: Path | str, record: Record, *, force: bool = False) -> None:
    """Write a record as JSON, whole or not at all.

    Args:
        path: Where to.
        record: A profile, cluster, plan, allocation, run, ...
        force: Overwrite what is there.

    Raises:
        FileError: The file exists and ``force`` is off, or it cannot be written.

    Example:
        >>> import hetflow, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "pool.json"
        >>> hetflow.write(path, hetflow.Cluster.parse("V100"))
        >>> hetflow.write(path, hetflow.Cluster.parse("P100"), force=True)
    """
    files.write(Path(path), record, force=force)


def plan_of(given: Plan | Path | str) -> Plan:
    """A plan, or the one in a file.

    Raises:
        FileError: It is missing, has faults, or holds something else.
    """
    found = files.read_any(Path(given)) if isinstance(given, Path | str) else given
    if not isinstance(found, Plan):
        raise FileError(f"{given}: must be hetflow.plan/1, got {found.schema}")
    return found


def jobs_of(given: Jobs | Path | str) -> Jobs:
    """Jobs, or those in a file of any form that is read.

    Raises:
        FileError: The file is missing or has faults.
    """
    return given if isinstance(given, Jobs) else read_jobs(Path(given))


def throughputs_of(given: Throughputs | Path | str, *, pairs: bool) -> Throughputs:
    """Throughputs, or those in a file of any form that is read.

    Args:
        given: Throughputs or their file.
        pairs: Whether pairs of models are needed.

    Raises:
        FileError: The file is missing or has faults.
    """
    if isinstance(given, Throughputs):
        return given
    return read_throughputs(Path(given), pairs=pairs)
