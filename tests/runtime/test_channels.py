"""Messages between stages: both ends of a channel in one process, over real gloo groups."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hetflow.devices.collectives import payload_collective
from hetflow.runtime.pipeline.channels import Outbox, ReceiveQueue
from hetflow.runtime.pipeline.transport import (
    ChannelLine,
    ChannelLines,
    Neighbour,
    Routes,
    Transport,
    VectorSums,
    channels_of,
    meet_neighbours,
)
from hetflow.schema.errors import PeerLostError, TargetError

CPU = torch.device("cpu")


class Counting:
    """A line that notes how many bytes each transfer had."""

    def __init__(self, line: ChannelLine) -> None:
        self.line, self.peer, self.sizes = line, line.peer, []

    def send(self, part):
        self.sizes.append(part.numel() * part.element_size())
        return self.line.send(part)

    def receive(self, part):
        self.sizes.append(part.numel() * part.element_size())
        return self.line.receive(part)


def gloo_pair(store: dist.Store, *, limit_seconds: float = 5.0) -> list[dist.ProcessGroup]:
    """Both members of a group of two; each connects as the other does."""

    def member(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=limit_seconds))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(member, range(2)))


@pytest.fixture(params=["inside", "apart", "near"])
def channel(request):
    """(outbox, inbox, its sending lines).

    Payloads are in the frames, or have a line of their own; or both ends are on one host.
    """
    store = dist.HashStore()
    hosts = gloo_pair(dist.PrefixStore("host", store))
    devices = gloo_pair(dist.PrefixStore("device", store)) if request.param == "apart" else None
    near: list[dict[int, Neighbour]] = [{}, {}]
    if request.param == "near":
        with ThreadPoolExecutor(2) as pool:
            near = list(pool.map(lambda end: meet_neighbours(end, 2, hosts[end], 5.0), range(2)))

    def lines(end: int) -> ChannelLines:
        found = Transport(end, hosts[end], hosts[end], CPU, {}, near[end]).lines((0, 1, True))
        frames, aside = Counting(found.frames), Counting(found.aside)
        payloads = Counting(ChannelLine(devices[end], 1 - end)) if devices else aside
        return ChannelLines(frames, aside, payloads, CPU, found.copies)

    sending = lines(0)
    yield Outbox(sending), ReceiveQueue(lines(1)), sending
    for ends in near:
        for neighbour in ends.values():
            neighbour.close()


MESSAGES = [
    (torch.arange(6.0).reshape(2, 3),),
    (torch.ones(2, 3),),
    (torch.ones(3, 3, dtype=torch.bfloat16), None, 3, 2.5, True, (1, (2, -0.0))),
    (torch.tensor(True), torch.arange(5, dtype=torch.int16), torch.ones(1, dtype=torch.complex64)),
    (torch.zeros(0, 4), torch.zeros((), dtype=torch.float64)),
    (torch.ones(4, 6)[:, ::2].t(),),
    (),
    (None, None),
    (1,),
    (True,),
    (1.0,),
    (torch.ones(2, 3, requires_grad=True), torch.ones(2)),
]


def test_whatever_is_sent_arrives(channel) -> None:
    outbox, inbox, _ = channel
    order = [*MESSAGES, *MESSAGES[::-1], *(MESSAGES[i] for i in (0, 0, 2, 2, 0, 1, 8, 9, 10, 8))]
    for values in order:
        outbox.send(values)
        found, wants = inbox.take()
        assert len(found) == len(values)
        for value, sent, wanted in zip(found, values, wants, strict=True):
            assert type(value) is type(sent)
            if isinstance(sent, torch.Tensor):
                assert (value.dtype, value.shape) == (sent.dtype, sent.shape)
                assert torch.equal(value, sent.detach())
                assert wanted == sent.requires_grad
                assert value.storage_offset() * value.element_size() % 64 == 0
            else:
                assert repr(value) == repr(sent)
                assert not wanted
    outbox.flush()


def test_a_known_layout_costs_one_transfer_of_header_and_payload(channel) -> None:
    outbox, inbox, lines = channel
    sizes = [24] * 4 + [40] + [16] * 17
    for size in sizes:
        outbox.send((torch.ones(size // 8, dtype=torch.float64),))
        inbox.take()
    frames = [size - 64 for size in lines.frames.sizes]
    if lines.are_joined:
        # The first two, then as the first, as the second, and as the last of each block of eight.
        assert frames == [0, 0] + [24] * 16 + [16] * 4
        # Descriptions, and what the frames have no room for.
        assert [size for size in lines.aside.sizes if size < 64 and size % 8 == 0] == [24, 24, 40]
    else:
        assert frames == [0] * len(sizes)
        assert lines.payloads.sizes == sizes
    assert len(lines.aside.sizes) == 3 + (3 if lines.are_joined else 0)


def posted_after(channel, message, number):
    """How many receives are posted after each of so many messages."""
    outbox, inbox, _ = channel
    counts = []
    for _ in range(number):
        outbox.send((message,))
        inbox.take()
        counts.append(len(inbox._posted))
    outbox.flush()
    return counts


def test_receives_of_small_messages_are_posted_in_bursts(channel) -> None:
    assert posted_after(channel, torch.ones(3), 12) == [9, 16, *range(15, 8, -1), 16, 15, 14]


def test_few_receives_of_large_messages_are_posted_ahead(channel) -> None:
    counts = posted_after(channel, torch.ones(1 << 17), 4)
    assert counts == ([2] * 4 if channel[2].are_joined else [9, 16, 15, 14])


def test_messages_sent_ahead_stay_in_order_and_are_let_go(channel) -> None:
    outbox, inbox, _ = channel
    for number in range(20):
        outbox.send((torch.full((4,), float(number)),))
        if number >= 3:
            outbox.release()
        if number >= 2:
            assert inbox.take()[0][0][0] == number - 2
    assert len(outbox._leaving) == (0 if channel[2].copies else 3)
    for number in (18, 19):
        assert inbox.take()[0][0][0] == number
    outbox.flush()
    assert len(outbox._leaving) == 0


def test_a_lost_message_is_noticed(channel) -> None:
    outbox, inbox, _ = channel
    outbox.send((torch.ones(4),))
    inbox.take()
    outbox._number += 1
    outbox.send((torch.ones(4),))
    with pytest.raises(TargetError, match="sent message 2 where 1 was due"):
        inbox.take()


def test_a_message_of_another_size_than_its_values_is_refused(channel) -> None:
    outbox, inbox, _ = channel
    outbox.send((torch.ones(4),))
    inbox.take()
    outbox._layout.num_bytes = 32
    outbox.send((torch.ones(4),))
    with pytest.raises(
        TargetError, match="rank 0 sent 32 bytes in message 1, whose values have 16"
    ):
        inbox.take()


def test_waiting_ends() -> None:
    hosts = gloo_pair(dist.HashStore(), limit_seconds=2.0)
    frames, aside = (ChannelLine(hosts[1], 0, tag) for tag in (1, 3))
    inbox = ReceiveQueue(ChannelLines(frames, aside, aside, CPU))
    with pytest.raises(PeerLostError, match=r"(?i)timed? ?out"):
        inbox.take()


def test_other_things_cannot_cross(channel) -> None:
    with pytest.raises(TargetError, match="a dict would cross between two stages"):
        channel[0].send(({"a": torch.ones(1)},))


def test_numbers_are_summed_alike_on_all_workers() -> None:
    up, down = gloo_pair(dist.HashStore()), gloo_pair(dist.HashStore())
    ends = [VectorSums(Transport(rank, up[rank], down[rank], CPU, {}), 2, 3) for rank in range(2)]
    one, two = torch.tensor([0.1, 1, 0]).double(), torch.tensor([0.2, -1, 5]).double()
    for _ in range(3):
        for end, own in zip(ends, (one, two), strict=True):
            end.expect()
            end.own.copy_(own)
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(VectorSums.sum, ends)
        assert torch.equal(first, one + two)
        assert torch.equal(first, second)
    alone = VectorSums(None, 1, 3)
    alone.own.copy_(one)
    assert torch.equal(alone.sum(), one)


@pytest.mark.parametrize(
    ("device", "default", "backend"),
    [
        ("cuda", "nccl", "nccl"),  # every worker has a GPU of its own
        ("cuda", "gloo", None),  # some share one, or some have none
        ("cpu", "gloo", None),
    ],
)
def test_devices_on_nccl_send_to_each_other(device, default, backend) -> None:
    assert payload_collective(torch.device(device), default) == backend


def test_every_channel_has_a_queue_of_its_own() -> None:
    # 2-1 replicas, then two stages on the same ranks in turn, then both directions of DualPipe.
    found = channels_of([((0,), (1,)), ((2,),)])
    assert found == [(0, 2, True), (1, 2, True), (2, 0, False), (2, 1, False)]
    assert channels_of([((0,),), ((1,),), ((1,),), ((0,),)]) == [
        (0, 1, False), (0, 1, True), (1, 0, False), (1, 0, True),
    ]  # fmt: skip
    assert len(channels_of([((0,), (1,)), ((0,), (1,))])) == 4


@pytest.mark.parametrize(
    ("groups", "forward"),
    [
        (((0, 1), (2, 3)), [(0, 2), (1, 3)]),
        (((0, 1), (2,)), [(0, 2), (1, 2)]),
        (((0,), (1, 2)), [(0, 1), (0, 2)]),
        (((0, 1, 2, 3), (4, 5)), [(0, 4), (1, 4), (2, 5), (3, 5)]),
        (((0, 1), (2, 3, 4)), [(0, 2), (0, 3), (1, 3), (1, 4)]),
    ],
)
def test_workers_whose_parts_overlap_send_to_each_other(groups, forward) -> None:
    def channels(way: str, group: int, other: int, activation: bool) -> list:
        found = [getattr(Routes(rank, groups), way)(other, activation) for rank in groups[group]]
        return sorted(channel for channels in found for _, channel in channels)

    sent = channels("outgoing", 0, 1, True)
    assert sent == [(*pair, True) for pair in forward]
    assert sent == channels("incoming", 1, 0, True)
    back = channels("outgoing", 1, 0, False)
    assert back == channels("incoming", 0, 1, False)
    assert channels_of([[groups[0]], [groups[1]]]) == sorted(sent + back)


def test_lines_lead_to_the_other_end_by_the_group_of_their_way() -> None:
    up, down, device = object(), object(), object()
    apart = Transport(2, up, down, CPU, {(2, 0, False): device})
    lines = apart.lines((2, 0, False))
    assert (lines.frames.group, lines.frames.peer) == (down, 0)
    assert (lines.payloads.group, lines.payloads.peer) == (device, 0)
    assert not lines.are_joined
    lines = apart.lines((0, 2, True))
    assert (lines.frames.group, lines.frames.peer) == (up, 0)
    assert lines.are_joined
    both = [apart.lines((1, 2, way)) for way in (True, False)]
    assert len({line.tag for found in both for line in (found.frames, found.aside)}) == 4
