"""Estimated layers of tensor-parallel groups against measured ones.

A block of OPT-350M (sequences of 2,048 tokens) on groups of 1, 2 and 4 A100 and of 1, 2, 4 and 8
V100, as Sailor measured it (tests/data): forward, and backward with the forward pass again. The
model's attention is the plain one, and products are in TF32 where the device has it, as in
``device_estimates.py``; which of these Sailor ran is inferred from its times.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import hetflow
from hetflow.schema.profile import LayerGraph
from hetflow.tests.data.reference import planners

TARGET = """
import torch
from transformers import OPTConfig, OPTForCausalLM

def workload():
    model = OPTForCausalLM(OPTConfig(
        hidden_size=1024, num_hidden_layers=2, ffn_dim=4096, num_attention_heads=16,
        max_position_embeddings=2048, word_embed_proj_dim=1024, attn_implementation="eager",
    ))
    def batch(n):
        ids = torch.randint(50272, (n, 2048))
        return {"input_ids": ids, "labels": ids}
    return model, batch, lambda model, batch: model(**batch).loss
"""
DEVICES = {"A100-40": "A100-SXM4-40GB", "V100-16": "V100-SXM2-16GB"}
SIZES = (1, 2, 4)
BLOCK = ".layers.1."
MEASURED_BLOCK = "5"  # of 24 equal ones


def estimated_seconds(graph: LayerGraph) -> float:
    """Of a block with recomputation: twice its forward pass, and its backward pass."""
    block = [node for node in graph.nodes if BLOCK in node.id]
    return sum(2 * node.forward_seconds + node.backward_seconds for node in block)


def rows() -> list[dict[str, Any]]:
    """Each device, microbatch size and degree that was measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "opt.py"
        path.write_text(TARGET, encoding="utf-8")
        profiles = hetflow.profile(
            f"{path}:workload",
            [f"spec:{name}" for name in DEVICES.values()],
            layers=True,
            batch_sizes=[1],
            microbatch_sizes=SIZES,
            precision="tf32",
        )
    text = (planners() / "sailor" / "profiles_tmp.json").read_text(encoding="utf-8")
    measured_all = json.loads(text)["OPT-350"]
    found = []
    for name, profile in zip(DEVICES, profiles, strict=True):
        graphs = [(1, graph) for graph in profile.layer_tables]
        graphs += [(each.tensor_parallel_size, each.layers) for each in profile.tensor_layers]
        for degree, graph in graphs:
            measured = measured_all[name][str(graph.microbatch_size)].get(str(degree))
            if measured is None:
                continue
            found.append(
                {
                    "device": name,
                    "microbatch_size": graph.microbatch_size,
                    "degree": degree,
                    "measured_seconds": sum(measured[MEASURED_BLOCK][:2]),
                    "estimated_seconds": estimated_seconds(graph),
                }
            )
    return found


def main() -> None:
    """Print each, and the errors by degree; ``--json FILE`` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    found = rows()
    for row in found:
        print(
            f"{row['device']} x {row['degree']}, microbatch {row['microbatch_size']}: measured "
            f"{1e3 * row['measured_seconds']:.2f} ms, estimated "
            f"{1e3 * row['estimated_seconds']:.2f} ms"
        )
    for device in DEVICES:
        for degree in (1, 2, 4, 8):
            errors = [
                row["estimated_seconds"] / row["measured_seconds"] - 1
                for row in found
                if (row["device"], row["degree"]) == (device, degree)
            ]
            if errors:
                size = 100 * np.abs(errors)
                print(
                    f"{device} x {degree}: mean {size.mean():.1f} %, largest {size.max():.1f} %, "
                    f"signed mean {100 * np.mean(errors):+.1f} %"
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
