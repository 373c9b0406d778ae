"""``hetflow.testing.gpus``: what a user's own tests ask of the software device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetflow import testing
from hetflow.planning.costs.comm import Wire, collective_seconds
from hetflow.planning.costs.device_table import spec_of
from hetflow.planning.costs.efficiency import FITTED
from hetflow.planning.costs.estimate import LINK_LATENCY_SECONDS
from hetflow.planning.costs.roofline import operator_seconds
from hetflow.schema.layers import Operator
from hetflow.testing.fakecuda.build import CannotBuild
from hetflow.tests.testing.hosts import real_types

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.processes]

# As accelerate does: NCCL looks for the device at the first collective.
BEGINS = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("nccl", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.cuda.set_device(rank)
"""
PAIR = """
import os, runpy, sys
import torch.distributed
pair = []
for rank in range(2):
    pair.append(os.fork())
    if not pair[-1]:
        sys.argv[1:] = [str(rank), os.path.abspath("store")]
        runpy.run_path("each.py", run_name="__main__")
        sys.exit()
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in pair))
"""


def two(folder: Path, program: str) -> testing.Gpus:
    """A machine on which two processes have run a program, each on a GPU of its own."""
    if real_types():
        pytest.skip("this machine has GPUs of its own")
    try:
        gpus = testing.gpus("V100,A100", folder)
    except CannotBuild as error:
        pytest.skip(str(error))
    (folder / "each.py").write_text(BEGINS + program)
    (folder / "pair.py").write_text(PAIR)
    gpus.run([sys.executable, "pair.py"], timeout_seconds=60)
    return gpus


PRODUCT = """
x = torch.ones(1024, 1024, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    work = dist.all_reduce(x.clone(), async_op=True)
for _ in range(3):
    x.mm(x)
work.wait()
x.mm(x)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> testing.Timeline:
    return two(tmp_path_factory.mktemp("product"), PRODUCT).timeline()


def test_operators_take_what_estimates_say_and_collectives_what_planning_says(
    summed: testing.Timeline,
) -> None:
    size = 4 * 1024**2
    product = Operator(name="mm", dtype="float32", flops=2 * 1024**3, num_bytes=3 * size)
    link = spec_of("V100-SXM2-16GB").link_bytes_per_second * FITTED.link  # the slower one
    wire = Wire(LINK_LATENCY_SECONDS, link)
    for device, spec in zip(summed.devices, ("V100-SXM2-16GB", "A100-SXM4-40GB"), strict=True):
        assert device.spec == spec
        own = [span for span in summed.spans if span.device == device]
        products = [span for span in own if span.name == "mm"]
        seconds = operator_seconds(product, spec_of(spec), FITTED)
        took = [span.end_seconds - span.start_seconds for span in products]
        assert took == pytest.approx([seconds] * 4)
        (sent,) = [span for span in own if span.name == f"allreduce {size}"]
        assert sent.end_seconds - sent.start_seconds == pytest.approx(
            collective_seconds("all-reduce", size, 2, wire)
        )
        # Three products do not wait for the sum, and the fourth does.
        assert products[0].start_seconds < sent.end_seconds
        assert products[3].asked_seconds == max(products[2].end_seconds, sent.end_seconds)


BESIDE = """
beside = dist.new_group([0, 1])
works = [
    dist.all_reduce(torch.ones(size, device="cuda"), group=group, async_op=True)
    for size, group in ((1024**2, None), (1024, beside))
]
for work in works:
    work.wait()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def test_a_short_sum_shares_the_link_with_a_long_one(tmp_path: Path) -> None:
    timeline = two(tmp_path, BESIDE).timeline()
    link = spec_of("V100-SXM2-16GB").link_bytes_per_second * FITTED.link  # the slower one
    wire = Wire(LINK_LATENCY_SECONDS, link)
    long, short = (collective_seconds("all-reduce", 4 * n, 2, wire) for n in (1024**2, 1024))
    took = {span.name: span.end_seconds - span.start_seconds for span in timeline.spans}
    assert took["allreduce 4096"] == pytest.approx(2 * short)
    assert took[f"allreduce {4 * 1024**2}"] == pytest.approx(long + short)


BEHIND = """
x, side = torch.ones(1024, 1024, device="cuda"), torch.cuda.Stream()
work = dist.all_reduce(x.clone(), async_op=True)
with torch.cuda.stream(side):
    work.wait()
    x.add(1.0)
x.mm(x)
dist.destroy_process_group()
"""


def test_with_one_queue_an_operation_waits_for_those_asked_for_before_it(tmp_path: Path) -> None:
    """A product of another stream is behind a sum's result, as on CUDA with one connection."""
    gpus = two(tmp_path, BEHIND)
    for rates in (testing.Rates(), testing.Rates(one_queue=True)):
        timeline = gpus.timeline(rates)
        for device in timeline.devices:
            own = {span.name: span for span in timeline.spans if span.device == device}
            is_behind = own["mm"].start_seconds >= own[f"allreduce {4 * 1024**2}"].end_seconds
            assert is_behind is rates.one_queue


CROSSED = """
sent, there = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
calls = [(dist.isend, sent), (dist.irecv, there)]
works = [call(tensor, 1 - rank) for call, tensor in calls[:: ORDER]]
torch.cuda.synchronize()
"""


def test_two_ranks_that_both_send_first_are_a_deadlock(tmp_path: Path) -> None:
    """A communicator has one queue; gloo, which carries the bytes here, would not mind."""
    with pytest.raises(testing.DeadlockError, match="send 16"):
        two(tmp_path, CROSSED.replace("ORDER", "1")).timeline()


def test_a_rank_that_receives_first_meets_one_that_sends_first(tmp_path: Path) -> None:
    timeline = two(tmp_path, CROSSED.replace("ORDER", "1 - 2 * rank")).timeline()
    assert [span.name for span in timeline.spans if span.kind == "nccl"] == ["send 16"] * 4


def test_a_timeline_is_written_for_perfetto(tmp_path: Path, summed: testing.Timeline) -> None:
    summed.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    products = [event for event in events if event["name"] == "mm"]
    assert {event["pid"] for event in products} == {0, 1}
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in products)
    named = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert ["V100-SXM2-16GB" in named[0], "A100-SXM4-40GB" in named[1]] == [True, True]


LACKS = """
import sys
import torch
from torch import nn

def said(function):
    try:
        function()
    except RuntimeError as error:
        print(error)

x = torch.ones(4, 4, device="cuda")
said(lambda: nn.DataParallel(nn.Linear(4, 4).cuda())(x))
said(torch.cuda.CUDAGraph().replay)
said(torch.cuda.memory_summary)
torch.cuda.nvtx.range_push("of no use")
torch.cuda.nvtx.range_pop()
stats = torch.cuda.memory_stats()
print(stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated() > 0)
sys.exit("ended by itself")
"""


def test_what_the_device_lacks_and_why_a_program_failed_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real_types():
        pytest.skip("this machine has GPUs of its own")
    monkeypatch.chdir(tmp_path)
    try:
        gpus = testing.gpus("V100,V100", Path("not", "there", "yet"))
    except CannotBuild as error:
        pytest.skip(str(error))
    (gpus.folder / "lacks.py").write_text(LACKS)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        gpus.run([sys.executable, "lacks.py"])
    assert failed.value.__notes__ == ["ended by itself\n"]
    *lacks, is_told = failed.value.stdout.splitlines()
    assert [line.partition("has no ")[2].partition(" (")[0] for line in lacks] == [
        "torch.nn.DataParallel; use DistributedDataParallel",
        "replay of CUDA graphs",
        "torch.cuda.memory_summary; torch.cuda.memory_stats has sums",
    ]
    assert is_told == "True"
