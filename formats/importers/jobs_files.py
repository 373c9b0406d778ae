"""Read files of jobs and throughputs in every form that commands accept."""

import json
from pathlib import Path

from ...schema import files
from ...schema.errors import FileError
from ...schema.jobs import Jobs, Throughputs

SAMPLE = "sample:"


def path_of(path: Path) -> Path:
    """The file that ``sample:NAME`` stands for (examples/cluster); any other path is unchanged.

    Raises:
        FileError: There is no such sample.
    """
    text = str(path)
    if not text.startswith(SAMPLE):
        return path
    folder = Path(__file__).resolve().parents[2] / "examples" / "cluster"
    names = sorted(found.name for found in folder.glob("*.csv"))
    name = text.removeprefix(SAMPLE)
    if name not in names:
        raise FileError(f"{text[:60]}: no such sample", hint=f"samples are {', '.join(names)}")
    return folder / name


def read_jobs(path: Path) -> Jobs:
    """Read jobs from a hetflow file, a CSV, a Gavel ``.trace``, or a plug-in's format.

    Raises:
        FileError: The file is missing or has faults.
    """
    from .registry import JOBS_IMPORTERS

    path = path_of(path)
    foreign = JOBS_IMPORTERS.find(path.suffix) if path.suffix else None
    return files.read(path, Jobs) if foreign is None else foreign(path)


def read_throughputs(path: Path, *, pairs: bool) -> Throughputs:
    """Read throughputs from a hetflow file, a CSV, or Gavel's table.

    Args:
        path: The file.
        pairs: Whether colocated pairs of models are needed; most of Gavel's table is pairs.

    Raises:
        FileError: The file is missing or has faults.
    """
    from .csv_tables import read_throughputs_csv
    from .gavel import read_gavel_throughputs

    path = path_of(path)
    if path.suffix == ".csv":
        return read_throughputs_csv(path)
    try:
        document = json.loads(files.read_text(path))
    except (ValueError, RecursionError):
        document = {"schema": None}  # the strict reader reports what is wrong with it
    if isinstance(document, dict) and "schema" not in document:
        return read_gavel_throughputs(path, pairs=pairs)
    return files.read(path, Throughputs)
