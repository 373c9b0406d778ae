"""The tree of all hetflow errors.

::

    HetflowError            exit 2
    |-- ProblemError        a value that makes no sense (also a ValueError)
    |-- FileError           a file that is missing, broken, or in the way
    |-- TargetError         a model or script that cannot be loaded or run
    |-- InfeasibleError     exit 3: no plan exists; says what to relax, and by how much
    |-- BackendError        exit 1: a solver library misbehaved
    |   `-- TooLittleTimeError    a limit of time came before there was a plan
    |-- PeerLostError       exit 1: another worker was lost during communication
    `-- LaunchError         a worker failed: exits with the worker's own code
"""


class HetflowError(Exception):
    """An error the user can fix.

    Args:
        message: One line: what is wrong, where, and the rule it breaks.
        hint: At most one line: how to fix it.

    Example:
        >>> import hetflow
        >>> try:
        ...     hetflow.Cluster.parse("2xV100:16QB")
        ... except hetflow.HetflowError as error:
        ...     print(error.exit_code)
        2
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ProblemError(HetflowError, ValueError):
    """An invalid value. It is also a ValueError, so that pydantic's validators collect it.

    Example:
        >>> import hetflow
        >>> try:
        ...     hetflow.Job(id="a", model="m", steps=-1)
        ... except hetflow.ProblemError as error:
        ...     print(error.message)
        Job: $.steps: must be > 0.0, got -1
    """


class FileError(HetflowError):
    """A file that is missing, broken, of another format, or in the way.

    Example:
        >>> import hetflow
        >>> try:
        ...     hetflow.read("absent.json")
        ... except hetflow.FileError as error:
        ...     print(error.message)
        absent.json: no such file
    """


class TargetError(HetflowError):
    """A model, factory or script that cannot be loaded or run.

    Example:
        >>> import hetflow
        >>> try:
        ...     hetflow.profile("absent.py:workload")
        ... except hetflow.TargetError as error:
        ...     print(error.message)
        absent.py: no such file
    """


class InfeasibleError(HetflowError):
    """No plan satisfies the constraints. The message names the binding one.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=2 << 30)
        >>> small = hetflow.Profile(
        ...     model="m", device_type="T4", device_memory_bytes=1 << 30,
        ...     weight_bytes=4, update_seconds=0.0, batch_curve=(point,),
        ... )
        >>> try:
        ...     hetflow.solve([small], "T4", batch_size=8)
        ... except hetflow.InfeasibleError as error:
        ...     print(error.exit_code)
        3
    """

    exit_code = 3


class BackendError(HetflowError):
    """A solver library returned an invalid answer.

    Example:
        >>> import hetflow
        >>> hetflow.BackendError.exit_code, issubclass(hetflow.BackendError, hetflow.HetflowError)
        (1, True)
    """

    exit_code = 1


class TooLittleTimeError(BackendError):
    """A limit of time came before a search had a plan."""

    exit_code = 3


class PeerLostError(HetflowError):
    """Another worker was lost: communication between workers failed.

    Args:
        message: What failed, with torch's message.
        timed_out: Whether the other worker only missed the time limit, and may still be alive.
    """

    exit_code = 1

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class LaunchError(HetflowError):
    """A worker, or the launch itself, failed.

    Args:
        message: The first cause of the failure.
        hint: How to fix it.
        exit_code: The failing worker's own exit code.

    Example:
        >>> import hetflow
        >>> hetflow.LaunchError("worker 1 (V100) failed with exit code 7", exit_code=7).exit_code
        7
    """

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 2) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
