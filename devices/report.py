"""What a user sends after a trial on GPUs of their own: versions, topology, results of the suite.

The document has no names of hosts or users, no paths, and no serial numbers of devices.
"""

import getpass
import math
import platform
import re
import socket
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..schema.errors import FileError
from ..schema.files import read_text
from .doctor import Facts, Finding

SCHEMA = "hetflow.report/1"
_PATH = re.compile(r"(?<![\w/])~?/[^\s'\",:;()\[\]]+")
_LONGEST_TEXT = 300
_LEAST_NAME = 3  # characters; shorter names would be found inside words


def report(
    facts: Facts, findings: tuple[Finding, ...], suite: dict[str, Any] | None
) -> dict[str, Any]:
    """The document.

    Args:
        facts: Of this machine.
        findings: About them.
        suite: As ``suite_results`` gives them; None where the suite did not run.
    """
    document = {
        "schema": SCHEMA,
        "hetflow": version("hetflow"),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "facts": asdict(facts),
        "findings": [finding.text for finding in findings],
        "collective_versions": _collective_versions(),
        "topology": topology(),
        "suite": suite,
    }
    cleaned: dict[str, Any] = scrubbed(document, _own_names())
    return cleaned


def topology() -> dict[str, Any]:
    """The GPUs that torch sees, and which of them reach which others' memory directly."""
    try:
        import torch
    except ImportError:
        return {"gpus": [], "peers": []}
    if not torch.cuda.is_available():
        return {"gpus": [], "peers": []}
    number = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(index) for index in range(number)]
    # Slices of one GPU have one place on the bus; the places themselves are nobody's business.
    places = [
        (getattr(p, "pci_domain_id", 0), getattr(p, "pci_bus_id", n)) for n, p in enumerate(found)
    ]
    return {
        "gpus": [
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": int(properties.total_memory),
                "num_multiprocessors": int(properties.multi_processor_count),
                "card": sorted(set(places)).index(place),
            }
            for properties, place in zip(found, places, strict=True)
        ],
        "peers": [
            [other for other in range(number) if other != own and _reaches(own, other)]
            for own in range(number)
        ],
    }


def _reaches(own: int, other: int) -> bool:
    import torch

    return bool(torch.cuda.can_device_access_peer(own, other))


def _collective_versions() -> dict[str, str]:
    from .backend import DEVICES

    try:
        import torch  # noqa: F401
    except ImportError:
        return {}
    found = {b.collective: b.collective_version() for b in DEVICES.registered()}
    return {name: text for name, text in found.items() if text is not None}


def suite_results(path: Path) -> dict[str, Any]:
    """What ``pytest --junitxml`` has written: how many tests ended how, and each test's end.

    Of a failure the type of the error is kept, of a skipped test its reason; no tracebacks.

    Raises:
        FileError: It cannot be read, or is no such file.
    """
    try:
        root = ElementTree.fromstring(read_text(path))
        tests = [_result_of(case) for case in root.iter("testcase")]
    except (ElementTree.ParseError, ValueError) as error:
        raise FileError(
            f"{path}: no results of pytest ({error})", hint="write them by `--junitxml FILE`"
        ) from None
    if not tests:
        raise FileError(f"{path}: holds no tests", hint="write them by `--junitxml FILE`")
    counted = Counter(test["outcome"] for test in tests)
    return {"num_tests": dict(sorted(counted.items())), "tests": tests}


def _result_of(case: ElementTree.Element) -> dict[str, Any]:
    seconds = float(case.get("time", 0))
    if not math.isfinite(seconds):
        raise ValueError(f"a test of {seconds} seconds")
    test: dict[str, Any] = {
        "test": f"{case.get('classname', '')}::{case.get('name', '')}",
        "outcome": "passed",
        "seconds": seconds,
    }
    for outcome in ("skipped", "failure", "error"):
        found = case.find(outcome)
        if found is not None:
            said = found.get("message", "")
            test["outcome"] = {"failure": "failed"}.get(outcome, outcome)
            test["said"] = said if outcome == "skipped" else re.split(r"[:\s]", said, maxsplit=1)[0]
    return test


def scrubbed(value: Any, names: tuple[str, ...]) -> Any:
    """Any JSON value without absolute paths and without these names, texts cut to a few lines.

    Args:
        value: The value.
        names: Of hosts and users.
    """
    if isinstance(value, dict):
        return {key: scrubbed(entry, names) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(entry, names) for entry in value]
    if not isinstance(value, str):
        return value
    text = value if value == SCHEMA else _PATH.sub("(path)", value)
    for name in names:
        text = re.sub(rf"\b{re.escape(name)}\b", "(name)", text)
    return text[:_LONGEST_TEXT]


def _own_names() -> tuple[str, ...]:
    """This host's and this user's, the longest first."""
    found = {socket.gethostname(), socket.gethostname().partition(".")[0], Path.home().name}
    try:
        found.add(getpass.getuser())
    except (KeyError, OSError, ImportError):
        pass  # no user of that number, as in some containers
    return tuple(sorted((n for n in found if len(n) >= _LEAST_NAME), key=len, reverse=True))
