"""Whether workers agree: fingerprints, settings, verdicts; and what is refused at once."""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime.agreement.agreement import (
    KnownParameters,
    SettingsNumber,
    settings_of,
)
from hetflow.runtime.agreement.verdict import (
    Shadow,
    Statement,
    differing,
    find_fault,
    fingerprint,
    shadow_of,
)
from hetflow.runtime.checkpoints import restoring, saving
from hetflow.runtime.totals import is_one_number
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.plan import Plan

# Fingerprints

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@given(
    st.sampled_from(TYPES),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 2**30),
    st.integers(0, 7),
)
def test_any_single_bit_changes_the_fingerprint(
    dtype: torch.dtype, shape: list[int], where: int, bit: int
) -> None:
    tensor = drawn(dtype, *shape)
    before = fingerprint([tensor])
    assert fingerprint([tensor.clone()]) == before
    flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0)
    if len(flat):
        flat[where % len(flat)] ^= 1 << (0 if dtype == torch.bool else bit)
        assert fingerprint([tensor]) != before


@pytest.mark.parametrize("size", [1 << 14, 40_001, (1 << 16) + 3, 300_000])
def test_large_tensors_change_it_wherever_they_change(size: int) -> None:
    tensor = drawn(torch.float32, size)
    before, seen = fingerprint([tensor]), set()
    for place in (0, size // 2, size - 1):
        other = tensor.clone()
        other.view(torch.int32)[place] += 1
        seen.add(int(fingerprint([other])))
    swapped = tensor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert len(seen | {int(before), int(fingerprint([swapped]))}) == 5


def test_rows_and_tensors_that_change_places_change_it() -> None:
    rows = drawn(torch.float64, 3, 1 << 14)  # as long as the row of weights
    assert fingerprint([rows]) != fingerprint([rows[[1, 0, 2]]])
    small, large = drawn(torch.float32, 4), drawn(torch.float32, 4, seed=1)
    assert fingerprint([small, large]) != fingerprint([large, small])
    assert fingerprint([rows, rows * 2]) != fingerprint([rows * 2, rows])


def test_memory_layout_and_alignment_do_not_matter() -> None:
    picture = drawn(torch.float32, 2, 3, 4, 5)
    last = picture.to(memory_format=torch.channels_last)
    assert fingerprint([picture]) == fingerprint([last])
    crooked = torch.cat([torch.zeros(1), picture.view(-1)])[1:].view(2, 3, 4, 5)
    assert fingerprint([crooked]) == fingerprint([picture])
    assert fingerprint([]) == fingerprint([])


def test_the_blocks_of_a_device_without_integer_products_give_the_same_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What CUDA runs, on the host."""
    from hetflow.runtime.agreement import verdict

    tensor = drawn(torch.float32, 600 * 2 * (1 << 14) // 100 + 5)
    expected = fingerprint([tensor])

    def in_blocks(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([(block * weights).sum(1) for block in torch.split(rows, 3)])

    monkeypatch.setattr(verdict, "_row_sums", in_blocks)
    assert fingerprint([tensor]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_near_and_another_update_is_not(dtype: torch.dtype) -> None:
    values = drawn(dtype, 50_000)
    rounded = values * (1 + torch.finfo(dtype).eps)
    noise = 1e-3 if dtype != torch.bfloat16 else 0.2
    moved = (values.double() + noise * 50 * drawn(torch.float64, 50_000, seed=1) / 50).to(dtype)
    assert shadow_of(values).is_near(shadow_of(rounded))
    assert not shadow_of(values).is_near(shadow_of(moved))


def test_exact_values_and_missing_numbers_are_never_near() -> None:
    whole = drawn(torch.int64, 10)
    assert not shadow_of(whole).is_near(shadow_of(whole))
    holes = drawn(torch.float32, 10)
    holes[3] = math.nan
    assert not shadow_of(holes).is_near(shadow_of(drawn(torch.float32, 10)))
    assert shadow_of(holes).is_near(shadow_of(holes.clone()))


# Settings


def sgd(*groups: dict, **options: float) -> torch.optim.Optimizer:
    parameters = [{"params": [nn.Parameter(torch.ones(2))], **group} for group in groups or [{}]]
    return torch.optim.SGD(parameters, **{"lr": 0.1, **options})


def test_the_number_follows_every_setting_and_nothing_else() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1))
    number = SettingsNumber([optimizer])
    first = number.read()
    assert number.has_changed
    optimizer.param_groups[0]["initial_lr"] = 7.0
    assert number.read() == first
    assert not number.has_changed
    for key, value in {"lr": 0.2, "betas": (0.8, 0.9), "amsgrad": True, "eps": 1e-3}.items():
        before = number.read()
        optimizer.param_groups[0][key] = value
        assert number.read() != before
        assert number.has_changed


@given(st.lists(st.integers(0, 2**22 - 1), min_size=1, max_size=600), st.booleans())
def test_sums_tell_whether_all_numbers_are_one(numbers: list[int], same: bool) -> None:
    numbers = [numbers[0]] * len(numbers) if same else numbers
    total = squares = 0.0
    for number in numbers:
        total, squares = total + float(number), squares + float(number) ** 2
    assert is_one_number(float(len(numbers)), total, squares) == (len(set(numbers)) == 1)


def test_the_first_unlike_setting_is_found() -> None:
    one, other = settings_of([sgd({}, {})]), settings_of([sgd({}, {"momentum": 0.9})])
    assert differing([one, one, other]) == (1, "momentum")
    assert differing([one, one]) is None
    assert differing([one, one[:1]]) == (1, "the group itself")
    near = [{**one[0], "lr": 0.1 * (1 + 1e-9)}]
    assert differing([one[:1], near]) == (0, "lr")
    assert differing([one[:1], near], relative=1e-4) is None


# Verdicts


def told(**changes: object) -> Statement:
    usual = Statement(
        arithmetic="cpu",
        joined_step=0,
        agreed_step=50,
        settings=[{"lr": 0.1}],
        groups=["body.weight"],
        frozen=[],
        unheld=["count"],
        numbers={"body.weight": 1, "head.weight": 2, "count": 3},
        shadows={},
    )
    return Statement.of_json(replace(usual, **changes).as_json())  # as it travels


def test_the_odd_worker_the_parameter_and_the_steps_are_named() -> None:
    odd = told(numbers={"body.weight": 1, "head.weight": 9, "count": 3})
    fault = find_fault([told(), odd, told()], 70)
    assert fault is not None
    assert fault.message == (
        "head.weight on worker 1 is not what it is on workers 0, 2: the workers have diverged "
        "(steps 51 to 70)"
    )
    assert "job.rank" in fault.hint
    assert find_fault([told(), told()], 70) is None


def test_a_worker_that_joined_is_told_to_register() -> None:
    odd = told(numbers={"body.weight": 7, "head.weight": 9, "count": 3}, joined_step=57)
    fault = find_fault([told(), told(), odd], 58)
    assert fault is not None
    assert "body.weight (and 1 more) on worker 2 is not" in fault.message
    assert "worker 2 joined before step 58: give job.register(...)" in fault.hint


def test_what_no_optimizer_holds_is_the_scripts_own_doing() -> None:
    odd = told(numbers={"body.weight": 1, "head.weight": 2, "count": 8})
    fault = find_fault([told(), odd], 60)
    assert fault is not None
    assert fault.message.startswith("count on worker 1")
    assert "no optimizer of hf.prepare holds it" in fault.hint


def test_settings_and_freezing_are_the_cause_before_parameters_are() -> None:
    odd = {"body.weight": 7, "head.weight": 2, "count": 3}
    fault = find_fault([told(), told(), told(settings=[{"lr": 0.4}], numbers=odd)], 60)
    assert fault is not None
    assert fault.message == (
        "body.weight has diverged (steps 51 to 60): lr of the optimizer's group 0 (body.weight) is "
        "0.4 on worker 2, 0.1 on workers 0, 1"
    )
    frozen = find_fault([told(frozen=["head.weight"]), told(), told()], 60)
    assert frozen is not None
    assert frozen.message.startswith("head.weight is frozen on worker 0 and not on workers 1, 2")


def test_rounding_between_unlike_devices_is_no_fault_and_more_is() -> None:
    def with_shadow(arithmetic: str, number: int, projection: float) -> Statement:
        shadow = Shadow(10.0, (projection, 0.0, 0.0, 0.0), 1.2e-7)
        return told(
            arithmetic=arithmetic, numbers={"body.weight": number}, shadows={"body.weight": shadow}
        )

    first, near = with_shadow("V100", 1, 1.0), with_shadow("P100", 2, 1.0001)
    assert find_fault([first, near], 60) is None
    assert find_fault([first, with_shadow("V100", 2, 1.0001)], 60) is not None
    assert find_fault([first, with_shadow("P100", 2, 1.5)], 60) is not None


# In a script

N = nn.functional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def loader() -> DataLoader:
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_of: Callable[..., Plan]) -> None:
    """This process is the only worker of a plan with two virtual nodes."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    files.write(tmp_path / "plan.json", plan_of([(2, 4)]))
    monkeypatch.setenv("HETFLOW_PLAN", str(tmp_path / "plan.json"))


@pytest.fixture
def jobs() -> Iterator[Callable[..., hf.Job]]:
    made = []

    def prepare(*arguments: object) -> hf.Job:
        made.append(hf.prepare(*arguments))
        return made[-1]

    yield prepare
    for job in made:
        job.abandon()


def steps(job: hf.Job, function: Callable, *optimizers: torch.optim.Optimizer) -> Iterator[int]:
    for number, batch in enumerate(job.batches(loader())):
        job.backward(function, batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield number


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("change", ["replaced", "added", "group", "gone", "thawed", "unknown"])
def test_parameters_that_prepare_did_not_see_are_refused_at_the_next_step(
    jobs: Callable[..., hf.Job], change: str
) -> None:
    model = Net()
    model.body.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.head.parameters(), model.body.bias], lr=0.1)
    job = jobs(model, optimizer)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return N.cross_entropy(model(x), y)

    training = steps(job, loss_of, optimizer)
    next(training)
    said = ""
    if change == "replaced":
        model.head = nn.Linear(4, 3)
        said = r"parameter head.weight \(and 1 more\) was replaced after hf.prepare.*still holds"
    elif change == "added":
        model.body.register_parameter("scale", nn.Parameter(torch.ones(1)))
        said = "parameter body.scale was added to the model after hf.prepare"
    elif change == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        said = r"parameter 0 of group 1 of the SGD, of shape \[3\], was added after hf.prepare"
    elif change == "gone":
        model.head = nn.Sequential(model.head)  # the same parameters, elsewhere
    elif change == "thawed":
        model.body.weight.requires_grad_(True)
        optimizer.add_param_group({"params": [model.body.weight]})
    elif change == "unknown":
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        other.step()  # trains beside the job, and the loss does not depend on it
    if said:
        with pytest.raises(TargetError, match=said):
            next(training)
    else:
        assert len(list(training)) == 2


@pytest.mark.usefixtures("launched")
def test_a_head_that_only_a_second_optimizer_knows_is_refused(jobs: Callable[..., hf.Job]) -> None:
    model, head = nn.Linear(5, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    job = jobs(model, optimizer)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return N.cross_entropy(head(model(x)), y)

    training = steps(job, loss_of, optimizer, other)
    with pytest.raises(TargetError, match=r"depends on the (weight|bias) of a Linear, of shape"):
        next(training)
    both = jobs(model, [optimizer, other])
    assert len(list(steps(both, loss_of, optimizer, other))) == 3
    assert "optimizers[1].param_groups[0][0]" in both._session.parameters


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kind", ["in the loss", "beside the loss", "a parameter beside it"])
def test_a_leaf_that_only_a_second_optimizer_knows_is_refused(
    jobs: Callable[..., hf.Job], kind: str
) -> None:
    model = nn.Linear(5, 2)
    log_alpha = torch.zeros((), requires_grad=True)
    if kind.startswith("a parameter"):
        log_alpha = nn.Parameter(log_alpha.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([log_alpha], lr=0.1)
    is_in_loss = kind == "in the loss"

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inputs = x.clone().requires_grad_()  # a leaf that nobody trains
        logits = model(inputs)
        if not is_in_loss:
            (log_alpha * logits.detach().mean()).backward()
        return N.cross_entropy(logits * log_alpha.exp() if is_in_loss else logits, y)

    job = jobs(model, optimizer)
    said = (
        r"depends on a tensor, of shape \[\]"
        if is_in_loss
        else r"SGD steps a \w+ of shape \[\], which"
    )
    with pytest.raises(TargetError, match=said) as caught:
        next(steps(job, loss_of, optimizer, other))
    assert "all optimizers" in str(caught.value.hint)
    job.abandon()
    if is_in_loss:
        assert len(list(steps(jobs(model, [optimizer, other]), loss_of, optimizer, other))) == 3
    else:
        kept = jobs(model, optimizer)
        kept.register(other)
        assert len(list(steps(kept, loss_of, optimizer, other))) == 3


@pytest.mark.usefixtures("launched")
def test_a_leaf_that_the_script_updates_by_hand_is_refused(jobs: Callable[..., hf.Job]) -> None:
    model = nn.Linear(5, 2)
    delta = torch.zeros(1, 5, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inputs = x.clone().requires_grad_()  # a leaf that nobody trains
        return N.cross_entropy(model(inputs + delta), y)

    job = jobs(model, optimizer)
    with pytest.raises(TargetError, match=r"depends on a tensor, of shape \[1, 5\]"):
        list(steps(job, loss_of, optimizer))
    assert job.num_steps <= 1
    job.abandon()


@pytest.mark.usefixtures("launched")
def test_a_second_optimizer_of_the_model_is_refused_unless_its_state_is_kept(
    jobs: Callable[..., hf.Job],
) -> None:
    model = Net()
    body = torch.optim.SGD(model.body.parameters(), lr=0.1)
    head = torch.optim.Adam(model.head.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return N.cross_entropy(model(x), y)

    job = jobs(model, body)
    with pytest.raises(TargetError, match=r"second optimizer \(Adam\) steps head.weight and 1 mo"):
        next(steps(job, loss_of, body, head))
    job.abandon()
    kept = jobs(model, body)
    kept.register(head)
    assert len(list(steps(kept, loss_of, body, head))) == 3


@pytest.mark.usefixtures("launched")
def test_the_optimizer_of_another_job_is_no_stranger(jobs: Callable[..., hf.Job]) -> None:
    model = Net()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.Adam(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return N.cross_entropy(model(x), y)

    for optimizer in (first, second):
        assert len(list(steps(jobs(model, optimizer), loss_of, optimizer))) == 3


def test_what_is_no_optimizer_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TargetError, match="needs an optimizer, got StepLR, which has no"):
        hf.prepare(model, [optimizer, scheduler])
    with pytest.raises(TargetError, match="the same optimizer twice"):
        hf.prepare(model, [optimizer, optimizer])
    with pytest.raises(TargetError, match="needs an optimizer, got generator"):
        hf.prepare(model, model.parameters())
    with pytest.raises(TargetError, match="SparseAdam updates only rows with a gradient"):
        hf.prepare(model, [torch.optim.SparseAdam(model.body.parameters())])


@pytest.mark.usefixtures("launched")
def test_the_state_of_several_optimizers_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: Callable[..., hf.Job]
) -> None:
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path / "saved"))

    def train(stop: int | None = None) -> tuple[dict, list]:
        monkeypatch.setattr(saving.OpenedFolders, "jobs", 0)  # as in a process of its own
        model = Net()
        body = torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9)
        head = torch.optim.Adam(model.head.parameters(), lr=0.1)
        job = jobs(model, [body, head])

        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return N.cross_entropy(model(x), y)

        for number in steps(job, loss_of, body, head):
            if number == stop:
                job.checkpoint()
                break
        return model.state_dict(), [body.state_dict(), head.state_dict()]

    train(stop=1)
    parameters, states = train()
    monkeypatch.delenv("HETFLOW_CHECKPOINT")
    expected, expected_states = train()
    for name, value in expected.items():
        assert torch.equal(parameters[name], value)
    for mine, other in zip(states, expected_states, strict=True):
        assert mine["param_groups"] == other["param_groups"]
        for index, entries in other["state"].items():
            for key, value in entries.items():
                assert torch.equal(
                    torch.as_tensor(mine["state"][index][key]), torch.as_tensor(value)
                )


def test_a_plain_run_without_checkpoints_may_do_as_it_likes(
    jobs: Callable[..., hf.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HETFLOW_PLAN", raising=False)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = jobs(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    training = steps(job, lambda x, y: N.cross_entropy(model(x), y), optimizer, other)
    next(training)
    model.head = nn.Linear(4, 2)
    assert len(list(training)) == 2


def test_a_module_with_another_dict_of_parameters_is_looked_at() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    known = KnownParameters(model, [], dict(model.named_parameters()), keeps_groups=False)
    known.look_closer()
    model[1]._parameters = {"slope": nn.Parameter(torch.ones(1))}
    with pytest.raises(TargetError, match=r"parameter 1\.slope was added to the model after"):
        known.look_closer()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kind", ["averaged", "registered", "wrapped"])
def test_a_copy_of_the_model_that_is_not_registered_is_warned_of_on_resume(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jobs: Callable[..., hf.Job],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path / "saved"))

    def train(stop: int | None) -> None:
        monkeypatch.setattr(saving.OpenedFolders, "jobs", 0)  # as in a process of its own
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = jobs(model, optimizer)
        held = nn.Sequential(model)
        if kind != "wrapped":
            held = torch.optim.swa_utils.AveragedModel(model)
        if kind == "registered":
            job.register(held)
        for number in steps(job, lambda x, y: N.cross_entropy(model(x), y), optimizer):
            if number == stop:
                job.checkpoint()
                break
        job.abandon()

    train(stop=1)
    assert "a copy of the model" not in caplog.text
    everything = gc.get_objects
    earlier = [found for found in everything() if issubclass(type(found), nn.Module)]
    hidden = set(map(id, earlier))  # a process of its own would not have these
    monkeypatch.setattr(
        restoring.gc,
        "get_objects",
        lambda: [found for found in everything() if id(found) not in hidden],
    )
    train(stop=None)
    assert ("a copy of the model (AveragedModel)" in caplog.text) == (kind == "averaged")
