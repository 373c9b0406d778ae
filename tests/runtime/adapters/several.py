"""Run scripts one after another in this process: `several.py ANSWER SCRIPT...`."""

import json
import os
import runpy
import sys
from pathlib import Path

target, *scripts = sys.argv[1:]
answers = {}
for script in scripts:
    name, *options = script.split(":")
    part = Path(f"{target}.{name}")
    sys.argv = [name, str(part), *options]
    runpy.run_path(str(Path(__file__).with_name(name)), run_name="__main__")
    if os.environ.get("RANK", "0") == "0" and part.exists():
        answers[f"{len(answers)}.{name}"] = json.loads(part.read_text())
        part.unlink()
if answers:
    Path(target).write_text(json.dumps(answers))
