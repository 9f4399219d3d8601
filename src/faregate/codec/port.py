"""The codec port."""

from collections.abc import Callable
from typing import Any, Protocol

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


class Codec(Protocol):
    """Turns messages into bytes and back. Implementations hold no state and may be shared by threads."""

    content_type: str

    def encoder(self, cls: type) -> Encode:
        """A function from an instance of `cls` to bytes."""

    def decoder(self, cls: type) -> Decode:
        """A function from bytes to an instance of `cls`.

        It ignores fields that `cls` does not declare. It raises `ValueError` (msgspec's and pydantic's
        errors are such) on anything that is not a `cls`.
        """
