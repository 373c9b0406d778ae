"""How running out of memory looks, of any kind of device."""

import re
from collections.abc import Iterator

from .backend import DEVICES


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has run out (of any device)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """Whether a message of torch's, a device library's or the C++ runtime's says so."""
    return any(re.search(words, text, re.IGNORECASE) for words in _words())


def _words() -> Iterator[str]:
    for backend in DEVICES.registered():
        yield from backend.out_of_memory_words()
