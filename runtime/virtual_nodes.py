"""Facts that follow from a worker's place: who holds which virtual node, and how sums are made."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..schema.errors import TargetError
from .determinism import is_invariant
from .emulation import PassHolder
from .group import Place
from .invariant import InvariantSum

# Divide the samples of a global batch over the virtual nodes (VirtualFlow 3.2, 5.2).


def share_out(num_samples: int, batch_sizes: Sequence[int]) -> list[int]:
    """Divide a global batch of ``num_samples`` samples: [virtual nodes] each one's.

    A full batch gives each virtual node its own size. A short one (the last of an epoch) is divided
    in proportion to the sizes by largest remainder; ties go to the lower index. The result depends
    on the virtual nodes only, not on the devices that run them.
    """
    total = sum(batch_sizes)
    whole = [num_samples * size // total for size in batch_sizes]
    rest = [num_samples * size % total for size in batch_sizes]
    by_remainder = sorted(range(len(batch_sizes)), key=lambda index: (-rest[index], index))
    for index in by_remainder[: num_samples - sum(whole)]:
        whole[index] += 1
    return whole


def slices(num_samples: int, batch_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """[virtual nodes] the (start, end) of each one's samples in a global batch, end excluded."""
    return list(pairwise([0, *accumulate(share_out(num_samples, batch_sizes))]))


def holdings_of(place: Place) -> list[list[int]]:
    """[workers] the virtual nodes of each worker, by rank."""
    assert place.start.config is not None
    return [[node.index for node in slot.virtual_nodes] for slot in place.start.config.workers]


def holders_of(place: Place) -> list[int]:
    """[virtual nodes] the rank that holds each."""
    config = place.start.config
    slots = config.workers if config is not None else ()
    ranks = {node.index: slot.rank for slot in slots for node in slot.virtual_nodes}
    return [ranks[node] for node in sorted(ranks)] or [0]


def pass_holder_of(place: Place) -> PassHolder | None:
    """The object that stretches the passes of an emulated device; None on a real device."""
    config, slot = place.start.config, place.slot
    if config is None or slot is None:
        return None
    for device in config.emulated:
        if device.device_type == slot.device_type:
            return PassHolder(device.passes)
    return None


def invariant_of(place: Place) -> InvariantSum | None:
    """This worker's part in sums that do not depend on the mapping.

    Returns:
        The sum; None where the determinism level asks for no such sums.

    Raises:
        TargetError: Virtual nodes are not in order.
    """
    config = place.start.config
    if config is None or not is_invariant(config.determinism):
        return None
    holdings = holdings_of(place)
    if any(nodes != sorted(nodes) for nodes in holdings):
        raise TargetError("a worker must run its virtual nodes in order of their index")
    return InvariantSum(holdings, place.rank)


def batch_sizes_of(place: Place) -> tuple[int, ...]:
    """[virtual nodes of the job] samples of each, by index; empty under plain python."""
    config = place.start.config
    if config is None:
        return ()
    # All stages of a pipeline run the same microbatches, so an index may occur more than once.
    sizes = {node.index: node.batch_size for slot in config.workers for node in slot.virtual_nodes}
    return tuple(sizes[index] for index in sorted(sizes))
