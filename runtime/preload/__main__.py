"""``python -m hetflow.runtime.preload SOCKET [MODULE ...]``: serve launches until a signal."""

import sys

from ...schema.errors import HetflowError
from .process import run
from .server import main

if __name__ == "__main__":
    command = None
    try:
        command = main(sys.argv[1:])
    except HetflowError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"hetflow: {error.message}{hint}\n")
        sys.exit(error.exit_code)
    if command is not None:  # this is a forked process
        run(command)
