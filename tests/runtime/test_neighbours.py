"""Messages between workers of one host: two ends in one process, over real sockets and memory."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from hetflow.runtime.pipeline import transport
from hetflow.runtime.pipeline.transport import Neighbour, meet_neighbours
from hetflow.schema.errors import PeerLostError, TargetError
from hetflow.tests.runtime.test_channels import gloo_pair

SIZES = (0, 1, 1024, 1025, 4096, 5000, 300_000)


def met(limit_seconds: float = 5.0) -> list[dict[int, Neighbour]]:
    """What two workers of this host find."""
    groups = gloo_pair(dist.HashStore())
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda r: meet_neighbours(r, 2, groups[r], limit_seconds), range(2)))


@pytest.fixture
def ends() -> Iterator[tuple[Neighbour, Neighbour]]:
    first, second = met()
    yield first[1], second[0]
    first[1].close()
    second[0].close()


def bytes_like(number: int, size: int) -> torch.Tensor:
    return torch.arange(number, number + size).to(torch.uint8)


def taken(end: Neighbour, tag: int, size: int) -> torch.Tensor:
    part = torch.empty(size, dtype=torch.uint8)
    end.receive(tag, part).wait()
    return part


def test_messages_of_a_tag_come_in_order_whatever_their_sizes(ends) -> None:
    for sender, receiver in (ends, ends[::-1]):
        for _ in range(3):
            for number, size in enumerate(SIZES):
                sender.send(1, bytes_like(number, size)).wait()
                sender.send(2, bytes_like(number + 100, size))
            for tag, first in ((2, 100), (1, 0)):
                for number, size in enumerate(SIZES):
                    assert torch.equal(taken(receiver, tag, size), bytes_like(first + number, size))


def test_tensors_of_other_types_keep_their_values(ends) -> None:
    values = torch.randn(4, 100, dtype=torch.float64)
    ends[0].send(1, values)
    found = torch.empty(400, dtype=torch.float64)
    ends[1].receive(1, found).wait()
    assert torch.equal(found, values.flatten())


def test_what_was_sent_may_be_changed_at_once(ends) -> None:
    for size in (100, 100_000):
        part = bytes_like(3, size)
        ends[0].send(1, part)
        part.zero_()
        assert torch.equal(taken(ends[1], 1, size), bytes_like(3, size))


def test_slots_are_filled_again(ends) -> None:
    sender, receiver = ends
    for _ in range(2):
        for number in range(20):
            for _ in range(3):
                sender.send(1, bytes_like(number, 60_000 + number))
            for _ in range(3):
                taken(receiver, 1, 60_000 + number)
    # Three messages were under way at once.
    assert os.fstat(sender._own._descriptor).st_size == 3 * 65_536


def test_more_messages_than_the_socket_holds_wait_for_the_receiver(ends) -> None:
    number = 3000

    def both_ways(end: Neighbour) -> int:
        for value in range(number):
            end.send(1, bytes_like(value, 1))
        return sum(int(taken(end, 1, 1)) for _ in range(number))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(both_ways, ends)) == [sum(n % 256 for n in range(number))] * 2


def test_a_message_of_another_size_is_refused(ends) -> None:
    ends[0].send(1, bytes_like(0, 5))
    with pytest.raises(TargetError, match="rank 0 sent 5 bytes where 6 were due"):
        taken(ends[1], 1, 6)


def test_a_worker_that_is_gone_is_noticed_once_its_messages_are_read(ends) -> None:
    gone, left = ends
    for size in (10, 10_000):
        gone.send(1, bytes_like(1, size))
    left.send(1, bytes_like(0, 10))  # never read
    gone.close()
    for size in (10, 10_000):
        assert torch.equal(taken(left, 1, size), bytes_like(1, size))
    with pytest.raises(PeerLostError, match="lost another worker in receive: rank 0 is gone") as e:
        taken(left, 1, 10)
    assert not e.value.timed_out
    with pytest.raises(PeerLostError, match="lost another worker in send"):
        left.send(1, bytes_like(0, 10))


def test_a_worker_that_sends_nothing_is_waited_for_within_the_limit() -> None:
    first, second = met(limit_seconds=0.05)
    with pytest.raises(PeerLostError, match="waited in vain for another worker") as error:
        taken(first[1], 1, 1)
    assert error.value.timed_out
    first[1].close()
    second[0].close()


def test_workers_of_other_hosts_are_no_neighbours(monkeypatch) -> None:
    monkeypatch.setattr(transport._Listener, "is_near", lambda *_: False)
    assert met() == [{}, {}]


def test_where_one_worker_cannot_connect_nobody_does(monkeypatch) -> None:
    real, calls = os.memfd_create, []

    def second_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("no more files")
        return real(*arguments)

    monkeypatch.setattr(transport, "_MEETING_SECONDS", 0.2)
    monkeypatch.setattr(os, "memfd_create", second_fails)
    assert met() == [{}, {}]
