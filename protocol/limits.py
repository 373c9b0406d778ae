"""What a plan that is launched may have at most, so that a crafted one ends in a sentence."""

from ..schema.errors import ProblemError

MAX_WORKERS = 1 << 16
MAX_VIRTUAL_NODES = 1 << 20


def check_numbers(num_workers: int, num_virtual_nodes: int) -> None:
    """Refuse a plan whose workers or virtual nodes are too many to list.

    Args:
        num_workers: Devices in use.
        num_virtual_nodes: Of one global batch; of a pipeline, its microbatches.

    Raises:
        ProblemError: They are too many.
    """
    for number, most, name in (
        (num_workers, MAX_WORKERS, "workers"),
        (num_virtual_nodes, MAX_VIRTUAL_NODES, "virtual nodes in a step"),
    ):
        if number > most:
            raise ProblemError(
                f"the plan has {number} {name}; at most {most} are launched",
                hint="take larger virtual nodes or microbatches, or a smaller batch",
            )
