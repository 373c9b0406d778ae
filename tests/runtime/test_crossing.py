"""Scatter/gather: what tensor-parallel groups send to each other, and what arrives."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.profilers.zoo.models import GPT
from hetflow.runtime import peers
from hetflow.runtime.pipeline.channels import (
    HEADER_BYTES,
    Holding,
    Outbox,
    ReceiveQueue,
    Receiver,
    Sender,
)
from hetflow.runtime.pipeline.cut import cut, holdings_of
from hetflow.runtime.pipeline.trace import layers_of
from hetflow.runtime.pipeline.transport import ChannelLines, Routes
from hetflow.runtime.tensor.operators import TensorGroup
from hetflow.runtime.tensor.roles import sharing_of
from hetflow.schema.errors import TargetError

from ..profiles import examples

CPU = torch.device("cpu")
WHOLE, OWN, TOKENS = Holding


class Wire:
    """One end of a line in memory: counts what is sent, delivers in order."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()
        self.num_bytes, self.num_transfers, self.peer = 0, 0, 0

    def send(self, part: torch.Tensor) -> "Wire":
        self.sent.append(part.clone())
        self.num_bytes += part.nbytes
        self.num_transfers += 1
        return self

    def receive(self, part: torch.Tensor) -> "Arrival":
        return Arrival(self, part)

    def wait(self) -> None:
        pass


class Arrival:
    def __init__(self, wire: Wire, part: torch.Tensor) -> None:
        self.wire, self.part = wire, part

    def wait(self) -> None:
        self.part.copy_(self.wire.sent.popleft())


class Crossing:
    """All workers of two groups in one process; threads stand for the receiving group."""

    def __init__(self, senders: int, receivers: int) -> None:
        groups = (tuple(range(senders)), tuple(range(senders, senders + receivers)))
        self.frames: dict[tuple[int, int], Wire] = {}
        lines: dict[tuple[int, int, bool], ChannelLines] = {}
        for rank in groups[0]:
            for _, channel in Routes(rank, groups).outgoing(1, True):
                frames, aside = Wire(), Wire()
                self.frames[channel[:2]] = frames
                lines[channel] = ChannelLines(frames, aside, aside, CPU)
        self.senders, self.receivers = [], []
        for lane, rank in enumerate(groups[0]):
            found = Routes(rank, groups).outgoing(1, True)
            outboxes = [(other, Outbox(lines[channel])) for other, channel in found]
            group = TensorGroup(senders, lane, groups[0])
            self.senders.append(Sender(outboxes, group, receivers))
        for lane, rank in enumerate(groups[1]):
            found = Routes(rank, groups).incoming(0, True)
            inboxes = [(other, ReceiveQueue(lines[channel])) for other, channel in found]
            # The fake all-gather below takes a worker's position for its process group.
            group = TensorGroup(receivers, lane, groups[1], lane)
            self.receivers.append(Receiver(inboxes, group, senders, CPU))
        self.rows = [torch.empty(0)] * receivers
        self.num_gathers, self.bytes_gathered = 0, 0
        self.barrier, self.pool = Barrier(receivers), ThreadPoolExecutor(receivers)

    def all_gather(self, rows: torch.Tensor, row: torch.Tensor, group: int) -> None:
        self.rows[group] = row
        if self.barrier.wait(20) == 0:
            self.num_gathers += 1
            self.bytes_gathered += rows.nbytes
        rows.copy_(torch.cat(self.rows))
        self.barrier.wait(20)

    def send(self, values, holdings=()):
        """What each receiver gets of a message; unless it is whole, senders have their own."""
        for lane, sender in enumerate(self.senders):
            own = tuple(
                value[lane] if holdings and holdings[number] else value
                for number, value in enumerate(values)
            )
            sender.send(own, holdings)
        return list(self.pool.map(Receiver.take, self.receivers))

    def steady_bytes(self, values, holdings=()) -> dict[tuple[int, int], int]:
        """Bytes of payload on each link once the layout is known and the buffers are as large."""
        for _ in range(3):
            self.send(values, holdings)
        before = {link: (wire.num_bytes, wire.num_transfers) for link, wire in self.frames.items()}
        self.send(values, holdings)
        found = {}
        for link, wire in self.frames.items():
            num_bytes, num_transfers = before[link]
            assert wire.num_transfers == num_transfers + 1
            found[link] = wire.num_bytes - num_bytes - HEADER_BYTES
        return found


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch):
    made: list[Crossing] = []

    def make(senders: int, receivers: int) -> Crossing:
        made.append(Crossing(senders, receivers))
        monkeypatch.setattr(peers, "all_gather", made[-1].all_gather)
        return made[-1]

    yield make
    for one in made:
        one.pool.shutdown()


DTYPES = (torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64)
TENSORS = st.builds(
    lambda shape, dtype: (torch.rand(shape) * 9).to(dtype),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(DTYPES),
)


@settings(max_examples=examples(60))
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.lists(TENSORS | st.sampled_from([None, 3, (1, (2, 0.5))]), max_size=4), max_size=2),
)
def test_every_worker_gets_the_whole_of_every_value(senders, receivers, messages) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = Crossing(senders, receivers)
        patch.setattr(peers, "all_gather", world.all_gather)
        for values in messages:
            answers = world.send(tuple(values))
            assert len(answers) == receivers
            for (found, wants), holdings in answers:
                assert len(found) == len(values) == len(wants)
                assert holdings == ()
                for value, sent in zip(found, values, strict=True):
                    assert type(value) is type(sent)
                    if isinstance(sent, torch.Tensor):
                        assert (value.dtype, value.shape) == (sent.dtype, sent.shape)
                        assert torch.equal(value, sent)
                    else:
                        assert value == sent
        world.pool.shutdown()


@pytest.mark.parametrize(
    ("degrees", "parts"),
    [
        ((2, 2), {(0, 2): 2, (1, 3): 2}),  # a t-th on each link
        ((4, 4), {(0, 4): 4, (1, 5): 4, (2, 6): 4, (3, 7): 4}),
        ((2, 1), {(0, 2): 2, (1, 2): 2}),
        ((1, 2), {(0, 1): 2, (0, 2): 2}),
        ((4, 2), {(0, 4): 4, (1, 4): 4, (2, 5): 4, (3, 5): 4}),
        ((2, 3), {(0, 2): 3, (0, 3): 6, (1, 3): 6, (1, 4): 3}),
        ((1, 1), {(0, 1): 1}),
    ],
)
def test_each_byte_of_an_activation_is_sent_once(crossing, degrees, parts) -> None:
    world, value = crossing(*degrees), torch.rand(2, 6, 16, dtype=torch.float64)
    found = world.steady_bytes((value,))
    assert found == {link: value.nbytes // part for link, part in parts.items()}
    assert sum(found.values()) == value.nbytes
    assert world.num_gathers == (4 if degrees[1] > 1 else 0)
    assert world.bytes_gathered == world.num_gathers * value.nbytes


def test_several_values_are_joined_by_one_all_gather(crossing) -> None:
    world = crossing(2, 2)
    world.send((torch.rand(3, 5), torch.arange(7), None, torch.rand(4)))
    assert world.num_gathers == 1


def test_a_share_goes_whole_to_the_worker_at_its_position(crossing) -> None:
    world, own = crossing(2, 2), torch.rand(2, 3, 8, requires_grad=True)
    whole, mask = torch.rand(3, 4, requires_grad=True), torch.ones(3, dtype=torch.bool)
    for lane, received in enumerate(world.send((whole, own, mask), (WHOLE, OWN, WHOLE))):
        (values, wants), holdings = received
        assert torch.equal(values[0], whole)
        assert torch.equal(values[1], own[lane])
        assert wants == (True, True, False)
        assert holdings == (WHOLE, OWN, WHOLE)
        assert received.of_gradients() == (WHOLE, OWN)


@pytest.mark.parametrize("degrees", [(2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (2, 3)])
def test_tokens_go_to_those_who_need_them_and_nothing_is_gathered(crossing, degrees) -> None:
    world, whole = crossing(*degrees), torch.rand(2, 12, 8, dtype=torch.float64)
    value = whole.requires_grad_().chunk(degrees[0], -2)
    parts = whole.chunk(degrees[1], -2)
    for received, part in zip(world.send((value, None), (TOKENS, WHOLE)), parts, strict=True):
        (values, wants), holdings = received
        assert torch.equal(values[0], part)
        assert (values[1], wants, holdings) == (None, (True, False), (TOKENS, WHOLE))
        assert received.of_gradients() == (TOKENS,)
    assert sum(world.steady_bytes((value, None), (TOKENS, WHOLE)).values()) == whole.nbytes
    assert world.num_gathers == 0


def test_tokens_that_do_not_divide_are_refused(crossing) -> None:
    with pytest.raises(TargetError, match="a sequence of 10 tokens does not divide among the 4"):
        crossing(2, 4).send((torch.rand(2, 3, 5, 8),), (TOKENS,))


def test_a_cut_inside_a_pair_of_layers_knows_what_is_a_share() -> None:
    model = GPT(vocabulary=8, max_tokens=4, depth=1, num_heads=2, channels=8)
    names = [layer.id for layer in layers_of(model).layers]
    at = names.index("blocks.0.attention.project_in") + 1
    for first in (at, at + 1):
        parts = cut(layers_of(model), [names[:first], names[first:]])
        found, _ = holdings_of(parts, sharing_of(model))
        if first == at:  # the residual is whole, and heads are a share
            assert len(found) == len(parts[0].outputs)
            assert set(found) == {OWN, WHOLE}
        else:
            assert found == ()
