"""The names of GPU types, from what their drivers call them."""

import re

_VENDOR_WORDS = {"nvidia", "amd", "geforce", "tesla", "quadro", "graphics", "radeon", "instinct"}
_FORM_FACTORS = re.compile(
    r"^(sxm\d*|pcie|nvl|hbm\d*e?|ada|generation|laptop|gpu|max-q|\d+(\.\d+)?[gt]i?b)$",
    re.IGNORECASE,
)
_SUFFIXES = {"ti": "Ti", "super": "SUPER"}


def device_type_name(name: str) -> str:
    """The type name of a device as its driver names it.

    ``Tesla V100-SXM2-16GB`` is ``V100``, ``NVIDIA GeForce RTX 2080 Ti`` is ``RTX2080Ti``,
    ``NVIDIA H200`` is ``H200``: vendor, form factor and memory are left out, the rest is joined.
    """
    words = [word for part in name.split() for word in re.split(r"-(?!Q\b)", part) if word]
    kept = [
        _SUFFIXES.get(word.lower(), word)
        for word in words
        if word.lower() not in _VENDOR_WORDS and not _FORM_FACTORS.match(word)
    ]
    joined = re.sub(r"[^\w.+-]", "", "".join(kept))
    return joined if joined and joined[0].isalpha() else f"GPU{joined}"
