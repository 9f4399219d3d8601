"""Bloom filters of keys and correlations: what is there is never denied, and most of what is not, is."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faregate.broker.journal.bloom import BITS_FOR_EACH, bloom_of, may_hold

SHAPES = ["order-{}", "{:032x}", "{}", "customer/{:08d}/eu", "k{}ß"]


@settings(deadline=None)
@given(st.lists(st.none() | st.text(), max_size=200))
def test_what_is_there_is_never_denied(texts: list[str | None]) -> None:
    bloom = bloom_of(pa.array(texts, pa.string()))
    assert all(may_hold(bloom, text) for text in texts if text is not None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 7, 300, 10_000])
def test_nearly_all_that_is_not_there_is_denied(shape: str, count: int) -> None:
    bloom = bloom_of(pa.array([shape.format(number) for number in range(count)], pa.string()))
    others = [shape.format(number) for number in range(count, count + 20_000)]
    assert sum(may_hold(bloom, text) for text in others) < 0.06 * len(others)


def test_it_grows_with_different_texts_alone() -> None:
    assert bloom_of(pa.array(["a", None, "b"] * 1000, pa.string())) == bloom_of(pa.array(["b", "a"], pa.string()))
    assert len(bloom_of(pa.array([str(number) for number in range(800)], pa.string()))) == 100 * BITS_FOR_EACH
    assert bloom_of(pa.array([None, None], pa.string())) == bloom_of(pa.array([], pa.string())) == b""
    assert not may_hold(b"", "a")


def test_the_bits_are_those_of_the_format() -> None:
    """Segments are read by later versions, so what stands there may not change."""
    assert bloom_of(pa.array(["order-17", "order-18", "ß"], pa.string())).hex() == "a0105002"
