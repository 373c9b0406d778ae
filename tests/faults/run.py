"""One run of the campaign: a launch, faults, further launches, and what must hold at the end."""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hetflow.runtime.checkpoints.parts import is_complete
from hetflow.schema import files
from hetflow.schema.options import Shard
from hetflow.schema.plan import Plan
from hetflow.tests import plan_parts

from ..launcher.elastic_runs import plan_of as plan_by_hand
from ..launcher.test_hosts import free_port
from ..programs import Program
from ..runtime.sharded_plans import shared
from .faults import Fault, Story, craft, flip, folder_to_harm, tear
from .processes import Commands, is_gone, send

HETFLOW = [sys.executable, "-m", "hetflow.cli.main"]
SCRIPT = Path(__file__).with_name("training.py")
NODES, NODE_SAMPLES = 4, 4
LIMIT_SECONDS = 200.0  # for any one thing to happen; a hang otherwise
HEARTBEAT_SECONDS = 3.0
CHECKPOINT_EVERY = 5
NUM_EPOCHS = 40  # of five steps: for 25 faults
FULL_DISK_BYTES = 128 << 10  # less than a checkpoint, more than any other file of a worker
REFUSED = "none of the checkpoints there can be used"
UNWRITTEN = "the checkpoint was not written"
HOSTS_MAPPING = "1xcpu:fast,1xcpu:slow"
RUN_FILES = {"plan.json", "launch.json", "run.json", "logs"}


class Violation(Exception):
    """Something that must hold does not."""


class Ended(Exception):
    """The launch has ended by itself."""


def plan_of(mapping: str, shard: Shard | None = None) -> Plan:
    """Four virtual nodes on the devices of a specification; the first ones hold more.

    If they share states, their shares are unlike, and one of four has none.
    """
    types = []
    for part in mapping.split(","):
        number, _, name = part.partition("x")
        types += [name] * int(number)
    counts = [NODES // len(types) + (n < NODES % len(types)) for n in range(len(types))]
    plan = plan_by_hand(counts, types, model="faults", samples=NODE_SAMPLES)
    return shared(plan, shard, (1, 3, 0, 2)[: len(types)])


def pipeline_plan() -> Plan:
    """Two stages of the model, and four microbatches."""
    layers = (tuple("01234"), tuple("567"))
    stages = tuple(
        plan_parts.pipeline_stage(
            layers=own,
            num_replicas=1,
            device_type="cpu:fast",
            first_device=number,
            num_in_flight=2 - number,
            weight_versions=1,
            seconds_per_input=0.001,
            compute_seconds=0.001,
            output_seconds=0.0,
            memory_bytes=1000,
        )
        for number, own in enumerate(layers)
    )
    split = plan_of("2xcpu:fast")
    return plan_parts.pipeline_plan(
        model=split.model,
        global_batch_size=split.global_batch_size,
        microbatch_size=NODE_SAMPLES,
        num_microbatches=NODES,
        schedule="1f1b",
        recompute=False,
        stages=stages,
        predicted=split.predicted,
        proof=split.proof,
        noam=2,
        stage_cost="ring",
        solved="flat",
    )


class Run:
    """A run that goes through a story.

    Args:
        folder: Of its own; made here.
        story: What happens.
        commands: How commands start; those of one run at a time.
        num_epochs: How long it trains.
    """

    def __init__(self, folder: Path, story: Story, commands: Commands, num_epochs: int) -> None:
        for name in ("saved", "tmp"):
            (folder / name).mkdir(parents=True)
        self.folder, self.run, self.saved = folder, folder / "run", folder / "saved"
        self._story, self._commands, self._processes = story, commands, commands.processes
        self._num_epochs = num_epochs
        self.did: list[str] = []
        self.counts: Counter[str] = Counter()
        self.num_launches = self.last_step = 0
        self._steps: list[tuple[int, int]] = []
        self._read = 0
        self._limit = 0
        self._launchers: list[Program] = []
        self._outputs: list[Path] = []
        self._from_scratch = False
        self._next_trickle, self._pause_seconds = 0.0, 0.1

    # The launch

    def launch(self) -> None:
        """Start, or start again with the same folders on the story's next mapping."""
        mapping = self._story.mappings[self.num_launches % len(self._story.mappings)]
        self.num_launches += 1
        plan = self.folder / "plan.json"
        is_pipeline = self._story.is_pipeline
        mapping = HOSTS_MAPPING if self._story.is_on_hosts else mapping
        whole = pipeline_plan() if is_pipeline else plan_of(mapping, self._story.shard)
        files.write(plan, whole, force=True)
        level = "static" if is_pipeline else "elastic"
        options = ["--determinism", level, "--on-failure", self._story.on_failure]
        options += ["--checkpoint", str(self.saved), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        options += ["--heartbeat", str(HEARTBEAT_SECONDS), "--timeout", "60", "--force"]
        options += ["--restart-from-scratch"] if self._from_scratch else []
        options += ["--redundancy", "1"] if self._story.redundancy else []
        self._restart_progress(from_scratch=self._from_scratch)
        self._from_scratch = False
        script = [str(SCRIPT), str(self.folder), str(self._num_epochs)]
        script += ["pipeline"] if is_pipeline else []
        self._launchers, self._outputs = [], []
        for host in self._hosts_options():
            number = len(self._launchers)
            run = self.run if number == 0 else self.folder / f"run-{number}"
            command = [*HETFLOW, "launch", *options, *host, "-o", str(run), str(plan), *script]
            self._start(command, self.folder / f"launch-{self.num_launches}-{number}.txt")

    def _hosts_options(self) -> list[list[str]]:
        if not self._story.is_on_hosts:
            return [[]]
        shared = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        types = ("cpu:slow", "cpu:fast")  # the first rank, which saves, is on host 1
        return [
            [*shared, "--node-rank", str(number), "--devices", f"1x{name}"]
            for number, name in enumerate(types)
        ]

    def _start(self, command: list[str], output: Path) -> None:
        with output.open("wb") as stream:
            launcher = self._commands.start(
                command,
                temporary=self.folder / "tmp",
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self._launchers.append(launcher)
        self._outputs.append(output)

    @property
    def process(self) -> Program:
        """The launcher, host 0's where there are two."""
        return self._launchers[0]

    def output(self) -> str:
        """What the launchers have said."""
        return "".join(path.read_text(errors="replace") for path in self._outputs)

    def _is_over(self) -> bool:
        return any(launcher.poll() is not None for launcher in self._launchers)

    def _restart_progress(self, *, from_scratch: bool = False) -> None:
        with (self.folder / "progress").open("wb"):
            self._steps, self._read = [], 0  # those who write to it append
        saved = [] if from_scratch else self._checkpoints()
        self._limit = 0  # they go back to the newest checkpoint
        self.allow(1 + (int(saved[-1].name.removeprefix("step-")) if saved else 0))

    def allow(self, step: int) -> None:
        """Let the workers go on up to a step."""
        self._limit = max(self._limit, step)
        new = self.folder / "limit.new"
        new.write_text(str(self._limit))
        new.rename(self.folder / "limit")

    def steps(self) -> list[tuple[int, int]]:
        """(step, process) of every step that a worker completed since the last start."""
        with (self.folder / "progress").open() as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole)
        self._steps += [(int(s), int(p)) for s, p in map(str.split, whole.splitlines())]
        return self._steps

    def step(self) -> int:
        """The step completed last."""
        found = self.steps()
        return found[-1][0] if found else 0

    def wait(self, is_there: Callable[[], object], what: str) -> None:
        """Wait for something while training slowly goes on.

        Raises:
            Ended: The launch ends meanwhile.
            Violation: It does not happen within the limit.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        self._pause_seconds = 0.1
        while not is_there():
            if self._is_over():
                raise Ended
            if time.monotonic() > deadline:
                raise Violation(f"hang: no {what} within {LIMIT_SECONDS:g} s")
            self._trickle()

    def _trickle(self) -> None:
        time.sleep(0.01)
        if time.monotonic() > self._next_trickle:
            self._next_trickle = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(1.5 * self._pause_seconds, 1.0)
            if self.step() >= self._limit - 1:
                self.allow(self._limit + 1)

    def wait_for_progress(self) -> None:
        """Wait for one more completed step."""
        before = len(self.steps())
        self.wait(lambda: len(self.steps()) > before, "step")

    def wait_for_end(self, what: str) -> int:
        """Wait until the launch is over and all its processes are gone; its exit code.

        Of two launchers it is the first that is no success.
        """
        with contextlib.suppress(Ended):
            self.wait(lambda: False, what)
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(launcher.poll() is None for launcher in self._launchers):
            if time.monotonic() > deadline:
                raise Violation(f"hang: only one launcher ended after {what}")
            self._trickle()
        left = self._processes.wait_until_gone(15)
        if left:
            raise Violation(f"orphans after {what}: {left}")
        codes = [launcher.returncode for launcher in self._launchers]
        return next(filter(None, codes), 0)

    # The story

    def go(self) -> list[Fault]:
        """Go through the story and check the end; faults for which the run was too short."""
        faults, hurried = list(self._story.faults), False
        self._is_hurried = False  # whether a worker's death just before is not mended yet
        self.launch()
        try:
            while faults:
                fired = False
                try:
                    if not hurried:
                        base = self.step()
                        if not base:
                            self.wait(self.step, "first step")
                            base = self.step()
                        self.allow(base + faults[0].steps)
                        self.wait(lambda: self.step() >= base + faults[0].steps, "step")  # noqa: B023
                    time.sleep(faults[0].seconds)
                    fired, fault = True, faults.pop(0)
                    self.did.append(f"{fault} (launch {self.num_launches})")
                    self.counts[fault.kind] += 1
                    self._is_hurried = hurried
                    hurried = self.do(fault)
                except Ended:
                    hurried = False
                    if self._ended_well(fired=fired):
                        break
                    self._from_scratch = REFUSED in self.output()
                    self.launch()
            self.last_step = self.step()
            self.allow(1 << 30)
            while not self._ended_well(fired=True, code=self.wait_for_end("the last step")):
                self._from_scratch = REFUSED in self.output()
                self.launch()
                self.allow(1 << 30)
            self._check_what_is_left()
        finally:
            self._processes.end()
        return faults

    def do(self, fault: Fault) -> bool:
        """Let it happen, and see training go on; whether the next comes without waiting."""
        {
            "kill": self._kill,
            "freeze": self._freeze,
            "pause": self._pause,
            "slow link": self._slow_link,
            "cut": self._cut,
            "full disk": self._full_disk,
            "resize": self._resize,
            "resize, kill": self._resize,
            "resize, freeze": self._resize,
            "kill in predict": self._kill_in_predict,
            "all killed": self._kill_all,
            "SIGTERM": self._terminate,
            "launcher killed": self._kill_launcher,
            "torn": self._break_checkpoint,
            "bit flip": self._break_checkpoint,
            "crafted": self._break_checkpoint,
            "all broken": self._break_checkpoint,
            "lost host": self._lose_host,
            "disk full at the end": self._full_disk_at_the_end,
            "SIGTERM after finish": self._terminate_after_finish,
        }[fault.kind](fault)
        if fault.kind in ("kill", "cut") and fault.second < 0.3:
            return True
        self.wait_for_progress()
        return False

    def _pick(self, fault: Fault, *, trained: bool = False) -> int | None:
        """A worker; ``trained`` leaves those out that are on their way in."""
        found = self._processes.workers()
        if trained:
            known = {pid for _, pid in self.steps()}
            found = [pid for pid in found if pid in known]
        return found[int(fault.first * len(found))] if found else None

    def _kill(self, fault: Fault) -> None:
        pid = self._pick(fault)
        if pid is not None:
            send(pid, signal.SIGKILL)

    def _freeze(self, fault: Fault) -> None:
        pid = self._pick(fault, trained=True)
        if pid is not None:
            send(pid, signal.SIGSTOP)
            self.wait(lambda: is_gone(pid), "end of a frozen worker")

    def _pause(self, fault: Fault) -> None:
        candidates = [*self._processes.workers(), self.process.pid]
        pid = candidates[int(fault.first * len(candidates))]
        send(pid, signal.SIGSTOP)
        time.sleep(0.2 + 0.6 * fault.second)
        send(pid, signal.SIGCONT)

    def _slow_link(self, fault: Fault) -> None:
        pid = self._pick(fault)
        for _ in range(10 if pid is not None else 0):
            send(pid, signal.SIGSTOP)
            time.sleep(0.05)
            send(pid, signal.SIGCONT)
            time.sleep(0.05)
            self._trickle()

    def _cut(self, fault: Fault) -> None:
        pid = self._pick(fault, trained=True)
        if pid is not None:
            asked = self.folder / f"cut-{pid}"
            asked.touch()
            gone = lambda: not asked.exists() or is_gone(pid)  # noqa: E731
            self.wait(gone, "cut connections")
            asked.unlink(missing_ok=True)

    def _full_disk(self, fault: Fault) -> None:
        limited = self._limit_disk()
        everything = resource.RLIM_INFINITY
        until = self.step() + CHECKPOINT_EVERY + fault.steps
        self.allow(until)
        self.wait(lambda: self.step() >= until or self.step() < until - 50, "step on a full disk")
        for pid in limited:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (everything, everything))

    def _limit_disk(self) -> list[int]:
        limited = self._processes.workers()
        for pid in limited:
            with contextlib.suppress(ProcessLookupError):
                limits = (FULL_DISK_BYTES, resource.RLIM_INFINITY)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        return limited

    def _full_disk_at_the_end(self, fault: Fault) -> None:
        self._limit_disk()
        self.allow(1 << 30)
        code = self.wait_for_end("the last step on a full disk")
        if code != 2 or UNWRITTEN not in self.output():
            raise Violation(f"the last checkpoint was not written: exit code {code}")
        raise Ended

    def _terminate_after_finish(self, fault: Fault) -> None:
        hold = self.folder / "hold-finish"
        hold.touch()
        self.allow(1 << 30)
        try:
            self.wait(self._finished, "end of the job")
            found = self._finished()
            if fault.first < 0.5 or not found:
                self.process.terminate()
                code = self.wait_for_end("SIGTERM after the job's end")
                if code != 143:
                    raise Violation(f"SIGTERM after the job's end: exit code {code}")
            else:
                pid = found[int(fault.second * len(found))]
                send(pid, signal.SIGTERM)
                with contextlib.suppress(Ended):
                    self.wait(lambda: is_gone(pid), "end of a worker after SIGTERM")
        finally:
            hold.unlink()
            for path in self.folder.glob("finished-*"):
                path.unlink()
        raise Ended

    def _finished(self) -> list[int]:
        """The workers that wait after their job's end; none before all do."""
        noted = {int(path.name[9:]) for path in self.folder.glob("finished-*")}
        workers = self._processes.workers()
        return workers if noted.issuperset(workers) else []

    def _lose_host(self, fault: Fault) -> None:
        self._launchers[int(fault.first * len(self._launchers))].kill()
        self.wait_for_end("the loss of a host")
        raise Ended

    def _resize(self, fault: Fault) -> None:
        own = self._story.own_mappings
        gpus = own[int(fault.first * len(own))]
        to = ["--gpus", gpus]
        if self._story.shard is not None:
            plan = self.folder / "resized.json"
            files.write(plan, plan_of(gpus, self._story.shard), force=True)
            to = ["--plan", str(plan)]
        before = set(self._processes.workers())
        asked = self._commands.start(
            [*HETFLOW, "resize", str(self.run), *to, "--timeout", "100"],
            temporary=self.folder / "tmp",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            if fault.kind != "resize":
                while asked.poll() is None and set(self._processes.workers()) <= before:
                    time.sleep(0.2)
                    self.wait(lambda: True, "newcomer")
            if fault.kind == "resize, freeze":
                for pid in set(self._processes.workers()) - before:
                    send(pid, signal.SIGSTOP)
            elif fault.kind == "resize, kill":
                until = time.monotonic() + 4 * fault.second
                self.wait(lambda: asked.poll() is not None or time.monotonic() > until, "moment")
                self._kill(fault)
            self.wait(lambda: asked.poll() is not None, "answer to a resize")
        finally:
            _, said = asked.communicate(timeout=LIMIT_SECONDS)
            self.counts[f"resizes with exit code {asked.returncode}"] += 1
            check_words(said, asked.returncode, "resize", (0, 1, 2))

    def _kill_in_predict(self, fault: Fault) -> None:
        hold = self.folder / "hold-predict"
        hold.touch()
        try:
            self.wait(self._predicting, "prediction")
            found = self._predicting()
            if found:
                send(found[int(fault.first * len(found))], signal.SIGKILL)
        finally:
            hold.unlink()
            for path in self.folder.glob("predicting-*"):
                path.unlink()

    def _predicting(self) -> list[int]:
        """The workers that are in a prediction and wait there."""
        noted = {int(path.name[11:]) for path in self.folder.glob("predicting-*")}
        return [pid for pid in self._processes.workers() if pid in noted]

    def _kill_all(self, fault: Fault) -> None:
        for pid in self._processes.workers():
            send(pid, signal.SIGKILL)
        self._restart_progress()

    def _terminate(self, fault: Fault) -> None:
        self._launchers[int(fault.first * len(self._launchers))].terminate()
        code = self.wait_for_end("SIGTERM")
        # Nobody holds the stages of a worker that has just died: what was saved before counts.
        can_save = not (self._is_hurried and self._story.is_pipeline)
        if code == 143 and can_save and not list(self.saved.glob("step-*")):
            raise Violation("SIGTERM left no checkpoint")
        raise Ended

    def _kill_launcher(self, fault: Fault) -> None:
        self.process.kill()
        self.wait_for_end("SIGKILL of the launcher")
        raise Ended

    def _break_checkpoint(self, fault: Fault) -> None:
        self.wait(self._whole_checkpoints, "checkpoint")
        by_launcher = int(fault.first * 1000) % 2
        if by_launcher:
            self.process.kill()
            self.wait_for_end("SIGKILL of the launcher")
        else:
            self._kill_all(fault)
            gone = lambda: self._is_over() or not self.steps()  # noqa: E731
            self.wait(gone, "end of the workers")
        harm = {"torn": tear, "bit flip": flip, "crafted": craft}
        checkpoints = self._whole_checkpoints()
        for path in checkpoints if fault.kind == "all broken" else checkpoints[-1:]:
            harm.get(fault.kind, tear)(folder_to_harm(path, fault), fault)
        if by_launcher:
            self.launch()
        with contextlib.suppress(Ended):
            self.wait(self.steps, "step")
        # A bit of the manifest may say the same in another way, such as 1E-05.
        is_harmless = fault.kind == "bit flip" and fault.first >= 0.7
        if not is_harmless and "is broken" not in self._said() and REFUSED not in self.output():
            raise Violation(f"{fault}: nobody said that {checkpoints[-1]} is broken")
        if fault.kind == "all broken":
            unnamed = [path.name for path in checkpoints if path.name not in self.output()]
            if REFUSED not in self.output() or unnamed:
                raise Violation(f"{fault}: not refused, or {unnamed} not named")
        self.wait(self.steps, "step")

    def _checkpoints(self) -> list[Path]:
        return sorted(self.saved.glob("step-*"))

    def _whole_checkpoints(self) -> list[Path]:
        """Those whose writers were not killed before the last part."""
        return [path for path in self._checkpoints() if is_complete(path)]

    def _said(self) -> str:
        logs = [*(self.run / "logs").glob("*.err"), *self._outputs]
        return "".join(path.read_text(errors="replace") for path in logs)

    # What must hold

    def _ended_well(self, *, fired: bool, code: int | None = None) -> bool:
        """Look at a launch that is over: whether it succeeded. A failure must explain itself."""
        code = self.wait_for_end("the launch's end") if code is None else code
        if code == 0:
            return True
        for launcher, output in zip(self._launchers, self._outputs, strict=True):
            if launcher.returncode not in (0, -signal.SIGKILL):
                said = output.read_text(errors="replace")
                line = check_words(said, launcher.returncode, "launch", (1, 2, 137, 143))
                line = line.replace(str(self.folder), "FOLDER")
                self.counts[f"launch ended: {line[:160]} (exit code {launcher.returncode})"] += 1
        if self.num_launches > len(self._story.faults) + 5:
            raise Violation("it never ends well")
        return False

    def _check_what_is_left(self) -> None:
        left = {path.name for path in self.run.iterdir()} - RUN_FILES
        left |= {p.name for p in (self.run / "logs").iterdir() if not p.name.startswith("rank")}
        for path in self.saved.glob("[!.]*"):
            if path.name.startswith("before-"):  # set aside, broken as they are
                continue
            folders = list(path.glob("part-*")) if self._story.is_pipeline else [path]
            files_in = [{p.name for p in folder.iterdir()} for folder in folders]
            whole = all(names == {"tensors.bin", "manifest.json"} for names in files_in)
            left |= set() if path.name.startswith("step-") and whole else {f"saved/{path.name}"}
        # torch keeps a cache of its own there, under the user's name.
        temporary = {path.name for path in (self.folder / "tmp").iterdir()}
        left |= {name for name in temporary if not name.startswith("torchinductor_")}
        left |= set(self._processes.shared_memory())
        if left:
            raise Violation(f"left behind: {', '.join(sorted(left))}")
        if json.loads((self.run / "run.json").read_text())["status"] != "done":
            raise Violation("run.json does not say that the run is done")

    def digest(self) -> str:
        """Digest of all that training left, but for an optimizer's state that workers share."""
        return self.digest_of("all" if self._story.shard is None else "weights")

    def digest_of(self, what: str) -> str:
        """One of the digests that ``training.py`` writes."""
        return (self.folder / f"digest-{what}").read_text()


def check_words(said: str, code: int, command: str, allowed: tuple[int, ...]) -> str:
    """A command that failed says so in one line, without a traceback; that line.

    Raises:
        Violation: It does not.
    """
    lines = [line for line in said.splitlines() if line.startswith("hetflow: ")]
    if code not in allowed or "Traceback" in said or (code and not lines):
        raise Violation(f"{command} ended with exit code {code} and said:\n{said[-3000:]}")
    return lines[-1].removeprefix("hetflow: ") if lines else ""
