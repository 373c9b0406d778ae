"""Signals and deaths in launches over two hosts."""

from pathlib import Path

import pytest

from .elastic_runs import Launch
from .two_hosts import Hosts

LONG = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Launch(tmp_path_factory.mktemp("whole") / "run", [8], epochs=LONG).digest()


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_notice_to_one_host_saves_and_ends_all(
    tmp_path: Path, node: int, undisturbed: str
) -> None:
    saving = ("--checkpoint", str(tmp_path / "saved"))
    hosts = Hosts(tmp_path / "a", 0, [5, 3], *saving, seconds=0.4, epochs=LONG)
    hosts.wait_for_step(4)
    hosts.processes[node].terminate()
    assert hosts.end() == [143, 143]
    for said in hosts.said():
        assert "hetflow: interrupted by SIGTERM; all workers are stopped\n" in said
    saved = list((tmp_path / "saved").glob("step-*"))
    assert len(saved) == 1
    last = max(step for step, _, _ in hosts.steps())
    assert saved[0].name == f"step-{last:010d}" or saved[0].name.endswith(str(last))
    again = Hosts(tmp_path / "a", 1, [5, 3], *saving, epochs=LONG)
    assert again.end() == [0, 0], again.said()
    assert (tmp_path / "a" / "digest").read_text() == undisturbed
