"""Tensor-parallel layers and trainings, on real gloo processes, against one process."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetflow import runtime as hf
from hetflow.schema import files
from hetflow.schema.layers import LayerTrace, TracedInput
from hetflow.schema.plan import Plan

from ..parallel_plans import parallel_plan
from .gloo_workers import run_workers

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "tensor_cases.py"
WHOLE = ("all",)  # a model of one stage is not cut, so its layers' names do not matter
BLOCK = (
    "norms.0", "attention.project_in", "attention.project_out", "norms.1", "feed_forward.0",
    "feed_forward.1", "feed_forward.2",
)  # fmt: skip
FIRST = ("tokens", "positions", *(f"blocks.0.{name}" for name in BLOCK))
LAST = (*(f"blocks.1.{name}" for name in BLOCK), "norm")
CHUNKS = (FIRST[:5], FIRST[5:], LAST[:3], LAST[3:])  # of two rounds over two positions
APART = ((*FIRST, *LAST[:2]), LAST[2:])  # between two layers that are cut
AT_NORM = ((*FIRST, *LAST[:1]), LAST[1:])  # behind a norm

# Layers of transformers' models as torch.export finds them, in two stages. All but GPT-2 have one
# block: exporting two takes longer, and shows no more.
GPT2_BLOCK = (
    "ln_1", "attn.c_attn", "attn.c_proj", "attn.resid_dropout", "ln_2", "mlp.c_fc", "mlp.act",
    "mlp.c_proj", "mlp.dropout",
)  # fmt: skip
QWEN_BLOCK = (
    "input_layernorm", "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj",
    "self_attn.k_norm", "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm",
    "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
BERT_BLOCK = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.dropout", "attention.output.LayerNorm", "intermediate.dense",
    "intermediate.intermediate_act_fn", "output.dense", "output.dropout", "output.LayerNorm",
)  # fmt: skip
NEOX_BLOCK = (
    "input_layernorm", "attention.query_key_value", "attention.dense", "post_attention_dropout",
    "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h",
    "post_mlp_dropout",
)  # fmt: skip
VIT_BLOCK = (
    "layernorm_before", "attention.q_proj", "attention.k_proj", "attention.v_proj",
    "attention.o_proj", "dropout", "layernorm_after", "mlp.fc1", "mlp.activation_fn", "mlp.fc2",
    "dropout#2",
)  # fmt: skip


def halves(before: tuple[str, ...], place: str, block: tuple[str, ...], behind: tuple[str, ...]):
    """A model of two blocks, cut between them."""
    first, second = ([f"{place}.{number}.{name}" for name in block] for number in (0, 1))
    return (*before, *first), (*second, *behind)


def named(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


GPT2 = halves(
    ("transformer.wte", "transformer.wpe", "transformer.drop"), "transformer.h", GPT2_BLOCK,
    ("transformer.ln_f", "lm_head"),
)  # fmt: skip
QWEN = (  # between two layers that are cut
    ("model.embed_tokens", *named("model.layers.0", QWEN_BLOCK[:2])),
    (*named("model.layers.0", QWEN_BLOCK[2:]), "model.norm", "lm_head"),
)
BERT = (
    (
        *named("bert.embeddings", ("word_embeddings", "token_type_embeddings",
               "position_embeddings", "LayerNorm", "dropout")),
        *named("bert.encoder.layer.0", BERT_BLOCK),
    ),
    named("cls.predictions", ("transform.dense", "transform.transform_act_fn",
          "transform.LayerNorm", "decoder")),
)  # fmt: skip
NEOX = (
    ("gpt_neox.embed_in", "gpt_neox.emb_dropout", *named("gpt_neox.layers.0", NEOX_BLOCK)),
    ("gpt_neox.final_layer_norm", "lm_head"),
)
VIT = (
    (
        "embeddings.patch_embeddings.projection",
        "embeddings.dropout",
        *named("layers.0", VIT_BLOCK[:-1]),
    ),
    (*named("layers.0", VIT_BLOCK[-1:]), "layernorm"),
)
IDS = TracedInput(name="input_ids", shape=(2, 6), dtype="int64")
PIXELS = TracedInput(name="pixel_values", shape=(2, 1, 2, 3), dtype="float64")
OF_LOGITS = LayerTrace(way="export", inputs=(IDS,), constants={"logits_to_keep": 0})
TRACES = {
    "gpt2": OF_LOGITS,
    "qwen": OF_LOGITS,
    "neox": OF_LOGITS,
    "bert": LayerTrace(way="export", inputs=(IDS,)),
    "vit": LayerTrace(way="export", inputs=(PIXELS,)),
}

OURS = {"zoo", "sized", "dropping", "layers"}  # what does without transformers
# name: (case, stages)
WORLDS: dict[str, tuple[int, dict[str, tuple[str, list]]]] = {
    "t2": (2, {
        "layers": ("layers", [(WHOLE, (2,))]),
        "zoo": ("zoo:sgd:clip", [(WHOLE, (2,))]),
        "zoo-tokens": ("zoo:sgd:clip", [(WHOLE, (2,))]),
        "d2": ("zoo:sgd:clip", [(WHOLE, (1, 1))]),
        "d2-shards": ("zoo:sgd:clip", [(WHOLE, (1, 1))]),
        "d2-unlike-shards": ("zoo:sgd:clip", [(WHOLE, (1, 1))]),
        "d2-gradients-shards": ("zoo:sgd:clip", [(WHOLE, (1, 1))]),
        "scaled-gradients": ("zoo:sgd:clip-scaled", [(WHOLE, (1, 1))]),
        "carried-gradients": ("zoo:sgd:clip-carry", [(WHOLE, (1, 1))]),
        "carried-weights": ("zoo:sgd:clip-carry", [(WHOLE, (1, 1))]),
        "scaled-weights": ("zoo:sgd:clip-scaled", [(WHOLE, (1, 1))]),
        "zoo-cores": ("zoo:sgd:clip", [(WHOLE, (2,))]),
    }),
    "t2-more": (2, {
        "adam": ("zoo:adam:clip-inf", [(WHOLE, (2,))]),
        "llama": ("llama:sgd:clip", [(WHOLE, (2,))]),
        "llama-logits": ("llama-logits:sgd:clip", [(WHOLE, (2,))]),
        "gpt2": ("gpt2:sgd:clip-inf", [(WHOLE, (2,))]),
        "sdpa": ("gpt2-drop:sgd:", [(WHOLE, (2,))]),
        "eager": ("gpt2-eager:sgd:", [(WHOLE, (2,))]),
        "dropout": ("dropping:sgd:", [(WHOLE, (2,))]),
        "llama-tokens": ("llama:sgd:clip", [(WHOLE, (2,))]),
        "sdpa-tokens": ("gpt2-drop:sgd:", [(WHOLE, (2,))]),
        "sdpa-tokens-again": ("gpt2-drop:sgd:", [(WHOLE, (2,))]),
        "sdpa-tokens-cores": ("gpt2-drop:sgd:", [(WHOLE, (2,))]),
        "eager-cores": ("gpt2-eager:sgd:", [(WHOLE, (2,))]),
        "dropout-cores": ("dropping:sgd:", [(WHOLE, (2,))]),
        "qwen": ("qwen:sgd:clip", [(WHOLE, (2,))]),
        "groups": ("zoo:groups:clip-inf", [(WHOLE, (1, 1))]),
        "groups-gradients-shards": ("zoo:groups:clip-inf", [(WHOLE, (1, 1))]),
        "whole": ("zoo:adafactor:clip", [(WHOLE, (1, 1))]),
        "whole-shards": ("zoo:adafactor:clip", [(WHOLE, (1, 1))]),
        "adam-shards": ("zoo:adam:clip-inf", [(WHOLE, (2,))]),
    }),
    "t2-1": (3, {
        "layers": ("layers", [(WHOLE, (3,))]),
        "zoo": ("zoo:sgd:clip", [(WHOLE, (2, 1))]),
        "gpt2": ("gpt2:adam:clip-inf", [(WHOLE, (1, 2))]),
        "odd": ("zoo:sgd:", [(WHOLE, (3,))]),
        "sized": ("sized:sgd:clip", [(WHOLE, (2, 1))]),
        "gpt2-shards": ("gpt2:adam:clip-inf", [(WHOLE, (1, 2))]),
        "d3": ("gpt2:adam:clip-inf", [(WHOLE, (1, 1, 1))]),
        "d3-shards": ("gpt2:adam:clip-inf", [(WHOLE, (1, 1, 1))]),
        "d3-gradients": ("gpt2:adam:clip-inf", [(WHOLE, (1, 1, 1))]),
        "gpt2-gradients": ("gpt2:adam:clip-inf", [(WHOLE, (1, 2))]),
    }),
    "p2": (2, {
        "zoo": ("zoo:sgd:clip", [(FIRST, (1,)), (LAST, (1,))]),
        "zoo-cores": ("zoo:sgd:clip", [(FIRST, (1,)), (LAST, (1,))]),
        "again": ("zoo:sgd:clip", [(FIRST, (1,)), (LAST, (1,))]),
        "chunks": ("zoo:sgd:clip", [(part, (1,)) for part in CHUNKS]),
        "chunks-again": ("zoo:sgd:clip", [(part, (1,)) for part in CHUNKS]),
    }),
    "p2-unlike": (3, {
        "zoo": ("zoo:sgd:clip", [(FIRST, (2,)), (LAST, (1,))]),
        "back": ("zoo:adam:clip-inf", [(FIRST, (1,)), (LAST, (2,))]),
        "tokens": ("zoo:sgd:clip", [(FIRST, (2,)), (LAST, (1,))]),
        "back-tokens": ("zoo:adam:clip-inf", [(FIRST, (1,)), (LAST, (2,))]),
        "apart": ("zoo:sgd:", [(APART[0], (2,)), (APART[1], (1,))]),
        "sized": ("sized:sgd:clip", [(FIRST, (2,)), (LAST, (1,))]),
        "chunks": ("zoo:sgd:clip", [(part, (2 - place % 2,)) for place, part in enumerate(CHUNKS)]),
        "exported-bert": ("bert:adam:clip-unseen", [(BERT[0], (2,)), (BERT[1], (1,))]),
        "exported-neox": ("neox:adam:clip-unseen", [(NEOX[0], (2,)), (NEOX[1], (1,))]),
        "exported-vit": ("vit:sgd:clip-inf", [(VIT[0], (2,)), (VIT[1], (1,))]),
    }),
    "p2-t2": (4, {
        "zoo": ("zoo:adam:clip-inf", [(FIRST, (2,)), (LAST, (2,))]),
        "apart": ("zoo:sgd:clip", [(APART[0], (2,)), (APART[1], (2,))]),
        "apart-tokens": ("zoo:sgd:clip", [(APART[0], (2,)), (APART[1], (2,))]),
        "norm-tokens": ("zoo:sgd:clip", [(AT_NORM[0], (2,)), (AT_NORM[1], (2,))]),
        "d2": ("zoo:sgd:clip", [(FIRST, (1, 1)), (LAST, (1, 1))]),
        "chunks": ("zoo:adam:clip", [(part, (2,)) for part in CHUNKS]),
        "chunks-d2": ("zoo:sgd:clip", [(part, (1, 1)) for part in CHUNKS]),
        "chunks-cores": ("zoo:adam:clip", [(part, (2,)) for part in CHUNKS]),
        "exported-gpt2-cores": ("gpt2:sgd:clip-unseen", [(GPT2[0], (2,)), (GPT2[1], (2,))]),
        "exported-qwen": ("qwen:adam:clip-unseen", [(QWEN[0], (2,)), (QWEN[1], (2,))]),
        "sized-chunks": ("sized:sgd:clip", [(part, (2,)) for part in CHUNKS]),
        "apart-cores": ("zoo:sgd:clip", [(APART[0], (2,)), (APART[1], (2,))]),
        "d2-unlike-gradients-shards": ("zoo:sgd:clip", [(FIRST, (1, 1)), (LAST, (1, 1))]),
        "chunks-d2-gradients-shards": ("zoo:sgd:clip", [(part, (1, 1)) for part in CHUNKS]),
        "exported-qwen-weights-unlike-again": (
            "qwen:sgd:clip-inf-unseen", [(QWEN[0], (1, 1)), (QWEN[1], (1, 1))]
        ),
    }),
    "p2-t2-d2": (8, {
        "weights": ("zoo:sgd:clip", [(APART[0], (2, 2)), (APART[1], (2, 2))]),
        "chunks": ("zoo:sgd:clip", [(part, (2, 2)) for part in CHUNKS]),
    }),
    "t2-d2": (4, {
        "zoo": ("zoo:adam:clip", [(WHOLE, (2, 2))]),
        "zoo-shards": ("zoo:adam:clip", [(WHOLE, (2, 2))]),
        "zoo-gradients-shards": ("zoo:adam:clip", [(WHOLE, (2, 2))]),
        "weights-unlike-tokens": ("zoo:sgd:clip", [(WHOLE, (2, 2))]),
        "t4": ("zoo:sgd:clip", [(WHOLE, (4,))]),
    }),
}  # fmt: skip
FAST = ("t2",)
TRAININGS = [
    pytest.param(world, name, marks=() if world in FAST else (pytest.mark.slow,))
    for world, (_, found) in WORLDS.items()
    for name in found
    if name not in ("layers", "odd") and (world, name) != ("p2-unlike", "apart")
]
# These are compared with themselves, sharded and not. Adafactor divides gradients that are zero but
# for rounding (those of keys' biases) by their size.
ONLY_SHARDED = ("groups", "whole")
COMPARED = [p for p in TRAININGS if not str(p.values[1]).startswith(ONLY_SHARDED)]
SAME_BITS = [
    p
    for p in TRAININGS
    if str(p.values[1]).endswith(("-shards", "-cores")) and "exported" not in str(p.values[1])
]


def run_world(folder: Path, size: int, plans: dict[str, tuple[str, Plan]]) -> list[dict]:
    """All cases of one number of workers, in one set of processes."""
    for name, (_, plan) in plans.items():
        files.write(folder / f"{name}.json", plan)
    asked = [f"{name}={case}" for name, (case, _) in plans.items()]
    needs_more = {case.partition(":")[0] for case, _ in plans.values()} - OURS
    run_workers(SCRIPT, size, folder, *asked, seconds=180, with_transformers=bool(needs_more))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def planned(key: str, stages: list) -> Plan:
    """The plan of a case.

    "tokens" has sequence parallelism, "again" recomputes, "cores" recomputes attention cores,
    "chunks" is interleaved, "shards" shares the optimizer's state, "unlike" as 1 to 3,
    "gradients" also gradients, "weights" all.
    """
    plan = parallel_plan(stages, num_model_chunks=2 if "chunks" in key else 1)
    plan = replace(plan, sequence_parallel="tokens" in key or None)
    has_gradients = "gradients" in key or None
    plan = replace(plan, shard_optimizer="shards" in key or has_gradients)
    plan = replace(plan, shard_gradients=has_gradients)
    if key.startswith("exported"):
        plan = replace(plan, trace=TRACES[key.split("-")[1]])
    if "weights" in key:
        plan = replace(plan, stages=tuple(replace(stage, shard="all") for stage in plan.stages))
    if "unlike" in key or "weights" in key:
        stages = []
        for stage in plan.stages:
            held = (1000, 3000 if "unlike" in key else 1000)
            groups = zip(stage.replicas, held, strict=True)
            replicas = tuple(replace(group, state_share_bytes=share) for group, share in groups)
            stages.append(replace(stage, replicas=replicas))
        plan = replace(plan, stages=tuple(stages))
    kind = {"again": "full", "cores": "selective"}.get(key.rpartition("-")[2], "none")
    return replace(plan, stages=tuple(replace(stage, recompute=kind) for stage in plan.stages))


class Worlds(dict[str, list[dict]]):
    """What came out of each set of workers; run when first asked for."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self.folder, self.failed = folder, set()

    def __missing__(self, name: str) -> list[dict]:
        assert name not in self.failed, "failed before"
        self.failed.add(name)
        size, cases = WORLDS[name]
        plans = {key: (case, planned(key, stages)) for key, (case, stages) in cases.items()}
        self[name] = run_world(self.folder(name), size, plans)
        return self[name]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """The same training on one worker, by case; each run once."""
    found: dict[str, dict] = {}

    def train(case: str) -> dict:
        if case not in found:
            plan = parallel_plan([(WHOLE, (1,))])
            (answer,) = run_world(tmp_path_factory.mktemp("one"), 1, {"one": (case, plan)})
            found[case] = answer["one"]
        return found[case]

    return train


@pytest.mark.parametrize("world", ["t2", pytest.param("t2-1", marks=pytest.mark.slow)])
def test_layers_of_a_group_equal_the_whole_layer(world: str, worlds: Worlds) -> None:
    for answer in worlds[world]:
        found = answer["layers"]
        assert sorted(found) == [
            "attention", "column, row", "cross-entropy", "dropout", "embedding", "output",
        ]  # fmt: skip
        assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize(("world", "name"), COMPARED)
def test_trainings_equal_one_process(
    world: str, name: str, worlds: Worlds, one_process: Callable[[str], dict]
) -> None:
    expected = one_process(WORLDS[world][1][name][0])
    for answer in worlds[world]:
        found = answer[name]
        assert "error" not in found, found
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-10, atol=1e-10)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)


@pytest.mark.parametrize(("world", "name"), SAME_BITS)
def test_sharded_state_and_recomputed_cores_give_the_same_bits(
    world: str, name: str, worlds: Worlds
) -> None:
    plain = name
    for suffix in ("-shards", "-gradients", "-unlike", "-cores"):
        plain = plain.removesuffix(suffix)
    for answer in worlds[world]:
        found, expected = answer[name], answer[plain]
        assert (found["losses"], found["norms"]) == (expected["losses"], expected["norms"])
        for key, value in expected["state"].items():
            assert torch.equal(found["state"][key], value), key


@pytest.mark.parametrize("name", ["d2-unlike-shards"])
def test_unlike_replicas_share_the_state_unlike(name: str, worlds: Worlds) -> None:
    """Shares of 1 to 3; parameters stay whole, and the largest is a sixth of all here."""
    less, more = (answer[name]["kept"] for answer in worlds["t2"])
    assert less + more == worlds["t2"][0]["d2"]["kept"]
    assert 2 < more / less < 4


def test_replicas_have_the_gradients_of_what_they_update(worlds: Worlds) -> None:
    """Between a step's sum and the next step; a gradient elsewhere takes a number or two."""
    whole = [answer["d2"]["gradients"] for answer in worlds["t2"]]
    shared = [answer["d2-gradients-shards"]["gradients"] for answer in worlds["t2"]]
    assert whole[0] == whole[1]
    assert sum(shared) < 1.1 * whole[0]
    assert max(shared) < 0.7 * whole[0]


@pytest.mark.parametrize(
    ("world", "name", "replicas"),
    [
        ("t2", "d2-shards", 2),
        pytest.param("t2-more", "groups-gradients-shards", 2, marks=pytest.mark.slow),
        pytest.param("t2-1", "d3-shards", 3, marks=pytest.mark.slow),
        pytest.param("t2-d2", "zoo-shards", 2, marks=pytest.mark.slow),
    ],
)
def test_replicas_share_the_optimizer_s_state(
    world: str, name: str, replicas: int, worlds: Worlds
) -> None:
    """All keep together what one keeps otherwise, each about as much."""
    plain = name.removesuffix("-shards").removesuffix("-gradients")
    whole = [answer[plain]["kept"] for answer in worlds[world]]
    kept = [answer[name]["kept"] for answer in worlds[world]]
    assert whole[0] > 0
    assert sum(kept) <= sum(whole) / replicas
    assert max(kept) < 1.35 * whole[0] / replicas  # parameters stay whole, and few are many here


def test_each_worker_holds_its_part_only(worlds: Worlds) -> None:
    held, (whole, shared) = [answer["zoo"]["held"] for answer in worlds["t2"]], parameters()
    assert held == [whole - shared // 2] * 2


def parameters() -> tuple[int, int]:
    """Of the zoo's GPT: how many, and how many of them a group of two cuts in half."""
    from hetflow.runtime.tensor.roles import sharing_of

    from . import tensor_cases

    model = tensor_cases.zoo()
    cuts = sharing_of(model).cuts
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes.values()), sum(sizes[name] for name in cuts)


@pytest.mark.slow
def test_a_degree_that_does_not_divide_is_refused_in_a_line(worlds: Worlds) -> None:
    said = "degree of 3 does not divide the 4 (num_heads) (degrees that do: 2 and 4)"
    assert all(said in answer["odd"]["error"] for answer in worlds["t2-1"])


@pytest.mark.slow
def test_a_pair_of_cut_layers_stays_with_one_degree(worlds: Worlds) -> None:
    said = "blocks.1.attention.project_in and blocks.1.attention.project_out are in two stages"
    assert all(said in answer["apart"]["error"] for answer in worlds["p2-unlike"])


@pytest.mark.slow
def test_a_checkpoint_loads_under_other_degrees(
    tmp_path: Path, one_process: Callable[[str], dict]
) -> None:
    from . import tensor_cases

    expected = one_process("zoo:adam:clip")
    saved = tmp_path / "saved"
    case = f"zoo:adam:clip-save={saved}"
    weights: list[dict[str, torch.Tensor]] = []
    for number, save, load in ((0, (2,), (1, 1)), (1, (1, 1), (2,))):
        plans = {"save": (case, parallel_plan([(WHOLE, save)]))}
        run_world(folder_of(tmp_path, f"save{number}"), 2, plans)
        plain = tensor_cases.zoo().double()
        hf.load_weights(plain, saved)
        weights.append(plain.state_dict())
        for degrees in (load, (1,)):
            copy = tmp_path / f"from{number}-{len(degrees)}-{sum(degrees)}"
            shutil.copytree(saved, copy)
            plans = {"load": (f"zoo:adam:clip-load={copy}", parallel_plan([(WHOLE, degrees)]))}
            name = f"load{number}-{sum(degrees)}"
            for answer in run_world(folder_of(tmp_path, name), sum(degrees), plans):
                found = answer["load"]
                assert "error" not in found, found
                # What was saved is the whole first epoch, whose steps are not run again.
                assert found["losses"] == pytest.approx(expected["losses"][2:], rel=1e-10)
                torch.testing.assert_close(
                    found["state"], expected["state"], rtol=1e-10, atol=1e-10
                )
        shutil.rmtree(saved)
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_checkpoint_loads_sharded_or_not(
    tmp_path: Path, one_process: Callable[[str], dict]
) -> None:
    """From sharded replicas to whole ones and to a tensor-parallel group, and back."""
    expected = one_process("zoo:adam:clip")
    steps = {
        "save-shards-1": (1, 1), "load-1": (1, 1),
        "save-unlike-gradients-shards-2": (1, 1), "load-2": (2,),
        "save-3": (1, 1), "load-unlike-gradients-shards-3": (1, 1),
        "save-4": (2,), "load-shards-4": (1, 1),
    }  # fmt: skip
    plans = {}
    for name, degrees in steps.items():
        case = f"zoo:adam:clip-{name[:4]}={tmp_path / name[-1]}"
        plans[name] = (case, planned(name, [(WHOLE, degrees)]))
    for answer in run_world(folder_of(tmp_path, "world"), 2, plans):
        for name in steps:
            found = answer[name]
            assert "error" not in found, found
            if name.startswith("load"):
                assert found["losses"] == pytest.approx(expected["losses"][2:], rel=1e-10)
                torch.testing.assert_close(
                    found["state"], expected["state"], rtol=1e-10, atol=1e-10
                )


def folder_of(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name
