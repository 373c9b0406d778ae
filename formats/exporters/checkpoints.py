"""Write checkpoints as others read them: torch.distributed.checkpoint, and safetensors."""

import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...schema.errors import FileError, ProblemError
from .registry import EXPORTERS, CheckpointExporter


def write_dcp(source: Path, output: Path) -> str:
    """Write a folder that ``torch.distributed.checkpoint`` (DCP) reads under any number of workers.

    Its keys are those of ``get_state_dict``; see ``state_dicts_of``. torch writes one tensor at a
    time from the checkpoint's files; no file is unpickled.

    Args:
        source: A folder of checkpoints, or one of them.
        output: The new folder.

    Returns:
        What was written, for people.

    Raises:
        FileError: There is no usable checkpoint, or the folder cannot be written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from ...runtime.checkpoints.saving import state_dicts_of

    state = state_dicts_of(source)
    # Settings also under each parameter, for scripts that flatten their optimizers' state dicts.
    groups = state["optim"].get("param_groups", ())
    settings = {
        f"param_groups.{name}.{key}": value
        for group in groups
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    listed = {f"param_groups.{n}.{key}" for n, group in enumerate(groups) for key in group}
    if listed.isdisjoint(settings):  # else a parameter is called 0
        state["optim"] |= settings
    with _made(output) as making, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        making.mkdir()
        save(
            {key: value for key, value in state.items() if value or key == "step"},
            # No copy ahead, which would use a GPU's stream for what is on the host.
            storage_writer=FileSystemWriter(making, per_thread_copy_ahead=0),
            no_dist=True,
        )
    beside = " and its optimizer" if groups else ""
    return f"the model{beside} after step {state['step']}"


def write_safetensors(source: Path, output: Path) -> str:
    """Write a model's weights and saved buffers as one file of safetensors, each tensor once.

    Args:
        source: A folder of checkpoints, or one of them.
        output: The file.

    Returns:
        What was written, for people.

    Raises:
        FileError: There is no usable checkpoint, or the file cannot be written.
        ProblemError: safetensors is not installed.
    """
    from ...runtime.checkpoints.saving import weights_of

    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ProblemError(
            "safetensors is not installed", hint="pip install safetensors; or export to dcp"
        ) from None
    weights = weights_of(source)
    with _made(output) as making:
        save_file(weights, making, metadata={"format": "pt"})  # transformers asks for it
        with making.open("rb") as stream:
            os.fsync(stream.fileno())
    return f"{len(weights)} tensors"


@contextmanager
def _made(output: Path) -> Iterator[Path]:
    """A name beside the output that becomes it once all is written; else nothing is left."""
    making = output.parent / f".making-{output.name}.{secrets.token_hex(8)}"
    try:
        yield making
        os.replace(making, output)
    except BaseException as error:  # torch's of checkpoints is no Exception
        shutil.rmtree(making, ignore_errors=True)
        making.unlink(missing_ok=True)
        if not isinstance(error, Exception) and not hasattr(error, "failures"):
            raise  # an interrupt
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        told = causes[0] if causes else error
        reason = getattr(told, "strerror", None) or str(told).partition("\n")[0]
        raise FileError(f"{output}: cannot be written: {reason}") from None


for _name, _write in (("dcp", write_dcp), ("safetensors", write_safetensors)):
    EXPORTERS.add(_name, CheckpointExporter(name=_name, write=_write), __name__)
