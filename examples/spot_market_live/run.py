"""A training on an emulated spot market: machines are taken away with notice, others come back.

    python examples/spot_market_live/run.py            under two minutes
    python examples/spot_market_live/run.py -o FOLDER  keep what it made

Time on the market runs faster than real time. Three types of machines (emulated devices) come and
go by a trace. Two market minutes before a machine is taken away, its user gets a notice. The user
here always holds the machines that end the training for the fewest dollars before its deadline; at
a change it resizes the launch, and where nothing is left it lets the job save and launches it again
later. The training must end with the bits of an undisturbed one. What it cost is printed beside
what the plans predict for the same trace.
"""

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import hetflow
from hetflow.schema.market import Availability, InstanceType, Market
from hetflow.schema.plan import Plan

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "live_cluster" / "train.py"
BATCH_SIZE, VIRTUAL_NODES, STEPS_AN_EPOCH = 128, 8, 8
NOTICE_SECONDS = 120.0
TICK_SECONDS = 20.0
SPEEDS = {"cpu:fast": 0.4, "cpu:mid": 0.25, "cpu:slow": 0.2}
DOLLARS_PER_HOUR = {"cpu:fast": 0.90, "cpu:mid": 0.62, "cpu:slow": 0.55}
START = "2024-01-01T00:00:00Z"


@dataclass(frozen=True)
class Scene:
    """A trace of the market, in market minutes, and the training.

    ``there``: device type -> times at which a machine comes and is taken away.
    ``fast_minutes`` is the work, in minutes of a machine of the fast type.
    """

    there: Mapping[str, Sequence[tuple[float, float]]]
    last_minute: float
    fast_minutes: float
    deadline_minutes: float


WHOLE = Scene(
    there={
        "cpu:fast": ((0, 5), (9, 60)),
        "cpu:slow": ((0, 9),),
        "cpu:mid": ((5, 9),),
    },
    last_minute=60,
    fast_minutes=8.7,
    deadline_minutes=14.7,
)
SHORT = Scene(
    there={"cpu:fast": ((0, 11 / 3), (4, 40)), "cpu:slow": ((0, 14 / 3),)},
    last_minute=40,
    fast_minutes=2.0,
    deadline_minutes=11,
)


def market_of(scene: Scene) -> Market:
    """The scene as a market that hetflow reads: machines, prices, and when they are there."""
    num_ticks = round(scene.last_minute * 60 / TICK_SECONDS)
    return Market(
        instance_types=tuple(
            InstanceType(name=name, device_type=name, spot_dollars_per_hour=DOLLARS_PER_HOUR[name])
            for name in scene.there
        ),
        availability=tuple(
            Availability(
                zone="here",
                instance_type=name,
                start=START,
                tick_seconds=TICK_SECONDS,
                available=tuple(
                    int(any(a * 60 <= tick * TICK_SECONDS < b * 60 for a, b in times))  # type: ignore[misc]
                    for tick in range(num_ticks)
                ),
            )
            for name, times in scene.there.items()
        ),
    )


@dataclass(frozen=True, order=True)
class Event:
    """A machine comes, is announced to be taken away, or is gone; in market seconds."""

    at_seconds: float
    kind: Literal["comes", "notice", "gone"]
    machine: str


def events_of(market: Market) -> list[Event]:
    """What happens on a market, in order; whatever is there at its end stays."""
    found = []
    for window in market.availability:
        before = 0
        for tick, there in enumerate(window.available):
            now, name = tick * window.tick_seconds, str(window.instance_type)
            if there and not before:
                found.append(Event(now, "comes", name))
            elif before and not there:
                found.append(Event(max(0.0, now - NOTICE_SECONDS), "notice", name))
                found.append(Event(now, "gone", name))
            before = there or 0
    return sorted(found)


def moments_of(events: Sequence[Event]) -> Iterator[tuple[float, list[Event]]]:
    """The events of each time together."""
    for when in sorted({event.at_seconds for event in events}):
        yield when, [event for event in events if event.at_seconds == when]


@dataclass(frozen=True)
class Choice:
    """Machines to hold; a step on them takes ``step_seconds`` of real time."""

    machines: tuple[str, ...]
    step_seconds: float
    dollars_per_hour: float

    @property
    def gpus(self) -> str:
        """As ``--gpus`` takes them."""
        return ",".join(f"1x{name}" for name in self.machines)


@dataclass
class Planner:
    """Chooses machines by hetflow's plans.

    ``scale`` is market seconds per real second.
    """

    profiles: Path
    scale: float
    plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    def choice_of(self, machines: tuple[str, ...]) -> Choice:
        """Predict a step on machines by a plan of theirs."""
        if machines not in self.plans:
            pool = ",".join(f"1x{name}" for name in machines)
            plan = hetflow.solve(
                self.profiles, pool, batch_size=BATCH_SIZE, virtual_nodes=VIRTUAL_NODES,
                strategy="split",
            )  # fmt: skip
            assert plan.kind == "split"
            self.plans[machines] = plan
        price = sum(DOLLARS_PER_HOUR[name] for name in machines)
        return Choice(machines, self.plans[machines].predicted.step_seconds, price)

    def best(self, there: set[str], steps_left: float, seconds_left: float) -> Choice | None:
        """The cheapest machines that end by the deadline; the fastest if none does."""
        names = sorted(there)
        every = [
            self.choice_of(machines)
            for number in range(1, len(names) + 1)
            for machines in combinations(names, number)
        ]

        def market_seconds(one: Choice) -> float:
            return steps_left * one.step_seconds * self.scale

        in_time = [one for one in every if market_seconds(one) <= seconds_left]
        if in_time:
            return min(in_time, key=lambda one: market_seconds(one) * one.dollars_per_hour)
        return min(every, key=market_seconds, default=None)


@dataclass
class Ledger:
    """What is held, since when, and what has been paid; in market seconds and dollars."""

    held: Choice | None = None
    since: float = 0.0
    dollars: float = 0.0
    rows: list[tuple[float, str, str]] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)  # when a machine was last given up

    def hold(self, now: float, choice: Choice | None, why: str) -> None:
        """Pay for what was held, and hold something else from now on."""
        self.pay(now)
        before = self.held.machines if self.held else ()
        after = choice.machines if choice else ()
        self.left |= dict.fromkeys(set(before) - set(after), now)
        self.held = choice
        self.rows.append((now, choice.gpus if choice else "nothing", why))

    def pay(self, now: float) -> None:
        """Pay until now."""
        if self.held is not None:
            self.dollars += (now - self.since) / 3600 * self.held.dollars_per_hour
        self.since = now


@dataclass
class Progress:
    """The steps that are left, by the plans' predictions; a launch works after ``ready``."""

    steps_left: float
    scale: float
    launch_seconds: float
    at: float = 0.0
    ready: float = 0.0

    def launched(self, now: float) -> None:
        """A launch was started."""
        self.ready = now + self.launch_seconds * self.scale

    def end_on(self, choice: Choice) -> float:
        """When the training ends on these machines."""
        return max(self.at, self.ready) + self.steps_left * choice.step_seconds * self.scale

    def advance(self, now: float, choice: Choice | None) -> None:
        """Work until now."""
        if choice is not None:
            worked = max(0.0, now - max(self.at, self.ready)) / self.scale
            self.steps_left = max(0.0, self.steps_left - worked / choice.step_seconds)
        self.at = now


def predict(scene: Scene, planner: Planner, steps: int, launch_seconds: float) -> Ledger:
    """What the same decisions cost if every step takes what its plan predicts."""
    ledger, there = Ledger(), set[str]()
    progress = Progress(steps, planner.scale, launch_seconds)
    deadline = scene.deadline_minutes * 60
    for now, events in moments_of(events_of(market_of(scene))):
        if ledger.held is not None and progress.end_on(ledger.held) <= now:
            break
        progress.advance(now, ledger.held)
        _update(there, events)
        choice = planner.best(there, progress.steps_left, deadline - now)
        if choice != ledger.held:
            if ledger.held is None:
                progress.launched(now)
            ledger.hold(now, choice, _why(events))
    if ledger.held is None:
        sys.exit("no machine comes back before the trace ends")
    ledger.hold(progress.end_on(ledger.held), None, "the training ends")
    return ledger


def _update(there: set[str], events: Sequence[Event]) -> None:
    for event in events:
        if event.kind == "comes":
            there.add(event.machine)
        else:
            there.discard(event.machine)


def _why(events: Sequence[Event]) -> str:
    words = {"comes": "comes", "notice": "will be taken away", "gone": "is gone"}
    return "; ".join(f"{event.machine} {words[event.kind]}" for event in events)


class Demonstration:
    """Runs the commands in a folder; each is printed before it runs."""

    def __init__(self, folder: Path, scene: Scene, scale: float, *, at_once: bool) -> None:
        """Set up; ``at_once``: the undisturbed training runs beside the market, not before it."""
        self._folder, self._scene, self._scale = folder, scene, scale
        self._at_once = at_once
        self._planner = Planner(folder / "profiles", scale)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as on emulated devices
        self._epochs = 0
        self._launches = 0
        self._running: subprocess.Popen[str] | None = None

    def _command(self, *words: str) -> list[str]:
        print(f"$ hetflow {shlex.join(words)}", flush=True)
        return [sys.executable, "-m", "hetflow", *words]

    def hetflow(self, *words: str) -> None:
        """Run a hetflow command to its end."""
        done = subprocess.run(
            self._command(*words), cwd=self._folder, env=self._environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{done.stderr}hetflow {words[0]} exited with {done.returncode}")

    def run(self) -> dict[str, Any]:
        """Run everything; return what was predicted and what became of it."""
        devices = [word for name in self._scene.there for word in
                   ("--device", f"{name}={SPEEDS[name]}")]  # fmt: skip
        self.hetflow("profile", f"{SCRIPT}:workload", "--name", "small", *devices,
                     "--batch-sizes", str(BATCH_SIZE // VIRTUAL_NODES), "--sync-devices", "0",
                     "--quick", "-o", "profiles")  # fmt: skip
        fast = self._planner.choice_of(("cpu:fast",))
        # What a launch takes beside its steps; a notice is long enough for one, and half as much.
        _, launch_seconds = self._undisturbed("one-epoch", fast, 1)
        self._scale = min(self._scale, NOTICE_SECONDS / (1.5 * launch_seconds + 1e-9))
        self._planner.scale = self._scale
        print(f"a notice of {NOTICE_SECONDS:g} s lasts {NOTICE_SECONDS / self._scale:.1f} s here")
        step_market_seconds = fast.step_seconds * self._scale
        epochs = self._scene.fast_minutes * 60 / step_market_seconds / STEPS_AN_EPOCH
        self._epochs = max(1, round(epochs))
        steps = self._epochs * STEPS_AN_EPOCH
        hetflow.write(self._folder / "market.json", market_of(self._scene))
        if self._at_once:
            beside = self._start_undisturbed("alone", fast, self._epochs)
            predicted = predict(self._scene, self._planner, steps, launch_seconds)
            try:
                actual = self._on_the_market(steps, launch_seconds)
                alone = self._ended(beside, "alone")
            finally:
                beside.kill()
                beside.wait()
        else:
            alone, again_seconds = self._undisturbed("alone", fast, self._epochs)
            launch_seconds = min(launch_seconds, again_seconds)  # the first one may be slower
            predicted = predict(self._scene, self._planner, steps, launch_seconds)
            actual = self._on_the_market(steps, launch_seconds)
        record = json.loads((self._folder / f"part-{self._launches}" / "run.json").read_text())
        return {
            "steps": steps,
            "step_seconds": fast.step_seconds,
            "launch_seconds": launch_seconds,
            "scale": self._scale,
            "alone": alone["parameters_digest"],
            "digest": record["parameters_digest"],
            "num_launches": self._launches,
            "predicted": asdict(predicted),
            "actual": asdict(actual),
        }

    def _plan(self, choice: Choice) -> str:
        """Write the plan of a choice; return the file's name."""
        name = f"plan-{choice.gpus.replace(',', '-').replace(':', '_')}.json"
        plan = self._planner.plans[choice.machines]
        hetflow.write(self._folder / name, plan, force=True)
        return name

    def _undisturbed(self, name: str, choice: Choice, epochs: int) -> tuple[dict[str, Any], float]:
        """Train on machines that stay; return the run's record, and seconds beside the steps."""
        before = time.monotonic()
        record = self._ended(self._start_undisturbed(name, choice, epochs), name)
        taken = time.monotonic() - before
        return record, max(0.0, taken - epochs * STEPS_AN_EPOCH * choice.step_seconds)

    def _start_undisturbed(self, name: str, choice: Choice, epochs: int) -> subprocess.Popen[str]:
        """Begin to train on machines that stay."""
        words = self._command("launch", "--determinism", "elastic", "-o", name,
                              self._plan(choice), str(SCRIPT), str(epochs))  # fmt: skip
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                words, cwd=self._folder, env=self._environment, stdout=log, stderr=log, text=True
            )

    def _ended(self, launch: subprocess.Popen[str], name: str) -> dict[str, Any]:
        """Wait for an undisturbed training; return the run's record."""
        if code := launch.wait(300):
            said = (self._folder / f"{name}.log").read_text()[-2000:]
            sys.exit(f"{said}\nthe undisturbed training exited with {code}")
        record: dict[str, Any] = json.loads((self._folder / name / "run.json").read_text())
        return record

    def _on_the_market(self, steps: int, launch_seconds: float) -> Ledger:
        """Follow the market in real time until the training ends."""
        ledger, there = Ledger(), set[str]()
        progress = Progress(steps, self._scale, launch_seconds)
        deadline = self._scene.deadline_minutes * 60
        start = time.monotonic()

        def now() -> float:
            return (time.monotonic() - start) * self._scale

        try:
            for when, events in moments_of(events_of(market_of(self._scene))):
                if self._ended_by(start + when / self._scale):
                    break
                self._tell(when, events)
                self._check_gone(events, ledger, now())
                progress.advance(now(), ledger.held)
                _update(there, events)
                choice = self._planner.best(there, progress.steps_left, deadline - now())
                if choice != ledger.held:
                    self._change(choice, ledger, progress, now, _why(events))
            if self._running is None or self._running.wait(300):
                sys.exit(f"the last launch failed: {self._said()}")
        finally:
            if self._running is not None and self._running.poll() is None:
                self._running.kill()
                self._running.wait()
        ledger.hold(now(), None, "the training ends")
        return ledger

    def _ended_by(self, moment: float) -> bool:
        """Wait until a time; whether the training ended first."""
        while (left := moment - time.monotonic()) > 0:
            if self._running is not None and self._running.poll() is not None:
                return True
            time.sleep(min(left, 0.05))
        return self._running is not None and self._running.poll() is not None

    def _tell(self, when: float, events: Sequence[Event]) -> None:
        print(f"{when / 60:5.1f} min  {_why(events)}", flush=True)

    def _check_gone(self, events: Sequence[Event], ledger: Ledger, now: float) -> None:
        """The market ends whoever is still on a machine that is gone."""
        for event in events:
            if event.kind == "gone" and ledger.held and event.machine in ledger.held.machines:
                sys.exit(f"{event.machine} was taken away while the job was on it")
            left = ledger.left.get(event.machine, 0.0)
            if event.kind == "gone" and left > event.at_seconds:
                late = (left - event.at_seconds) / self._scale
                sys.exit(f"the job left {event.machine} {late:.1f} s too late")

    def _change(
        self,
        choice: Choice | None,
        ledger: Ledger,
        progress: Progress,
        now: Any,
        why: str,
    ) -> None:
        """Launch, resize, or stop; what is joined and what is left are paid until it is done."""
        if choice is None:
            self._stop()
            ledger.hold(now(), None, why)
            return
        if ledger.held is None:
            self._launch(choice)
            progress.launched(now())
            ledger.hold(now(), choice, why)
            return
        both = tuple(sorted({*ledger.held.machines, *choice.machines}))
        ledger.pay(now())
        before, ledger.held = ledger.held, self._planner.choice_of(both)
        self._wait_for_workers()
        print(f"$ hetflow resize part-{self._launches} --gpus {choice.gpus}", flush=True)
        answer = hetflow.resize(
            self._folder / f"part-{self._launches}", choice.gpus, profiles=self._folder / "profiles"
        )
        if answer is None or answer.status != "done":
            sys.exit(f"the resize was not done: {answer}")
        progress.advance(now(), before)
        ledger.hold(now(), choice, why)

    def _wait_for_workers(self) -> None:
        """Wait until the launch can be resized; the notice may come before it has begun."""
        current = self._folder / f"part-{self._launches}" / "control" / "current.json"
        while not current.exists():
            if self._running is None or self._running.poll() is not None:
                sys.exit(f"the launch ended before its notice: {self._said()}")
            time.sleep(0.05)

    def _launch(self, choice: Choice) -> None:
        self._launches += 1
        plan = self._plan(choice)
        words = ["launch", "--determinism", "elastic", "--checkpoint", "checkpoints", "-o",
                 f"part-{self._launches}", plan, str(SCRIPT), str(self._epochs)]  # fmt: skip
        log = (self._folder / f"part-{self._launches}.log").open("w")
        with log:
            self._running = subprocess.Popen(
                self._command(*words), cwd=self._folder, env=self._environment, stdout=log,
                stderr=log, text=True,
            )  # fmt: skip

    def _stop(self) -> None:
        """A notice, and nowhere to go: the job saves and ends."""
        assert self._running is not None
        print("$ kill -TERM LAUNCH", flush=True)
        self._running.terminate()
        code = self._running.wait(60)
        if code != 143:
            sys.exit(f"the launch ended with {code} instead of 143: {self._said()}")
        self._running = None

    def _said(self) -> str:
        return (self._folder / f"part-{self._launches}.log").read_text()[-2000:]


@contextmanager
def preloaded(folder: Path) -> Iterator[None]:
    """Keep a process with torch imported, from which launches fork workers, unless one exists."""
    if "HETFLOW_PRELOAD" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # it only serves processes with the same settings
    path = folder / "preload.sock"
    print("$ python -m hetflow.preload preload.sock &", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "hetflow.preload", str(path)])
    try:
        while not path.is_socket() and process.poll() is None:
            time.sleep(0.05)
        os.environ["HETFLOW_PRELOAD"] = str(path)
        yield
    finally:
        process.terminate()
        process.wait()


def table_of(title: str, ledger: dict[str, Any]) -> str:
    """What was held from when on."""
    lines = [f"{title}: {ledger['dollars']:.4f} $"]
    lines += [f"{at / 60:7.1f} min  {held:28}  {why}" for at, held, why in ledger["rows"]]
    return "\n".join(lines)


def main() -> None:
    """Run it, and print the costs and whether the bits are those of the undisturbed training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", "-o", type=Path, help="a new folder to keep")
    parser.add_argument(
        "--short",
        action="store_true",
        help="two types, less training, and the undisturbed training at the same time",
    )
    parser.add_argument(
        "--scale", type=float, default=20.0, help="market seconds per second, at most"
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    # Each plan would warn that communication was not measured; here it is within one machine.
    logging.getLogger("hetflow").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="hetflow-") as name, preloaded(Path(name)):
        folder = Path(name)
        if arguments.output is not None:
            arguments.output.mkdir(parents=True)
            folder = arguments.output.resolve()
        scene = SHORT if arguments.short else WHOLE
        made = Demonstration(folder, scene, arguments.scale, at_once=arguments.short)
        result = made.run()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    predicted, actual = result["predicted"], result["actual"]
    print(table_of("predicted", predicted))
    print(table_of("actual", actual))
    error = predicted["dollars"] / actual["dollars"] - 1
    same = result["digest"] == result["alone"]
    print(
        f"it cost {actual['dollars']:.4f} $, predicted {predicted['dollars']:.4f} $ "
        f"({100 * error:+.1f} %); parameters {str(result['digest'])[:12]}: "
        + ("the same as undisturbed" if same else f"UNDISTURBED {result['alone']}")
    )
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
