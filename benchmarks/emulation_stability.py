"""How steady three ways to emulate slow devices are: hold to a table, sleep in proportion, nice.

python benchmarks/emulation_stability.py [--quick] [--json FILE]

Four processes train the demo's model for real on this machine's cores: two stated to run at 0.5 of
the CPU's speed and two at 0.125 (a ratio of 4), alone and beside one and two processes that
only burn CPU. A method is good if passes take the stated time, whatever else the machine does.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetflow.profilers.child import die_with_parent

SPEEDS = {"cpu:fast": 0.5, "cpu:slow": 0.125}
COPIES = 2
BATCH_SIZE = 128
WEIGHT_STEP = 1.25  # one nice level is about 1.25 in the scheduler's weight
Pass = Callable[[], None]


def demo_pass() -> Pass:
    """One forward and backward pass of the demo's model on one thread."""
    import torch

    from hetflow.profilers.zoo import factory_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, make_batch, loss = factory_of("digits-cnn")()
    batch = make_batch(BATCH_SIZE)
    return lambda: loss(model, batch).backward()


def base_seconds(repeats: int) -> float:
    """Median CPU time of a pass, warm."""
    run = demo_pass()
    samples = []
    for index in range(repeats + 10):
        start = time.process_time()
        run()
        if index >= 10:
            samples.append(time.process_time() - start)
    return statistics.median(samples)


def held(run: Pass, speed: float, base: float) -> Pass:
    """Hold each pass to the table's time, as hetflow does."""
    from hetflow.runtime.emulation import PassHolder
    from hetflow.schema.plan import PassTime

    holder = PassHolder([PassTime(batch_size=BATCH_SIZE, step_seconds=base / speed)])

    def once() -> None:
        holder.begin_step()
        with holder.hold(BATCH_SIZE):
            run()

    return once


def proportional(run: Pass, speed: float, base: float) -> Pass:
    """Sleep in proportion to the wall time that the pass has just taken."""

    def once() -> None:
        start = time.perf_counter()
        run()
        time.sleep((time.perf_counter() - start) * (1 / speed - 1))

    return once


def niced(run: Pass, speed: float, base: float) -> Pass:
    """Give slow devices less weight in the scheduler; no time is stated to it."""
    level = round(math.log(SPEEDS["cpu:fast"] / speed, WEIGHT_STEP))
    os.nice(level)
    return run


METHODS = {"table": held, "proportional": proportional, "nice": niced}


def work(
    method: str, device_type: str, base: float, seconds: float, gate: Any, answers: Any
) -> None:
    """One emulated device: train until the time is over, tell the time of each pass."""
    die_with_parent()
    once = METHODS[method](demo_pass(), SPEEDS[device_type], base)
    for _ in range(3):
        once()
    gate.wait()
    samples = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        once()
        samples.append(time.perf_counter() - start)
    answers.put((device_type, samples))


def burn(stop: Any) -> None:
    """Somebody else's program."""
    die_with_parent()
    while not stop.is_set():
        sum(range(10_000))


def busy_seconds() -> float:
    """CPU seconds spent by every process of this machine since it started."""
    user, nice, system, _, _, irq, soft_irq, steal = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    )
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def run_method(
    method: str, base: float, seconds: float, burners: int
) -> tuple[dict[str, list[float]], float]:
    """Pass times by device type, of all processes of one method at once.

    The second answer is how many cores strangers kept busy meanwhile: disturbance not of ours.
    """
    start, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
    context = multiprocessing.get_context("spawn")
    answers, stop = context.Queue(), context.Event()
    gate = context.Barrier(COPIES * len(SPEEDS))
    others = [context.Process(target=burn, args=(stop,), daemon=True) for _ in range(burners)]
    workers = [
        context.Process(target=work, args=(method, name, base, seconds, gate, answers), daemon=True)
        for name in SPEEDS
        for _ in range(COPIES)
    ]
    for process in others + workers:
        process.start()
    passes: dict[str, list[float]] = {name: [] for name in SPEEDS}
    try:
        for _ in workers:
            name, samples = answers.get(timeout=120 + 4 * seconds)
            passes[name] += samples
    finally:
        stop.set()
        for process in others + workers:
            process.join(timeout=10)
            process.kill()
            process.join()
    elapsed = time.perf_counter() - start
    strangers = (busy_seconds() - busy - (own_seconds() - own)) / elapsed
    return passes, max(0.0, strangers)


def summary(passes: dict[str, list[float]], base: float) -> dict[str, Any]:
    """Achieved against stated, and spread."""
    medians = {name: statistics.median(samples) for name, samples in passes.items()}
    devices = {}
    for name, samples in passes.items():
        cuts = statistics.quantiles(samples, n=20)
        devices[name] = {
            "stated_seconds": base / SPEEDS[name],
            "median_seconds": medians[name],
            "error": medians[name] / (base / SPEEDS[name]) - 1,
            "spread_5_to_95": (cuts[-1] - cuts[0]) / medians[name],
            "passes": len(samples),
        }
    stated = SPEEDS["cpu:fast"] / SPEEDS["cpu:slow"]
    achieved = medians["cpu:slow"] / medians["cpu:fast"]
    return {"stated_ratio": stated, "achieved_ratio": achieved, "devices": devices}


def main() -> None:
    """Compare the methods, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from hetflow.schema import files

    seconds, loads = (4.0, (0,)) if arguments.quick else (12.0, (0, 1, 2))
    base = base_seconds(20 if arguments.quick else 100)
    print(f"one pass of the demo's model, batch {BATCH_SIZE}: {base * 1e3:.1f} ms of CPU")
    print(
        f"{'method':14}{'others':>7}{'strangers':>10}{'ratio':>7}"
        "  error and spread of cpu:fast, cpu:slow"
    )
    results = []
    for burners in loads:
        for method in METHODS:
            passes, strangers = run_method(method, base, seconds, burners)
            figures = summary(passes, base)
            about = {"method": method, "other_processes": burners, "stranger_cores": strangers}
            results.append(about | figures)
            rows = [
                f"{d['error']:+7.1%} {d['spread_5_to_95']:6.1%}"
                for d in figures["devices"].values()
            ]
            ratio = figures["achieved_ratio"]
            print(f"{method:14}{burners:7}{strangers:10.2f}{ratio:7.2f}  {'   '.join(rows)}")
    document = {
        "cores": len(os.sched_getaffinity(0)),
        "batch_size": BATCH_SIZE,
        "base_seconds": base,
        "speeds": SPEEDS,
        "copies": COPIES,
        "results": results,
    }
    if arguments.json:
        files.write_text(arguments.json, json.dumps(document, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
