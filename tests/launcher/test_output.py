"""Workers' output on our own streams: whole lines, whatever pieces they come in."""

import os
import sys
import threading
import time
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from hetflow.cli.common import library_speaks
from hetflow.runtime.launcher import workers
from hetflow.runtime.launcher.workers import OutputLines, follow, tee


class Console(TextIOWrapper):
    """A stream that remembers its writes."""

    def __init__(self) -> None:
        self.raw_bytes = BytesIO()
        super().__init__(self.raw_bytes)

    def text(self) -> str:
        return self.raw_bytes.getvalue().decode()


def test_two_streams_in_pieces_do_not_mix_within_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PARTIAL_SECONDS", 60.0)  # however busy the machine is
    console, pipes, threads = Console(), [os.pipe(), os.pipe()], []
    for number, (read, _) in enumerate(pipes):
        arguments = (read, tmp_path / f"log{number}", console)
        threads.append(threading.Thread(target=tee, args=arguments))
        threads[-1].start()
    for _ in range(50):
        for piece in range(4):
            for number, (_, write) in enumerate(pipes):
                os.write(write, [b"of ", b"stream ", b"%d" % number, b"\n"][piece])
    for _, write in pipes:
        os.close(write)
    for thread in threads:
        thread.join(timeout=10)
    lines = console.text().splitlines()
    assert sorted(lines) == ["of stream 0"] * 50 + ["of stream 1"] * 50
    assert (tmp_path / "log0").read_text() == "of stream 0\n" * 50


def test_the_beginning_of_a_line_is_shown_when_nothing_follows(tmp_path: Path) -> None:
    console, (read, write) = Console(), os.pipe()
    thread = threading.Thread(target=tee, args=(read, tmp_path / "log", console))
    thread.start()
    os.write(write, b"50 %\rready? ")
    deadline = time.monotonic() + 10
    while console.text() != "50 %\rready? " and time.monotonic() < deadline:
        time.sleep(0.01)
    assert console.text() == "50 %\rready? "
    os.close(write)
    thread.join(timeout=10)


def test_a_log_is_followed_to_its_end_by_lines(tmp_path: Path) -> None:
    console, log = Console(), tmp_path / "log"
    log.write_text("before\n")
    is_over = threading.Event()
    arguments = (log, console, is_over.is_set, lambda: True)
    thread = threading.Thread(target=follow, args=arguments)
    thread.start()
    time.sleep(2 * workers.FOLLOW_SECONDS)
    with log.open("a") as stream:
        stream.write("a line\nand its")
    time.sleep(2 * workers.FOLLOW_SECONDS)
    with log.open("a") as stream:
        stream.write(" end")
    is_over.set()
    thread.join(timeout=10)
    assert console.text() == "a line\nand its end"


def test_a_console_that_is_gone_is_no_error() -> None:
    console = Console()
    lines = OutputLines(console)
    console.close()
    lines.add(b"a line\n")
    assert not lines.is_open


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_that_cannot_be_written_ends_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    console, (read, write) = Console(), os.pipe()
    thread = threading.Thread(target=tee, args=(read, Path("/dev/full"), console))
    thread.start()
    for number in range(3):
        os.write(write, b"line %d\n" % number)
        time.sleep(0.01)
    os.close(write)
    thread.join(timeout=10)
    assert console.text() == "line 0\nline 1\nline 2\n"
    said = "/dev/full: No space left on device; what follows is shown, not kept"
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_worker_goes_on_where_neither_log_nor_terminal_nor_warning_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    with Path("/dev/full").open("w", buffering=1) as full, library_speaks():
        monkeypatch.setattr(sys, "stderr", full)
        thread = threading.Thread(target=tee, args=(read, Path("/dev/full"), full))
        thread.start()
        for _ in range(3):
            os.write(write, b"more than a pipe holds\n" * 10_000)  # SIGPIPE, if nobody reads
        os.close(write)
        thread.join(timeout=10)
        assert not thread.is_alive()
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
