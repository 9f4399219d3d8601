"""Bloom filters of keys and correlations: what is there is never denied, and most of what is not, is."""

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faregate.broker.journal.bloom import BITS_FOR_EACH, Bloom, bloom_of
from faregate.broker.journal.frame import NO_BLOOM

SHAPES = ["order-{}", "{:032x}", "{}", "customer/{:08d}/eu", "k{}ß"]


@settings(deadline=None)
@given(st.lists(st.none() | st.text(), max_size=200))
def test_what_is_there_is_never_denied(texts: list[str | None]) -> None:
    bloom = Bloom(bloom_of(pa.array(texts, pa.string())))
    assert all(bloom.may_hold(text) for text in texts if text is not None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 7, 300, 10_000])
def test_nearly_all_that_is_not_there_is_denied(shape: str, count: int) -> None:
    bloom = Bloom(bloom_of(pa.array([shape.format(number) for number in range(count)], pa.string())))
    others = [shape.format(number) for number in range(count, count + 20_000)]
    assert sum(bloom.may_hold(text) for text in others) < 0.06 * len(others)


def bits(*texts: str | None) -> bytes:
    return msgspec.json.decode(bloom_of(pa.array(texts, pa.string())), type=bytes)


def test_it_grows_with_different_texts_alone() -> None:
    assert bits(*["a", None, "b"] * 1000) == bits("b", "a")
    assert len(bits(*map(str, range(800)))) == 100 * BITS_FOR_EACH
    assert bits(None, None) == bits() == b""
    assert not Bloom(bloom_of(pa.array([], pa.string()))).may_hold("a")


def test_where_there_is_none_nothing_is_denied() -> None:
    assert Bloom(NO_BLOOM).may_hold("a")


def test_the_bits_are_those_of_the_format() -> None:
    """Segments are read by later versions, so what stands there may not change."""
    assert bits("order-17", "order-18", "ß").hex() == "a0105002"
