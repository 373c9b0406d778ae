"""Kinds of devices: what the rest of hetflow asks of one, and the only room that names any.

``backend.py`` says what a kind answers; ``cpu.py`` (also emulated devices) and ``cuda.py`` are the
kinds that come with hetflow, and plug-ins add theirs (``hetflow.devices``). Importing this room
does not import torch, so hosts that only plan can name devices too.
"""
