"""Files of jobs and throughputs in every form that commands take; a pool spelled as they are."""

import json
from collections.abc import Iterable
from pathlib import Path

from ..schema import files
from ..schema.cluster import Cluster
from ..schema.errors import FileError, ProblemError
from ..schema.jobs import Jobs, Throughputs
from ..schema.records import nearest

SAMPLE = "sample:"


def path_of(path: Path) -> Path:
    """The file that ``sample:NAME`` stands for (examples/cluster), any other path as it is.

    Raises:
        FileError: There is no such sample.
    """
    text = str(path)
    if not text.startswith(SAMPLE):
        return path
    folder = Path(__file__).resolve().parent.parent / "examples" / "cluster"
    names = sorted(found.name for found in folder.glob("*.csv"))
    name = text.removeprefix(SAMPLE)
    if name not in names:
        raise FileError(f"{text[:60]}: no such sample", hint=f"samples are {', '.join(names)}")
    return folder / name


def read_jobs(path: Path) -> Jobs:
    """Jobs from a hetflow file, a CSV, or a Gavel ``.trace``.

    Raises:
        FileError: The file is missing or has faults.
    """
    from .csv_tables import read_jobs_csv
    from .gavel import read_gavel_trace

    path = path_of(path)
    if path.suffix == ".trace":
        return Jobs(jobs=tuple(read_gavel_trace(path)))
    if path.suffix == ".csv":
        return read_jobs_csv(path)
    return files.read(path, Jobs)


def read_throughputs(path: Path, *, pairs: bool) -> Throughputs:
    """Throughputs from a hetflow file, a CSV, or Gavel's table.

    Args:
        path: The file.
        pairs: Whether pairs of models are needed; most of Gavel's table is pairs.

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
        document = {"schema": None}  # the strict reader says what is wrong with it
    if isinstance(document, dict) and "schema" not in document:
        return read_gavel_throughputs(path, pairs=pairs)
    return files.read(path, Throughputs)


def spelled_as(pool: Cluster, throughputs: Throughputs) -> Cluster:
    """The pool with its device types spelled as the throughputs spell them: case does not matter.

    Raises:
        ProblemError: No throughput is for a type of the pool, whatever its case.
    """
    tables: list[Iterable[str]] = [entry.steps_per_second for entry in throughputs.models]
    tables += [pair.steps_per_second for pair in throughputs.pairs]
    tables += [mix.devices for mix in throughputs.mixes]
    known = list(dict.fromkeys(name for table in tables for name in table))
    pool = pool.spelled_as(known)
    for name in pool.num_devices:
        if name not in known:
            guess = nearest(name, known)
            raise ProblemError(
                f"no throughput is for device type {name!r}"
                + (f"; did you mean {guess!r}?" if guess else ""),
                hint=f"the throughputs are for {', '.join(known)}",
            )
    return pool
