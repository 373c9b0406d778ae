"""A Slurm cluster of fake nodes on this host, in a folder and on ports of its own."""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel")
_CONFIGURATION = """\
ClusterName=hetflow
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=2
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
NodeName=fast0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=400 \
Gres=gpu:cpu_fast:2
NodeName=slow0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=400 \
Gres=gpu:2 Feature=cpu_slow
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# A GPU needs a device file; a count alone leaves the nodes drained.
_GRES = """\
AutoDetect=off
NodeName=fast0 Name=gpu Type=cpu_fast File=/dev/tty[0-1]
NodeName=slow0 Name=gpu File=/dev/tty[0-1]
"""


def why_not() -> str | None:
    """What this host lacks."""
    # The daemons are in a folder that only root has on the path.
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"Slurm's {', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    return None if Path("/dev/tty1").exists() else "no device files that stand in for GPUs"


@contextmanager
def slurm_cluster(logs: Path) -> Iterator[dict[str, str]]:
    """Nodes ``fast0`` (2 x cpu:fast by GRES) and ``slow0`` (2 x cpu:slow by a feature).

    Args:
        logs: A folder for what the daemons say.

    Yields:
        The variables that Slurm's commands need.
    """
    # Each job gets a Unix socket under slurmd's folder, and those have names of at most 107 bytes:
    # in pytest's folder, whose name is longer under several workers, no job would ever begin.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name,
        _serving(Path(name), logs) as variables,
    ):
        yield variables


@contextmanager
def _serving(folder: Path, logs: Path) -> Iterator[dict[str, str]]:
    host = socket.gethostname().partition(".")[0]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    environment = {**os.environ, **variables}
    (folder / "state").mkdir()
    for node in ("fast0", "slow0"):
        (folder / f"spool-{node}").mkdir()
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(host=host, folder=folder, logs=logs, ports=_free_ports(3))
    )
    (folder / "gres.conf").write_text(_GRES)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
         f"--key-file={key}", f"--log-file={logs}/munged.log", f"--pid-file={folder}/munged.pid",
         f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "fast0"],
        ["slurmd", "-D", "-N", "slow0"],
    ]  # fmt: skip
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (logs / f"{command[0]}.out").open("ab") as output:
                daemons.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                        stderr=output, start_new_session=True,
                    )
                )  # fmt: skip
            if command[0] == "munged":
                _until(lambda: (folder / "munge.socket").exists(), "munged")
        _until(lambda: _are_idle(environment), "the nodes")
        yield variables
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "--user=root"], env=environment, timeout=5, capture_output=True,
                check=False,
            )  # fmt: skip
        _until(lambda: not _jobs(environment), "jobs to end", must=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in _processes(folder, b"slurm"):
            os.kill(process, signal.SIGKILL)


def kill_slurmd(variables: Mapping[str, str], node: str) -> None:
    """SIGKILL a node's daemon; its jobs go on."""
    [process] = _processes(Path(variables["SLURM_CONF"]).parent, b"-N\0" + node.encode())
    os.kill(process, signal.SIGKILL)


def start_slurmd(variables: Mapping[str, str], node: str) -> None:
    """Start a node's daemon again, and wait until it listens; it ends with the cluster."""
    subprocess.run(
        ["slurmd", "-N", node], env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    configuration = Path(variables["SLURM_CONF"]).read_text()
    port = int(re.findall(rf"NodeName={node} .* Port=(\d+) ", configuration)[0])
    _until(lambda: _listens(port), f"slurmd of {node}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _are_idle(environment: dict[str, str]) -> bool:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout.split() == ["idle", "idle"]


def _jobs(environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["squeue", "-h", "-o", "%i"], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout


def _processes(folder: Path, what: bytes) -> list[int]:
    """Processes of this cluster, whose environment names its folder, with such a command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                is_such = what in (entry / "cmdline").read_bytes()
                if is_such and os.fsencode(folder) in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _until(condition: object, what: str, *, must: bool = True) -> None:
    end = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            assert not must, f"waited in vain for {what}"
            return
        time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
