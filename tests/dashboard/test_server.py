"""The HTTP side: who may read, what is answered, and what is refused."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.dashboard import server
from hetflow.clusters.dashboard.server import Address, Dashboard
from hetflow.clusters.scheduler.store import FILE
from hetflow.schema.errors import ProblemError
from hetflow.tests.scheduler.test_loop import Cluster

from .conftest import HOSTILE

PAGE = Path(server.__file__).parent / "page"


@pytest.fixture
def dashboard(cluster: Cluster) -> Iterator[Dashboard]:
    made = Dashboard(cluster.folder, Address("127.0.0.1", 0))
    with made.answering():
        yield made


def asked(
    dashboard: Dashboard, path: str, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", dashboard.address.port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def path_of(dashboard: Dashboard) -> str:
    """The path that holds the token, with a slash at its end."""
    return dashboard.url.removeprefix(f"http://{dashboard.address}")


def test_the_page_its_files_and_the_state_are_served(
    dashboard: Dashboard, cluster: Cluster
) -> None:
    root = path_of(dashboard)
    for name, kind in (("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css"),
                       ("icon.svg", "image/svg"), ("state.json", "application/json")):  # fmt: skip
        response, text = asked(dashboard, root + name)
        assert response.status == 200
        assert response.getheader("Content-Type", "").startswith(kind)
        assert "default-src 'none'" in response.getheader("Content-Security-Policy", "")
        assert "unsafe" not in response.getheader("Content-Security-Policy", "")
        assert response.getheader("X-Content-Type-Options") == "nosniff"
        assert response.getheader("Referrer-Policy") == "no-referrer"
        assert response.getheader("Cache-Control") == "no-store"
        assert response.getheader("Access-Control-Allow-Origin") is None
    found = json.loads(text)
    assert found["names"] == {str(number): name for number, name in enumerate(HOSTILE, 1)}
    assert found["folder"] == str(cluster.folder)
    response, text = asked(dashboard, root, "HEAD")
    assert (response.status, text) == (200, "")
    assert asked(dashboard, f"{root}state.json?window=all", Origin="http://evil.example")[
        0
    ].getheader("Access-Control-Allow-Origin") is None  # fmt: skip


def test_nobody_reads_without_the_token(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(first)
        return first == second

    monkeypatch.setattr(server.hmac, "compare_digest", compare)  # it takes constant time
    token = path_of(dashboard).strip("/")
    wrong = ["", "state.json", token[:-1], token + "x", token.swapcase(), "%00", "/[::1"]
    for path in wrong:
        for name in ("", "/", "/state.json", "/page.js"):
            response, text = asked(dashboard, f"/{path}{name}")
            assert response.status == 403, path
            assert token not in text
            assert HOSTILE[0] not in text
    assert len(compared) == 4 * len(wrong)


def test_another_sites_name_that_points_here_is_refused(dashboard: Dashboard) -> None:
    ours = "127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80", "192.168.7.3:80"
    others = (
        "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:127", "",
        "[::1", "user@127.0.0.1:80", "127.0.0.1/evil.example", "127.1",
    )  # fmt: skip
    for host in (*ours, *others):
        status = asked(dashboard, path_of(dashboard), Host=host)[0].status
        assert status == (200 if host in ours else 403), host


def test_it_only_reads(dashboard: Dashboard, cluster: Cluster) -> None:
    before = cluster.store.rows("SELECT * FROM jobs")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        response, text = asked(dashboard, path_of(dashboard), method)
        assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")
    for name in ("../state.sqlite", "%2e%2e/state.sqlite", "index.html", "page.js/", "server.py"):
        assert asked(dashboard, path_of(dashboard) + name)[0].status == 404
    response, text = asked(dashboard, f"{path_of(dashboard)}state.json?window=7")
    assert (response.status, text.startswith("window is one of 600")) == (400, True)
    assert [tuple(row) for row in cluster.store.rows("SELECT * FROM jobs")] == [
        tuple(row) for row in before
    ]


def test_a_state_that_goes_is_said_and_comes_back(
    dashboard: Dashboard, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_FRESH_SECONDS", -1.0)
    state = f"{path_of(dashboard)}state.json"
    (cluster.folder / FILE).rename(cluster.folder / "away")
    response, text = asked(dashboard, state)
    assert (response.status, text.count("\n")) == (503, 1)
    assert "no cluster was started there" in text
    (cluster.folder / "away").rename(cluster.folder / FILE)
    assert asked(dashboard, state)[0].status == 200


def test_those_who_ask_together_share_one_answer(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_FRESH_SECONDS", 1e6)
    state = f"{path_of(dashboard)}state.json?window="
    first = json.loads(asked(dashboard, state + "600")[1])
    assert json.loads(asked(dashboard, state + "600")[1]) == first
    assert json.loads(asked(dashboard, state + "all")[1])["now"] > first["now"]


def test_too_many_connections_are_closed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 1)
    made = Dashboard(cluster.folder, Address("127.0.0.1", 0))
    with made.answering():
        first = HTTPConnection("127.0.0.1", made.address.port, timeout=10)
        first.request("GET", path_of(made))
        assert first.getresponse().read()  # and the connection stays open
        with pytest.raises(OSError, match="closed|reset"):
            asked(made, path_of(made))
        first.close()


def test_slow_strangers_do_not_keep_the_owner_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Dashboard(cluster.folder, Address("127.0.0.1", 0))
    before = threading.active_count()
    with made.answering(), ExitStack() as opened:
        address = ("127.0.0.1", made.address.port)
        owner = HTTPConnection(*address, timeout=10)
        opened.callback(owner.close)
        strangers = []
        for number in range(200):
            strangers.append(opened.enter_context(socket.create_connection(address, timeout=10)))
            strangers[-1].sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
            if number % 50 == 0:  # by the connection that is open, and by new ones
                owner.request("GET", path_of(made))
                assert owner.getresponse().read()
                assert asked(made, path_of(made))[0].status == 200
        assert asked(made, path_of(made) + "state.json")[0].status == 200
        assert threading.active_count() - before <= server._MOST_CONNECTIONS + 1
        # The rest are closed in time, though they send a byte now and then.
        monkeypatch.setattr(server, "_IDLE_SECONDS", 0.5)
        ends = time.monotonic() + 10
        while threading.active_count() - before > 2 and time.monotonic() < ends:
            for stranger in strangers[-5:]:
                with suppress(OSError):
                    stranger.sendall(b"x")
            time.sleep(0.05)
        assert threading.active_count() - before <= 2  # who listens, and the owner's
        owner.request("GET", path_of(made))
        assert owner.getresponse().read()


def test_addresses() -> None:
    assert str(Address.parse("127.0.0.1:80")) == "127.0.0.1:80"
    assert str(Address.parse("[::1]:0")) == "[::1]:0"
    assert Address.parse("localhost:8080") == Address("127.0.0.1", 8080)
    assert Address.parse("127.0.0.1:80").is_loopback
    assert not Address.parse("0.0.0.0:80").is_loopback
    for wrong in ("", "80", ":80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1",
                  "::1:80", "[127.0.0.1]:80", "lab1:80", "127.0.0.1:8 0", "1.2.3:80"):  # fmt: skip
        with pytest.raises(ProblemError, match="is no address to listen on"):
            Address.parse(wrong)


def test_bad_input_is_one_line(
    dashboard: Dashboard, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state", str(cluster.folder)]
    start = ["cluster", "start", "--gpus", "1xcpu:fast", "--dashboard"]
    taken = str(dashboard.address)
    for arguments, said in (
        (["dashboard", "--listen", taken, *state], "Address already in use"),
        (["dashboard", "--listen", "lab1:80", *state], "is no address to listen on"),
        (["dashboard", "--listen", "192.0.2.1:80", *state], "cannot listen on 192.0.2.1:80"),
        (["dashboard", "--state", str(tmp_path)], "no cluster was started there"),
        ([*start, taken, "--state", str(tmp_path / "new")], "Address already in use"),
        ([*start, "80", "--state", str(tmp_path / "new")], "is no address to listen on"),
    ):
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.err.count("\n") == 2  # with a hint
        assert captured.out == ""
    assert not (tmp_path / "new").exists()


def test_the_page_needs_no_other_host_and_reads_names_as_text_alone() -> None:
    for path in sorted(PAGE.iterdir()):
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+[\w/.]*", re.sub(r"//\s.*", "", text)))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\("
                             r"|\son\w+=|style=|<script>|javascript:", text), path.name  # fmt: skip
