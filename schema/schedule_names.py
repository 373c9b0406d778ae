"""Which schedules are planned; apart from the records, so that the CLI starts without them."""

from typing import Literal

PlannedSchedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "pipedream",
    "pipedream-vertical-sync",
    "2bw",
]
