"""Rates: exact counts per node and type, windows that add up, and a chart that shows them."""

from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.cli.spark.jobs import sparkline, stores_of
from faregate.errors import ConfigurationError
from faregate.spark.jobs.rates import window_seconds
from faregate.spark.jobs.rates_chart import draw
from tests.spark.jobs_rig import DEAD, HANDLED, ORDERS, SKIPPED, TWICE, build


@pytest.mark.services
def test_every_message_that_ended_is_in_one_window(spark: SparkSession, tmp_path: Path) -> None:
    world = build(tmp_path, delayed=3)
    rows = fg.spark.rates(spark, journal=world.journal, store=world.store, window="1s").collect()
    sums: Counter[tuple[str, str]] = Counter()
    for row in rows:
        assert row["type"] == "OrderPlaced"
        assert row["to"] - row["from"] == timedelta(seconds=1)
        assert row["per_second"] == row["ended"]
        if row["handled"]:
            assert 0 <= row["p50"] <= row["p95"] <= row["p99"] < 600
        for name in ("ended", "handled", "skipped", "duplicate", "dead", "redelivered"):
            sums[row["node"], name] += row[name]
    assert sums == {
        ("billing", "ended"): ORDERS + len(TWICE),
        ("billing", "handled"): HANDLED,
        ("billing", "skipped"): len(SKIPPED),
        ("billing", "duplicate"): len(TWICE),
        ("billing", "dead"): len(DEAD),
        ("billing", "redelivered"): 1,
        ("stock", "ended"): ORDERS + len(TWICE),
        ("stock", "handled"): ORDERS,
        ("stock", "duplicate"): len(TWICE),
        **{("stock", name): 0 for name in ("skipped", "dead", "redelivered")},
    }
    # A log engine settles nothing in queues: its ledger says when it ended.
    for side in (world.journal / "settled").iterdir():
        side.write_bytes(b"")
    assert fg.spark.rates(spark, journal=world.journal).count() == 0
    by_ledger = fg.spark.rates(spark, journal=world.journal, store=world.store, window="1d").collect()
    ended = {row["node"]: (row["handled"], row["skipped"], row["duplicate"]) for row in by_ledger}
    assert ended == {"billing": (HANDLED, len(SKIPPED), len(TWICE)), "stock": (ORDERS, 0, len(TWICE))}


def rows() -> list[dict[str, object]]:
    start = datetime(2026, 11, 15, 9)
    return [
        {
            "from": start + timedelta(seconds=10 * n),
            "to": start + timedelta(seconds=10 * n + 10),
            "node": node,
            "type": "<b>Order</b>",
            "ended": 100,
            "handled": 99,
            "skipped": 0,
            "filtered": 0,
            "duplicate": 0,
            "dead": 1,
            "redelivered": 0,
            "per_second": 10.0,
            "error_rate": 0.01,
            "p50": 0.1,
            "p95": None if n == 3 else 0.2,
            "p99": 0.3,
        }
        for n in range(6)
        for node in ("billing", "stock")
    ]


def test_the_chart_is_sound_and_escapes_names() -> None:
    page = draw(rows(), 10.0, "a & b")
    assert "<b>Order" not in page
    assert "a &amp; b" in page
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page
    pictures = [part.partition("</svg>")[0] for part in page.split("<svg")[1:]]
    assert len(pictures) == 2 + 3  # a mark for each in the legend, and three charts
    for picture in pictures:
        ElementTree.fromstring(f"<svg{picture}</svg>")
    assert "Nothing has ended yet" in draw([], 10.0, "x")


def test_windows_stores_and_lines_are_read_as_written() -> None:
    assert [window_seconds(text) for text in ("10s", "5m", "1h", "0.5s")] == [10, 300, 3600, 0.5]
    for text in ("10", "0s", "ten"):
        with pytest.raises(ConfigurationError, match="is no length of time: write 10s"):
            window_seconds(text)
    assert stores_of([]) is None
    assert stores_of(["sqlite:x=1.db"]) == "sqlite:x=1.db"
    assert stores_of(["a=sqlite:1", "b=sqlite:2"]) == {"a": "sqlite:1", "b": "sqlite:2"}
    with pytest.raises(ConfigurationError, match="does not say whose it is"):
        stores_of(["sqlite:1", "sqlite:2"])
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"
    assert len(sparkline([1.0] * 1000)) <= 24
