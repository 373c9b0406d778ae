"""Memory that training was measured to take, beside what is counted.

transformers' page "Methods and tools for efficient training on a single GPU" (Apache-2.0) trains
bert-large-uncased on a V100 of 16 GB with the Trainer, sequences of 512 tokens, AdamW, and prints
what the driver says is occupied: 14,949, 8,681 and 13,939 MiB, of which 1,343 were the context's.
"""

from pathlib import Path

from hetflow.planning.costs.estimate import RESERVE_BYTES
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.schema.options import Precision

_MODEL = f"{Path(__file__).with_name('published_models.py')}:bert_large"
_MIB = 2**20
_MEASURED: tuple[tuple[int, Precision | None, int], ...] = (
    (4, None, 14949),
    (1, None, 8681),
    (4, "float16", 13939),
)


def memory_errors() -> dict[str, float]:
    """Relative errors of all that a device holds, by batch size and precision."""
    errors = {}
    for size, precision, occupied in _MEASURED:
        counts = count_model(targets.parse(_MODEL), (size,), (), "adamw", precision=precision)
        (found,) = counts.passes
        peak = max(found.peak_bytes, counts.update_workspace_bytes)
        held = counts.standing_bytes + found.batch_bytes + peak + RESERVE_BYTES
        errors[f"batch {size}, {precision or 'float32'}"] = held / _MIB / occupied - 1
    return errors
