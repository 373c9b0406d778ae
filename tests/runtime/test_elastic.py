"""The parts of changing workers: the mirror of buffers, connections, messages, transfers."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetflow.runtime import wire
from hetflow.runtime.buffers import VirtualNodeBuffers
from hetflow.runtime.elastic.control import Connections, Control
from hetflow.runtime.elastic.mirror import Mirror
from hetflow.runtime.protocol.messages import (
    Abort,
    Beat,
    Lost,
    Recover,
    Report,
    Reported,
    Unreadable,
    encode,
    from_worker,
)
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from hetflow.tests import programs

UNMET = Path(__file__).with_name("unmet.py")
pytestmark = pytest.mark.processes


class Counting(nn.Module):
    """Counts its calls in a buffer that is no batch-norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("fixed", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


def run_pass(model: nn.Module, buffers: VirtualNodeBuffers, node: int) -> None:
    buffers.load(node)
    model(torch.randn(4, 3) + node)
    buffers.save(node)


def test_the_mirror_has_what_passes_changed_once_the_step_counts() -> None:
    model = Counting()
    buffers = VirtualNodeBuffers(model, [0, 1], [4, 4, 4])
    mirror = Mirror(buffers, 3)
    before = mirror.num_bytes
    for node in (0, 1):
        run_pass(model, buffers, node)
    mirror.launch([[0, 1, 2]], 0)
    mirror.wait()
    assert mirror.state()["nodes"] == [{}, {}, {}]  # not agreed on yet
    mirror.commit()
    kept = mirror.state()["nodes"]
    assert set(kept[0]) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert not torch.equal(kept[0]["norm.running_mean"], kept[1]["norm.running_mean"])
    assert kept[2] == {}
    # A buffer that a pass was first seen to change joins; one that nobody changes does not.
    assert sum(mirror.found) == 1
    assert mirror.grow(mirror.found)
    assert mirror.num_bytes > before
    mirror.launch([[0, 1, 2]], 0)
    mirror.wait()
    mirror.commit()
    assert mirror.state()["nodes"][1]["calls"].item() == 1


def test_the_mirror_takes_all_that_a_captured_state_has() -> None:
    """Where no worker can be lost, passes are not mirrored, and a resize captures their buffers."""
    model = Counting()
    buffers = VirtualNodeBuffers(model, [0, 1], [4, 4])
    mirror = Mirror(buffers, 2)
    run_pass(model, buffers, 0)
    mirror.reset(buffers.capture([0, 0], distributed=False))
    kept = mirror.state()["nodes"]
    assert kept[0]["calls"].item() == 1
    assert "calls" not in kept[1]


def test_a_step_that_does_not_count_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = Counting()
    buffers = VirtualNodeBuffers(model, [0, 1], [4, 4])
    mirror = Mirror(buffers, 2)
    mirror.grow([1.0, 0.0])
    run_pass(model, buffers, 0)
    mirror.launch([[0, 1]], 0, torch.tensor([0.1, 2.0, 3.0], dtype=torch.float64))
    assert mirror.wait().tolist() == [0.1, 2.0, 3.0]
    mirror.commit()
    expected = {name: value.clone() for name, value in mirror.state()["nodes"][0].items()}
    run_pass(model, buffers, 0)
    run_pass(model, buffers, 1)
    buffers.move([0], mirror.state())
    buffers.load(0)
    for name, value in dict(model.named_buffers()).items():
        if name in expected:
            assert torch.equal(value, expected[name]), name


def test_what_the_script_writes_between_steps_is_everybodys() -> None:
    model = Counting()
    buffers = VirtualNodeBuffers(model, [0, 1], [4, 4])
    mirror = Mirror(buffers, 2)
    buffers.follow(mirror)
    run_pass(model, buffers, 0)
    mirror.launch([[0, 1]], 0)
    mirror.commit()
    buffers.install(buffers.merged(None))
    model.norm.running_mean.fill_(7.0)
    buffers.begin_step()
    buffers.move([0, 1], mirror.state())
    buffers.load(0)
    assert model.norm.running_mean.tolist() == [7.0] * 3
    assert model.norm.num_batches_tracked == 1


def test_what_the_script_wrote_before_a_checkpoint_is_everybodys_after_a_loss() -> None:
    model = Counting()
    buffers = VirtualNodeBuffers(model, [0, 1], [4, 4])
    mirror = Mirror(buffers, 2)
    buffers.follow(mirror)
    run_pass(model, buffers, 0)
    mirror.launch([[0, 1]], 0)
    mirror.commit()
    model.norm.running_mean.fill_(7.0)
    buffers.capture([0, 0], distributed=False)  # as a checkpoint does
    for node in mirror.state()["nodes"]:
        assert node.get("norm.running_mean", torch.full((3,), 7.0)).tolist() == [7.0] * 3


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def test_cutting_wakes_who_waits_and_leaves_other_connections() -> None:
    connections = Connections()
    kept = pair()
    with connections.opening(2):
        own = pair()
        listening = socket.create_server(("127.0.0.1", 0))
    timer = threading.Timer(0.1, connections.cut)
    timer.start()
    own[0].settimeout(60)  # else it waits for ever
    assert own[0].recv(1) == b""
    kept[0].sendall(b"x")
    assert kept[1].recv(1) == b"x"
    socket.create_connection(listening.getsockname()).close()
    for one in (*own, *kept, listening):
        one.close()
    connections.cut()  # numbers that are closed, or another's by now, are left alone
    timer.join()


def test_cutting_wakes_who_waits_for_a_connection_of_one_that_died() -> None:
    """gloo would wait without end, whatever its time-out."""
    done = programs.run([sys.executable, str(UNMET)], timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 0.5  # the last one waited, and no more


def test_messages_arrive_while_the_main_thread_is_busy() -> None:
    near, far = socket.socketpair()
    control = Control(near, "3", "losses")
    slot = WorkerSlot(
        rank=0, device_type="cpu", virtual_nodes=(VirtualNode(index=0, batch_size=2),)
    )
    config = LaunchConfig(model="m", global_batch_size=2, workers=(slot,), seed=0)
    message = Recover(generation=1, config=config, ranks={"3": 0}, behind=(), donor="3")
    sent = encode(Abort(generation=0)) + encode(message)
    far.sendall(sent[:60])
    control.wait(lambda: control.is_broken, lambda: None)
    far.sendall(sent[60:])
    control.wait(lambda: control.recovery is not None, lambda: None)
    assert control.recovery == message
    control.generation = 1
    assert not control.is_broken
    control.send(Lost(generation=0, operation=0, why="a test"))
    told_by: list[str] = []
    control.report = lambda: told_by.append(threading.current_thread().name)
    far.sendall(encode(Report()))
    far.sendall(b'{"kind": "abort", "generation": "one"}\n')
    said = b""
    while b"unreadable" not in said or not said.endswith(b"\n"):
        said += far.recv(1 << 16)
    told = [from_worker(line) for line in said.splitlines()]
    assert {type(message) for message in told} == {Beat, Lost, Reported, Unreadable}
    assert len(told_by) == 1
    assert told_by != [threading.main_thread().name]
    why = "$.abort.generation: must be a whole number, got 'one'"
    assert Unreadable(why=why) in told
    far.close()
    time.sleep(0.1)  # until the thread has seen it
    near.close()


VALUE = {
    "weights": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.zeros(0, 3),
    "number": torch.tensor(7),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "many": [torch.full((1000,), n) for n in range(3)],
    "plain": [1, 2.5, None, "text"],
}


def carry(rank: int, folder: str) -> None:
    wire.CHUNK_BYTES = 4096  # so that tensors are joined and cut
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    if rank == 0:
        wire.send(VALUE, [1, 2])
    else:
        found = wire.receive(0)
        assert found["plain"] == VALUE["plain"]
        for name in ("weights", "empty", "number", "half"):
            assert found[name].dtype == VALUE[name].dtype
            assert torch.equal(found[name], VALUE[name])
        assert all(torch.equal(a, b) for a, b in zip(found["many"], VALUE["many"], strict=True))
        Path(folder, f"done{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


def test_a_value_travels_whole_to_several_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    script = tmp_path / "carrying.py"
    script.write_text(
        "import sys\nfrom hetflow.tests.runtime.test_elastic import carry\n"
        "carry(int(sys.argv[1]), sys.argv[2])\n"
    )
    ends = [
        programs.start(
            [sys.executable, script, str(rank), tmp_path],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    said = [end.communicate(timeout=120)[1] for end in ends]
    assert [end.returncode for end in ends] == [0, 0, 0], said
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done1", "done2"]
