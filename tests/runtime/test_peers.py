"""Which errors mean that another worker is gone, and which are the script's own."""

import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetflow.runtime import peers
from hetflow.runtime.gradients import GradientReducer
from hetflow.runtime.peers import SharedStore
from hetflow.runtime.protocol.ended import is_lost_peer, may_be_echo
from hetflow.schema.errors import PeerLostError

READS_LIKE_A_LOSS = [
    FileNotFoundError(2, "No such file", "/data/igloo/3.jpg"),
    RuntimeError("Connection reset by peer"),
    RuntimeError("NCCL error in: my own wrapper"),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionResetError("Connection reset by peer"),
]


@pytest.mark.parametrize("error", READS_LIKE_A_LOSS, ids=repr)
def test_no_text_makes_an_error_of_the_script_a_loss(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    assert raised.value is error
    assert not is_lost_peer(error)
    assert not may_be_echo(error)


def pair() -> list[dist.ProcessGroup]:
    """Both ends of a group of two, in one process."""
    store, groups = dist.HashStore(), {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=2))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[rank] for rank in range(2)]


def test_a_wait_in_vain_ends_where_gloo_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(peers, "_LOOK", timedelta(milliseconds=20))
    groups = pair()
    peers.give_up_when(is_over.is_set)
    try:
        started = peers.all_reduce(torch.zeros(1), group=groups[0], async_op=True)
        assert started is not None
        threading.Timer(0.1, is_over.set).start()
        with pytest.raises(PeerLostError, match="^lost another worker in all_reduce$"):
            started.wait()
        assert is_over.is_set()
        is_over.clear()
        peers.all_reduce(values := torch.ones(1), group=groups[1], async_op=True).wait()
        started.wait()  # the other has come after all; some looks long
        assert values == 1
    finally:
        peers.give_up_when(None)


class JustAfterALook:
    """A sum that comes between the end of a look and the question whether it is there."""

    def __init__(self) -> None:
        self.waits: list[timedelta | None] = []

    def wait(self, limit: timedelta | None = None) -> bool:
        self.waits.append(limit)
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return True


def test_what_comes_just_after_a_look_is_no_loss() -> None:
    work = JustAfterALook()
    peers.give_up_when(lambda: True)
    try:
        peers.Collective(work, "all_reduce").wait()  # type: ignore[arg-type]
    finally:
        peers.give_up_when(None)
    assert work.waits == [peers._LOOK, None]


def test_a_peer_that_leaves_or_stays_away_is_lost() -> None:
    groups = pair()
    coming = peers.started("receive", groups[0].recv, [torch.zeros(1)], 1, 0)
    with pytest.raises(PeerLostError, match=r"^waited in vain for another worker in receive: "
                       ".*Timed out") as late:  # fmt: skip
        coming.wait()
    assert late.value.timed_out
    assert is_lost_peer(late.value)
    assert isinstance(late.value.__cause__, RuntimeError)
    groups = pair()
    coming = peers.started("receive", groups[0].recv, [torch.zeros(1)], 1, 0)
    del groups[1]
    with pytest.raises(PeerLostError, match="^lost another worker in receive: ") as gone:
        coming.wait()
    assert not gone.value.timed_out


def test_a_store_that_has_no_answer_in_time_is_a_loss() -> None:
    store = SharedStore(dist.HashStore()).under("some")
    store.set("key", "value")
    assert (store.get("key"), store.has("key"), store.has("other")) == ("value", True, False)
    assert store.add("number", 2) == 2
    with pytest.raises(PeerLostError) as late:
        store.wait(["other"], timedelta(seconds=0.05))
    assert late.value.timed_out


def test_what_is_wrong_with_this_worker_is_no_loss() -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def refuse() -> None:
        raise ValueError("Default process group has not been initialized")

    with pytest.raises(torch.OutOfMemoryError):
        peers.guarded("send", run_out)()
    with pytest.raises(ValueError, match="has not been initialized"):
        peers.guarded("send", refuse)()


def test_a_loss_found_in_the_hooks_of_a_backward_pass_stays_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("[pair.cc:547] Connection closed by peer")

    model = nn.Linear(2, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        reducer = GradientReducer(dict(model.named_parameters()))
        monkeypatch.setattr(peers, "all_reduce", peers.guarded("all_reduce", fails))
        reducer.begin()
        reducer.arm()
        with pytest.raises(PeerLostError, match="lost another worker in all_reduce"):
            model(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_an_exchange_of_the_scripts_own_may_be_an_echo_but_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def caught(function: Callable[[], object]) -> Exception:
        try:
            function()
        except (RuntimeError, ValueError) as error:
            return error
        raise AssertionError("nothing was raised")

    def typed() -> None:
        raise dist.DistBackendError("NCCL error")

    def inside_torch() -> None:
        source = "def all_reduce():\n    raise RuntimeError('said nothing of a connection')\n"
        path = dist.distributed_c10d.__file__
        found: dict[str, Callable[[], None]] = {}
        exec(compile(source, path, "exec"), found)
        found["all_reduce"]()

    def wrapped() -> None:
        try:
            raise PeerLostError("lost another worker in all_reduce")
        except PeerLostError:
            raise ValueError("the script's own words") from None

    for function in (typed, inside_torch, wrapped):
        error = caught(function)
        assert may_be_echo(error)
        assert not is_lost_peer(error)
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert not may_be_echo(caught(typed))
