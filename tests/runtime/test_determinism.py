"""Levels of determinism: the tree of sums, refusals, and one digest over mappings."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetflow.runtime.determinism import check_level, scan
from hetflow.runtime.group import Place
from hetflow.runtime.invariant import InvariantSum, Subtree, turns_of
from hetflow.runtime.protocol.environment import Start, pins
from hetflow.runtime.protocol.lower import check_level as check_name
from hetflow.schema import files
from hetflow.schema.errors import ProblemError, TargetError
from hetflow.schema.plan import Plan
from hetflow.tests import programs

from . import digests
from .gloo_workers import run_workers

pytestmark = pytest.mark.processes

# How a sum was made, as nested pairs: floats cannot tell, and need not here.
Term = object


def tree_of(start: int, level: int, num_leaves: int) -> Term:
    """The aligned tree over the leaves from ``start``, from its definition."""
    if level == 0:
        return start if start < num_leaves else None
    left = tree_of(start, level - 1, num_leaves)
    right = tree_of(start + (1 << (level - 1)), level - 1, num_leaves)
    return left if right is None else (left, right)


def run_turns(nodes: Sequence[int], num_leaves: int) -> list[tuple[Subtree, Term]]:
    """A worker's step on symbols instead of tensors."""
    turns, trees = turns_of(nodes, num_leaves)
    running: Term = None
    spares: list[Term] = []
    for turn in turns:
        if turn.spills:
            spares.append(running)
            running = None
        running = turn.node if running is None else (running, turn.node)
        for _ in range(turn.num_merges):
            running = (spares.pop(), running)
    return list(zip(trees, [*spares, running], strict=True))


@given(st.integers(1, 40), st.data())
def test_every_mapping_makes_the_branches_of_one_tree(num_leaves: int, data: st.DataObject) -> None:
    holders = data.draw(st.lists(st.integers(0, 4), min_size=num_leaves, max_size=num_leaves))
    for holder in set(holders):
        nodes = [node for node in range(num_leaves) if holders[node] == holder]
        for tree, term in run_turns(nodes, num_leaves):
            assert term == tree_of(tree.start, tree.level, num_leaves)


def test_one_device_keeps_at_most_log2_of_its_nodes_spares() -> None:
    for nodes in (1, 2, 3, 4, 8, 16, 64):
        assert InvariantSum([range(nodes)], 0).num_spares <= max(nodes - 1, 0).bit_length() - (
            nodes > 1
        )


@pytest.mark.parametrize("num_leaves", [1, 2, 5, 8])
def test_the_buffer_ends_with_the_tree_sum(num_leaves: int) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(num_leaves, 4) * 10 ** torch.randint(-6, 6, (num_leaves, 4))
    flat, sums = torch.zeros(4), InvariantSum([range(num_leaves)], 0)
    sums.allocate([flat])
    for _ in range(2):
        sums.begin()
        flat.zero_()
        for node, gradient in enumerate(gradients):
            sums.enter(node)
            flat += gradient
            sums.leave()
        sums.settle()
        sums.launch(0, 0, 4)
        sums.wait()

    def add(term: Term) -> torch.Tensor:
        return add(term[0]) + add(term[1]) if isinstance(term, tuple) else gradients[term]

    assert torch.equal(flat, add(tree_of(0, 3, num_leaves)))


def test_virtual_nodes_without_samples_count_as_zero() -> None:
    flat, sums = torch.zeros(2), InvariantSum([range(6)], 0)
    sums.allocate([flat])
    sums.begin()
    for node in (1, 2):
        sums.enter(node)
        flat += node
        sums.leave()
    assert not sums.in_last_turn
    sums.settle()
    sums.launch(0, 0, 2)
    assert flat.tolist() == [3.0, 3.0]


def test_many_buckets_share_the_room_of_a_few_on_uneven_workers(tmp_path: Path) -> None:
    script = [sys.executable, str(Path(__file__).parent / "exchanging.py"), str(tmp_path / "store")]
    workers = [programs.start([*script, str(rank)], stderr=subprocess.PIPE) for rank in range(3)]
    for worker in workers:
        _, said = worker.communicate(timeout=120)
        assert worker.returncode == 0, said


def test_scan_names_what_prevents_a_level() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    assert scan(model, "heterogeneous", ["cpu"]) == []
    assert scan(model, "elastic", ["V100"]) == []  # a mean: torch refuses what it must as it runs
    unlike = {o.name for o in scan(model, "heterogeneous", ["V100", "P100"])}
    assert unlike == {"1", "3"}
    assert scan(model, "none", ["V100", "P100"]) == []


def test_a_level_without_its_settings_says_what_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(start=Start(), slot=None, device=torch.device("cpu"))
    for name, value in pins("elastic").items():
        monkeypatch.setenv(name, value)
    check_level(nn.Linear(2, 2), "elastic", place)
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(TargetError) as caught:
        check_level(nn.Linear(2, 2), "elastic", place)
    assert "export PYTHONHASHSEED=0" in caught.value.hint


def test_an_obstacle_is_one_line_with_a_way_out() -> None:
    place = Place(start=Start(), slot=None, device=torch.device("cuda", 0))
    model = nn.Sequential(*(nn.MaxUnpool2d(2) for _ in range(5)))
    with pytest.raises(TargetError, match=r"0 \(MaxUnpool2d\), 1 .* and 2 more: has no") as e:
        check_level(model, "static", place)
    assert "\n" not in e.value.message
    assert "replace the operator" in e.value.hint


@pytest.mark.parametrize(
    ("which", "operator"), [("module", "unpool (MaxUnpool1d)"), ("function", "max_unpool")]
)
def test_an_operator_without_a_deterministic_form_is_refused_in_one_line(
    which: str, operator: str, tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    files.write(tmp_path / "plan.json", plan_of([(1, 16)]))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--determinism", "static"]
    command += ["-o", str(tmp_path / "run"), str(tmp_path / "plan.json")]
    command += [str(Path(__file__).parent / "unpooling.py"), which]
    done = programs.run(command, timeout=120)
    assert done.returncode == 2, done.stderr
    said, hint = done.stderr.splitlines()
    assert "determinism static cannot hold" in said
    assert operator in said
    assert "unpooling.py, line" in said
    assert hint == "hint: replace the operator, or use --determinism none"
    # A module is seen by the scan, before anything is trained.
    assert ("prepared" in done.stdout) == (which == "function")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ProblemError, match="must be one of none, static, elastic, hetero"):
        check_name("exact")


def test_elastic_gives_one_digest_on_one_worker_and_on_unlike_ones() -> None:
    first, second = (digests.undisturbed(name, "elastic") for name in ("1 worker", "2 types"))
    assert set(first) == {"CNN", "transformer", "embeddings"}
    assert first == second


@pytest.mark.slow
def test_elastic_gives_one_digest_on_every_mapping() -> None:
    found = [digests.undisturbed(name, "elastic") for name in digests.MAPPINGS]
    assert all(each == found[0] for each in found)


@pytest.mark.slow
def test_static_repeats_itself_and_heterogeneous_holds_on_every_mapping(tmp_path: Path) -> None:
    again = [digests.launch("3 uneven", "static", tmp_path / str(n)) for n in range(2)]
    assert again[0] == again[1]
    alone = digests.undisturbed("1 worker", "static")
    assert alone["transformer"] != again[0]["transformer"]
    names = ("1 worker", "3 uneven", "2 types")
    found = [digests.undisturbed(name, "heterogeneous") for name in names]
    assert all(each == found[0] for each in found)


def against_ddp(which: str, plan: Plan, folder: Path) -> torch.Tensor:
    """The parameters after one training."""
    folder.mkdir()
    script = Path(__file__).parent / "against_ddp.py"
    if which == "ddp":  # as torchrun starts it: under a plan hetflow would weigh its gradients
        size = sum(group.num_devices for group in plan.groups)
        run_workers(script, size, which, folder / "parameters.json", seconds=240)
        return torch.tensor(json.loads((folder / "parameters.json").read_text()))
    files.write(folder / "plan.json", plan)
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--determinism", "elastic"]
    command += ["-o", str(folder / "run"), str(folder / "plan.json")]
    command += [str(script), which, str(folder / "parameters.json")]
    done = programs.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads((folder / "parameters.json").read_text()))


@pytest.mark.slow
def test_two_virtual_nodes_have_the_bits_of_plain_ddp_on_two_workers(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    one, two = plan_of([(2, 12)]), plan_of([(1, 12), (1, 12)])
    theirs = against_ddp("ddp", two, tmp_path / "ddp")
    assert torch.equal(against_ddp("hetflow", one, tmp_path / "one"), theirs)
    assert torch.equal(against_ddp("hetflow", two, tmp_path / "two"), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [3, 4])
def test_more_virtual_nodes_differ_from_plain_ddp_in_the_last_bits_only(
    num_nodes: int,
    tmp_path: Path,
    plan_of: Callable[..., Plan],
    record_property: Callable[[str, object], None],
) -> None:
    size = 24 // num_nodes
    theirs = against_ddp("ddp", plan_of([(1, size)] * num_nodes), tmp_path / "ddp")
    ours = against_ddp("hetflow", plan_of([(num_nodes, size)]), tmp_path / "one")
    difference = (ours - theirs).abs().max().item()
    record_property("difference", difference)  # for --junit-xml, and docs/determinism.md
    assert 0 < difference < 1e-5
