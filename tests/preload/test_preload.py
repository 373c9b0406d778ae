"""Forked processes against fresh ones: what a script sees, how it ends, what it dies with."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from pydantic_core import _pydantic_core

from hetflow.runtime import preload
from hetflow.runtime.preload import process as preloaded
from hetflow.runtime.preload.process import _keep
from hetflow.schema import files
from hetflow.schema.plan import Prediction, Proof
from hetflow.tests.plan_parts import split_plan, whole_group

pytestmark = pytest.mark.processes

TELLS = """
import json, os, resource, signal, subprocess, sys, threading
def stream(s):
    names = ("name", "mode", "encoding", "errors", "line_buffering", "write_through", "newlines")
    return [getattr(s, name) for name in names] + [type(s.buffer).__name__, s.seekable()]
def handler(number):
    found = signal.getsignal(number)
    return getattr(found, "name", str(found).split(" at ")[0])
get = resource.getrlimit
limits = {n: get(getattr(resource, n)) for n in dir(resource) if n[:7] == "RLIMIT_"}
print(json.dumps(dict(
    environment=dict(os.environ),
    c_environment=os.fsdecode(subprocess.check_output(["env", "-0"])).split("\\0"),
    argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path,
    main=[__name__, __file__, __spec__ and __spec__.name],
    is_main=sys.modules["__main__"].__dict__ is globals(), flags=list(sys.flags),
    folder=os.getcwd(), umask=os.umask(0), niceness=os.nice(0), limits=limits,
    affinity=sorted(os.sched_getaffinity(0)), descriptors=sorted(os.listdir("/proc/self/fd")),
    is_leader=os.getsid(0) == os.getpgrp() == os.getpid(), threads=threading.active_count(),
    handlers={n: handler(n) for n in sorted(signal.valid_signals())},
    mask=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    streams=[stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
    title=open("/proc/self/cmdline").read().rstrip("\\0"),
)))
"""
DRAWS = """
import multiprocessing, random, json, numpy, torch, uuid
print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(),
    torch.initial_seed(), str(uuid.uuid4()), multiprocessing.current_process().authkey.hex()]))
"""
PEAKS = """
import json, torch._dynamo, hetflow.runtime.worker
from hetflow.devices.memory import peak_memory_bytes, resident_memory_bytes, status_bytes
print(json.dumps([peak_memory_bytes(), status_bytes("VmHWM"), resident_memory_bytes()]))
"""


@pytest.fixture(scope="module", name="place")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with preload.serving(tmp_path_factory.mktemp("preload") / "own") as path:
        yield path


@pytest.fixture(name="two_workers")
def plan_two_workers(here: Path) -> Path:
    group = whole_group(
        device_type="cpu:fast",
        num_devices=2,
        device_batch_size=4,
        virtual_nodes=2,
        virtual_node_batch_size=2,
    )
    plan = split_plan(
        model="m",
        global_batch_size=8,
        groups=(group,),
        predicted=Prediction(step_seconds=0.5, samples_per_second=16.0),
        proof=Proof(
            termination="feasible", objective=0.5, lower_bound=None, gap=None, method="hand"
        ),
    )
    files.write(here / "plan.json", plan)
    return here / "plan.json"


@pytest.fixture(name="here")
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(preload.VARIABLE, str(place))
    return tmp_path


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def forked(*arguments: str, **named: Any) -> preload.Forked:
    named = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | named
    return preload.fork([sys.executable, *arguments], **named)


def said(process: preload.Forked) -> str:
    with process:
        out, err = (stream.read().decode() for stream in (process.stdout, process.stderr) if stream)
    assert process.returncode == 0, err
    return out


def wait_until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def is_temporary_of_torch(folder: str) -> bool:
    """Whether a folder was made by ``tempfile``, which names none that a test makes."""
    return Path(folder).parent == Path(tempfile.gettempdir()) and folder.startswith(
        os.path.join(tempfile.gettempdir(), tempfile.gettempprefix())
    )


@pytest.mark.parametrize("way", ["script", "safe path", "module", "package"])
@pytest.mark.slow
def test_a_script_cannot_tell_that_it_was_forked(
    here: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(here, TELLS)
    (here / "package").mkdir()
    (here / "package" / "__main__.py").write_text(Path(path).read_text())
    program = {
        "script": [path],
        "safe path": ["-P", path],
        "module": ["-m", "script"],
        "package": ["-m", "package"],
    }[way]
    command = [sys.executable, *program, "--epochs", "2", "a b"]
    environment = {**os.environ, "EMPTY": "", "NOT_UTF8": "\udcff", "ODD": "a=b\nc"}
    del environment["HOME"]
    monkeypatch.setenv("ONLY_OURS", "1")
    before = os.umask(0o027)
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reading, writing = os.pipe()
    try:
        asked: Any = {"env": environment, "stdin": subprocess.DEVNULL, "pass_fds": (writing,)}
        fresh = subprocess.run(
            command, capture_output=True, check=False, start_new_session=True, **asked
        )
        found = said(forked(*command[1:], **asked))
    finally:
        os.umask(before)
        signal.signal(signal.SIGHUP, old_handler)
        os.close(reading)
        os.close(writing)
    assert fresh.returncode == 0, fresh.stderr.decode()
    expected = json.loads(fresh.stdout)
    told = json.loads(found)
    for answer in (expected, told):
        answer["c_environment"].sort()
        # Importing an older torch (2.9 does) appends a temporary folder for its generated modules.
        answer["path"] = [p for p in answer["path"] if not is_temporary_of_torch(p)]
        if way != "safe path":  # -P is a flag, and the preloaded process has it
            del answer["flags"]
    assert told == expected
    assert told["environment"] == environment


def test_forked_processes_draw_different_numbers(here: Path) -> None:
    path = script(here, DRAWS)
    first, second = (json.loads(said(forked(path))) for _ in range(2))
    assert not set(map(str, first)) & set(map(str, second))


def test_a_forked_process_has_the_imports_and_no_cuda(here: Path) -> None:
    path = script(
        here,
        "import sys; before = 'torch._dynamo' in sys.modules\n"
        "import os, torch\n"
        "threads = len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(2); torch.rand(600, 600) @ torch.rand(600, 600)\n"
        "print(before, threads, torch.get_num_threads(), torch.cuda.is_initialized(),\n"
        "      torch._C._cuda_isInBadFork() if torch.backends.cuda.is_built() else False)\n",
    )
    assert said(forked(path)).split() == ["True", "1", "2", "False", "False"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("import os; os._exit(9)", 9),
        ("import sys; sys.exit('words')", 1),
        ("raise ValueError('wrong')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("import sys; sys.exit(256 + 3)", 3),
        ("import sys; sys.stdout = open('/dev/full', 'w'); print('lost')", 120),
    ],
)
def test_a_forked_process_ends_as_a_fresh_one_does(here: Path, text: str, code: int) -> None:
    with forked(script(here, text)) as process:
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        assert process.wait(30) == code
    assert process.poll() == process.returncode == code
    if "ValueError" in text:
        assert errors.endswith("ValueError: wrong\n")


def test_what_a_forked_process_loads_itself_ends_in_full(here: Path) -> None:
    """Exit handlers of inherited libraries are left out; its own run, and C streams are written."""
    path = script(
        here,
        "import ctypes, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.strdup.restype = libc.fopen.restype = ctypes.c_void_p\n"
        "stream = libc.fopen(sys.path[0].encode() + b'/stream', b'w')\n"
        "libc.fputs(b'buffered', ctypes.c_void_p(stream))\n"
        "libc.on_exit(libc.dprintf, ctypes.c_void_p(libc.strdup(b'handled')))  # (code, text)\n"
        "sys.exit(1)\n",
    )
    with forked(path) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"handled"
        assert process.wait(30) == 1
    assert (here / "stream").read_text() == "buffered"


@pytest.mark.parametrize(("own", "code"), [("", 0), ("own.so", -signal.SIGABRT)])
def test_where_a_forked_process_loads_a_library_python_ends_before_it(
    here: Path, own: str, code: int
) -> None:
    """A model that inductor had compiled died at its end, in what its library does then."""
    shutil.copy(str(_pydantic_core.__file__), here / "own.so")  # the copy is another library
    text = "import ctypes\nctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)\n"
    with forked(script(here, text + (f"ctypes.CDLL('./{own}')\n" if own else ""))) as process:
        assert process.wait(30) == code


def test_a_forked_programs_own_modules_are_taken_apart_and_its_files_are_written(
    here: Path,
) -> None:
    (here / "own.py").write_text(
        "class Last:\n"
        "    def __init__(self, word):\n"
        "        self.word = word\n"
        "    def __del__(self):\n"
        "        print(self.word, flush=True)\n"
        "kept = Last('module')\n"
    )
    path = script(
        here,
        "import atexit, own, torch, weakref\n"
        "atexit.register(print, 'handler', flush=True)\n"
        "main = own.Last('main')\n"
        "weakref.finalize(main, print, 'finalized', flush=True)\n"
        "print(sum(f.atexit for f in weakref.finalize._registry), flush=True)  # not torch's\n"
        "file, held = open('file', 'w'), open('held', 'w')\n"
        "file.write('all'), held.write('all')\n"
        "torch.holds_what_is_the_scripts = held\n",
    )
    number, *first, _, _ = lines = said(forked(path)).splitlines()
    assert (number, first) == ("1", ["handler", "finalized"])
    assert sorted(lines[-2:]) == ["main", "module"]
    assert (here / "file").read_text() == (here / "held").read_text() == "all"


def test_what_outlives_the_interpreter_can_be_imported_to_the_end() -> None:
    inherited = {name: sys.modules[name] for name in ("json", "json.decoder")}
    with mock.patch.dict(sys.modules):
        _keep(inherited, 0)
        assert not any(isinstance(sys.modules[name], ModuleType) for name in inherited)
        import json.decoder
        from json.decoder import JSONDecoder

        assert json.decoder.JSONDecoder is JSONDecoder is inherited["json.decoder"].JSONDecoder
    assert sys.modules["json"] is inherited["json"]


def test_a_forked_process_answers_to_signals(here: Path) -> None:
    path = script(here, "import time; print('up', flush=True); time.sleep(60)")
    with forked(path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        os.killpg(process.pid, signal.SIGTERM)  # it leads its group
        assert process.wait(30) == -signal.SIGTERM
        process.kill()  # too late, and no error


def test_pipes_lead_to_a_forked_process(here: Path) -> None:
    process = forked(script(here, "print(input()[::-1])"), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"abc\n")
    process.stdin.close()
    assert said(process) == "cba\n"


def test_what_cannot_be_forked_is_refused(here: Path) -> None:
    with pytest.raises(preload.PreloadError, match="not a program of this Python"):
        preload.fork(["sh", "-c", "true"])
    with pytest.raises(preload.PreloadError, match="not a program of this Python"):
        forked("-c", "print(1)")
    with pytest.raises(preload.PreloadError, match="No such file"):
        forked(script(here, ""), cwd=here / "nowhere")
    assert said(forked(script(here, "print('still there')"))) == "still there\n"


@pytest.mark.slow
def test_a_launch_forks_all_of_its_workers(here: Path, two_workers: Path) -> None:
    path = script(
        here,
        "import os, pathlib, sys\n"
        "has = 'torch._dynamo' in sys.modules\n"
        "pathlib.Path('told' + os.environ['RANK']).write_text(f'{has} {os.getppid()}')\n",
    )
    command = ["-m", "hetflow.cli.main", "launch", "-o", "run", str(two_workers), path]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [(here / f"told{rank}").read_text().split() for rank in range(2)]
    assert [has for has, _ in told] == ["True", "True"]
    assert told[0][1] == told[1][1]


def test_forked_processes_die_with_who_asked_for_them(here: Path) -> None:
    path = script(here, "import time; time.sleep(60)")
    asking = (
        "import sys, time\n"
        "from hetflow.runtime import preload\n"
        "print(preload.fork([sys.executable, sys.argv[1]]).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", asking, path], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert is_alive(pid)
        client.kill()
    wait_until(lambda: not is_alive(pid))


def test_a_preloaded_process_dies_with_its_launch(here: Path) -> None:
    asking = (
        "import os, time\n"
        "from hetflow.runtime.preload import Preload\n"
        "Preload('').prepare(os.environ)\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", asking], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "started\n"
        pids = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
        assert len(pids) == 1
        assert is_alive(int(pids[0]))
        client.kill()
    wait_until(lambda: not is_alive(int(pids[0])))


def test_without_its_host_a_launch_starts_fresh_processes(
    here: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = script(here, "import time; time.sleep(60)")
    command = [sys.executable, path]
    with preload.Preload(str(place)) as own:
        own.wait(os.environ, lambda: None)
        process = own.start(command, os.environ)
        assert process is not None
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        wait_until(lambda: not is_alive(process.pid))
        assert own.start(command, os.environ) is None
        assert own.start(command, os.environ) is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "workers start as fresh processes"
    ]


def test_waiting_for_a_preloaded_process_can_be_interrupted(here: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt() -> None:
        raise Interrupted

    with preload.Preload("") as own, pytest.raises(Interrupted):
        own.wait(os.environ, interrupt)


@pytest.mark.parametrize("where", ["nowhere", "stale", "file"])
def test_a_socket_that_nobody_serves_means_fresh_processes(
    here: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = here / where
    if where == "stale":
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    elif where == "file":
        path.write_text("")
    with preload.Preload(str(path)) as own:
        own.wait(os.environ, lambda: None)
        assert own.start([sys.executable, "script.py"], os.environ) is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_fresh_processes_can_be_asked_for(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    with preload.Preload(preload.OFF) as own:
        own.wait(os.environ, lambda: None)
        assert own.start([sys.executable, "script.py"], os.environ) is None
    assert not caplog.records


def test_a_socket_is_for_its_user_alone(place: Path) -> None:
    assert place.stat().st_mode & 0o777 == 0o600
    assert place.parent.stat().st_mode & 0o777 == 0o700


def serve_at(path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "hetflow.runtime.preload", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_socket_is_served_once(place: Path) -> None:
    done = serve_at(place)
    assert done.returncode == 2
    assert done.stderr == f"hetflow: {place} is served by another process\n"


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = serve_at(tmp_path / "socket")
    assert done.returncode == 2
    assert "open to other users" in done.stderr
    assert "chmod 700" in done.stderr


def test_a_socket_left_by_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "preload.sock"))
    with preload.serving(folder) as path, socket.socket(socket.AF_UNIX) as probe:
        wait_until(lambda: probe.connect_ex(str(path)) == 0)
    assert list(folder.iterdir()) == []


def check_in_a_process(first: str) -> str:
    """What ``check_forkable`` says in a process where ``torch`` is a stand-in."""
    code = (
        "import sys, threading, time, types\n"
        "cuda = types.SimpleNamespace(is_initialized=lambda: False)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
        "from hetflow.runtime.preload import server\n"
        f"{first}\n"
        "try:\n"
        "    server.check_forkable()\n"
        "except server.Unfit as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_threads_and_cuda_keep_a_process_from_being_forked() -> None:
    assert check_in_a_process("") == ""
    thread = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    assert check_in_a_process(thread) == "the imports have started 1 thread(s)\n"
    asked = "cuda.is_initialized = lambda: True"
    assert check_in_a_process(asked) == "the imports have initialised CUDA\n"


def test_what_acts_before_the_imports_is_told_apart() -> None:
    early = {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "LD_PRELOAD": "libx.so",
        "TORCH_LOGS": "all",
        "NVIDIA_TF32_OVERRIDE": "0",
        "LANG": "C",
    }
    late = {
        "CUDA_VISIBLE_DEVICES": "1",
        "RANK": "0",
        "HETFLOW_SLOT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "PYTHONBREAKPOINT": "pdb.set_trace",
    }
    assert preload.import_settings(early | late) == early


@pytest.mark.slow
def test_the_memory_of_a_forked_process_counts_what_a_fresh_one_would(here: Path) -> None:
    """Libraries that only the preloaded process has touched are memory of a fresh one's."""
    file = script(here, PEAKS)
    with forked(file) as process:
        assert process.stdout is not None
        peak, seen, resident = json.loads(process.stdout.read())
    fresh = subprocess.run([sys.executable, file], capture_output=True, check=True)
    expected, seen_fresh, resident_fresh = json.loads(fresh.stdout)
    assert abs(expected - seen_fresh) < 1 << 20  # of the same process, a moment later
    assert peak > seen  # it has touched less of torch
    assert abs(peak - expected) < 0.1 * expected
    assert abs(resident - resident_fresh) < 0.1 * resident_fresh


@pytest.mark.parametrize(("module", "at_the_end"), [("triton._C.libtriton", "gone\n"), ("m", "")])
def test_what_complains_of_the_living_is_collected_at_the_end(module: str, at_the_end: str) -> None:
    code = (
        "import sys, types\n"
        "from hetflow.runtime.preload import server\n"
        "class Bound:\n"
        "    def __init__(self):\n"
        "        self.itself = self\n"
        "    def __del__(self):\n"
        "        print('gone', flush=True)\n"
        f"sys.modules[{module!r}] = types.ModuleType({module!r})\n"
        "Bound()\n"
        "server.freeze()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == at_the_end


def test_one_python_by_another_name_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = preloaded.identity()
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(other))
    assert preloaded.identity() == own
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # another environment of that Python
    assert preloaded.identity() != own
