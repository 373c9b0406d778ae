"""Measuring in a process that may die: real processes, a tiny model, tiny memory."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from hetflow.profilers.batch_curve import CurveLimits, measure_curve
from hetflow.profilers.process import (
    Child,
    Loading,
    Measurer,
    started_like_workers,
    stretched,
    verify,
)
from hetflow.profilers.targets import parse
from hetflow.profilers.timing import RepeatPolicy
from hetflow.schema.errors import TargetError
from hetflow.schema.profile import BatchPoint
from hetflow.tests import programs

pytestmark = pytest.mark.measures

SOURCE = """
import os
import torch
from torch import nn

def small():
    print("chatter on stdout")
    return nn.Linear(8, 8), lambda n: torch.randn(n, 8), lambda model, x: model(x).sum()

def hungry():
    # 16 MiB a sample, and as much for its gradient.
    loss = lambda model, x: (model(x).sum() * torch.ones(len(x), 1 << 22)).sum()
    return nn.Linear(8, 8), lambda n: torch.randn(n, 8), loss

def huge():
    return nn.Linear(1 << 20, 1 << 20), len, len

def dies():
    os.abort()

def killed_later():
    def loss(model, x):
        if len(x) > 2:
            os.kill(os.getpid(), 9)
        return model(x).sum()
    return nn.Linear(8, 8), lambda n: torch.randn(n, 8), loss

def slow():
    import time
    time.sleep(600)

def crowded():
    # Four processes of the usual priority leave little of a core to one of the lowest.
    import subprocess, sys, time
    (core, *_) = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    os.nice(19)
    try:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
    finally:
        for each in busy:
            each.kill()
            each.wait()
    return small()

def optimizer_raises():
    def make_optimizer(parameters):
        try:
            return {}["momentum"]
        except KeyError as error:
            raise RuntimeError("no optimizer") from error
    return *small(), make_optimizer

def kept():
    # Fails where malloc was told to map nothing before the model is made.
    import ctypes
    large = torch.empty(64 << 20, dtype=torch.uint8)
    fields = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (*fields, "fordblks", "keepcost")]
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    assert mallinfo().hblkhd >= large.numel(), "in the heap"
    return small()

def forked():
    import gc
    assert gc.get_freeze_count() > 1000, "fresh"
    return small()

def loss_raises():
    return nn.Linear(8, 8), lambda n: torch.randn(n, 9), lambda model, x: model(x).sum()"""
POLICY = RepeatPolicy(max_repeats=4, budget_seconds=0.5)
LIMITS = CurveLimits(repeats=POLICY, budget_seconds=30.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def measurer(file: Path, factory: str, memory: int = 2 << 30, seconds: float = 60.0) -> Measurer:
    target = parse(f"{file}:{factory}")
    loading = Loading(target=target, memory_bytes=memory, optimizer="sgd")
    return Measurer(loading, device="cpu", answer_seconds=seconds)


@pytest.mark.slow
def test_a_small_model_is_measured_updated_and_held(file: Path) -> None:
    with measurer(file, "small") as measure:
        first = measure.measure(4, POLICY)
        assert first is not None
        assert first.timing.median_seconds > 0
        assert first.peak_memory_bytes > 1 << 20
        assert measure.facts["weight_bytes"] == (8 * 8 + 8) * 4
        assert measure.facts["torch_threads"] == 1
        ((first_step, second_step),) = measure.rehearse([4, 4], num_steps=2)
        assert first_step.ended > 0
        assert second_step.update_seconds > 0
        point = BatchPoint(batch_size=4, step_seconds=second_step.ended / 2, peak_memory_bytes=1)
        table = stretched([point], 0.001)
        (held,) = verify(measure, table, budget_seconds=1.0)
    # Never faster than stated; slower only by what the machine's other work takes away.
    assert held.measured.high_seconds >= held.table_seconds
    assert held.error > -0.01


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's mallinfo2")
def test_a_model_lies_in_memory_where_a_workers_does(file: Path) -> None:
    with measurer(file, "kept") as measure:
        assert measure.measure(1, POLICY) is not None
        with pytest.raises(TargetError, match="no repeated layers"):
            measure.measure(1, POLICY, activations="recomputed")


@pytest.mark.parametrize("is_off", [False, True])
def test_it_starts_as_workers_do(file: Path, is_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(programs.VARIABLE, "off" if is_off else programs.preloaded())
    fresh = pytest.raises(TargetError, match="fresh") if is_off else nullcontext()
    with started_like_workers(), measurer(file, "forked") as measure, fresh:
        assert measure.measure(1, POLICY) is not None


def test_memory_ends_a_curve_in_the_child_and_it_goes_on_after(file: Path) -> None:
    limits = CurveLimits(repeats=RepeatPolicy(max_repeats=1, min_repeats=1), sizes=(1, 5, 256))
    with measurer(file, "hungry", memory=2 << 30) as measure:
        curve = measure_curve(
            lambda size: measure.measure(size, limits.repeats), limits, time.monotonic
        )
        assert curve.stopped == "out of memory"
        assert curve.out_of_memory_batch_size == 256
        peaks = [result.peak_memory_bytes for result in curve.results]
        assert peaks[1] - peaks[0] >= 4 * (12 << 20)
        with pytest.raises(MemoryError):
            measure.rehearse([256, 256], num_steps=1)
        assert len(measure.rehearse([1, 1], num_steps=1)[0]) == 1


def test_being_killed_at_a_larger_size_is_recorded_as_memory(file: Path) -> None:
    with measurer(file, "killed_later") as measure:
        curve = measure_curve(lambda size: measure.measure(size, POLICY), LIMITS, time.monotonic)
    assert curve.out_of_memory_batch_size == 3
    assert measure.death == "SIGKILL"


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("huge", "does not fit the device's memory at batch size 1"),
        ("dies", r"the measuring process died \(SIGABRT\)"),
        ("loss_raises", "mine.py:.*: loss raised RuntimeError: (addmm: )?mat1 and mat2"),
    ],
)
def test_faults_of_the_model_are_one_line(file: Path, factory: str, said: str) -> None:
    with measurer(file, factory) as measure, pytest.raises(TargetError, match=said):
        measure_curve(lambda size: measure.measure(size, POLICY), LIMITS, time.monotonic)


def test_the_first_cause_is_the_line_and_the_traceback_comes_with_debug(file: Path) -> None:
    with measurer(file, "optimizer_raises") as measure, pytest.raises(TargetError) as caught:
        measure.measure(1, POLICY)
    line = SOURCE.splitlines().index('            return {}["momentum"]') + 1
    assert str(caught.value) == (
        f"the measuring process failed: KeyError: 'momentum' (mine.py:{line})"
    )
    (note,) = caught.value.__notes__
    assert "in make_optimizer" in note
    assert "RuntimeError: no optimizer" in note


def test_a_model_that_hangs_is_given_up(file: Path) -> None:
    with (
        measurer(file, "slow", seconds=0.5) as measure,
        pytest.raises(TargetError, match="no answer within"),
    ):
        measure.measure(1, POLICY)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="reads /proc")
def test_time_in_which_others_keep_the_core_busy_is_not_the_models(file: Path) -> None:
    began = time.monotonic()
    with measurer(file, "crowded", seconds=3.0) as measure:
        assert measure.measure(1, POLICY) is not None
    assert time.monotonic() - began > 3.0  # of which the model had a fraction


@pytest.fixture
def child() -> Iterator[Child]:
    with Child() as process:
        yield process


def test_no_process_is_left_behind(child: Child) -> None:
    number = child._process.pid
    child.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    with pytest.raises(ValueError, match="closed file"):
        child.send("load")


@pytest.mark.slow
def test_the_base_is_what_a_process_holds_without_its_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def large():\n"
        "    return nn.Linear(4096, 4096), lambda n: torch.randn(n, 4096),"
        " lambda model, x: model(x).sum()\n"
    )
    target = parse(f"{tmp_path / 'model.py'}:large")
    loading = Loading(target=target, memory_bytes=8 << 30, optimizer="adam")
    with Measurer(loading, device="cpu") as measurer:
        peak = measurer.measure(1, POLICY)
        base = measurer.base_memory(1)
        assert peak is not None
        assert base is not None
        # Weights, gradients and two of Adam's, 64 MiB each, are gone; Python and torch are not.
        assert 100 << 20 < base < peak.peak_memory_bytes - (250 << 20)
        assert measurer.measure(1, POLICY) is not None  # another process has taken its place
