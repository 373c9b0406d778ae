"""A worker's place under hetflow's launcher, torchrun, srun, or none."""

from pathlib import Path

import pytest

from hetflow.runtime.protocol.environment import assign_slots, read_environment
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.errors import FileError, TargetError
from hetflow.schema.launch import LaunchConfig, PipelineStage, PipelineWork, VirtualNode, WorkerSlot
from hetflow.schema.plan import Prediction, Proof, ReplicaGroup
from hetflow.tests.plan_parts import split_plan, whole_group, with_groups


def group(device_type: str, number: int, nodes: int, size: int) -> ReplicaGroup:
    return whole_group(
        device_type=device_type,
        num_devices=number,
        device_batch_size=nodes * size,
        virtual_nodes=nodes,
        virtual_node_batch_size=size,
    )


PLAN = split_plan(
    model="m",
    global_batch_size=48,
    groups=(group("V100", 1, 2, 8), group("P100", 2, 4, 4)),
    predicted=Prediction(step_seconds=1.0, samples_per_second=48.0),
    proof=Proof(termination="feasible", objective=1.0, lower_bound=None, gap=None, method="hand"),
)


@pytest.fixture
def plan_path(tmp_path: Path) -> str:
    files.write(tmp_path / "plan.json", PLAN)
    return str(tmp_path / "plan.json")


def test_lowering_numbers_ranks_and_virtual_nodes_through_the_groups() -> None:
    config = lower(PLAN, seed=7)
    assert [slot.device_type for slot in config.workers] == ["V100", "P100", "P100"]
    assert [[n.index for n in slot.virtual_nodes] for slot in config.workers] == [
        [0, 1], [2, 3, 4, 5], [6, 7, 8, 9],
    ]  # fmt: skip
    assert config.seed == 7
    assert sum(n.batch_size for slot in config.workers for n in slot.virtual_nodes) == 48


def test_plain_python_is_one_worker() -> None:
    start = read_environment({})
    assert (start.config, start.rank, start.world_size) == (None, 0, 1)


def test_our_launcher_deals_slots_itself(plan_path: str) -> None:
    env = {"HETFLOW_PLAN": plan_path, "HETFLOW_SLOT": "2", "RANK": "2", "WORLD_SIZE": "3"}
    start = read_environment(env)
    assert (start.rank, start.is_slot, start.plan) == (2, True, PLAN)


def test_torchrun_states_a_role(plan_path: str) -> None:
    env = {"HETFLOW_PLAN": plan_path, "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}
    env |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
    start = read_environment({**env, "ROLE_NAME": "P100"})
    assert (start.rank, start.is_slot, start.stated_type) == (1, False, "P100")
    assert (start.address, start.port, start.local_rank) == ("10.0.0.1", 29501, 1)
    assert read_environment({**env, "ROLE_NAME": "default"}).stated_type is None
    named = read_environment({**env, "ROLE_NAME": "P100", "HETFLOW_DEVICE_TYPE": "V100"})
    assert named.stated_type == "V100"


@pytest.mark.parametrize(
    ("nodes", "host"), [("gpu[03-07,9],cpu1", "gpu03"), ("a1,b2", "a1"), ("one", "one")]
)
def test_srun_names_the_first_host(plan_path: str, nodes: str, host: str) -> None:
    env = {"HETFLOW_PLAN": plan_path, "SLURM_PROCID": "2", "SLURM_NTASKS": "3"}
    env |= {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "18001"}
    start = read_environment(env)
    assert (start.rank, start.local_rank, start.address, start.port) == (2, 1, host, 20001)


def test_one_task_of_a_foreign_launcher_has_nobody_to_meet(tmp_path: Path) -> None:
    """Nobody holds a store there: waiting for one would last until the time limit."""
    alone = with_groups(PLAN, global_batch_size=16, groups=(group("V100", 1, 2, 8),))
    files.write(tmp_path / "alone.json", alone)
    env = {"HETFLOW_PLAN": str(tmp_path / "alone.json"), "RANK": "0", "WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
    assert read_environment(env).address is None
    assert read_environment({**env, "HETFLOW_SLOT": "0"}).address == "10.0.0.1"
    held = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert read_environment({**env, **held}).address == "10.0.0.1"


def test_slots_go_by_type_not_by_rank() -> None:
    config = lower(PLAN)
    assert assign_slots(config, ["P100", "P100", "V100"]) == [1, 2, 0]
    assert assign_slots(config, ["P100", None, "V100"]) == [1, 2, 0]
    assert assign_slots(config, [None, "V100", None]) == [1, 0, 2]


def test_foreign_launchers_deal_slots_in_order_of_the_planned_devices():
    nodes = (VirtualNode(index=0, batch_size=8),)
    stage = PipelineStage(layers=("l",), ranks=(0,))
    work = PipelineWork(schedule="1f1b", num_microbatches=1, recompute=False, stages=(stage,) * 3)
    config = LaunchConfig(
        model="m",
        global_batch_size=8,
        pipeline=work,
        workers=tuple(
            WorkerSlot(rank=rank, device_type="V100", virtual_nodes=nodes, device=device)
            for rank, device in enumerate([2, 0, 3])
        ),
    )
    assert assign_slots(config, [None] * 3) == [1, 0, 2]
    assert assign_slots(config, ["V100"] * 3) == [1, 0, 2]


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TargetError, match="needs a V100 for rank 0"):
        assign_slots(lower(PLAN), ["P100", "P100", "P100"])


@pytest.mark.parametrize(("text", "steps"), [("", 50), ("0", 0), ("7", 7)])
def test_steps_between_comparisons(plan_path: str, text: str, steps: int) -> None:
    env = {"HETFLOW_PLAN": plan_path, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    assert read_environment({**env, "HETFLOW_COMPARE_EVERY": text}).compare_every == steps
    with pytest.raises(TargetError, match="HETFLOW_COMPARE_EVERY must be 0 or more, got '-1'"):
        read_environment({**env, "HETFLOW_COMPARE_EVERY": "-1"})


def test_bad_environments_are_refused(plan_path: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="2 workers started without a plan"):
        read_environment({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(TargetError, match=r"needs 3 worker\(s\), but 1 started"):
        read_environment({"HETFLOW_PLAN": plan_path})
    with pytest.raises(TargetError, match="RANK must be a whole number, got 'x'"):
        read_environment({"HETFLOW_PLAN": plan_path, "RANK": "x", "WORLD_SIZE": "3"})
    with pytest.raises(FileError, match="no such file"):
        read_environment({"HETFLOW_PLAN": str(tmp_path / "none.json")})
