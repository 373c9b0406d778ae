"""``hetflow resize``: change the devices of a running launch."""

from ..schema.requests.resize import ResizingRequest
from .asking import Asked, asks
from .common import JsonFlag, emit, emit_json


@asks(ResizingRequest)
def resize(asked: Asked, json: JsonFlag = False) -> None:
    """Change the devices of a running launch; it trains on, with the same result.

    New workers start beside the running ones. When they are ready, all go over between two steps:
    those who stay keep their process, and joining workers get the state directly from one of
    them. A pipeline's workers all change: they hand over through checkpoint parts.

    \b
    hetflow resize hetflow-runs/m-20250101-120000 --gpus 4xV100
    hetflow resize runs/a --plan smaller.json
    """
    from .. import resize as change
    from ..schema.errors import LaunchError
    from ..schema.files import to_plain

    answer = change(**asked)
    if answer is None:
        _say({"status": "asked"}, "asked; run.json lists it when it is done", json)
        return
    if answer.status != "done":
        sentence = answer.detail if answer.status == "refused" else f"not resized: {answer.detail}"
        code = 2 if answer.status == "refused" else 1
        if json:
            emit_json(to_plain(answer))
        raise LaunchError(sentence, hint=answer.hint, exit_code=code)
    pause = f"; training paused {answer.pause_seconds or 0.0:.3f} s"
    _say(to_plain(answer), f"{answer.detail}{pause}", json)


def _say(document: object, sentence: str, json: bool) -> None:
    if json:
        emit_json(document)
    else:
        emit(sentence)
