"""``hetflow dashboard``: a web page that shows a live cluster."""

import threading
from typing import Annotated

import typer

from .cluster import DEFAULT_STATE, StateOption
from .common import JsonFlag, emit, emit_json


def dashboard(
    listen: Annotated[
        str,
        typer.Option(metavar="ADDRESS:PORT", help="Where to listen; port 0 is any that is free."),
    ] = "127.0.0.1:0",
    state: StateOption = DEFAULT_STATE,
    json: JsonFlag = False,
) -> None:
    """Serve a web page that shows a cluster, until interrupted; it changes nothing.

    The URL that is printed holds a token: whoever has it can read the page. It works beside a
    scheduler that runs, and without one.

    \b
    hetflow dashboard
    hetflow dashboard --listen 127.0.0.1:8080 --state hetflow-cluster
    """
    from ..clusters.dashboard.server import serving
    from ..clusters.scheduler.store import Store

    Store.read(state).close()
    with serving(listen, state) as served:
        if json:
            emit_json({"url": served.url, "address": str(served.address)})
        else:
            emit(served.url)
        threading.Event().wait()
