"""Fixtures for pytest. It loads in every run of pytest where Faregate is installed, so it imports Faregate only when a
test asks for a fixture. A package of its own, since importing a module of `faregate` imports that.

The test itself is `async def`, and a plugin runs it: pytest-asyncio, or that of anyio on asyncio. Nothing here depends
on which: the fixtures are plain, and a bench is started in the test, by `async with`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from faregate.testing import Bench

__all__ = ["faregate_bench", "faregate_store"]


@pytest.fixture
def faregate_store() -> str:
    """The URL of the store that benches run on. A project overrides it in its conftest.py, for example with several, by
    `params=`."""
    return "memory:"


@pytest.fixture
def faregate_bench(faregate_store: str) -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """`async with faregate_bench(node) as bench:` is `fg.testing.bench` on the store that `faregate_store` names."""
    from faregate.testing import bench

    return partial(bench, store=faregate_store)
