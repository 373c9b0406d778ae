"""Data without an index: every sample once, under any plan, also after a stop."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hetflow import runtime as hf
from hetflow.runtime.data import rows_of
from hetflow.runtime.epoch import digest_of, num_rows
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.plan import Plan
from hetflow.tests import programs
from hetflow.tests.launcher.elastic_runs import Launch
from hetflow.tests.runtime import streamed

SCRIPT = Path(streamed.__file__)
WORLDS = {"24/8": [(1, 24), (2, 4)], "three": [(3, 4), (1, 4), (4, 4)]}
ONCE = ["iterable", "workers", "stateful", "bucketed"]  # whose losses are not tried


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def launch(
    folder: Path, plan: Plan, *arguments: str, options: tuple[str, ...] = ()
) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    files.write(folder / "plan.json", plan)
    done = programs.run(
        [sys.executable, "-m", "hetflow.cli.main", "launch", *options, "--force", "plan.json"]
        + [str(SCRIPT), str(folder), *arguments],
        timeout=240,
        cwd=folder,
    )
    return done.returncode, done.stderr


def results(folder: Path, number: int) -> list[dict[str, streamed.Result]]:
    return [torch.load(folder / f"results{rank}.pt") for rank in range(number)]


@pytest.fixture(scope="module")
def launched(
    tmp_path_factory: pytest.TempPathFactory, plan_of: Callable[..., Plan]
) -> dict[str, list[dict[str, streamed.Result]]]:
    found = {}
    for name, devices in WORLDS.items():
        folder = tmp_path_factory.mktemp("streamed")
        code, said = launch(folder, plan_of(devices), *streamed.TRAININGS)
        assert code == 0, said
        found[name] = results(folder, len(devices))
    return found


@cache
def alone(name: str) -> streamed.Result:
    return streamed.TRAININGS[name](hf.prepare)


def near(found: streamed.Result, expected: streamed.Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.processes
@pytest.mark.parametrize("name", streamed.TRAININGS)
def test_uneven_workers_train_as_plain_python_does(launched: dict[str, Any], name: str) -> None:
    for world in WORLDS:
        for result in launched[world]:
            near(result[name], alone(name))


@pytest.mark.processes
@pytest.mark.parametrize("name", ONCE)
def test_every_sample_comes_exactly_once_an_epoch(launched: dict[str, Any], name: str) -> None:
    for world, workers in launched.items():
        seen = Counter(index for result in workers for index in result[name][2])
        assert seen == dict.fromkeys(range(streamed.NUM_SAMPLES), streamed.EPOCHS), world


def test_plain_python_trains_on_the_batches_that_the_source_gives() -> None:
    model = streamed.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(streamed.EPOCHS):
        for x, y, _index in DataLoader(streamed.Stream(), batch_size=streamed.GLOBAL_BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    near(alone("iterable"), (losses, dict(model.state_dict()), []))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["noisy", "stateful"])
@pytest.mark.parametrize("stop", [2, 4])
@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path,
    plan_of: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stop: int,
) -> None:
    saved = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "1")
    failing = (*saved, "--on-failure", "stop")
    monkeypatch.setenv("STOP", str(stop))
    code, said = launch(tmp_path, plan_of(WORLDS["24/8"]), name, options=failing)
    assert code != 0
    assert "stopped" in said
    monkeypatch.setenv("STOP", "")
    (tmp_path / "plan.json").unlink()
    plan = plan_of([(1, 24), (1, 4), (1, 4)])  # the same virtual nodes, on three workers
    code, said = launch(tmp_path, plan, name, options=saved)
    assert code == 0, said
    for result in results(tmp_path, 3):
        losses, state, _ = result[name]
        near((losses, state, []), (alone(name)[0][stop:], alone(name)[1], []))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["drawn", "read_on", "workers", "bucketed", "iterable"])
def test_other_sources_go_on_after_a_stop(
    tmp_path: Path,
    plan_of: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path, plan_of, monkeypatch, name, 3)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("awkward", ["", "1"])
def test_resizes_and_losses_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awkward: str
) -> None:
    monkeypatch.setenv("STREAM", "1")
    monkeypatch.setenv("AWKWARD", awkward)
    expected = Launch(tmp_path / "one", [8]).digest()
    run = Launch(tmp_path / "changing", [5, 3], holds=[4, 8])
    run.wait_for_step(4, 2)
    asked = run.resize_later("--gpus", "3xcpu:fast")
    run.wait_for_newcomers(3)
    run.go(4)
    _, said = asked.communicate(timeout=60)
    assert asked.returncode == 0, said
    run.wait_for_step(8, 3)
    run.kill(1)
    run.go(8)
    assert run.digest() == expected


@pytest.mark.processes
def test_workers_that_draw_unlike_batches_end_before_an_update(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        "from hetflow import runtime as hf\n"
        "from hetflow.tests.runtime import streamed\n"
        "rank = int(os.environ['RANK'])\n"
        "def get_batch():\n"
        "    items = [streamed.sample(2 * i + rank) for i in range(32)]\n"
        "    return torch.utils.data.default_collate(items)\n"
        "streamed.trained(hf.prepare, lambda: get_batch, steps=3)\n"
    )
    files.write(tmp_path / "plan.json", plan_of(WORLDS["24/8"]))
    done = programs.run(
        [sys.executable, "-m", "hetflow.cli.main", "launch", "plan.json", "train.py"],
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "workers 0 and 1 drew unlike batches by step" in done.stderr
    assert "Traceback" not in done.stderr


# What is refused


def lists() -> Iterator[Any]:
    yield torch.ones(4, 4), torch.ones(3)


def function() -> None:
    return None


REFUSED = {
    "a function without an end": (function, {}, "a function that draws batches has no end"),
    "a function without a batch": (function, {"steps": 2}, "returned None"),
    "parts of unlike rows": (lists(), {}, r"parts of \[3, 4\] rows"),
    "numbers": ([1, 2], {}, "a batch holds a int"),
    "a number beside tensors": ([(torch.ones(4), 3)], {}, "a batch holds a int"),
    "a tensor without rows": ([torch.ones(())], {}, "a tensor without a row for each sample"),
    "no tensors": ([{"kind": "text"}], {}, "parts of no rows"),
    "steps of an index": (DataLoader(torch.ones(4, 4)), {"steps": 2}, "steps is for data without"),
    "neither": (3, {}, "an iterable of batches or a function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_in_one_line(case: str) -> None:
    source, options, said = REFUSED[case]
    job = hf.prepare(streamed.net())
    with pytest.raises(TargetError, match=said) as caught:
        next(iter(job.batches(source, **options)))
    assert "\n" not in str(caught.value)
    job.abandon()


class Unending:
    """A batch sampler that does not know how many batches it has."""

    def __iter__(self) -> Iterator[list[int]]:
        yield [0]


def test_a_batch_sampler_without_a_length_and_predictions_are_refused() -> None:
    job, data = hf.prepare(streamed.net()), torch.ones(8, 4)
    endless = DataLoader(data, batch_sampler=Unending())
    with pytest.raises(TargetError, match=r"the batch_sampler .Unending. has no length"):
        job.batches(endless)
    with pytest.raises(TargetError, match="job.predict needs a DataLoader"):
        job.predict([data], lambda x: x)
    sampler = streamed.Buckets()
    with pytest.raises(TargetError, match="this loader has a batch_sampler"):
        job.predict(DataLoader(data, batch_sampler=sampler), lambda x: x)
    job.abandon()


def test_rows_are_cut_from_every_part_of_a_batch() -> None:
    item = {
        "x": torch.arange(8).reshape(4, 2),
        "pair": (np.arange(4), ["a", "b", "c", "d"]),
        "kind": "text",
        "none": None,
    }
    assert num_rows(item) == 4
    found = rows_of(item, 4, 1, 3)
    assert found["x"].tolist() == [[2, 3], [4, 5]]
    assert found["pair"][0].tolist() == [1, 2]
    assert found["pair"][1:] == (["b", "c"],)
    assert (found["kind"], found["none"]) == ("text", None)
    assert digest_of(item) == digest_of({**item, "x": item["x"].clone()})
    assert digest_of(item) != digest_of({**item, "x": item["x"] + 1})
