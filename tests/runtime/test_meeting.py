"""Workers that wait for each other: who is late, who never comes, and who cannot work together."""

import logging
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetflow.runtime import group
from hetflow.runtime.group import Build, Meeting, check_builds, join, own_build
from hetflow.runtime.peers import SharedStore
from hetflow.runtime.protocol.environment import read_environment
from hetflow.schema import files
from hetflow.schema.errors import LaunchError, PeerLostError, TargetError
from hetflow.schema.files import to_json
from hetflow.schema.launch import Determinism, LaunchConfig, VirtualNode, WorkerSlot
from hetflow.schema.records import adapter_of

TYPES = ["V100", "V100", "P100"]


def meeting(limit_seconds: float = 60.0, late_seconds: float = 60.0) -> Meeting:
    made = Meeting(
        store=SharedStore(dist.HashStore()),
        device_types=TYPES,
        limit_seconds=limit_seconds,
        late_seconds=late_seconds,
    )
    made.store.set("word/0", "zero")
    return made


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"HETFLOW_SLOT": "1"}, "no launcher answers at"), ({}, "no rank 0 answers at")],
)
def test_a_worker_that_nobody_waits_for_is_told(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [(VirtualNode(index=rank, batch_size=4),) for rank in range(2)]
    slots = tuple(
        WorkerSlot(rank=rank, device_type="cpu", virtual_nodes=own)
        for rank, own in enumerate(nodes)
    )
    files.write(tmp_path / "plan.json", LaunchConfig(model="m", global_batch_size=8, workers=slots))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(group, "_LAUNCHER_SECONDS", 0.0)
    monkeypatch.setattr(group._Jobs, "joining", False)
    start = read_environment(
        {
            "HETFLOW_PLAN": str(tmp_path / "plan.json"),
            **{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            **{"MASTER_PORT": str(port), "HETFLOW_TIMEOUT": "0"},
            **variables,
        }
    )
    with pytest.raises(TargetError, match=f"{said} 127.0.0.1:{port} .*refused") as ended:
        join(start)
    assert "hetflow launch" in str(ended.value.hint)


def test_words_come_by_rank_once_all_are_there() -> None:
    met = meeting()

    def others() -> None:
        time.sleep(0.05)
        for rank, word in ((2, "two"), (1, "one")):
            met.arrive(rank)
            met.store.set(f"word/{rank}", word)

    threading.Thread(target=others).start()
    assert met.read("word") == ["zero", "one", "two"]


def test_who_ended_without_coming_is_not_waited_for() -> None:
    met = meeting()
    met.arrive(1)
    met.leave(2)
    began = time.monotonic()
    with pytest.raises(LaunchError) as ended:
        met.read("word")
    assert time.monotonic() - began < 30
    said = "rank 2 (P100) ended without coming to hf.prepare, where the others wait"
    assert (ended.value.message, ended.value.exit_code) == (said, 1)


def test_who_came_and_got_no_further_is_named() -> None:
    met = meeting(late_seconds=0.2)
    met.arrive(2)
    met.store.set("word/1", "one")
    with pytest.raises(PeerLostError) as stuck:
        met.read("word")
    assert stuck.value.timed_out
    assert stuck.value.message.endswith(
        "s in vain for rank 2 (P100), which came to hf.prepare and got no further"
    )


class Told(logging.Handler):
    """Keeps what workers tell."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told; other tests of this process may have left handlers of their own."""
    handler, log = Told(), logging.getLogger("hetflow")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    return handler.texts


def test_who_is_still_on_the_way_is_told_once_and_waited_for_until_the_limit(
    told: list[str],
) -> None:
    met = meeting(limit_seconds=0.6, late_seconds=0.1)
    with pytest.raises(PeerLostError) as late:
        met.read("word")
    assert late.value.timed_out
    both = "ranks 1 (V100), 2 (P100)"
    assert late.value.message.endswith(
        f"s in vain for {both}, which did not come to meet the others"
    )
    assert told == [
        f"still waiting for {both} to come to hf.prepare, where workers meet; up to 0.6 s "
        "(timeout_seconds)"
    ]


def build(host: str, release: str, nccl: str | None) -> Build:
    return Build(host=host, torch=release, toolkit="CUDA 12.6", collective_version=nccl)


def test_the_own_build_comes_as_it_was_sent() -> None:
    own = own_build(torch.device("cpu"))
    assert adapter_of(Build).validate_json(to_json(own)) == own
    assert own.torch == torch.__version__
    assert torch.__version__.startswith(own.release)
    assert "+" not in own.release


OLD, NEW = build("a", "2.7.1+cu126", "2.26.2"), build("b", "2.9.1+cu128", "2.27.5")
SAME_RELEASE = build("c", "2.7.1+cu128", "2.26.2")
BOTH = (
    "rank 0 on a has {} (torch 2.7.1+cu126, CUDA 12.6), "
    "rank 1 on b has {} (torch 2.9.1+cu128, CUDA 12.6)"
)


@pytest.mark.parametrize(
    ("backend", "level", "sentence"),
    [
        ("nccl", "none", "NCCL of unlike versions cannot work together: "
         + BOTH.format("2.26.2", "2.27.5")),
        ("gloo", "static", "determinism=\"static\" needs one release of torch on all hosts: "
         + BOTH.format("2.7.1", "2.9.1")),
    ],
)  # fmt: skip
def test_builds_that_cannot_work_together_are_refused_in_one_line(
    backend: str, level: Determinism, sentence: str
) -> None:
    with pytest.raises(TargetError) as refused:
        check_builds([OLD, NEW], backend, level)
    assert refused.value.message == sentence


def test_builds_that_may_fail_together_are_told_and_like_ones_are_not(
    told: list[str],
) -> None:
    check_builds([OLD, SAME_RELEASE], "nccl", "heterogeneous")
    check_builds([OLD, build("d", "2.7.1+cpu", None)], "gloo", "heterogeneous")
    assert not told
    check_builds([OLD, NEW], "gloo", "none")
    assert told == [
        "workers run unlike releases of torch, which may fail together: "
        + BOTH.format("2.7.1", "2.9.1")
    ]
