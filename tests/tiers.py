"""The long tier, `@pytest.mark.full`: the time limit of its tests, and slices of it for who cannot wait for all."""

from collections.abc import Sequence
from typing import TypeVar

import pytest

SECONDS = 900
"""The time limit of a test of the long tier; pyproject.toml has that of the others."""

T = TypeVar("T")


def is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("full") is not None


def one_of(items: Sequence[T], chosen: str) -> Sequence[T]:
    """The slice "K/N": every Nth, from the Kth on, so that similar tests, which are neighbours, spread over all."""
    try:
        number, count = map(int, chosen.split("/"))
        if not 1 <= number <= count:
            raise ValueError
    except ValueError:
        raise pytest.UsageError(f"--slice takes K/N, for example 2/4; got {chosen!r}") from None
    return items[number - 1 :: count]
