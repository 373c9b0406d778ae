"""An order in which the operations of all ranks can run.

The timer adds times to it. The judge has an order of its own (checks/schedule.py).
"""

from collections import deque
from collections.abc import Iterator

from ..schema.operations import RECEIVES, SENDS, Kind, Message, Schedule, message_of

Place = tuple[int, int]


def walk(schedule: Schedule) -> Iterator[Place]:
    """Yield (rank, index of the operation) so that causes come before effects.

    Sends do not block, receives wait for their message, and a reduction waits for all ranks of its
    stage; these ranks are then yielded one directly after another. O(operations). Stops early if
    every unfinished rank waits, which is a deadlock.
    """
    position = [0] * schedule.num_ranks
    sent: set[Message] = set()
    waiting: dict[Message, int] = {}
    arrived: dict[tuple[int, int], list[int]] = {}
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        operations = schedule.ranks[rank]
        while position[rank] < len(operations):
            operation = operations[position[rank]]
            if operation.kind in RECEIVES:
                message = message_of(operation, rank)
                if message not in sent:
                    waiting[message] = rank
                    break
                sent.remove(message)
            elif operation.kind is Kind.REDUCE:
                group = arrived.setdefault((operation.stage, operation.microbatch), [])
                group.append(rank)
                if len(group) < len(schedule.placement[operation.stage]):
                    break
                for peer in group:
                    yield peer, position[peer]
                    position[peer] += 1
                ready.extend(peer for peer in group if peer != rank)
                continue
            elif operation.kind in SENDS:
                message = message_of(operation, rank)
                sent.add(message)
                if message in waiting:
                    ready.append(waiting.pop(message))
            yield rank, position[rank]
            position[rank] += 1
