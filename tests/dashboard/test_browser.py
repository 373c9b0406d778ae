"""The page in a real browser (Debian's ``chromium``), and the two commands that serve it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.request import urlopen

import pytest

from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.tests.scheduler.test_loop import Cluster

from .conftest import HOSTILE

pytestmark = [pytest.mark.slow, pytest.mark.processes]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def served(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that serves the page; it is interrupted at the end, as by ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hetflow", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def in_the_browser(url: str, folder: Path) -> tuple[str, str]:
    """The page's document once it has been drawn, and what the browser logged."""
    if BROWSER is None:
        pytest.skip("no browser: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
    done = subprocess.run(
        [BROWSER, "--headless", "--disable-gpu", *sandbox, f"--user-data-dir={folder / 'browser'}",
         "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


def part(document: str, identifier: str) -> str:
    """What is in the element of an id, up to the next one that has an id."""
    [found] = re.findall(
        rf'id="{identifier}"[^>]*>(.*?)(?=<[a-z0-9]+ id="|</body>)', document, re.S
    )
    return found


class Tags(HTMLParser):
    """The names of all elements of a document, and of their attributes."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_a_browser_draws_the_state_and_runs_no_jobs_name(cluster: Cluster, tmp_path: Path) -> None:
    with served("dashboard", "--json", "--state", str(cluster.folder)) as process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        document, log = in_the_browser(json.loads(text)["url"], tmp_path)
    assert process.returncode == 130
    assert "<title>hetflow cluster</title>" in document
    assert ">live</span>" in document
    assert "CONSOLE" not in log  # neither errors nor what the policy of the page forbids
    for name in HOSTILE:
        escaped = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert escaped in part(document, "queue")
    tags = Tags(document)
    assert [tags.names.count(name) for name in ("script", "h1", "img")] == [1, 1, 0]
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert part(document, "queue").count("<tr") == 4
    assert f"exit code 2: hetflow: {HOSTILE[0][:7]}".replace("<", "&lt;") in document
    assert "of 2" in part(document, "tiles")
    assert document.count('class="bar ') > 10
    assert part(document, "types").count("<polyline") == 2
    assert part(document, "shares").count('class="aim"') >= 2
    assert "\u221210.0 %" in part(document, "queue")  # measured against predicted
    assert '"label server">lab 2</text>' in document


def test_a_scheduler_serves_its_own_page(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with served(
        "cluster", "start", "--gpus", "2xcpu:fast", "--state", str(state),
        "--dashboard", "127.0.0.1:0",
    ) as process:  # fmt: skip
        assert process.stderr is not None
        line = ""
        while not line.startswith("dashboard: "):
            line = process.stderr.readline()
        while not process.stderr.readline().startswith("2 devices"):
            pass
        with urlopen(f"{line.split()[1]}state.json", timeout=10) as answer:
            found = json.load(answer)
    assert [device["device_type"] for device in found["devices"]] == ["cpu:fast", "cpu:fast"]
    assert found["policy"] == "las_weighted"
    assert process.returncode == 0
    assert ClusterStore.read(state).get("inventory")
