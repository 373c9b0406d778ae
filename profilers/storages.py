"""Which memory tensors lie in."""

from typing import Any


def storage_key(tensor: Any) -> int:
    """A number of the memory that a tensor lies in, equal for its views while that is alive."""
    key: int = tensor.untyped_storage()._cdata
    return key
