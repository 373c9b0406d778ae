"""The weights of a checkpoint in a model that is not launched, to publish or to use them.

A checkpoint holds whole parameters under the model's own names, whatever plan wrote it. The model
that gets them says what a plain state dict needs besides: which parameters are tied, and which
buffers are saved at all.
"""

from pathlib import Path

from torch import nn

from ..schema.errors import FileError, TargetError
from ..schema.options import command
from . import checkpoint, parts
from .buffers import VirtualNodeBuffers
from .checkpoint import Checkpoint
from .manifest import BrokenCheckpoint, shape_difference, shapes_of
from .restoring import check_buffers, load_parameters
from .saving import unusable


def load_weights(model: nn.Module, folder: Path | str) -> int:
    """Fill a model with the parameters and buffers of a checkpoint; no launch is needed.

    Afterwards ``model.state_dict()`` is plain, and so is what ``save_pretrained`` and
    ``safetensors.torch.save_model`` write. Virtual nodes' buffers are merged as by
    ``job.sync_buffers()``.

    Args:
        model: The model that was trained, built anew; on any device.
        folder: A ``--checkpoint`` folder, whose newest usable checkpoint is taken, or one
            checkpoint in it.

    Returns:
        The number of steps after which the checkpoint was written.

    Raises:
        FileError: There is no checkpoint, or none can be used; says why.
        TargetError: It is of another model; names the first difference.

    Example:
        >>> from torch import nn
        >>> from hetflow import runtime as hf
        >>> hf.load_weights(nn.Linear(2, 1), "nowhere")
        Traceback (most recent call last):
        hetflow.schema.errors.FileError: nowhere: there is no checkpoint...
    """
    found = _read(Path(folder))
    parameters = dict(model.named_parameters())
    theirs, own = found.header["parameters"], shapes_of(parameters)
    if theirs != own:
        raise TargetError(
            f"{found.path} is of another model: {shape_difference(theirs, own)}",
            hint="build the model that was trained",
        )
    sizes, state = found.header["virtual_nodes"], found.state["buffers"]
    nodes = state["nodes"] or [{} for _ in sizes]
    buffers = VirtualNodeBuffers(model, range(len(nodes)), sizes)
    check_buffers(found.path, state, buffers.all(), buffers.names)
    load_parameters(parameters, found.state["parameters"])
    buffers.restore({**state, "nodes": nodes})
    buffers.install(buffers.merged(None))
    steps: int = found.header["step"]
    return steps


def _read(folder: Path) -> Checkpoint:
    """The checkpoint, or the newest usable one of a folder of them."""
    read = parts.reader()
    if not checkpoint.found(folder) and folder.is_dir() and any(folder.iterdir()):
        try:
            return read(folder)
        except BrokenCheckpoint as error:
            raise FileError(f"{folder}: is no usable checkpoint: {error}") from None
    found, broken = checkpoint.newest(folder, read)
    if found is not None:
        return found
    if broken:
        raise unusable(folder, broken, can_restart=False)
    raise FileError(
        f"{folder}: there is no checkpoint",
        hint=f"give the folder of {command('launch', checkpoint=None)}",
    )
