"""The preloaded process: a host that has imported torch and hetflow, and forks workers.

A fresh worker spends seconds of CPU time on imports before its first step; a forked one spends a
few hundredths of a second. The preloaded process imports once, starts no threads and never touches
CUDA. Each request over its socket forks one process, which then becomes what the request says:
arguments, environment, folder, descriptors, signals, limits. To the script it is a fresh process.

- ``Preload`` is what a launch uses: it starts preloaded processes of its own in the background,
  or connects to the one that ``HETFLOW_PRELOAD`` names, and falls back to fresh processes.
- ``fork`` is like ``subprocess.Popen`` for Python programs, over ``HETFLOW_PRELOAD``.
- ``serving`` keeps one for many launches; so does ``python -m hetflow.runtime.preload SOCKET``.

Everything that a forked process inherits in Python, and what it cannot, is in ``process``.
Nothing here imports torch before the preloaded process itself does.
"""

from .client import OFF, VARIABLE, Forked, Preload, PreloadError, fork, serving
from .process import import_settings

__all__ = [
    "OFF",
    "VARIABLE",
    "Forked",
    "Preload",
    "PreloadError",
    "fork",
    "import_settings",
    "serving",
]
