"""States that workers share: as one process, through checkpoints, and what is refused."""

import pickle
import sys
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import hetflow
from hetflow import runtime as hf
from hetflow.runtime.launcher.mapping import same_nodes
from hetflow.runtime.promise.recording import Recording
from hetflow.runtime.protocol.lower import lower
from hetflow.runtime.sharding.flats import ALIGNMENT, AwayParameter, cuts_of, sources
from hetflow.runtime.sharding.precision import Precision, precision_of
from hetflow.runtime.sharding.states import SharedStates, order_of_turns
from hetflow.schema import files
from hetflow.schema.errors import PeerLostError, ProblemError, TargetError
from hetflow.schema.options import Shard
from hetflow.schema.plan import Plan
from hetflow.schema.run import RunRecord
from hetflow.tests import programs
from hetflow.tests.runtime import sharded_reads, sharded_run
from hetflow.tests.runtime.sharded_plans import shared

HERE = Path(__file__).parent
SIZE = 3
DEVICES = [(2, 3), (2, 1)]
"""Virtual nodes and their samples on each of two workers."""


def train(folder: Path, *kinds: str, code: int = 0) -> list[str]:
    """Train kinds of models on three workers that share states, and in one process."""
    shared = programs.preloaded(*programs.TRANSFORMERS)
    workers = [
        programs.start(
            [sys.executable, HERE / "sharded.py", folder / "store", str(rank), *kinds],
            env={"OMP_NUM_THREADS": "1", programs.VARIABLE: shared},
            stderr=-1,
        )
        for rank in range(SIZE)
    ]
    try:
        said: list[str] = [worker.communicate(timeout=300)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [code] * SIZE, "\n".join(said)
    return said


@pytest.mark.processes
def test_workers_that_share_train_as_one_process(tmp_path: Path) -> None:
    train(tmp_path, "lora", "towers", "masters of towers", "policy of towers", "chosen")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("again", [0, 1])
def test_layers_that_run_again_on_some_workers_end_all(tmp_path: Path, again: int) -> None:
    """Not in the first pass, where workers learn from each other how layers run."""
    said = train(tmp_path, str(again), code=1)
    assert f"run {1 - again} times again in a pass on this worker" in said[1]
    for other in (said[0], said[2]):
        assert "PeerLostError" in other


@pytest.mark.slow
@pytest.mark.processes
def test_all_kinds_of_models_train_as_one_process(tmp_path: Path) -> None:
    train(tmp_path, "compiled", "gpt", "policy of lora", "fsdp2", "llama", "resnet")


def by_hand(epochs: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The evaluated loss and the state of a model whose virtual nodes have statistics of their own.

    Each node normalises its own samples. The evaluated model has the mean of their statistics by
    samples.
    """
    torch.manual_seed(0)
    model = sharded_run.NormModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sizes = [size for number, size in DEVICES for _ in range(number)]
    own = [deepcopy(dict(model.named_buffers())) for _ in sizes]
    ids, targets = sharded_run.data_of()
    for batch in list(zip(ids.split(8), targets.split(8), strict=True)) * epochs:
        optimizer.zero_grad()
        parts = zip(*(each.split(sizes) for each in batch), strict=True)
        for statistics, samples in zip(own, parts, strict=True):
            model.load_state_dict(statistics, strict=False)
            (sharded_run.loss_of(model, *samples) * len(samples[0]) / 8).backward()
            statistics.update(deepcopy(dict(model.named_buffers())))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    merged = {
        name: sum(size * each[name] for size, each in zip(sizes, own, strict=True)) / sum(sizes)
        for name in own[0]
        if own[0][name].is_floating_point()
    }
    model.load_state_dict({**own[0], **merged}, strict=False)
    return sharded_run.loss_of(model.eval(), ids, targets).item(), model.state_dict()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("shard", "shares"), [(None, ()), ("optimizer", (5, 1)), ("gradients", (1, 0)), ("all", (1, 3))]
)
def test_virtual_nodes_keep_their_own_statistics_whatever_is_shared(
    tmp_path: Path, plan_of: Callable[..., Plan], shard: Shard | None, shares: Sequence[int]
) -> None:
    files.write(tmp_path / "plan.json", shared(plan_of(DEVICES), shard, shares))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", tmp_path / "run"]
    command += [tmp_path / "plan.json", HERE / "sharded_run.py", "2", tmp_path / "end.pt"]
    command += ["norms", "parts"]
    done = programs.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    loss, state = by_hand(2)
    found = torch.load(tmp_path / "end.pt")
    assert found["loss"] == pytest.approx(loss, rel=1e-10)
    for name, value in state.items():
        assert torch.allclose(found["model"][name], value, rtol=1e-9, atol=1e-10), name


def launch(
    folder: Path,
    plan_of: Callable[..., Plan],
    types: Sequence[str],
    shard: Shard | None,
    shares: Sequence[int],
    epochs: int,
    *options: Any,
    devices: Sequence[tuple[int, int]] = DEVICES,
) -> str:
    """The digest of a launch at ``elastic``."""
    name = f"{shard}-{epochs}-{sum(shares)}"
    files.write(folder / f"{name}.json", shared(plan_of(devices), shard, shares))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", folder / name]
    command += ["--determinism", "elastic", *options]
    command += [folder / f"{name}.json", HERE / "sharded_run.py"]
    command += [str(epochs), folder / f"{name}.pt", "parts", *types]
    done = programs.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    record = files.read(folder / name / "run.json", RunRecord)
    assert record.parameters_digest is not None
    return record.parameters_digest


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("masters", [(), ("masters",)])
def test_checkpoints_move_between_shardings_bit_by_bit(
    tmp_path: Path, plan_of: Callable[..., Plan], masters: tuple[str, ...]
) -> None:
    """The same virtual nodes on other devices, with other shares or none: one digest.

    Masters need workers that share states: there the plan that is not stopped shares the optimizer.
    """
    run = partial(launch, tmp_path, plan_of, masters)
    none: tuple[Shard | None, Sequence[int]] = ("optimizer", (1, 1)) if masters else (None, ())
    whole = run(*none, 4)
    kept = ("--checkpoint", tmp_path / "kept")
    run("all", (1000, 3000), 1, *kept)
    run("gradients", (3, 1, 0, 2), 2, *kept, devices=[(1, 3), (1, 3), (1, 1), (1, 1)])
    run(*none, 3, *kept)
    assert run("optimizer", (1, 0), 4, *kept) == whole
    if not masters:
        return
    model = sharded_run.Model().bfloat16()
    hf.load_weights(model, tmp_path / "kept")
    for name, value in torch.load(tmp_path / "optimizer-4-1.pt")["model"].items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.slow
@pytest.mark.processes
def test_weights_that_run_in_other_types_have_one_digest(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    """By a policy of FSDP2, whatever is shared; a worker alone trains so too, to rounding."""
    run = partial(launch, tmp_path, plan_of, ["policy"])
    kept = ("--checkpoint", tmp_path / "kept")
    run("all", (1000, 3000), 1, *kept)
    devices = [(1, 3), (1, 3), (1, 1), (1, 1)]
    assert run("gradients", (3, 1, 0, 2), 2, *kept, devices=devices) == run("optimizer", (1, 0), 2)
    command = [sys.executable, HERE / "sharded_run.py", "2", tmp_path / "alone.pt", "policy"]
    done = programs.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"{name}.pt") for name in ("alone", "gradients-2-6")]
    for one, other in zip(*(each["model"].values() for each in found), strict=True):
        assert one.dtype == torch.float64
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_reads_and_writes_slices_as_whole_tensors(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    """It clips, adds noise, prunes and averages by hand; what one worker reads alone is refused."""
    launch(tmp_path, plan_of, ["hand"], "all", (1000, 3000), 2)
    command = [sys.executable, HERE / "sharded_run.py", "2", tmp_path / "alone.pt", "hand", "parts"]
    done = programs.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    alone, found = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "all-2-4000"))
    assert "worker 0 reads words.weight between two steps" in found.pop("said")
    assert not alone.pop("said")
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.processes
def test_losses_train_or_are_refused_as_without_sharing(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    """As under a split of whole states, and both workers alike: else they would hang."""
    found: dict[Shard | None, dict[str, Any]] = {}
    for shard in (None, *get_args(Shard)):
        plan = shared(plan_of([(2, 6), (2, 2)]), shard, (1, 3))
        # What refuses a loss sees whole weights but where all is shared.
        which = ["right"] if shard in ("optimizer", "gradients") else []
        found[shard] = trained_by(tmp_path, plan, "sharded_losses.py", shard, *which)
    own_ends = {
        ("all", "penalised"): "reads 0.weight outside of its layer",
        ("all", "penalised_first"): "reads 0.weight outside of its layer",
        ("all", "with_gradient_penalty"): "gradients of gradients",
        ("all", "short"): "leaves a virtual node without any",
        ("gradients", "short"): "leaves a virtual node without any",
    }
    for shard in get_args(Shard):
        for name, made in found[shard].items():
            expected = found[None][name]
            if (shard, name) in own_ends:
                assert own_ends[shard, name] in made
            elif isinstance(expected, str):
                assert isinstance(made, str), name
            else:
                torch.testing.assert_close(made, expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.slow
@pytest.mark.processes
def test_weights_read_outside_of_layers_in_late_steps_are_whole_or_refused(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    """In steps that test no loss: as in a split of whole states, or one line on all workers."""
    # Of a gradient that comes when its layer has gone back workers have summed the layer's.
    late = {"square ahead", "all squares ahead"}
    no_numbers = {"numel ahead", "shape ahead", "types ahead"}
    everything = set(sharded_reads.WAYS) - no_numbers
    # With the optimizer alone weights are whole from pass to update, as with gradients.
    some = ["detach ahead", "model copied ahead", "all squares ahead", "functional"]
    behind = [name for name in everything if name.endswith("behind")]
    with_gradients = [*some, "square ahead", "data ahead", *behind]
    ways: dict[Shard | None, list[str]] = {
        None: [*with_gradients, *no_numbers],  # of all that is trained, not refused
        "optimizer": some,
        "gradients": with_gradients,
        "all": [],  # every way
    }
    found: dict[Shard | None, dict[tuple[str, int], Any]] = {}
    for shard, names in ways.items():
        plan = shared(plan_of([(1, 4), (1, 4)]), shard, (1, 3))
        found[shard] = trained_by(tmp_path, plan, "sharded_reads.py", shard, *names)
    for shard in get_args(Shard):
        refused = set()
        for (name, step), made in found[shard].items():
            if isinstance(made, str):
                is_copy = "model copied" in name
                own = "copies a model whose states" if is_copy else "outside of its layer"
                assert own in made, (name, step)
                refused.add(name)
            else:
                expected = found[None][name, step]
                torch.testing.assert_close(
                    made, expected, rtol=0, atol=1e-10, msg=f"{name}, {step}"
                )
        sooner = {"model copied ahead"} | (late if shard == "gradients" else set())
        assert refused == (everything if shard == "all" else sooner)


def trained_by(
    folder: Path, plan: Plan, script: str, shard: Shard | None, *arguments: str
) -> dict[Any, Any]:
    """What a script saved on both workers of a plan."""
    files.write(folder / f"{shard}.json", plan)
    (folder / f"{shard}").mkdir()
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", folder / "runs"]
    command += ["--force", folder / f"{shard}.json", HERE / script, folder / f"{shard}"]
    command += arguments
    done = programs.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    one, other = (torch.load(folder / f"{shard}" / f"{rank}.pt") for rank in (0, 1))
    assert str(one) == str(other)
    return dict(one)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", ["detach ahead", "data ahead", "shape ahead", "square ahead"])
def test_a_worker_alone_reads_whole_weights_in_a_late_step(name: str) -> None:
    kept, whole = (
        sharded_reads.train(sharded_reads.WAYS[name], 3, masters)[0]
        for masters in (torch.float64, None)
    )
    torch.testing.assert_close(kept, whole, rtol=0, atol=1e-10)


def test_types_that_nobody_keeps_are_refused(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)

    def refused(said: str, **asked: Any) -> None:
        with pytest.raises(TargetError, match=said):
            hf.prepare(model, torch.optim.SGD(model.parameters()), **asked)

    policy = MixedPrecisionPolicy(torch.bfloat16)
    refused("masters and mp_policy both say", masters=torch.float32, mp_policy=policy)
    refused("mp_policy is no policy of FSDP, but torch.bfloat16", mp_policy=torch.bfloat16)
    refused(
        "must be a floating-point type, got torch.int8",
        mp_policy=replace(policy, param_dtype=torch.int8),
    )
    refused("masters must be a floating-point type, got 32", masters=32)
    files.write(tmp_path / "plan.json", plan_of(DEVICES))
    started = {"HETFLOW_PLAN": tmp_path / "plan.json", "RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}
    for name, value in {**started, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    refused("as an mp_policy says are kept by workers of a split that share", mp_policy=policy)
    refused("masters are kept by workers of a split that share states", masters=torch.float32)


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
)
def test_cuts_are_in_proportion_over_all_vectors(lengths: list[int], shares: list[int]) -> None:
    held, before = [0] * len(shares), 0
    for length in lengths:
        cuts = cuts_of(before, [length // 3, length - length // 3], shares)
        assert (cuts[0], cuts[-1]) == (0, length)
        first = length // 3
        for cut in cuts:  # a kernel's last few numbers are the same in a slice
            assert cut in (first, length) or (cut - first * (cut > first)) % ALIGNMENT == 0
        for rank, (low, high) in enumerate(pairwise(cuts)):
            assert low <= high
            held[rank] += high - low
        before += length
    for number, share in zip(held, shares, strict=True):
        assert abs(number - before * share / sum(shares)) <= (len(lengths) + 1) * ALIGNMENT


@given(
    st.permutations("abcdef").flatmap(
        lambda order: st.lists(
            st.sets(st.sampled_from(order)).map(lambda own: [*filter(own.__contains__, order)])
        )
    )
)
def test_each_worker_finds_the_layers_that_it_ran_in_the_order_of_turns(
    ran: list[list[str]],
) -> None:
    order = order_of_turns(ran, "abcdef")
    assert sorted(order) == [*"abcdef"]
    for own in ran:
        assert own == [name for name in order if name in own]


def test_workers_that_contradict_each_other_have_an_order_all_the_same() -> None:
    assert order_of_turns(["ba", "ab", "db"], "abcd") == [*"cdab"]


@given(st.data())
def test_only_what_changes_owners_travels(data: st.DataObject) -> None:
    """Workers join, leave, and may hold the same numbers: each gets what it lacks, once."""
    ends = st.lists(st.integers(0, 40), min_size=2, max_size=4).map(sorted)
    before = [0, *data.draw(ends), 40]
    copied = data.draw(st.integers(0, 5))
    after = data.draw(ends)
    wanted = [*pairwise([0, *after, 40])]
    held = [(max(low - copied, 0), high) for low, high in pairwise(before)]
    held += [(0, 0)] * (max(len(wanted) - len(held), 0) + 1)  # those who join hold nothing
    for rank, (first, last) in enumerate(wanted):
        got: list[int] = []
        for worker, begin, end in sources(held, (first, last), rank):
            assert held[worker][0] <= begin < end <= held[worker][1]
            assert worker == rank or not set(range(begin, end)) & set(range(*held[rank]))
            got += range(begin, end)
        assert sorted(got) == [*range(first, last)]


@pytest.mark.parametrize("number", range(1, 9))
def test_each_share_is_kept_by_a_neighbour_too(number: int, plan_of: Callable[..., Plan]) -> None:
    plan = shared(plan_of([(1, 2)] * number), "optimizer", [1] * number)
    once = lower(plan)
    assert [[*once.kept(rank)] for rank in range(number)] == [[rank] for rank in range(number)]
    twice = replace(once, redundancy=1)
    kept = [twice.kept(rank) for rank in range(number)]
    for rank in range(number):
        assert rank in kept[rank]
        assert sum(rank in ranks for ranks in kept) >= min(number, 2)
        assert len(kept[rank]) <= 3


def test_shares_that_all_lost_are_missed_by_all() -> None:
    with pytest.raises(PeerLostError, match="all workers that kept"):
        sources([(0, 4), (8, 9)], (0, 9), 0)


def session_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    place = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), distributed=False)
    return SimpleNamespace(
        parameters=dict(model.named_parameters()), optimizers=(optimizer,), place=place,
        model=model, device=place.device,
    )  # fmt: skip


def test_a_state_that_an_optimizer_made_at_once_is_cut() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    states = SharedStates(
        session_of(model, optimizer), "all", [1], precision=Precision(torch.float32)
    )
    total = optimizer.state[model[0].weight]["sum"]
    assert (total.tolist(), total.dtype) == ([0.5] * 4, torch.float32)
    states.close()


def test_batch_norm_keeps_its_type_where_the_rest_is_cast() -> None:
    """As in FSDP1: torch's kernel refuses 16-bit weights beside float32 statistics."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    whole = deepcopy(model)
    for layer in (whole[0], whole[2]):
        layer.bfloat16()
    x = torch.randn(8, 4)
    whole(x.bfloat16()).sum().backward()
    precision = precision_of(MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = SharedStates(session_of(model, optimizer), "all", [1], precision=precision)
    states.begin()
    states.enter(0)
    model(x).sum().backward()
    states.leave()
    states.launch_rest()
    states.wait()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert other.grad is not None
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.grad, other.grad.reshape(-1).float())
    assert torch.equal(model[1].running_mean, whole[1].running_mean)
    states.close()


def test_refuses_what_slices_cannot_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TargetError, match="Adafactor is none of"):
        SharedStates(session_of(model, torch.optim.Adafactor(model.parameters())), "all", [1])
    read: list[int] = []  # by a hook that was there before, as of pruning
    model[1].register_forward_pre_hook(lambda layer, _: read.append(len(layer.weight)))
    states = SharedStates(session_of(model, torch.optim.SGD(model.parameters())), "all", [1])
    states.begin()
    states.enter(0)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert read == [2]
    with pytest.raises(TargetError, match=r"torch\.func transforms a call of 0"):
        torch.func.vmap(model)(torch.ones(3, 2))
    states.leave()
    with pytest.raises(TargetError, match=r"outside of job\.backward"):
        model(torch.ones(1, 2))
    states.check_step(3, [1, 1, 1])
    with pytest.raises(TargetError, match="leaves a virtual node without any"):
        states.check_step(3, [4, 1, 1, 4])
    model[0].requires_grad_(False)
    with pytest.raises(TargetError, match="frozen or unfrozen"):
        states.begin()
    model[0].requires_grad_(True)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TargetError, match="had not before the first step"):
        states.begin()
    states.close()


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "all"])
@pytest.mark.parametrize("clears", [True, False])
def test_a_loop_may_clear_gradients_behind_its_forward_pass(shard: Shard, *, clears: bool) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (expected,) = torch.autograd.grad(model(x).sum(), [model[0].weight])
    states = SharedStates(session_of(model, optimizer), shard, [1])
    for _ in range(2):
        states.begin(late=True)
        states.enter(0)
        loss = model(x).sum()
        if clears:
            optimizer.zero_grad()
        states.take_earlier()
        loss.backward()
        states.leave()
        states.launch_rest()
        states.wait()
        found = model[0].weight.grad
        assert found is not None
    torch.testing.assert_close(found.flatten(), expected.flatten() * (1 if clears else 2))
    states.close()


def test_memory_that_a_weight_has_left_is_not_the_weights() -> None:
    """An operator that is recorded writes where a weight was that is away since."""
    weight = nn.Parameter(torch.ones(3))
    memory, recording = weight.data, Recording()

    def refuse() -> None:
        raise AssertionError("the weight is read")

    with recording:
        loss = (weight * 2).sum() + memory.sum()
        weight.data = torch.empty(0)
        AwayParameter.hide(weight, (memory.shape, refuse))
        memory.add_(loss.detach())
    assert memory.tolist() == [10.0] * 3


def test_state_dicts_of_slices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A file of them would hold one worker's share."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    job = hf.prepare(model, optimizer, masters=torch.float32)
    for batch in job.batches(torch.ones(4, 2).bfloat16().split(2)):
        job.backward(lambda x: model(x).square().mean(), batch)
        optimizer.step()
        optimizer.zero_grad()
    for name, thing in (("model", model), ("model.0", model[0]), ("optimizer", optimizer)):
        with pytest.raises(TargetError, match=rf"^{name}\.state_dict\(\)"):
            thing.state_dict()
    assert not model[1].state_dict()
    job.sync_buffers()
    assert model.state_dict()["0.weight"].shape == (2, 2)
    job.finish()
    pickle.dumps(model)
    optimizer.state_dict()  # beside the model's, which must not be lost
    assert "share of the states only; " in capsys.readouterr().err


def test_updates_with_a_closure_leave_whole_tensors_to_the_script() -> None:
    torch.manual_seed(0)
    model, one = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    one.load_state_dict(model.state_dict())
    data = torch.randn(4, 3, dtype=torch.float64)
    optimizer, own = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, one))
    job = hf.prepare(model, optimizer, mp_policy=MixedPrecisionPolicy(torch.float64))
    for _ in range(2):
        for batch in job.batches([data]):

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                return job.backward(lambda x: model(x).square().mean(), batch)

            optimizer.step(closure)
            own.zero_grad()
            one(data).square().mean().backward()
            own.step()
            grads = [each.weight.grad for each in (model, one)]
            torch.testing.assert_close(
                *[torch.stack([g.norm(), g[1, 2]]) for g in grads if g is not None]
            )
            torch.testing.assert_close(model.weight.T @ data.T[:2], one.weight.T @ data.T[:2])
            assert copy(model.weight).numel() == 6
            model.add_module("extra", nn.ReLU())  # no parameter
    job.finish()


class _Seen(TorchDispatchMode):
    """The operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = set[Any]()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.operators.add(function)
        return function(*arguments, **named or {})


def test_a_mode_sees_the_scripts_operators_alone() -> None:
    """A recorded loss held views of weights whose memory had gone: workers ended in SIGSEGV."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(4, 2)

    def seen() -> set[Any]:
        with _Seen() as mode:
            model(x).sum()
        return mode.operators

    plain = seen() | {torch.ops.aten.view.default}  # by which a layer hears of its backward pass
    states = SharedStates(session_of(model, torch.optim.SGD(model.parameters())), "all", [1])
    states.begin()
    states.enter(0)
    assert seen() <= plain
    states.close()


def test_a_launch_refuses_what_shares_cannot_follow(plan_of: Callable[..., Plan]) -> None:
    plan = shared(plan_of(DEVICES), "all", (1, 3))
    config = lower(plan)
    assert [slot.state_share_bytes for slot in config.workers] == [1, 3]
    with pytest.raises(ProblemError, match="shares nothing, the job shares all"):
        same_nodes(config, lower(plan_of(DEVICES)))
    with pytest.raises(ProblemError, match=r"meet in every pass, and have \[1, 3\]"):
        lower(shared(plan_of([(1, 2), (3, 2)]), "gradients", (1, 1)))
    for refused, copies in ((plan_of(DEVICES), 1), (plan, 2)):
        with pytest.raises(ProblemError, match="can be kept twice"):
            hetflow.dry_run(refused, str(HERE / "sharded_run.py"), redundancy=copies)
